"""Speed, memory and AUC over models, dims and vocabularies: stock Keras beside embeddings on a server.

Every field has the same number of ids, or Criteo's own with a cap. A cell is a worker process that trains on
the same generated batches, from memory, for some seconds; all kinds of a table take turns, and the table
shows the median round. Cells are appended to a file of JSON lines, so that they can be measured in pieces;
the report has all of them, and of those that the part auc has trained the AUC. OpenEmbedding, whose server is
a part of the worker, is built at first: minutes, in .cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import auc
import openembedding_build
from processes import Ended, Missing, run, server
from reporting import MISSED, RESULTS, append, gib, header, lines_of, measured, table, when

STOCK, SERVED, PMEM, PEER = "stock", "served", "served pmem_libpmem", "openembedding"
KINDS = (STOCK, SERVED, PMEM, "stock bfloat16", "served bfloat16", "served bfloat16 rows", PEER)
PARTS = RESULTS / "training_vocabularies.jsonl"
BATCHES = 50  # in memory, again and again
FIELDS, INTEGERS = 26, 13
# Times stock, in float32: where tables are tiny, and with a million rows a field or more.
TARGETS = {40_000: 1.0, 1_000_000: 2.0}
# By dim, where tables are tiny: times OpenEmbedding 0.1.2.
PEER_TARGETS = {9: 1.1, 64: 1.5}
DEEPREC = "1.64 to 1.81 times community TensorFlow in FP32"
SPARE = 1 << 30  # left to the system by a stock run


def main() -> int:
    """Measure some cells, or report all; 0 when the report misses no target."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training vocabularies", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", default=["wdl", "deepfm", "dlrm"])
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[40_000, 10**6, 10**7], help="a field")
    parser.add_argument("--criteo", action="store_true", help="Criteo's fields, of which --rows is the cap")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10, help="of training in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", type=Path, default=PARTS, help="where the lines are kept")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))
    if not options.report:
        for model, dim, rows in itertools.product(options.models, options.dims, options.rows):
            setup = {"model": model, "dim": dim, "rows": rows, "criteo": options.criteo}
            measure(options, {**setup, "batch_size": options.batch_size})
    return report(options.parts)


def measure(options: argparse.Namespace, setup: dict[str, Any]) -> None:
    """All kinds of one table, in turns; appends a line for each."""
    cells: dict[str, dict[str, Any]] = {}
    for number, kind in itertools.product(range(options.rounds), options.kinds):
        cell = cells.setdefault(kind, {**setup, "kind": kind, "speeds": [], "worker": 0, "server": 0})
        if "problem" in cell:
            continue
        found = turn(setup, kind, options.seconds)
        cell["speeds"] += found.pop("speeds", [])
        if "problem" in found:
            cell["problem"] = found.pop("problem")
        cell.update({name: max(cell[name], value) for name, value in found.items()})
        said = cell.get("problem") or f"{cell['speeds'][-1]:,.0f} samples/s"
        print(f"round {number + 1}: {setup} {kind}: {said}", file=sys.stderr, flush=True)
    when = measured()  # the same for all: only what ran in turns is compared
    for cell in cells.values():
        append(options.parts, {**cell, **when})


def turn(setup: dict[str, Any], kind: str, seconds: float) -> dict[str, Any]:
    """One process of a kind, with a server of its own if it is served."""
    if kind == PEER:
        return peer(setup, seconds)
    arguments = {
        **setup,
        "dtype": "mixed_bfloat16" if "bfloat16" in kind else "float32",
        "rows_dtype": "bfloat16" if kind.endswith("bfloat16 rows") else "float32",
        "seconds": seconds,
        "endpoint": "",
    }
    if not kind.startswith(SERVED):
        needed, there = stock_bytes(setup), available_bytes() - SPARE
        if needed > there:
            return {"problem": f"does not fit: {gib(needed)} GiB needed, {gib(there)} free"}
        return one_worker(arguments)
    storage = "pmem_libpmem" if kind == PMEM else "dram"
    with tempfile.TemporaryDirectory() as directory:
        with server(storage, Path(directory)) as one:
            found = one_worker({**arguments, "endpoint": one.endpoint})
        return {**found, "server": one.peak}


