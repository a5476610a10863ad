"""Where a job's processes run, behind one interface.

``Backend`` is what commands know of a job; ``registry.backend_of`` gives it, by the file that the job has of
``store.BACKENDS``. Of the processes on hosts, ``local`` runs those of this machine (in a container with
``containers``), and ``ssh`` the units of others; ``Process`` is what the supervisor knows of one, and
``Runner`` what placement knows of a host's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from provision.cluster.errors import HostError
    from provision.cluster.inventory import Host, Inventory
    from provision.hosts.stop_request import StopRequest
    from provision.jobs.backends.units import Place
    from provision.jobs.holding import Holding
    from provision.jobs.request import LaunchOptions, ScaleOptions, ServeOptions
    from provision.jobs.screen import JobScreen
    from provision.jobs.script_files import ScriptFiles
    from provision.jobs.store import Job, ProcessSpec, ProcessState
    from provision.node.state import State


CHECKPOINT_SECONDS = 600.0  # a worker may take to write its last checkpoint
ADAPTER = "adapter.py"  # of provision/node
_WILDCARDS = ("0.0.0.0", "::", "*", "")  # noqa: S104 - compared with, not listened on


class Backend(Protocol):
    """What can be done with a job, wherever it runs; TrainingError where one thing cannot.

    A new backend is one module with these names, and a line in ``store.BACKENDS``.
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

    def scale(
        self,
        job: Job,
        inventory: Callable[[], Inventory],
        options: ScaleOptions,
        *,
        state_dir: Path,
        screen: JobScreen,
    ) -> int:
        """Let a running job go on with other servers, from a checkpoint between two steps; the exit code.

        TrainingError where that cannot be, and nothing was changed.
        """

    def logs(self, job: Job, *, process: str | None, follow: bool, lines: int) -> int:
        """Print the logs of the job's processes; the exit code."""

    def fetch(self, job: Job, *, checkpoints: bool, replace: bool) -> int:
        """Copy export and report here; the exit code."""

    def serve(self, job: Job, options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
        """Start replicas that answer requests for the job's model, as a job of their own, which listens."""

    def roll_back(self, job: Job, step: int | None, *, newest: bool, screen: JobScreen) -> int | None:
        """Let replicas serve a kept step, or with ``newest`` follow training; the served step, if known.

        TrainingError: they serve what they did.
        """

    def manifests(self, job: Job, options: ServeOptions) -> str:
        """The objects of such replicas as text, where they are applied by hand."""

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


class Runner(Protocol):
    """How processes of jobs run on a host; ``runners.runner_of`` gives it. Placement knows only this."""

    host: Host
    python: str  # the interpreter of the environment that the host's processes run in
    own_python: str  # for programs that need no environment
    ending: tuple[str, ...] = ()  # of the command line of each program of ours

    def __init__(self, host: Host) -> None:
        self.host = host
        self.python = self.own_python = str(Path(host.runtime.venv) / "bin" / "python")

    def directory(self, job: Job) -> Path:
        """The job's directory on the host."""

    def sent(self, job: Job, path: Path, folder: str = "") -> Path:
        """Where a file that is at ``path`` here is on the host, if it travels to the job's ``folder``."""

    def environments(self, state_dir: Path) -> str:
        """The directory on the host of the environments of scripts."""

    def cpus(self, state: State | None) -> int:
        """All CPUs of the host."""

    def dram(self, state: State | None) -> int:
        """The host's DRAM in bytes; 0 if it was not observed."""

    def unit(self, job: Job, process: str) -> str:
        """The name of a process's systemd unit; empty if it has none."""
        return ""

    def server_start(
        self, job: Job, spec: ProcessSpec, where: Place, port: int, *, fresh: bool
    ) -> list[dict[str, Any]]:
        """What ``Fleet.prepare`` is told to start the server; nothing if the supervisor starts it."""
        return []

    def check(self, argv: Sequence[str], seconds: int) -> str:
        """Run a check as the workers' user; its error in words, empty if there is none."""

    def deliver(
        self, files: ScriptFiles | None, environment: dict[str, object], stop: StopRequest
    ) -> tuple[bool, bool]:
        """Bring a script's files, and make its ``environment`` if any: whether each was missing.

        TrainingError and HostError say why not.
        """


def endpoint(address: str, listens: str, port: int) -> str:
    """Where workers reach a server: where it listens, or its host's address if it listens everywhere."""
    address = address if listens in _WILDCARDS else listens
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
