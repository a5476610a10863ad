"""Other columns than Criteo's: stock Keras beside embeddings on a server, the trainer's own models and steps.

Avazu's schema (22 categories), a shop's (a basket, a history and tags of several values, 4 numbers) and a
bidder's (60 categories, 40 numbers), each with at most --max-cardinality ids per category: where tables are
tiny, which is the hardest case for a server. A cell is a worker process that trains on the same generated
batches, from memory, for some seconds; stock and served take turns. Cells are appended to a file of JSON
lines; the report has the newest of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import run, server
from reporting import MISSED, RESULTS, append, header, lines_of, measured, table, when
from trainee import Trainee
from vocabularies import samples_per_second, zipf

PARTS = RESULTS / "training_schemas.jsonl"
TARGETS = {9: 1.3, 64: 1.5}  # times stock, by dim
BATCHES = 50  # in memory, again and again
SHOP = {
    "label": "bought",
    "numbers": {"price": "log1p", "age": "log1p", "hour": "none", "visits": "log1p"},
    "categories": {
        "user": 2_000_000,
        "item": 500_000,
        "brand": 30_000,
        "city": 5_000,
        "device": 200,
        "basket": {"cardinality": 500_000, "length": 10},
        "history": {"cardinality": 500_000, "length": 20, "keep": "last"},
        "tags": {"cardinality": 1_000, "length": 5, "pooling": "sum"},
    },
}
BIDDER = {
    "label": "won",
    "numbers": [f"n{i}" for i in range(40)],
    "categories": {f"c{i}": 10 ** (2 + i % 5) for i in range(60)},
}
SCHEMAS = {"avazu": "avazu", "shop": json.dumps(SHOP), "bidder": json.dumps(BIDDER)}
KINDS = ("stock", "served")


def main() -> int:
    """Measure some cells, or report; 0 when the report misses no target."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training schemas", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=SCHEMAS)
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--max-cardinality", type=int, default=40000, help="0: the schema's own")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10, help="of training in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", type=Path, default=PARTS, help="where the lines are kept")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))
    if not options.report:
        for schema, dim in itertools.product(options.schemas, options.dims):
            measure(options, schema, dim)
    return report(options.parts)


def measure(options: argparse.Namespace, schema: str, dim: int) -> None:
    """Both kinds of one schema and dim, in turns; appends a line."""
    setup = {
        "schema": schema,
        "model": options.model,
        "dim": dim,
        "cap": options.max_cardinality,
        "batch_size": options.batch_size,
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, kind in itertools.product(range(options.rounds), KINDS):
        found = turn({**setup, "seconds": options.seconds}, kind)
        speeds[kind].append(found)
        print(f"{schema}, dim {dim}, {kind}: {found:,.0f} samples/s", file=sys.stderr, flush=True)
    append(options.parts, {**setup, "speeds": speeds, **measured()})


def turn(arguments: dict[str, Any], kind: str) -> float:
    """Samples per second of one process of a kind, with a server of its own if it is served."""
    if kind == "stock":
        return process({**arguments, "endpoint": ""})
    with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
        return process({**arguments, "endpoint": one.endpoint})


def process(arguments: dict[str, Any]) -> float:
    """What a worker process says last."""
    ended = run([sys.executable, str(Path(__file__).parent), "schemas", "--worker", json.dumps(arguments)])
    if ended.status:
        raise SystemExit(f"error: a worker ended with status {ended.status}")
    return float(json.loads(ended.output.splitlines()[-1])["samples_per_s"])


def worker(
    schema: str, model: str, dim: int, cap: int, batch_size: int, seconds: float, endpoint: str
) -> int:
    """Train for `seconds` after three steps of warm-up; prints the speed as JSON."""
    from oe_runtime.client import Client
    from oe_runtime.run.options import parse

    words = ["--data", "in-memory.csv", "--schema", SCHEMAS[schema], "--model", model, "--dim", str(dim)]
    words += ["--max-cardinality", str(cap), "--batch-size", str(batch_size)]
    options = parse([*words, *(["--servers", endpoint] if endpoint else ["--stock"])])
    client = Client([endpoint]) if endpoint else None
    trainee = Trainee(options, client)
    steps = itertools.pairwise(itertools.cycle(batches(options.schema.limited(cap), batch_size)))

    def step() -> int:
        batch, following = next(steps)
        trainee.train(batch, following)
        return int(batch.rows)

    speed = samples_per_second(step, seconds, None if client is None else client.settle)
    print(json.dumps({"samples_per_s": speed}))
    if client is not None:
        client.close()
    return 0


def batches(schema: Any, batch_size: int) -> list[Any]:
    """Batches of ids of each category as `zipf` draws them."""
    import numpy as np

    from oe_runtime.data.batch import Batch

    rng = np.random.default_rng(1)
    sizes = np.concatenate([[one.cardinality] * one.length for one in schema.categories])
    found = []
    for _ in range(BATCHES):
        ids = zipf(rng, sizes, (batch_size, len(sizes))) + 1
        dense = rng.standard_normal((batch_size, len(schema.numbers)), np.float32)
        labels = rng.integers(0, 2, batch_size).astype(np.float32)
        found.append(Batch(dense, np.asfortranarray(ids), labels))
    return found


def report(parts: Path) -> int:
    """The table of the newest line of each cell."""
    cells = {}
    for one in lines_of(parts):
        cells[one["schema"], one["model"], one["dim"], one["cap"]] = one
    rows, missed = [], 0
    for (schema, model, dim, cap), one in cells.items():
        stock, served = (statistics.median(one["speeds"][kind]) for kind in KINDS)
        ratio, target = served / stock, TARGETS[dim]
        missed += ratio < target
        verdict = "met" if ratio >= target else "MISSED"
        rows.append(
            [
                f"{schema}, {model}, dim {dim}, at most {cap:,} ids",
                f"{stock:,.0f}",
                f"{served:,.0f}",
                f"{ratio:.2f}",
                f"{target} {verdict}",
                when(one),
            ]
        )
    text = header("Training on other columns than Criteo's")
    text += """\
Adagrad, batch 4096, ids by Zipf's law from memory, the median of rounds in turns; one server process over
loopback shares the cores with the worker. Both are the trainer's own model and step, with all embeddings in
the worker (stock Keras) or on the server. The limit of both is the processor: two cores.

"""
    columns = ["schema, model", "stock, samples/s", "served, samples/s", "× stock", "asked", "measured"]
    parts.with_suffix(".md").write_text(text + table(columns, rows))
    print(parts.with_suffix(".md").read_text())
    return MISSED if missed else 0
