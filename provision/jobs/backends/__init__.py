"""Where a job's processes run, behind one interface.

``Backend`` is what commands know of a job; ``registry.backend_of`` gives it. There are two: ``hosts`` for
jobs with a ``job.json``, and ``kubernetes`` for jobs with a ``kubernetes.json``. Of the processes on hosts,
``local`` runs those of this machine (in a container with ``containers``), and ``ssh`` the units of others;
``Process`` is what the supervisor knows of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from provision.cluster.errors import HostError
    from provision.cluster.inventory import Inventory
    from provision.hosts.stop_request import StopRequest
    from provision.jobs.holding import Holding
    from provision.jobs.request import LaunchOptions
    from provision.jobs.screen import JobScreen
    from provision.jobs.store import Job, ProcessSpec, ProcessState


class Backend(Protocol):
    """What can be done with a job, wherever it runs; TrainingError where one thing cannot.

    A new backend is one module with these names, and a line in ``registry``.
    """

    STAYS: bool  # something of a job may be left there though it has ended

    def start(
        self, inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen
    ) -> int:
        """Check, prepare and run a new job; the command's exit code."""

    def resume(
        self,
        job: Job,
        inventory: Callable[[], Inventory],
        options: LaunchOptions,
        *,
        state_dir: Path,
        screen: JobScreen,
    ) -> int:
        """Run a stopped job again, from its last checkpoint; ``inventory`` reads that of today."""

    def is_running(self, job: Job) -> bool:
        """Whether anything of the job runs, or may still run."""

    def observe(self, job: Job) -> dict[str, Any]:
        """All that is known of the job now, for JSON; never raises for what is in its files."""

    def stop(self, job: Job, *, state_dir: Path, screen: JobScreen) -> int:
        """Let the workers write a checkpoint, then end all processes; the exit code."""

    def logs(self, job: Job, *, process: str | None, follow: bool, lines: int) -> int:
        """Print the logs of the job's processes; the exit code."""

    def fetch(self, job: Job, *, checkpoints: bool, replace: bool) -> int:
        """Copy export and report here; the exit code."""

    def results(self, job: Job) -> str:
        """Where the run's files are, if not in the job's directory here; else empty."""

    def holding(self, job: Job, size: int) -> Holding:
        """What the job holds, for its removal; ``size``: bytes of its directory here."""

    def remove(self, item: Holding, *, here_only: bool) -> None:
        """Remove what the job has beyond its directory here; TrainingError if it must stay.

        The caller holds the lock of the job's cluster until it has removed the directory too.
        """


class Refused(Exception):
    """A process did not start."""


class Stopped(Exception):
    """A stop request before training began."""


class Process(ABC):
    """A process of a run on hosts. ``fleet.stop`` ends those of other hosts, all at once."""

    spec: ProcessSpec
    pid: int = 0  # 0: unknown
    endpoint: str = ""  # where a server listens
    restarts: int = 0  # by the supervisor, in this run
    supervised: bool = False  # the supervisor restarts it; systemd restarts units
    silent: bool = False  # its host does not answer, so it may still run

    @property
    def label(self) -> str:
        """Name, host and pid as far as it is known, for messages."""
        return f"{self.spec.name} on {self.spec.host}" + (f" (pid {self.pid})" if self.pid else "")

    def start(  # noqa: B027 - a default
        self, argv: Sequence[str], environment: Mapping[str, str], stop: StopRequest, *, fresh: bool = True
    ) -> None:
        """Start it, unless the launch has. ``fresh``: forget earlier events. Raises Refused, Stopped."""

    def wait_ready(self, stop: StopRequest) -> dict[str, Any] | None:
        """Wait until a server listens; what it says then, if that is new. Raises Refused, Stopped."""
        return None

    def refresh(self, answer: dict[str, Any] | HostError) -> None:  # noqa: B027 - a default
        """Update it from the answer of its host, for those that need one to know that they have ended."""

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code once it has ended; negative for a signal."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Signal it: SIGTERM to finish the step and write a checkpoint, SIGKILL to end at once."""

    def end(self, seconds: float) -> None:  # noqa: B027 - a default
        """End a process of this machine: SIGTERM, and SIGKILL after ``seconds``."""

    @abstractmethod
    def state(self) -> ProcessState | None:
        """For ``state.json``; None if nothing of it can be there."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """In words."""
