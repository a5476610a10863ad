"""Jobs on hosts of the inventory: this machine, hosts over SSH, and containers on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.jobs import fetching, logview, observing, stopping
from provision.jobs.backends import units
from provision.jobs.backends.ssh import Fleet
from provision.jobs.holding import Holding, disk_bytes
from provision.jobs.metrics import summary
from provision.jobs.request import LaunchOptions, ScaleOptions, ServeOptions
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job

STAYS = False
is_running = stopping.is_running
stop = stopping.stop
observe = observing.readable_report
logs = logview.logs
fetch = fetching.fetch


def start(inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``."""
    from provision.jobs import launching  # slow to import, and only a launch needs it

    return launching.launch(inventory, options, state_dir=state_dir, screen=screen)


def resume(
    job: Job,
    inventory: Callable[[], Inventory],
    options: LaunchOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``; ``options.resume`` names the job."""
    from provision.jobs import launching

    launching.require_training(job.spec())
    return launching.launch(inventory(), options, state_dir=state_dir, screen=screen)


def scale(
    job: Job,
    inventory: Callable[[], Inventory],
    options: ScaleOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``."""
    from provision.jobs import scaling

    return scaling.scale(job, inventory, options, state_dir=state_dir, screen=screen)


def serve(job: Job, options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """See ``Backend``."""
    from provision.jobs import replicas

    return replicas.start(options, job, state_dir=state_dir, screen=screen)


def roll_back(job: Job, step: int | None, *, newest: bool, screen: JobScreen) -> int | None:
    """See ``Backend``."""
    del screen
    from provision.jobs import replicas

    return replicas.pin(job, step, newest=newest)


def manifests(job: Job, options: ServeOptions) -> str:
    """See ``Backend``."""
    del options
    raise TrainingError(f"--print: job {job.id} is not on Kubernetes; leave it out")


def results(job: Job) -> str:
    """See ``Backend``."""
    worker = job.spec().worker_unit
    return "" if worker is None else f"host {worker.host}: {units.job_directory(job.id)}/run"


def holding(job: Job, size: int) -> Holding:
    """See ``Backend``."""
    state, spec = job.state(), job.spec()
    job.read_state()  # raises if it is unknown whether the job runs
    facts, newest = summary(job.metrics_file), job.checkpoint()
    pools = [Path(item.pools) for item in spec.processes if item.pools and not item.unit]
    known = state.phase == "done" or job.has_checkpoint()
    return Holding(
        job,
        state.phase,
        bytes=size,
        spec=spec,
        pools=[(path, disk_bytes(path)) for path in pools if path.is_dir()],
        step=facts.step,
        steps=facts.steps,
        checkpoint=facts.checkpoint_step if newest is None else newest[0],
        left=job.rows_left() if not spec.has_worker or not known else [],
    )


def remove(item: Holding, *, here_only: bool) -> None:
    """See ``Backend``; on its hosts first: if one does not answer, the job stays and can be removed later."""
    if item.spec is None:  # nobody knows where it was
        return
    if is_running(item.job):
        raise TrainingError(f"it was started meanwhile; stop it first: oeprov stop {item.job.id}")
    for error in [] if here_only else Fleet(item.job, item.spec).remove():
        raise TrainingError(
            f"{error.host}: {error.reason}; the job stays; try again, or remove only what is here: "
            f"oeprov jobs rm {item.job.id} --here-only"
        )
    for process in item.spec.processes:
        item.job.remove_pools(process)
    if left := [path for path, _ in item.pools if path.exists()]:
        raise TrainingError(
            f"{left[0]} could not be removed; check whether a server uses it, and who may write there"
        )
