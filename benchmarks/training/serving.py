"""Latency and lookups a second of served models: exports with rows inside, and rows elsewhere.

DeepFM over 26 fields is trained for some steps and exported in each way. A cell is a process that loads one
and asks it in a closed loop, the same requests again and again, with one thread: what TensorFlow does with
stock Keras's export and with ours, what `oe_runtime.serving` does with ours, with rows in its process, from a
checkpoint, and with rows that it asks a server for. All kinds of a table take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import run, server
from reporting import RESULTS, append, gib, header, lines_of, measured, table, when
from vocabularies import FIELDS, batches

STOCK, EMBEDDED = "TensorFlow, stock Keras's export", "TensorFlow, save_as_original_model"
INSIDE, CHECKPOINT = "serving, rows inside", "serving, rows of a checkpoint"
KINDS = (STOCK, EMBEDDED, INSIDE, CHECKPOINT, "serving, rows at a server")
PARTS = RESULTS / "training_serving.jsonl"
SECONDS_OF_TRAINING = 2.0
WARM_UP = 20  # requests of a size


def main() -> int:
    """Measure some cells, or report all."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training serving", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--rows", type=int, default=40_000, help="a field")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 1024], help="examples in a request")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seconds", type=float, default=2, help="of requests of a size in each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", type=Path, default=PARTS, help="where the lines are kept")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        arguments = json.loads(options.worker)
        return export(**arguments) if "directory" in arguments else ask(**arguments)
    if not options.report:
        for dim in options.dims:
            measure(options, dim)
    return report(options.parts)


def measure(options: argparse.Namespace, dim: int) -> None:
    """All kinds of one dim, in turns; appends a line for each of them and each size."""
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
        setup = {"rows": options.rows, "endpoint": one.endpoint}
        worker({**setup, "dim": dim, "directory": directory})
        for number, kind in itertools.product(range(options.rounds), options.kinds):
            asked = {"kind": kind, "models": directory, "sizes": options.sizes, "seconds": options.seconds}
            found = worker({**setup, **asked})
            for size in options.sizes:
                new = {"dim": dim, "rows": options.rows, "kind": kind, "size": size, "rounds": []}
                cell = cells.setdefault((kind, size), new)
                cell["rounds"].append(found["sizes"][str(size)])
                agree(cells, size)
                cell["memory"] = max(cell.get("memory", 0), found["memory"])
                said = cell["rounds"][-1]
                print(f"round {number + 1}: dim {dim}, {kind}, {size}: {said}", file=sys.stderr, flush=True)
    when = measured()
    for cell in cells.values():
        append(options.parts, {**cell, **when})


def agree(cells: dict[tuple[str, int], dict[str, Any]], size: int) -> None:
    """SystemExit where two exports of the same model answer differently."""
    said = {kind: c["rounds"][-1]["said"] for (kind, n), c in cells.items() if n == size and kind != STOCK}
    if said and max(said.values()) - min(said.values()) > 1e-5:
        raise SystemExit(f"error: exports of one model do not agree: {said}")


def worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a process of this program says, and its peak memory."""
    ended = run([sys.executable, str(Path(__file__).parent), "serving", "--worker", json.dumps(arguments)])
    if ended.status:
        raise SystemExit(f"error: {arguments} ended with status {ended.status}")
    return {**json.loads(ended.output.splitlines()[-1]), "memory": ended.peak}


def export(dim: int, rows: int, endpoint: str, directory: str) -> int:
    """Train for some seconds, and write the model in each way under `directory`."""
    from oe_runtime.programs.click_model import import_keras

    keras = import_keras()
    import oe_runtime.keras as embed
    from oe_runtime import checkpoint, models
    from oe_runtime.client import Client

    place, fields = Path(directory), [rows] * FIELDS
    models.build("deepfm", fields, dim).export(place / "stock", verbose=False)
    with Client([endpoint]) as client:
        model = embed.distributed_model(
            models.build("deepfm", fields, dim, embedding=embed.Embedding), client
        )
        model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.01)), "binary_crossentropy")
        began = time.perf_counter()
        for x, y in batches(fields, 4096):
            model.train_on_batch(x, y)
            if time.perf_counter() - began > SECONDS_OF_TRAINING:
                break
        model.save_as_original_model(place / "original")
        model.save_serving_model(place / "model")

        def write(path: Path) -> dict[str, Any]:
            model.save_dense(path)
            return {"tables": client.save(path)}

        checkpoint.publish(place / "checkpoints", 1, write, keep=1)
    print("{}")
    return 0


def ask(kind: str, models: str, sizes: list[int], seconds: float, rows: int, endpoint: str) -> int:
    """Load what `kind` names and ask it for `seconds` with each size; prints milliseconds as JSON."""
    import numpy as np

    from oe_runtime.programs.click_model import import_keras

    import_keras(deterministic=False)
    answer = answering(kind, Path(models), endpoint)
    names = ["integers", *(f"C{i + 1}_id" for i in range(FIELDS))]
    examples, found = batches([rows] * FIELDS, max(sizes)), {}
    for size in sizes:
        requests = [
            dict(zip(names, (part[begin : begin + size] for part in x), strict=True))
            for x, _ in examples
            for begin in range(0, min(len(x[0]), 16 * size), size)
        ]
        milliseconds: list[float] = []
        for request in requests[:WARM_UP]:
            outputs = answer(request)
        began = time.perf_counter()
        for request in itertools.cycle(requests):
            before = time.perf_counter()
            answer(request)
            after = time.perf_counter()
            milliseconds.append((after - before) * 1000)
            if after - began > seconds:
                break
        p50, p99 = np.percentile(milliseconds, [50, 99])
        speed = len(milliseconds) * size * FIELDS / (after - began)
        said = float(np.mean(next(iter(outputs.values()))))  # the same of all kinds, but for stock
        found[size] = {"p50": p50, "p99": p99, "lookups_per_s": speed, "said": said}
    print(json.dumps({"sizes": found}))
    return 0


def answering(kind: str, place: Path, endpoint: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers a request, from the models under `place`: arrays by name, both ways."""
    if kind in (STOCK, EMBEDDED):
        import tensorflow as tf

        model = tf.saved_model.load(str(place / ("stock" if kind == STOCK else "original")))

        def answer(inputs: dict[str, Any]) -> dict[str, Any]:
            tensors = {name: tf.constant(array) for name, array in inputs.items()}
            outputs = model.signatures["serving_default"](**tensors)
            return {name: output.numpy() for name, output in outputs.items()}

        return answer
    from oe_runtime.client import Client
    from oe_runtime.serving import Model

    if kind == INSIDE:
        return Model.load(place / "original").predict
    if kind == CHECKPOINT:
        return Model.load(place / "model", place / "checkpoints").predict
    return Model.load(place / "model", client=Client([endpoint], read_only=True)).predict


def report(parts: Path) -> int:
    """The table of the newest line of each cell."""
    cells = {}
    for one in lines_of(parts):
        cells[one["rows"], one["dim"], one["size"], KINDS.index(one["kind"])] = one
    lines = []
    for (rows, dim, size, number), cell in sorted(cells.items()):
        median = {
            name: statistics.median(turn[name] for turn in cell["rounds"])
            for name in ("p50", "p99", "lookups_per_s")
        }
        name = f"dim {dim}, {rows:,} a field, {size} examples, {KINDS[number]}"
        shown = [f"{median['p50']:.2f}", f"{median['p99']:.2f}", f"{median['lookups_per_s']:,.0f}"]
        lines.append([name, *shown, gib(cell["memory"]), when(cell)])
    text = header("Serving: exports with rows inside, and rows elsewhere")
    text += f"""\
DeepFM, {FIELDS} fields with ids by Zipf's law; one process with one thread of requests, one after the other,
in a closed loop, arrays in and arrays out: without HTTP or gRPC, which cost the same for all. A lookup is an
id of a field, for which DeepFM takes two rows. "TensorFlow" loads a SavedModel and calls its signature, as
TensorFlow Serving does; "serving" is `oe_runtime.serving.Model.predict`, the server on the same cores. The
median of rounds in turns. Memory is the peak resident size of the process that answers.

"""
    text += table(["model", "p50, ms", "p99, ms", "lookups/s", "GiB", "measured"], lines)
    parts.with_suffix(".md").write_text(text)
    print(text)
    return 0
