"""PyTorch's sparse layers beside the same ones, and a collection, with rows on a server or in the process.

26 layers of as many ids each under a small dense part, one step of Adagrad after the other on the same
generated batches, from memory, for some seconds. A cell is a worker process; all kinds of a table take turns.
Cells are appended to a file of JSON lines; the report has the newest of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_turns
from processes import run, server
from reporting import RESULTS, append, gib, header, lines_of, measured, table, when
from vocabularies import FIELDS, INTEGERS, SPARE, available_bytes, batches, result, samples_per_second, speed

from oe_runtime.support.argument_types import count

STOCK = "torch.nn, sparse=True"
DENSE = "the dense part alone"  # what no embedding can be faster than
KINDS = (STOCK, "in process", "served", "collection", "collection, served", DENSE)
LAYERS = {"Embedding": 1, "EmbeddingBag": 3}  # ids of a field in an example
PARTS = RESULTS / "training_torch.jsonl"


def main() -> int:
    """Measure some cells, or report all."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training torch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument(
        "--dims", type=int, nargs="+", help="9 and 64; with --turns 16 and 64, as FBGEMM's are"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[40_000, 10**6], help="a field")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5, help="of training in each run")
    parser.add_argument("--rounds", type=count(1), default=2)
    parser.add_argument("--parts", type=Path, default=PARTS, help="where the lines are kept")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    parser.add_argument(
        "--turns",
        action="store_true",
        help="processor time per step instead, beside FBGEMM's tables too (pip install fbgemm-gpu-cpu)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--turns-worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))
    if options.turns_worker:
        return pytorch_turns.worker(**json.loads(options.turns_worker))
    options.dims = options.dims or ([16, 64] if options.turns else [9, 64])
    if options.turns and importlib.util.find_spec("torch") is not None:
        return pytorch_turns.main(options.dims, options.rows[0], options.batch_size, options.rounds)
    if not options.report:
        if importlib.util.find_spec("torch") is None:
            print("error: PyTorch is not installed: pip install torch", file=sys.stderr)
            return 1
        for layer, dim, rows in itertools.product(options.layers, options.dims, options.rows):
            setup = {"layer": layer, "dim": dim, "rows": rows, "batch_size": options.batch_size}
            measure(options, setup)
    return report(options.parts)


def measure(options: argparse.Namespace, setup: dict[str, Any]) -> None:
    """All kinds of one table, in turns; appends a line for each."""
    cells = {k: {**setup, "kind": k, "speeds": [], "worker": 0, "server": 0} for k in options.kinds}
    for _, kind in itertools.product(range(options.rounds), options.kinds):
        cell, found = cells[kind], turn(setup, kind, options.seconds)
        cell["speeds"] += found.pop("speeds", [])
        if "cpu_per_sample" in found:
            cell["cpu_per_sample"] = min(found.pop("cpu_per_sample"), cell.get("cpu_per_sample", math.inf))
        if "problem" in found:
            cell["problem"] = found.pop("problem")
        cell.update({name: max(cell[name], value) for name, value in found.items()})
        print(f"{setup} {kind}: {cell.get('problem') or cell['speeds'][-1]}", file=sys.stderr, flush=True)
    when = measured()
    for cell in cells.values():
        append(options.parts, {**cell, **when})


def turn(setup: dict[str, Any], kind: str, seconds: float) -> dict[str, Any]:
    """One process of a kind, with a server of its own if it is served."""
    # Weights and the optimizer's sums, while one layer's are being made.
    needed, there = 4 * setup["dim"] * setup["rows"] * (2 * FIELDS + 1) + (1 << 30), available_bytes() - SPARE
    if kind == STOCK and needed > there:
        return {"problem": f"does not fit: {gib(needed)} GiB needed, {gib(there)} free"}
    program = [sys.executable, str(Path(__file__).parent), "torch", "--worker"]
    arguments = {**setup, "kind": kind, "seconds": seconds, "endpoint": ""}
    if not kind.endswith("served"):
        return result(run([*program, json.dumps(arguments)]))
    with tempfile.TemporaryDirectory() as directory:
        with server("dram", Path(directory)) as one:
            found = result(run([*program, json.dumps({**arguments, "endpoint": one.endpoint})]))
        return {**found, "server": one.peak}


def worker(layer: str, dim: int, rows: int, batch_size: int, kind: str, seconds: float, endpoint: str) -> int:
    """Train for `seconds` after three steps of warm-up; prints the speed as JSON."""
    import numpy as np
    import torch
    from torch import nn

    import oe_runtime.torch as embed
    from oe_runtime.client import Client

    torch.manual_seed(0)

    class Clicks(nn.Module):
        """Logits of (integers (B, 13), ids (26, B, ids of a field))."""

        def __init__(self) -> None:
            super().__init__()
            made: list[Any] = []
            if kind == STOCK:
                made = [getattr(nn, layer)(rows, dim, sparse=True, **mode) for _ in range(FIELDS)]
            elif kind.startswith("collection"):
                tables = [embed.EmbeddingBagConfig(rows, dim, name) for name in names]
                self.collection = embed.EmbeddingBagCollection(tables)
            elif kind != DENSE:
                made = [getattr(embed, layer)(rows, dim, **mode) for _ in range(FIELDS)]
            self.fields = nn.ModuleList(made)
            sizes = [FIELDS * dim + INTEGERS, 256, 128]
            deep = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
            self.deep = nn.Sequential(*deep, nn.Linear(sizes[-1], 1))

        def forward(self, integers: Any, ids: Any) -> Any:
            """(B, 1)."""
            if kind == DENSE:
                return self.deep(torch.cat([zeros, integers], 1))
            if kind.startswith("collection"):
                return self.deep(torch.cat([self.collection(ids).values(), integers], 1))
            if kind != STOCK:
                embed.pull(dict(zip(self.fields, ids, strict=True)))
            found = [field(one).reshape(len(one), dim) for field, one in zip(self.fields, ids, strict=True)]
            return self.deep(torch.cat([*found, integers], 1))

    mode = {"mode": "sum"} if layer == "EmbeddingBag" else {}
    names = [f"field{number}" for number in range(FIELDS)]
    zeros = torch.zeros(batch_size, FIELDS * dim)
    model: Any = Clicks()
    client = None
    ours = kind not in (STOCK, DENSE)
    if ours:
        client = Client([endpoint]) if endpoint else Client.in_process()
        model = embed.distributed_model(model, client)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    if ours:
        optimizer = embed.distributed_optimizer(optimizer, model)
    data = []
    for x, y in batches([rows] * FIELDS, batch_size * LAYERS[layer]):
        ids = np.stack(x[1:]).reshape(FIELDS, batch_size, LAYERS[layer])
        integers, values, labels = (
            torch.from_numpy(part) for part in (x[0][:batch_size], ids, y[:batch_size])
        )
        if kind.startswith("collection"):
            lengths = torch.full((FIELDS * batch_size,), LAYERS[layer])
            values = embed.KeyedJaggedTensor(names, values.reshape(-1), lengths=lengths)
        data.append((integers, values, labels))
    steps = itertools.cycle(data)

    used = [0.0, 0.0]  # seconds of processor time before the first measured step, and steps

    def step() -> int:
        used[1] += 1
        if used[1] == 4:  # after the warm-up of samples_per_second
            used[0] = time.process_time()
        integers, ids, labels = next(steps)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(integers, ids), labels).backward()
        optimizer.step()
        return batch_size

    found = {"samples_per_s": samples_per_second(step, seconds)}
    found["cpu_per_sample"] = (time.process_time() - used[0]) / (used[1] - 3) / batch_size
    print(json.dumps(found))
    if client is not None:
        client.close()
    return 0


