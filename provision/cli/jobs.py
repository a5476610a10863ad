"""``oeprov jobs``: list, remove and prune jobs."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from provision.cli.options import DEFAULT_STATE_DIR, DoNotAsk, JobConsent, Json, StateDir

app = typer.Typer(
    help="List jobs and the disk space they use; remove old jobs.",
    epilog="Examples:  oeprov jobs  |  oeprov jobs rm j1  |  oeprov jobs prune --older-than 30d --state done",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d{1,6})([mhdw])")


def _age(text: str) -> int:
    """Seconds of an age such as 30d."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"found {text!r}; expected a number and m, h, d or w, such as 30d")
    return int(found[1]) * _SECONDS[found[2]]


@app.callback(invoke_without_command=True)
def list_jobs(
    context: typer.Context, as_json: Json = False, state_dir: StateDir = DEFAULT_STATE_DIR
) -> int | None:
    """List jobs and the disk space they use; remove old jobs.

    Contacts no host, and names what a job may have on hosts. `oeprov status` shows what jobs do.
    """
    if context.invoked_subcommand is not None:
        return None
    from provision.cli.views import cleanup

    return cleanup.show(state_dir, as_json=as_json)


@app.command("rm", epilog="Examples:  oeprov jobs rm j1  |  oeprov jobs rm j1 j2 --yes")
def rm(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB...", help="Job names, ids, or unique beginnings of ids.", show_default=False
        ),
    ],
    yes: DoNotAsk = False,
    consent: JobConsent = None,
    here_only: Annotated[
        bool, typer.Option("--here-only", help="Contact no host: leave the job's files there.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Remove jobs with their logs, checkpoints and exports, here and on their hosts.

    It lists them and asks first. A running job is refused. So is a job with rows only in persistent memory
    unless --consent names it. On Kubernetes, what is in the claim stays.
    """
    from provision.cli.views import cleanup

    return cleanup.remove(
        state_dir, names, yes=yes, consent=consent or [], here_only=here_only, as_json=as_json
    )


@app.command(
    "prune",
    epilog="Examples:  oeprov jobs prune --older-than 30d  |  oeprov jobs prune --keep 5 --state done --yes",
)
def prune(
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than",
            parser=_age,
            metavar="AGE",
            help="Only jobs that ended at least this long ago: 90m, 12h, 30d or 8w.",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, metavar="N", help="Keep the newest N of them.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only this state, such as done; can be repeated."),
    ] = None,
    yes: DoNotAsk = False,
    consent: JobConsent = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Remove the jobs that match all options; running jobs are skipped.

    It lists them and asks first. A job with rows only in persistent memory is kept unless --consent names it.
    """
    from provision.cli.views import cleanup
    from provision.cluster.errors import TrainingError
    from provision.jobs.cleanup import ENDED

    if older_than is None and keep is None and not state:
        raise TrainingError(
            "jobs prune: no jobs were selected; add --older-than AGE, --keep N or --state STATE"
        )
    unknown = [item for item in state or [] if item not in ENDED]
    if unknown:
        raise typer.BadParameter(f"found {unknown[0]!r}; allowed: {', '.join(ENDED)}", param_hint="--state")
    return cleanup.prune(
        state_dir,
        states=state or [],
        older_than=older_than or 0,
        keep=keep or 0,
        yes=yes,
        consent=consent or [],
        as_json=as_json,
    )
