"""Commands for training: ``launch-training``, ``resume``, ``status``, ``logs``, ``stop``, ``fetch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Json,
    Limit,
    StateDir,
    open_inventory,
    takes_settings,
)

LAUNCH_EXAMPLES = (
    "Examples:  oeprov launch-training -i inventory/local.yml  |  oeprov launch-training --data criteo.tsv "
    "--model deepfm --storage pmem_libpmem  |  oeprov launch-training --resume"
)
STATUS_EXAMPLES = "Examples:  oeprov status  |  oeprov status JOB --json  |  oeprov status -i inventory.yml"
LOGS_EXAMPLES = "Examples:  oeprov logs -f  |  oeprov logs JOB --process worker-0 --lines 100"
RESUME_EXAMPLES = "Examples:  oeprov resume  |  oeprov resume JOB --epochs 3  |  oeprov resume --servers 3"
FETCH_EXAMPLES = "Examples:  oeprov fetch  |  oeprov fetch JOB --checkpoints  |  oeprov fetch JOB --replace"
STOP_EXAMPLES = "Examples:  oeprov stop  |  oeprov stop JOB"

_JOB = "Which job: its name, its id or how the id begins; default: the running or the last one."


@takes_settings()
def launch_training(
    given: dict[str, Any],
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="With --resume: the job to go on with; default: the last."),
    ] = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name the job.")] = None,
    on: Annotated[
        str,
        typer.Option("--on", metavar="WHERE", help="hosts (of the inventory), kubernetes, docker or podman."),
    ] = "hosts",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a job from its last checkpoint, with its settings.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background; see `oeprov status`.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Train a model: start parameter servers and workers, show progress, export what was learned.

    Ctrl-C stops it: the worker finishes its step and writes a checkpoint, from which --resume continues.
    No process is left behind, however it ends.
    """
    from provision.jobs import containers, launching, store
    from provision.jobs.request import LaunchOptions

    if on not in ("hosts", "kubernetes", *containers.ENGINES):
        raise typer.BadParameter(f"--on: found {on!r}; allowed: hosts, kubernetes, docker, podman")
    if job is not None and not resume:
        raise typer.BadParameter(f"{job!r} is understood with --resume only; to name a new job: --name {job}")
    named = store.find(state_dir, job).id if job is not None else ""
    options = LaunchOptions(
        given,
        run_name=name,
        on=on if on in containers.ENGINES else None,
        resume=named if resume else None,
        detach=detach,
        as_json=as_json,
    )
    found = open_inventory(inventory, limit, state_dir)
    if on == "kubernetes":
        from provision.jobs.kubernetes import run

        return run.launch(found, options, state_dir=state_dir)
    return launching.launch(found, options, state_dir=state_dir)


@takes_settings(
    panel=None,
    servers={"help": "Parameter servers per host from now on; default: as many as before."},
    workers={"help": "Workers per host from now on; default: as many as before."},
    epochs={"min": 1, "metavar": "N", "help": "Train until N passes over the data in all."},
    steps={"min": 1, "metavar": "N", "help": "Train until step N, whatever the number of epochs."},
)
def resume(
    given: dict[str, Any],
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The job to go on with; default: the last.")
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i", "--inventory", metavar="FILE", help="Default: the one that the job was made with."
        ),
    ] = None,
    limit: Limit = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background; see `oeprov status`.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Go on with a job from its last checkpoint, with its own settings.

    The servers restore their rows from the checkpoint. It does not matter how the job ended, whether hosts
    were rebooted, or how many servers wrote it. --epochs or --steps replace both limits of the job; with
    either, a finished job can go on too. The same as launch-training --resume.
    """
    from provision.jobs import launching, store
    from provision.jobs.request import LaunchOptions

    found = store.find(state_dir, job)
    options = LaunchOptions(given, resume=found.id, detach=detach, as_json=as_json)
    if found.on_kubernetes:
        from provision.jobs.kubernetes import run

        return run.resume(found, options, state_dir=state_dir)
    path = inventory or Path(found.spec().inventory)
    return launching.launch(open_inventory(path, limit, state_dir), options, state_dir=state_dir)


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help=_JOB)] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i",
            "--inventory",
            metavar="FILE",
            help="Only jobs of this inventory's cluster, and all on Kubernetes; default: every job.",
        ),
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show jobs, and of a running one its processes: step, loss, rows, memory by tier, keys/s of servers.

    Looks at all of its hosts at once; a host that does not answer is a line that says so.
    """
    from provision.jobs import jobview

    cluster = open_inventory(inventory, None, state_dir).cluster if inventory else None
    return jobview.status(state_dir, job, cluster=cluster, as_json=as_json)


def logs(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help=_JOB)] = None,
    process: Annotated[
        str | None,
        typer.Option("--process", "-p", metavar="NAME", help="Only this process, such as worker-0."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 20,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Print what the processes of a job said."""
    from provision.jobs import logview, store

    found = store.find(state_dir, job)
    if found.on_kubernetes:
        from provision.jobs.kubernetes import view

        return view.logs(found, process=process, follow=follow, lines=lines)
    return logview.logs(state_dir, found.id, process_name=process, follow=follow, lines=lines)


def stop(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help=_JOB)] = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Stop a job: the worker writes a checkpoint, then the servers end, and nothing of them is left on hosts.

    Also for a job whose launcher was killed. Doing it twice does no harm.
    """
    from provision.jobs import stopping

    found = stopping.find(state_dir, job)
    if found.on_kubernetes:
        from provision.jobs.kubernetes import run

        return run.stop(found, state_dir=state_dir, as_json=as_json)
    return stopping.stop(state_dir, found.id, as_json=as_json)


def fetch(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Which job's results; default: the last job's.")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also copy checkpoints whose rows are in files.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace what was fetched before.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Copy the export and the report of a job from its worker's host to the job's directory here.

    The export and the report are copied completely or not at all. Existing copies stay unless you add
    --replace. If the worker ran on this machine, its files are here already.
    """
    from provision.cluster.errors import TrainingError
    from provision.jobs import fetching, store

    found = store.find(state_dir, job)
    if found.on_kubernetes:
        raise TrainingError(f"job {found.id} is on Kubernetes: what it has written is on its volume there")
    return fetching.fetch(state_dir, found.id, checkpoints=checkpoints, replace=replace)
