"""Training throughput: stock Keras, the same model with its embeddings on one server, and OpenEmbedding.

Every cell is a worker process of its own that trains on the same generated rows, from memory, for some
seconds; rounds of all cells are interleaved, so that a busy minute of the machine hits all alike, and the
table shows the median round. OpenEmbedding, whose server is a part of the worker, is built at first: minutes,
in .cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

import openembedding_build
from processes import gib, header, run, server, table

HERE = Path(__file__).resolve().parents[1]
PEER_ENVIRONMENT = HERE.parent / ".cache" / "benchmark-openembedding"
# Ours at least so many times stock with full cardinalities.
TARGETS = {9: 0.7, 64: 1.0}
STOCK, DRAM, PMEM, PEER = "stock", "dram", "pmem_libpmem", "openembedding"
KINDS = (STOCK, DRAM, PMEM, PEER)
# The same for OpenEmbedding 0.1.2.
PEER_TARGETS = {9: 1.1, 64: 1.5}
BATCHES = 100  # in memory, again and again


@dataclass
class Cell:
    """One line of the table."""

    dim: int
    cap: int
    kind: str
    speeds: list[float] = field(default_factory=list)
    worker: int = 0
    server: int = 0
    problem: str = ""

    @property
    def speed(self) -> float:
        """Median samples a second of the rounds."""
        return statistics.median(self.speeds) if self.speeds else 0.0


def main() -> int:
    """Run the benchmark; 0 when the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--caps", type=int, nargs="+", default=[40000, 0], help="--max-cardinality; 0: full")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--seconds", type=float, default=30, help="of training in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storage-directory", type=Path, help="for pmem_libpmem (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=HERE / "results/training_throughput.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(**json.loads(options.worker))

    cells = [Cell(d, c, k) for d in options.dims for c in options.caps for k in options.kinds]
    peer = openembedding_build.python(PEER_ENVIRONMENT) if PEER in options.kinds else None
    with tempfile.TemporaryDirectory() as directory:
        files = {cap: write_batches(cap, options.batch_size, Path(directory)) for cap in options.caps}
        for number, cell in itertools.product(range(options.rounds), cells):
            if not cell.problem:
                measure(cell, options, files[cell.cap], peer)
                result = cell.problem or f"{cell.speeds[-1]:,.0f} samples/s"
                print(f"round {number + 1}: dim {cell.dim} cap {cell.cap} {cell.kind}: {result}", flush=True)
    limits = {dim: dense_limit(dim, options.batch_size) for dim in options.dims}
    text, met = report(cells, options, limits)
    print(text)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(text)
    return 0 if met else 1


def write_batches(cap: int, batch_size: int, directory: Path) -> Path:
    """A file of generated batches: integers (N, B, 13), ids (N, B, 26), labels (N, B)."""
    import numpy as np

    from oe_runtime.data import Split, open_source, training_batches

    source = open_source(f"generate:{2 * BATCHES * batch_size}", cap)
    found = list(itertools.islice(training_batches(source, Split(0.0), batch_size), BATCHES))
    path = directory / f"batches-{cap}.npz"
    np.savez(
        path,
        integers=np.stack([batch.dense for batch in found]),
        ids=np.stack([batch.ids for batch in found]),
        labels=np.stack([batch.labels for batch in found]),
    )
    return path


def measure(cell: Cell, options: argparse.Namespace, batches: Path, peer: Path | None) -> None:
    """One round of a cell."""
    if cell.kind == PEER:
        from oe_runtime.data import field_rows

        script = HERE / "peers" / "openembedding_training.py"
        command = [str(peer), str(script), "--model", options.model, "--dim", str(cell.dim)]
        command += ["--optimizer", options.optimizer.capitalize(), "--seconds", str(options.seconds)]
        command += ["--rows", json.dumps([int(rows) for rows in field_rows(cell.cap)])]
        take(cell, [*command, "--batches", str(batches)])
        return
    arguments = {
        "model": options.model,
        "dim": cell.dim,
        "cap": cell.cap,
        "batches": str(batches),
        "optimizer": options.optimizer,
        "seconds": options.seconds,
    }
    if cell.kind == STOCK:
        needed = stock_bytes(cell.dim, cell.cap)
        if needed > available_bytes():
            cell.problem = (
                f"does not fit: about {gib(needed)} GiB needed, {gib(available_bytes())} GiB available"
            )
            return
        take(cell, worker_command(arguments))
        return
    with tempfile.TemporaryDirectory() as directory:
        with server(cell.kind, options.storage_directory or Path(directory)) as one:
            take(cell, worker_command(arguments | {"endpoint": one.endpoint}))
        cell.server = max(cell.server, one.peak)


def worker_command(arguments: dict[str, object]) -> list[str]:
    """This program as a worker."""
    return [sys.executable, __file__, "--worker", json.dumps(arguments)]


def take(cell: Cell, command: list[str]) -> None:
    """Run the worker and note its result."""
    ended = run(command)
    if ended.status:
        cell.problem = f"worker ended with status {ended.status}" + (
            " (out of memory?)" if ended.status < 0 else ""
        )
        return
    cell.speeds.append(json.loads(ended.output.splitlines()[-1])["samples_per_s"])
    cell.worker = max(cell.worker, ended.peak)


def stock_bytes(dim: int, cap: int) -> int:
    """What stock needs at the least: weights, accumulators, and dense temporaries of the largest field."""
    from oe_runtime.data import field_rows

    rows = field_rows(cap)
    return 4 * (dim + 1) * (2 * sum(rows) + 2 * max(rows)) + (1 << 30)


