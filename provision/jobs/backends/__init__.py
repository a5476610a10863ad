"""Where a job's processes run, behind one interface.

``Backend`` is what commands know of a job; ``registry.backend_of`` gives it. There are two: ``hosts`` for
jobs with a ``job.json``, and ``kubernetes`` for jobs with a ``kubernetes.json``. Of the processes on hosts,
``local`` runs those of this machine (in a container with ``containers``), and ``ssh`` the units of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from provision.cluster.inventory import Inventory
    from provision.jobs.holding import Holding
    from provision.jobs.request import LaunchOptions
    from provision.jobs.store import Job


class Backend(Protocol):
    """What can be done with a job, wherever it runs; TrainingError where one thing cannot.

    A new backend is one module with these names, and a line in ``registry``.
    """

    STAYS: bool  # something of a job may be left there though it has ended

    def start(self, inventory: Inventory, options: LaunchOptions, *, state_dir: Path) -> int:
        """Check, prepare and run a new job; the command's exit code."""

    def resume(
        self, job: Job, inventory: Callable[[], Inventory], options: LaunchOptions, *, state_dir: Path
    ) -> int:
        """Run a stopped job again, from its last checkpoint; ``inventory`` reads that of today."""

    def is_running(self, job: Job) -> bool:
        """Whether anything of the job runs, or may still run."""

    def observe(self, job: Job) -> dict[str, Any]:
        """All that is known of the job now, for JSON; never raises for what is in its files."""

    def stop(self, job: Job, *, state_dir: Path, as_json: bool) -> int:
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
