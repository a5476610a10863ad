"""AUC of the held-out rows over seeds: stock Keras beside the same model with served embeddings.

On real Criteo rows, or generated ones with a planted signal (--data generate:ROWS:SEED). The trainer's own
command trains on nine tenths and evaluates on the rest. Runs are appended to a file of JSON lines, so that
they can be made in pieces; the report has all of them.

"stock summed" is stock Keras but for one thing: the optimizer gets the gradients of equal ids summed, as
tables do (docs/decisions.md) and as Keras 2 did. Where it agrees with served and stock does not, that is why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from processes import RESULTS, header, measured, server, table

STOCK, SUMMED = "stock", "stock summed"
KINDS = (STOCK, SUMMED, "served", "served bfloat16")
PARTS = RESULTS / "training_auc.jsonl"
REAL = Path(__file__).resolve().parents[3] / "shared/data/criteo_kaggle_7200.tsv.gz"
TARGET = 0.002  # of the mean over seeds, against stock


def main() -> int:
    """Train, or report; 0 when every mean is within the target."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training auc", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", default=str(REAL), help="Criteo rows, or generate:ROWS:SEED")
    parser.add_argument("--models", nargs="+", default=["deepfm"])
    parser.add_argument("--optimizers", nargs="+", default=["adagrad", "adam"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--max-cardinality", type=int, default=40000)
    parser.add_argument("--storage", default="dram", choices=("dram", "pmem_libpmem"))
    parser.add_argument("--parts", type=Path, default=PARTS, help="where the lines are kept")
    parser.add_argument("--report", action="store_true", help="write the table, and train nothing")
    options = parser.parse_args()
    if not options.report:
        if not options.data.startswith("generate:") and not Path(options.data).exists():
            print(f"error: there is no {options.data}; name the rows with --data", file=sys.stderr)
            return 1
        runs = itertools.product(options.seeds, options.models, options.optimizers, options.kinds)
        for seed, model, optimizer, kind in runs:
            keep(options, train(options, model, optimizer, seed, kind))
    return report(options.parts)


def keep(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Append a line; say it."""
    print(json.dumps(line), file=sys.stderr, flush=True)
    with options.parts.open("a") as file:
        file.write(json.dumps(line) + "\n")


def train(options: argparse.Namespace, model: str, optimizer: str, seed: int, kind: str) -> dict[str, Any]:
    """One run of the trainer, in this process; its settings and what the evaluation says."""
    from oe_runtime.train import main as trainer

    settings = {
        "data": options.data,
        "model": model,
        "optimizer": optimizer,
        "seed": seed,
        "epochs": options.epochs,
        "batch-size": options.batch_size,
        "max-cardinality": options.max_cardinality,
    }
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        served = nullcontext() if kind in (STOCK, SUMMED) else server(options.storage, Path(directory))
        with served as one, summed() if kind == SUMMED else nullcontext():
            words = ["--stock"] if one is None else ["--servers", one.endpoint]
            precision = "bfloat16" if kind.endswith("bfloat16") else "float32"
            words += ["--precision", precision, "--run-dir", str(run_dir)]
            for name, value in settings.items():
                words += [f"--{name}", str(value)]
            if trainer([*words, "--checkpoint-steps", "0"]):
                raise SystemExit("error: the trainer failed")
        events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = next(event for event in events if event["event"] == "eval")
    data = options.data if options.data.startswith("generate:") else Path(options.data).name
    return {**settings, "data": data, "kind": kind, "auc": found["auc"], "loss": found["loss"], **measured()}


@contextmanager
def summed() -> Iterator[None]:
    """The trainer's optimizers get the gradient of each row of an embedding once."""
    from oe_runtime.training import optimizers

    make = optimizers.make

    def make_summed(name: str, learning_rate: float) -> Any:
        from oe_runtime.keras.gradients import each_row_once

        optimizer = make(name, learning_rate)
        apply = optimizer.apply
        optimizer.apply = lambda gradients, *rest: apply([each_row_once(g) for g in gradients], *rest)
        return optimizer

    optimizers.make = make_summed
    try:
        yield
    finally:
        optimizers.make = make


def report(parts: Path) -> int:
    """The means of all runs that differ by their seed only."""
    runs: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for line in parts.read_text().splitlines():
        one = json.loads(line)
        group = (one["data"], one["model"], one["epochs"], one["batch-size"], one["max-cardinality"])
        runs.setdefault((*group, one["kind"]), {})[one["seed"]] = one
    lines, missed = [], 0
    for (*group, kind), by_seed in runs.items():
        stock = runs.get((*group, "stock"), {})
        shared = sorted(by_seed.keys() & stock.keys())
        data, model, epochs, batch, cap = group
        aucs = [by_seed[seed]["auc"] for seed in shared]
        if not shared:
            continue
        difference = statistics.mean(aucs) - statistics.mean(stock[seed]["auc"] for seed in shared)
        spread = statistics.stdev(aucs) if len(aucs) > 1 else 0.0
        loss = statistics.mean(by_seed[seed]["loss"] for seed in shared)
        outside = kind != "stock" and abs(difference) > TARGET
        missed += outside
        verdict = "" if kind == "stock" else "MISSED" if outside else "met"
        name = f"{data}, {model}, {epochs} epochs of {batch}, {cap or 'all'} ids, {kind}"
        numbers = [f"{statistics.mean(aucs):.4f}", f"{spread:.4f}", f"{difference:+.4f}", verdict]
        lines.append(
            [name, str(len(shared)), *numbers, f"{loss:.4f}", max(r["day"] for r in by_seed.values())]
        )
    text = header("AUC of held-out rows: stock Keras and served embeddings")
    text += f"""\
Means over seeds that stock ran too. Served rows begin with values of the same distribution as TensorFlow's,
but other ones, so single seeds differ; ± is the standard deviation of a seed. Target: a mean within {TARGET}
of stock's.

"""
    columns = [
        "data, model, embeddings",
        "seeds",
        "AUC",
        "±",
        "against stock",
        "target",
        "log loss",
        "measured",
    ]
    text += table(columns, lines)
    parts.with_suffix(".md").write_text(text)
    print(text)
    return 1 if missed else 0