def available_bytes() -> int:
    """Memory that a new process can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def worker(
    model: str, dim: int, cap: int, batches: str, optimizer: str, seconds: float, endpoint: str = ""
) -> int:
    """Train for `seconds` after three steps of warm-up; prints the speed as JSON."""
    import numpy as np

    from oe_runtime.client import Client
    from oe_runtime.data import Batch
    from oe_runtime.training.options import parse
    from oe_runtime.training.stopping import StopRequest
    from oe_runtime.training.trainee import KerasTrainee

    with np.load(batches) as file:
        parts = zip(file["integers"], file["ids"], file["labels"], strict=True)
        all_batches = [Batch(*part) for part in parts]
    where = ["--servers", endpoint] if endpoint else ["--stock"]
    command = ["--data", "generate:1000", "--model", model, "--dim", str(dim), "--max-cardinality", str(cap)]
    options = parse([*command, *where, "--optimizer", optimizer])
    client = Client([endpoint]) if endpoint else None
    trainee = KerasTrainee(options, client, StopRequest(with_parent=False))
    steps = itertools.pairwise(itertools.cycle(all_batches))
    for _ in range(3):
        trainee.train(*next(steps))
    rows, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        batch, following = next(steps)
        trainee.train(batch, following)
        rows += batch.rows
    speed = rows / (time.perf_counter() - began)
    loss, auc = trainee.window()
    print(json.dumps({"samples_per_s": speed, "loss": loss, "auc": auc}))
    if client is not None:
        client.close()
    return 0


def dense_limit(dim: int, batch_size: int) -> float:
    """Samples a second if nothing but the deep layers' multiplications took time, at this machine's speed."""
    import numpy as np

    from oe_runtime.data.schema import CATEGORIES, INTEGERS
    from oe_runtime.models import Shape

    widths = [len(CATEGORIES) * dim + len(INTEGERS), *Shape.hidden, 1]
    flops = sum(2 * a * b for a, b in itertools.pairwise(widths)) * 3  # forward and both gradients
    a = np.ones((batch_size, widths[0]), np.float32)
    b = np.ones((widths[0], widths[1]), np.float32)
    best = 0.0
    for _ in range(20):
        began = time.perf_counter()
        a @ b
        best = max(best, 2 * batch_size * widths[0] * widths[1] / (time.perf_counter() - began))
    return best / flops


def report(cells: list[Cell], options: argparse.Namespace, limits: dict[int, float]) -> tuple[str, bool]:
    """The Markdown text, and whether the targets are met."""
    stock = {(c.dim, c.cap): c.speed for c in cells if c.kind == STOCK}
    peer = {(c.dim, c.cap): c.speed for c in cells if c.kind == PEER}
    lines, verdicts, met = [], [], True
    for cell in cells:
        base = stock.get((cell.dim, cell.cap), 0.0)
        ratio = cell.speed / base if base and cell.speeds else 0.0
        speed = f"{cell.speed:,.0f}" if cell.speeds else cell.problem
        spread = f"{min(cell.speeds):,.0f} to {max(cell.speeds):,.0f}" if cell.speeds else ""
        name = f"dim {cell.dim}, {cell.cap or 'full'}, {cell.kind}"
        shown = f"{ratio:.2f}" if ratio else "-"
        other = peer.get((cell.dim, cell.cap), 0.0)
        beside = f"{cell.speed / other:.2f}" if other and cell.speeds else "-"
        memory = [gib(m) if m else "-" for m in (cell.worker, cell.server)]
        lines.append([name, speed, spread, shown, beside, *memory])
        target = TARGETS.get(cell.dim)
        peer_target = PEER_TARGETS.get(cell.dim)
        if cell.kind == DRAM and other and peer_target:
            enough = cell.speed / other >= peer_target
            met = met and enough
            result = "met" if enough else "MISSED"
            verdicts.append(f"- {name}: {beside} × OpenEmbedding, target {peer_target}: {result}")
        if cell.kind in (DRAM, PMEM) and cell.cap == 0 and target and base:
            met = met and ratio >= target
            result = "met" if ratio >= target else "MISSED"
            verdicts.append(f"- {name}: {ratio:.2f} × stock, target {target}: {result}")
    columns = [
        "dim, ids a field, embeddings",
        "samples/s",
        "range",
        "× stock",
        "× peer",
        "worker GiB",
        "server GiB",
    ]
    text = header(f"{options.model} throughput: stock Keras, served embeddings, OpenEmbedding")
    text += f"""\
Batch {options.batch_size}, {options.optimizer}, generated rows, median of {options.rounds} interleaved
rounds of {options.seconds:g} s, {BATCHES} batches in memory again and again. One server process over loopback
shares the cores with the worker. The peer is OpenEmbedding 0.1.2 under TensorFlow 2.21 and Keras 2, with its
server in the worker's process and its own prefetching. Memory is the peak resident size;
that of a pmem_libpmem server includes the pages of its mapped files.

"""
    text += (
        table(columns, lines)
        + """
Physical limit, if only the multiplications of the deep layers took time (at the speed of one large matrix
product, measured here): """
    )
    text += ", ".join(f"{limit:,.0f} samples/s at dim {dim}" for dim, limit in limits.items()) + ".\n"
    return text + "".join(f"\n{v}" for v in ["", *verdicts] if verdicts) + "\n", met


if __name__ == "__main__":
    sys.exit(main())
