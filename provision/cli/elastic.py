"""Commands that change the servers of running jobs: scale, drain, undrain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    DoNotAsk,
    InventoryPath,
    Json,
    Limit,
    StateDir,
    open_inventory,
)

SCALE_EXAMPLES = "Examples:  oeprov scale JOB --servers 4  |  oeprov scale --servers 1 --yes"
DRAIN_EXAMPLES = "Examples:  oeprov drain re6p-1 -i inventory.yml  |  oeprov drain re6p-1 --yes"
UNDRAIN_EXAMPLES = "Examples:  oeprov undrain re6p-1 -i inventory.yml"

HostName = Annotated[str, typer.Argument(metavar="HOST", help="A host of the inventory.", show_default=False)]


def asking(*, yes: bool, as_json: bool) -> Callable[[str], bool]:
    """What asks the user; TrainingError where nobody can answer."""

    def confirm(question: str) -> bool:
        from provision.cli.views.terminal import Terminal
        from provision.cluster.errors import TrainingError

        if yes:
            return True
        screen = Terminal(as_json=as_json)
        if not screen.can_ask:
            raise TrainingError("no terminal to ask at: add --yes; nothing was changed")
        return screen.confirm(question)

    return confirm


def scale(
    servers: Annotated[
        int, typer.Option("--servers", min=1, metavar="N", help="Parameter servers in all, from now on.")
    ],
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Which job: its name, its id or how the id begins; default: the running one.",
        ),
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i", "--inventory", metavar="FILE", help="Default: the inventory that the job was launched with."
        ),
    ] = None,
    limit: Limit = None,
    yes: DoNotAsk = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Grow or shrink the parameter servers of a running job, which goes on from the same step.

    Asks first. Training pauses between two steps: the workers write a checkpoint, all processes end, and the
    job's own launcher starts them again with N servers, spread evenly over the hosts of parameter_servers. No
    step is lost or repeated. The last line says how long training paused. If the new servers cannot be
    started, the job goes on with the former ones. --servers of launch-training and resume is per host; this
    one is the whole number, and later resumes keep it.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs.backends import registry
    from provision.jobs.request import ScaleOptions

    found = registry.find_running(state_dir, job)
    return registry.backend_of(found).scale(
        found,
        lambda: open_inventory(inventory or Path(found.spec().inventory), limit, state_dir),
        ScaleOptions(asking(yes=yes, as_json=as_json), servers),
        state_dir=state_dir,
        screen=JobTerminal(as_json=as_json),
    )


def drain(
    host: HostName,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    yes: DoNotAsk = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Take a host out of running jobs and of placement, such as for a kernel upgrade.

    Each running job with a server or worker there goes on without the host, as `oeprov scale` does: with the
    same number of servers on the other hosts. Asks first for each job. Launches, resumes and scales leave the
    host out until `oeprov undrain HOST`; `oeprov status` shows it. If a job cannot leave the host, the host
    stays in placement. The host of a job's worker 0, which has its checkpoints, cannot be drained while that
    job runs. Does not move pods: on Kubernetes, use kubectl drain.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs import draining

    found = open_inventory(inventory, None, state_dir)
    confirm = asking(yes=yes, as_json=False)
    return draining.drain(found, host, confirm, state_dir=state_dir, screen=JobTerminal())


def undrain(
    host: HostName,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Let a drained host take part in placement again.

    Running jobs stay where they are; `oeprov scale` moves servers there.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs import draining

    found = open_inventory(inventory, None, state_dir)
    return draining.undrain(found, host, state_dir=state_dir, screen=JobTerminal())
