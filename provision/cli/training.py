"""Commands for a job: launch, resume, status, logs, stop, fetch, Kubernetes manifests, serve its export."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    JobConsent,
    Json,
    Limit,
    StateDir,
    open_inventory,
    script_words,
    takes_settings,
)

if TYPE_CHECKING:
    from provision.cluster.inventory import Inventory

LAUNCH_EXAMPLES = (
    "Examples:  oeprov launch-training -i inventory/local.yml  |  oeprov launch-training --data criteo.tsv "
    "--model deepfm --storage pmem_libpmem  |  oeprov launch-training --resume  |  "
    "oeprov launch-training --script train.py --data /data/clicks -- --epochs 3"
)
STATUS_EXAMPLES = "Examples:  oeprov status  |  oeprov status JOB --json  |  oeprov status -i inventory.yml"
LOGS_EXAMPLES = "Examples:  oeprov logs -f  |  oeprov logs JOB --process worker-0 --lines 100"
RESUME_EXAMPLES = "Examples:  oeprov resume  |  oeprov resume JOB --epochs 3  |  oeprov resume --servers 3"
FETCH_EXAMPLES = "Examples:  oeprov fetch  |  oeprov fetch JOB --checkpoints  |  oeprov fetch JOB --replace"
STOP_EXAMPLES = "Examples:  oeprov stop  |  oeprov stop JOB"
MANIFESTS_EXAMPLES = (
    "Examples:  oeprov manifests > job.yml  |  oeprov manifests --data /shared/criteo --form tfjob  |  "
    "oeprov manifests --token-file token | kubectl apply -f -  |  oeprov manifests --script train.py -- "
    "--epochs 3"
)
SERVE_EXAMPLES = (
    "Examples:  oeprov serve-export  |  oeprov serve-export JOB --print  |  oeprov serve-export --stop"
)

_JOB = "Which job: its name, its id or how the id begins; default: the running or the last one."
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Leave it running in the background; see `oeprov status`.")
]


@takes_settings()
def launch_training(
    context: typer.Context,
    given: dict[str, Any],
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="With --resume: the job to continue; default: the last."),
    ] = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name the job.")] = None,
    on: Annotated[
        str,
        typer.Option("--on", metavar="WHERE", help="hosts (of the inventory), kubernetes, docker or podman."),
    ] = "hosts",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a job from its last checkpoint, with its settings.")
    ] = False,
    consent: JobConsent = None,
    detach: Detach = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Train a model: start parameter servers and workers, show progress, export the model.

    With --script FILE it trains your own script, which gets all words after a lone -- as its arguments.

    Ctrl-C stops the job: the worker finishes its step and writes a checkpoint, and `oeprov resume` continues
    from there. No process stays behind, however the command ends.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs import store
    from provision.jobs.backends import containers, registry
    from provision.jobs.request import LaunchOptions

    if on not in registry.places():
        raise typer.BadParameter(f"--on: found {on!r}; allowed: {', '.join(registry.places())}")
    if job is not None and not resume:
        raise typer.BadParameter(f"{job!r} is for --resume only; to name a new job: --name {job}")
    if consent and not resume:
        raise typer.BadParameter("--consent goes with --resume: a new job has no rows yet")
    named = store.find(state_dir, job).id if job is not None else ""
    options = LaunchOptions(
        given,
        run_name=name,
        on=on if on in containers.ENGINES else None,
        script_arguments=script_words(context),
        resume=named if resume else None,
        consent=consent or (),
        detach=detach,
    )
    found = open_inventory(inventory, limit, state_dir)
    return registry.named(on).start(found, options, state_dir=state_dir, screen=JobTerminal(as_json=as_json))


@takes_settings(
    panel=None,
    servers={"help": "Parameter servers per host from now on; default: as many as before."},
    workers={"help": "Workers per host from now on; default: as many as before."},
    epochs={"min": 1, "metavar": "N", "help": "Train until N passes over the data in all."},
    steps={"min": 1, "metavar": "N", "help": "Train until step N, whatever the number of epochs."},
)
def resume(
    context: typer.Context,
    given: dict[str, Any],
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The job to continue; default: the last.")
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i", "--inventory", metavar="FILE", help="Default: the inventory that the job was launched with."
        ),
    ] = None,
    limit: Limit = None,
    consent: JobConsent = None,
    detach: Detach = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Continue a job from its last checkpoint, with its own settings.

    The servers restore their rows from the checkpoint. It does not matter how the job ended, whether hosts
    were rebooted, or how many servers wrote it. --epochs or --steps replaces both limits of the job, and
    then continues a finished job too. Words after a lone -- replace the arguments of a job's script. With
    --consent JOB, rows in persistent memory are removed first, and checkpoints in files remain. The same as
    launch-training --resume.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs import store
    from provision.jobs.backends import registry
    from provision.jobs.request import LaunchOptions

    found = store.find_trained(state_dir, job)
    options = LaunchOptions(
        given,
        resume=found.id,
        consent=consent or (),
        script_arguments=script_words(context),
        detach=detach,
    )

    def today() -> Inventory:
        return open_inventory(inventory or Path(found.spec().inventory), limit, state_dir)

    screen = JobTerminal(as_json=as_json)
    return registry.backend_of(found).resume(found, today, options, state_dir=state_dir, screen=screen)


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
    """Show jobs; for a running job also its processes: step, loss, rows, memory by tier, keys/s of servers.

    Asks all hosts of the job at once. A host that does not answer is shown as such.
    """
    from provision.cli.views import jobs

    cluster = open_inventory(inventory, None, state_dir).cluster if inventory else None
    return jobs.status(state_dir, job, cluster=cluster, as_json=as_json)


def logs(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help=_JOB)] = None,
    process: Annotated[
        str | None,
        typer.Option("--process", "-p", metavar="NAME", help="Only this process, such as worker-0."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 20,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Print the logs of a job's processes."""
    from provision.jobs import store
    from provision.jobs.backends import registry

    found = store.find(state_dir, job)
    return registry.backend_of(found).logs(found, process=process, follow=follow, lines=lines)


