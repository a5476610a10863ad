"""``oeprov manifests``: a training job as Kubernetes manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Limit,
    StateDir,
    open_inventory,
    takes_settings,
)

MANIFESTS_EXAMPLES = (
    "Examples:  oeprov manifests > job.yml  |  oeprov manifests --data /shared/criteo --form tfjob  |  "
    "oeprov manifests --token-file token | kubectl apply -f -"
)


@takes_settings(
    "model", "storage", panel=None, data={"help": "Below kubernetes_claim_path, or generate:ROWS[:SEED]."}
)
def manifests(
    given: dict[str, Any],
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name the job; default: its model.")
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="Workers as job, tfjob or mpijob; default: kubernetes_form.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Put the servers' token in, as a Secret: keep the output private.",
        ),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Print a training job as Kubernetes manifests, from the inventory's kubernetes_*, training_* and
    parameter_server_*.

    Parameter servers are a StatefulSet on nodes with persistent memory, workers an Indexed Job (or
    Kubeflow's TFJob or MPIJob). The same inventory gives the same text. Asks no cluster:
    `launch-training --on kubernetes` does, and starts it.
    """
    from provision.jobs.kubernetes import manifests as made
    from provision.jobs.kubernetes import plan
    from provision.jobs.request import LaunchOptions

    options = LaunchOptions(given, run_name=name)
    job = plan.settle(plan.with_form(open_inventory(inventory, limit, state_dir), form), options)
    for note in job.notes:
        typer.echo(f"note: {note}", err=True)
    token = plan.read_token(token_file) if token_file else ""
    typer.echo(made.render(job, made.build(job, token)), nl=False)
    return 0
