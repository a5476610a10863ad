"""``oeprov checkpoint`` and ``oeprov reshard``: run the runtime's checkpoint tools as child processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from provision.cli.options import DEFAULT_STATE_DIR, Json, StateDir
from provision.cli.runtime_program import run_program

RESHARD_EXAMPLES = (
    "Examples:  oeprov reshard JOB --servers 3  |  "
    "oeprov reshard step-0000001000 --servers 8 --output /mnt/nfs/checkpoints"
)

app = typer.Typer(
    no_args_is_help=True,
    help="Inspect, verify and compare checkpoints, without a server.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PATH = "A job, a checkpoint (step-…), a run's checkpoints, also by URL (s3://…), or one table file (.oet)."


def _tool(*arguments: object) -> int:
    """Run ``python -m oe_runtime.checkpoint`` on our output; return its exit code."""
    return run_program("oe_runtime.checkpoint", *arguments)


def _resolve(name: str, state_dir: Path) -> str:
    """Return a path, a URL, or the named job's checkpoints. TrainingError when it is none of these."""
    from provision.cluster.errors import TrainingError
    from provision.jobs import store
    from provision.jobs.backends import registry

    path = Path(name)
    if "://" in name or os.path.lexists(path) or len(path.parts) != 1:
        return name  # the tool reports a missing file
    try:
        job = store.find(state_dir, str(path))
    except TrainingError as error:
        raise TrainingError(f"{path}: there is no such file or directory, and {error}") from None
    found = job.run_dir / "checkpoints"
    if found.is_dir():
        return str(found)
    if place := registry.backend_of(job).results(job):
        raise TrainingError(f"the checkpoints of job {job.id} are not here, but on {place}/checkpoints")
    raise TrainingError(f"job {job.id} has no checkpoint yet in {found}")


def _json(wanted: bool) -> list[str]:
    return ["--json"] if wanted else []


@app.command(epilog="Examples:  oeprov checkpoint inspect JOB  |  oeprov checkpoint inspect step-0000001000")
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help=_PATH)],
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show step, tables, rows, bytes, servers and formats; one line per checkpoint of a directory."""
    return _tool("inspect", *_json(as_json), "--", _resolve(path, state_dir))


@app.command(epilog="Examples:  oeprov checkpoint verify step-0000001000 && rsync -a step-0000001000 backup:")
def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help=_PATH + " Or the storage directory of stopped servers.")
    ],
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Read everything and compare every checksum; one line per problem names file and field.

    For a storage directory (pmem_libpmem, dram_pmem, dram_ssd) or its parent, on its host: checks every row
    there. (A restarting server reads only their keys.) Exit code 1 when there is a problem.
    """
    return _tool("verify", *_json(as_json), "--", _resolve(path, state_dir))


@app.command(epilog="Examples:  oeprov checkpoint diff step-0000001000 step-0000002000")
def diff(
    before: Annotated[
        str, typer.Argument(metavar="BEFORE", help="A checkpoint, or a job or run (its last checkpoint).")
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same.")],
    memory: Annotated[
        int,
        typer.Option(
            min=1, metavar="MIB", help="Memory for rows; larger tables are read several times, in parts."
        ),
    ] = 1024,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Compare two checkpoints per table: settings, missing rows, changed rows and how far they moved.

    The checkpoints may have different numbers of servers. Exit code 0: no difference; 2: differences; 1: an
    error.
    """
    both = [_resolve(path, state_dir) for path in (before, after)]
    return _tool("diff", "--memory", memory, *_json(as_json), "--", *both)


def reshard(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint (step-…), or a job or run (its last)."),
    ],
    servers: Annotated[int, typer.Option(min=1, max=1024, help="The new number of servers.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to publish it; default: beside CHECKPOINT, as the newest."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the rows: float32, float64, bfloat16 or float16; default: as they are.")
    ] = "",
    state_dtype: Annotated[
        str, typer.Option(help="Of the optimizer's state: float32 or bfloat16; default: as it is.")
    ] = "",
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Rewrite a checkpoint for another number of servers: one file per table and server.

    Any number of servers can restore any checkpoint; with a matching number, each server reads only its own
    files. Everything is verified first, and the old checkpoint stays. A running job's next checkpoint waits
    until this one is written, unless --output is elsewhere. To continue a job on another number of servers:
    oeprov stop, then oeprov resume --servers N.
    """
    where = [] if output is None else ["--output", output]
    where += ["--dtype", dtype] if dtype else []
    where += ["--state-dtype", state_dtype] if state_dtype else []
    return _tool(
        "reshard", "--servers", servers, *where, *_json(as_json), "--", _resolve(checkpoint, state_dir)
    )
