"""``oeprov cost``: the price of parameter servers with rows in DRAM, in persistent memory and on drives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from provision.cli.options import Json

COST_EXAMPLES = (
    "Examples:  oeprov cost --rows 2.1e9 --dim 64 --optimizer sgd  |  "
    "oeprov cost --rows 5e8 --dim 16 --changed-rows 2e7 --prices prices.yml --epoch-hours 6 --json"
)


def _whole(text: str) -> int:
    """A count such as 2100000000 or 2.1e9."""
    try:
        value = float(text)
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"found {text!r}; expected a whole number, such as 2.1e9")


def cost(
    rows: Annotated[int, typer.Option(parser=_whole, metavar="N", help="Rows of all tables, such as 2.1e9.")],
    dim: Annotated[int, typer.Option(min=1, help="Width of an embedding.")] = 9,
    optimizer: Annotated[
        str, typer.Option(help="As in training_optimizer; it sets a row's size.")
    ] = "adagrad",
    dtype: Annotated[
        str, typer.Option(help="Of the weights: float32, float64, bfloat16 or float16.")
    ] = "float32",
    state_dtype: Annotated[
        str, typer.Option(help="Of the optimizer's state: float32 or bfloat16.")
    ] = "float32",
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prices and times; default: provision/jobs/prices.yml."),
    ] = None,
    changed_rows: Annotated[
        int | None,
        typer.Option(
            parser=_whole,
            metavar="N",
            help="Rows that change between two checkpoints in persistent memory: at most the keys of a batch "
            "times training_checkpoint_steps. Default: a sixteenth of the rows.",
        ),
    ] = None,
    kept: Annotated[
        int,
        typer.Option(min=1, max=64, help="Checkpoints kept there; as training_keep_checkpoints."),
    ] = 3,
    written_rows: Annotated[
        int,
        typer.Option(
            parser=_whole,
            metavar="N",
            help="With dram_ssd: rows per second that go from the cache to drives (rate of "
            "oe_cache_write_backs_total), at most the batch's rows that are not in the cache times batches "
            "per second. It gives the bytes written per day, to compare with the drives' rating.",
        ),
    ] = 0,
    epoch_hours: Annotated[
        float, typer.Option("--epoch-hours", min=1e-6, help="Hours of an epoch with rows in DRAM.")
    ] = 1.0,
    as_json: Json = False,
) -> int:
    """Compare sets of parameter servers for a model: number of servers per type, and cost per epoch.

    The price table has the hourly price of each server type and the time of an epoch with each storage, each
    with source and date. To use your own prices, copy and edit the table that comes with oeprov.

    In persistent memory and on drives, a row that changes between two checkpoints takes one more slot per
    kept checkpoint and one for the next: rows + changed rows × (kept + 1).
    """
    from provision.cli.views.cost import show
    from provision.jobs import cost as found

    model = found.Model(
        rows,
        dim,
        optimizer,
        cast(found.Dtype, dtype),
        changed_rows,
        kept,
        written_rows,
        cast(found.StateDtype, state_dtype),
    )
    return show(model, prices, epoch_hours, as_json=as_json)