def one_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a worker process measured, and its peak memory."""
    program = [sys.executable, str(Path(__file__).parent), "vocabularies", "--worker", json.dumps(arguments)]
    return result(run(program))


def peer(setup: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same of OpenEmbedding, on the same batches."""
    import numpy as np

    try:
        python = openembedding_build.python()
    except Missing as missing:
        return {"problem": str(missing)}
    program = [str(python), str(Path(openembedding_build.__file__).with_name("openembedding_training.py"))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "batches.npz"
        rows = field_sizes(setup["rows"], setup["criteo"])
        found = batches(rows, setup["batch_size"])
        np.savez(
            path,
            integers=np.stack([x[0] for x, _ in found]),
            ids=np.stack([np.concatenate(x[1:], axis=1) for x, _ in found]),
            labels=np.stack([y[:, 0] for _, y in found]),
        )
        words = ["--model", setup["model"], "--dim", setup["dim"], "--rows", rows]
        words += ["--batches", path, "--seconds", seconds]
        return result(run([*program, *map(str, words)]))


def result(ended: Ended) -> dict[str, Any]:
    """Of a worker: what it says last, and its peak memory."""
    if ended.status:
        return {"problem": f"ended with status {ended.status}"}
    said = json.loads(ended.output.splitlines()[-1])
    return {"speeds": [said.pop("samples_per_s")], "worker": ended.peak, **said}


def stock_bytes(setup: dict[str, Any]) -> int:
    """What stock needs: weights, accumulators, as much in temporaries, TensorFlow itself."""
    width = setup["dim"] + (setup["model"] != "dlrm")
    return 4 * width * sum(field_sizes(setup["rows"], setup["criteo"])) * 3 + (1 << 30)


def available_bytes() -> int:
    """Memory that a new process can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def worker(
    model: str,
    dim: int,
    rows: int,
    criteo: bool,
    batch_size: int,
    dtype: str,
    rows_dtype: str,
    seconds: float,
    endpoint: str,
) -> int:
    """Train for `seconds` after three steps of warm-up; prints the speed as JSON."""
    from oe_runtime.programs.click_model import import_keras

    keras = import_keras()
    import oe_runtime.keras as embed
    from oe_runtime import models
    from oe_runtime.client import Client

    keras.utils.set_random_seed(0)
    options = {"dtype": dtype, "seed": 0}
    optimizer = keras.optimizers.Adagrad(0.01)
    client = Client([endpoint]) if endpoint else None
    sizes = field_sizes(rows, criteo)
    if client is None:
        trained = models.build(model, sizes, dim, **options)
    else:
        embedding = functools.partial(embed.Embedding, dtype=rows_dtype)
        trained = models.build(model, sizes, dim, embedding=embedding, **options)
        trained = embed.distributed_model(trained, client)
        optimizer = embed.distributed_optimizer(optimizer)
    trained.compile(optimizer, "binary_crossentropy", jit_compile=False)
    data = batches(sizes, batch_size)
    steps = itertools.pairwise(itertools.cycle(data))

    def step() -> int:
        (x, y), following = next(steps)
        if client is not None:
            trained.prefetch(*following)
        trained.train_on_batch(x, y)
        return len(y)

    print(json.dumps({"samples_per_s": samples_per_second(step, seconds)}))
    if client is not None:
        client.close()
    return 0


def samples_per_second(
    step: Callable[[], int], seconds: float, settle: Callable[[], None] | None = None
) -> float:
    """Speed of steps, which return their number of samples, for `seconds` after three of warm-up.

    `settle` waits for what the last step has begun.
    """
    for _ in range(3):
        step()
    done, began = 0, time.perf_counter()
    while not done or time.perf_counter() - began < seconds:
        done += step()
    if settle is not None:
        settle()
    return done / (time.perf_counter() - began)


def field_sizes(rows: int, criteo: bool = False) -> list[int]:
    """Ids of each field: `rows`, or Criteo's with that cap."""
    from oe_runtime.data import field_rows

    return list(field_rows(rows)) if criteo else [rows] * FIELDS


def batches(sizes: Sequence[int], batch_size: int) -> list[tuple[Any, Any]]:
    """(x, y) of ids of each field as `zipf` draws them."""
    import numpy as np

    rng = np.random.default_rng(1)
    found = []
    for _ in range(BATCHES):
        ids = zipf(rng, np.array(sizes)[:, None], (FIELDS, batch_size))
        x = [rng.standard_normal((batch_size, INTEGERS), np.float32), *(field[:, None] for field in ids)]
        found.append((x, rng.integers(0, 2, (batch_size, 1)).astype(np.float32)))
    return found


def zipf(rng: Any, sizes: Any, shape: tuple[int, int]) -> Any:
    """Ids below `sizes` by Zipf's law with the exponent of the generator, scattered over each field."""
    import numpy as np

    from oe_runtime.data.generate import ZIPF_EXPONENT

    shrink = 1 - ZIPF_EXPONENT
    ranks = ((sizes.astype(float) ** shrink - 1) * rng.random(shape) + 1) ** (1 / shrink)
    return ranks.astype(np.int64) * 2654435761 % sizes


def report(parts: Path) -> int:
    """The table of the newest line of each cell."""
    cells, turns = {}, {}
    for one in lines_of(parts):
        setup = (one["criteo"], one["rows"], one["dim"], one["model"])
        cells[(*setup, KINDS.index(one["kind"]))] = one
        turns[(*setup, one["kind"], one["day"])] = one
    lines, verdicts, missed = [], [], 0
    aucs = auc.means()
    for (criteo, rows, dim, model, number), cell in sorted(cells.items()):
        kind, name = KINDS[number], f"{model}, dim {dim}, {'Criteo, ' * criteo}{rows:,} a field"
        beside = {base: times(turns, cell, base) for base in (STOCK, PEER)}
        shown = [f"{speed(cell):,.0f}" if cell["speeds"] else cell["problem"]]
        shown += [f"{ratio:.2f}" if ratio else "-" for ratio in beside.values()]
        shown += [gib(cell[what]) if cell[what] else "-" for what in ("worker", "server")]
        shown.append(aucs.get((model, dim, rows, kind), "-") if criteo else "-")
        lines.append([f"{name}, {kind}", *shown, when(cell)])
        if kind != SERVED:
            continue
        wanted = {
            STOCK: TARGETS[40_000]
            if rows <= 40_000
            else TARGETS[1_000_000]
            if dim >= 64 and not criteo
            else 0.0
        }
        wanted[PEER] = PEER_TARGETS.get(dim, 0.0) if rows <= 40_000 and model == "deepfm" else 0.0
        for base, target in wanted.items():
            if target and beside[base]:
                missed += beside[base] < target
                verdict = "met" if beside[base] >= target else "MISSED"
                verdicts.append(f"- {name}: {beside[base]:.2f} × {base}, target {target}: {verdict}\n")
    verdicts += memory(cells)
    text = header("Training over models, dims and vocabularies")
    text += f"""\
Adagrad, ids by Zipf's law, the median of rounds in turns; one server process over loopback shares the cores
with the worker, its rows in DRAM unless the line says pmem_libpmem (files in an ordinary directory). × stock
is against stock in float32, × peer against OpenEmbedding 0.1.2 under TensorFlow 2.21 and Keras 2 (its server
in the worker's process, its own prefetching), where both ran in turns with the line. bfloat16: products of
the hidden layers (Keras's mixed_bfloat16); "rows": the tables' rows too, the optimizer's state in float32.
Memory is the peak resident size of a process, with the pages of its mapped files. The load is that of the
machine when the cell was measured, its own included: others work on it. AUC (seeds): of the held-out tenth of
{auc.GRID}, one epoch in batches of {auc.GRID_BATCH} ([all](training_auc.md)). "Criteo": the fields have
Criteo's numbers of ids, at most so many.
All run TensorFlow's deterministic operations but the peer. What stock needs: 4 bytes × ids × values an id
(dim; 1 more but for DLRM) × 3 (weights, accumulators, temporaries), and 1 GiB.

{beside_deeprec(cells, turns)}

"""
    columns = ["model, embeddings", "samples/s", "× stock", "× peer", "worker GiB", "server GiB"]
    text += table([*columns, "AUC (seeds)", "measured"], lines) + "\n" + "".join(verdicts)
    parts.with_suffix(".md").write_text(text)
    print(text)
    return MISSED if missed else 0


def times(turns: dict[tuple[Any, ...], dict[str, Any]], cell: dict[str, Any], base: str) -> float:
    """The cell's speed as a multiple of another kind's that ran in turns with it; 0 if none did."""
    other = speed(turns.get((*(cell[n] for n in ("criteo", "rows", "dim", "model")), base, cell["day"]), {}))
    return speed(cell) / other if other else 0.0


def memory(cells: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """A line for each model and dim: the worker's memory over all vocabularies."""
    peaks: dict[tuple[str, int], dict[int, float]] = {}
    for (criteo, rows, dim, model, number), cell in cells.items():
        if KINDS[number] == SERVED and cell["worker"] and not criteo:
            peaks.setdefault((model, dim), {})[rows] = cell["worker"]
    return [
        f"- {model}, dim {dim}, the worker's memory over {len(by_rows)} vocabularies: "
        f"{gib(min(by_rows.values()))} to {gib(max(by_rows.values()))} GiB\n"
        for (model, dim), by_rows in sorted(peaks.items())
        if len(by_rows) > 1
    ]


def beside_deeprec(
    cells: dict[tuple[Any, ...], dict[str, Any]], turns: dict[tuple[Any, ...], dict[str, Any]]
) -> str:
    """DeepRec's claim and our range of the same, for each size of vocabulary."""
    ratios: dict[int, list[float]] = {}
    for (criteo, rows, _, _, number), cell in sorted(cells.items()):
        if KINDS[number] == SERVED and not criteo and times(turns, cell, STOCK):
            ratios.setdefault(rows, []).append(times(turns, cell, STOCK))
    ours = [f"{min(r):.2f} to {max(r):.2f} with {rows:,} ids a field" for rows, r in ratios.items()]
    return (
        f"DeepRec states {DEEPREC} (its models, batch 512, 8 CPUs); here, × stock Keras: {', '.join(ours)}."
    )


def speed(cell: dict[str, Any]) -> float:
    """Median samples a second; 0 for a cell that could not be measured."""
    return statistics.median(cell["speeds"]) if cell.get("speeds") else 0.0
