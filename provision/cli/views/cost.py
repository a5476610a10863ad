"""``oeprov cost``: the table of server sets with what an epoch costs on each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from provision.jobs import cost
from provision.jobs.cost import DEFAULT_PRICES, Choice, CostError, Model
from provision.jobs.screen import make_console, say


def show(model: Model, path: Path | None, hours: float, *, as_json: bool = False) -> int:
    """Print the sets of a price table with what an epoch costs; returns 0."""
    cost.check(model)
    prices = cost.read(path or DEFAULT_PRICES)
    found = cost.choices(model, prices, hours)
    if not found:
        raise CostError(f"{path or DEFAULT_PRICES}: no server has the memory that its systems need")
    if as_json:
        sets = [asdict(item) for item in found]
        print(json.dumps({"model": asdict(model), "currency": prices.currency, "choices": sets}))
        return 0
    console = make_console()
    say(
        console,
        f"{model.rows:,} rows of dim {model.dim}, {model.optimizer}, {model.dtype} (state "
        f"{'float64' if model.dtype == 'float64' else model.state_dtype}): {found[0].row_bytes} "
        f"bytes per row, {_gib(model.rows * found[0].row_bytes)} in all; {cost.changed(model):,} rows change "
        f"between checkpoints, of which {model.kept} are kept",
    )
    table = Table("rows in", "servers", "DRAM used", "other memory used", box=None, pad_edge=False)
    for name in (f"{prices.currency}/hour", "hours/epoch", f"{prices.currency}/epoch", "of the cheapest"):
        table.add_column(name, justify="right")
    for item in found:
        table.add_row(
            item.system,
            f"{item.servers} × {item.server}",
            _gib(item.dram),
            f"{_gib(item.ssd)} NVMe" if item.ssd else f"{_gib(item.pmem)} PMem" if item.pmem else "–",
            f"{item.price:.2f}",
            f"{item.hours:.2f}",
            f"{item.cost:.2f}",
            f"{item.cost / found[0].cost:.2f} ×",
        )
    console.print(table)
    for item in found:
        if item.ssd_writes:
            say(console, f"{'[yellow]![/] ' if item.ssd_wear > 1 else ''}{_endurance(item)}")
    oldest = min(item.date for item in [*prices.servers, *prices.systems])
    say(console, f"prices and times: {path or DEFAULT_PRICES}, the oldest of {oldest}")
    if path is None:
        say(console, "[yellow]![/] these are a paper's: copy the file and give your own with --prices")
    return 0


def _endurance(item: Choice) -> str:
    """What a choice writes to its drives."""
    words = f"{item.system} on {item.server}: its drives are written {_gib(item.ssd_writes)} a day"
    if not item.ssd_wear:
        return f"{words}; for their rating, set ssd_writes in the price table"
    words += f", {item.ssd_wear:.0%} of what they are rated for"
    return f"{words}: use a larger cache, or drives of a higher class" if item.ssd_wear > 1 else words


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