def report(parts: Path) -> int:
    """The table of the newest line of each cell."""
    cells, stock = {}, {}
    for one in lines_of(parts):
        setup = (list(LAYERS).index(one["layer"]), one["rows"], one["dim"])
        cells[(*setup, KINDS.index(one["kind"]))] = one
        if one["kind"] == STOCK:
            stock[(*setup, one["day"])] = one
    lines = []
    for (*setup, number), cell in sorted(cells.items()):
        peer = stock.get((*setup, cell["day"]), {})  # of the same turns
        base = speed(peer)
        shown = [f"{speed(cell):,.0f}" if cell["speeds"] else cell["problem"]]
        shown.append(f"{speed(cell) / base:.2f}" if base and cell["speeds"] else "-")
        known = peer.get("cpu_per_sample") and cell.get("cpu_per_sample")
        shown.append(f"{peer['cpu_per_sample'] / cell['cpu_per_sample']:.2f}" if known else "-")
        shown += [gib(cell[what]) if cell[what] else "-" for what in ("worker", "server")]
        name = f"{cell['layer']}, dim {cell['dim']}, {cell['rows']:,} a field, {KINDS[number]}"
        lines.append([name, *shown, when(cell)])
    batch = statistics.mode(cell["batch_size"] for cell in cells.values())
    text = header("PyTorch: sparse layers, and rows in tables")
    text += f"""\
{FIELDS} layers under a dense part of 256 and 128, batch {batch}, Adagrad, ids by Zipf's law: one a field for
Embedding, {LAYERS["EmbeddingBag"]} for EmbeddingBag (sum). torch.nn's with sparse gradients; ours with one
embed.pull in forward, "in process" in tables of the worker, "served" by a process over loopback on the same
cores. A "collection" is one EmbeddingBagCollection of all fields; the dense part alone bounds all of them.
The median of rounds in turns; × torch where both ran in turns, by samples per second and by the worker's
processor time per sample (the least of the rounds). Memory is a process's peak resident
size.

"""
    text += table(
        ["layer", "samples/s", "× torch", "by processor time", "worker GiB", "server GiB", "measured"], lines
    )
    parts.with_suffix(".md").write_text(text)
    print(text)
    return 0