def stop(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help=_JOB)] = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Stop a job: the worker writes a checkpoint, then the servers end and their units leave the hosts.

    Works for a job whose launcher was killed too. Stopping a job twice does no harm.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs.backends import registry

    found, screen = registry.find_running(state_dir, job), JobTerminal(as_json=as_json)
    return registry.backend_of(found).stop(found, state_dir=state_dir, screen=screen)


def fetch(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Which job's results; default: the last job's.")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also copy checkpoints whose rows are in files.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing copies.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Copy the export and the report of a job from its worker's host to the job's directory here.

    The export and the report are copied completely or not at all. Existing copies stay unless you add
    --replace. If the worker ran on this machine, its files are here already.
    """
    from provision.jobs import store
    from provision.jobs.backends import registry

    found = store.find_trained(state_dir, job)
    return registry.backend_of(found).fetch(found, checkpoints=checkpoints, replace=replace)


@takes_settings(
    *("model", "script", "storage"),
    panel=None,
    data={"help": "Below kubernetes_claim_path, or generate:ROWS[:SEED]."},
)
def manifests(
    context: typer.Context,
    given: dict[str, Any],
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the job; default: its model or script.")
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="Workers as job, tfjob or mpijob; default: kubernetes_form.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Add the servers' token as a Secret; keep the output private.",
        ),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Print a training job as Kubernetes manifests, from the inventory's kubernetes_*, training_* and
    parameter_server_*.

    Parameter servers are a StatefulSet on nodes with persistent memory, workers an Indexed Job (or
    Kubeflow's TFJob or MPIJob). The directory of --script is a ConfigMap; all words after a lone -- are the
    script's arguments. The same inventory gives the same text. Contacts no cluster; `oeprov launch-training
    --on kubernetes` starts the job.
    """
    from provision.cluster.errors import OeprovError
    from provision.inventory import vault
    from provision.jobs.backends.kubernetes import manifests as made
    from provision.jobs.backends.kubernetes import plan
    from provision.jobs.request import LaunchOptions

    options = LaunchOptions(given, run_name=name, script_arguments=script_words(context))
    job = plan.settle(plan.with_form(open_inventory(inventory, limit, state_dir), form), options)
    for note in job.notes:
        typer.echo(f"note: {note}", err=True)
    token = plan.read_token(token_file) if token_file else ""
    text = made.render(job, made.build(job, token))
    if vault.hide(text) != text:
        raise OeprovError(
            "the manifests would show values of a vaulted file, which oeprov never prints: start the job by "
            "`oeprov launch-training --on kubernetes`, or keep training_* and kubernetes_* outside the vault"
        )
    typer.echo(text, nl=False)
    return 0


def serve_export(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Which job's export; default: the newest export."),
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image of TensorFlow Serving; pin it in production.")
    ] = "tensorflow/serving:latest",
    port: Annotated[
        int, typer.Option(min=2, max=65535, help="Port of REST; gRPC gets the port before it.")
    ] = 8501,
    check_image: Annotated[
        bool, typer.Option("--check-image/--no-check-image", help="Ask the registry for the image first.")
    ] = True,
    show: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the container.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Serve a job's exported SavedModel with TensorFlow Serving in docker, and send one test request.

    Works for every flavor and listens on this machine only. For tables that are too large for a SavedModel,
    use `python -m oe_runtime.serve`.
    """
    from provision.jobs import serving

    found = serving.find(state_dir, job, image=image, port=port)
    if show:
        print(shlex.join(found.command()))
        return 0
    return serving.stop(found) if stop else serving.serve(found, check_image=check_image)
