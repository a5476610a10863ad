"""AUC of the held-out rows over seeds: stock Keras beside the same model with served embeddings.

On real Criteo rows, or generated ones with a planted signal (--data generate:ROWS:SEED). The trainer's own
command trains on nine tenths and evaluates on the rest. Runs are appended to a file of JSON lines, so that
they can be made in pieces; the report has all of them.

"stock by row" is stock Keras whose optimizer treats an embedding as tables do: it sums the gradients of equal
ids first, and leaves rows that are not in the batch as they are. Where it agrees with served and stock does
not, that is why (docs/design/decisions/equal-ids-are-summed.md).
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

from processes import server
from reporting import MISSED, RESULTS, append, header, lines_of, measured, table

STOCK, BY_ROW = "stock", "stock by row"
# Of a kind: the precision of the hidden layers, of rows, and of the optimizer's state of rows.
PRECISIONS = {
    STOCK: ("float32",) * 3,
    BY_ROW: ("float32",) * 3,
    "served": ("float32",) * 3,
    "stock bfloat16": ("bfloat16", "float32", "float32"),
    "served bfloat16": ("bfloat16", "float32", "float32"),
    "served bfloat16 rows": ("bfloat16", "bfloat16", "float32"),
    "served, rows in bfloat16": ("float32", "bfloat16", "float32"),
    "served, rows and state in bfloat16": ("float32", "bfloat16", "bfloat16"),
}
KINDS = tuple(PRECISIONS)
PARTS = RESULTS / "training_auc.jsonl"
REAL = Path(__file__).resolve().parents[3] / "shared/data/criteo_kaggle_7200.tsv.gz"
TARGET = 0.002  # of the mean over seeds, against stock
# What is trained for the AUC beside the speed of a model (vocabularies.py): data, rows of a batch.
GRID, GRID_BATCH = "generate:400000:1", 1024


def main() -> int:
    """Train, or report; 0 when every mean is within the target."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training auc", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", default=str(REAL), help="Criteo rows, or generate:ROWS:SEED")
    parser.add_argument("--models", nargs="+", default=["deepfm"])
    parser.add_argument("--dims", type=int, nargs="+", default=[9])
    parser.add_argument("--optimizers", nargs="+", default=["adagrad", "adam"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--learning-rate", type=float, help="another than the trainer's own")
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
        runs = itertools.product(
            options.seeds, options.models, options.dims, options.optimizers, options.kinds
        )
        for seed, model, dim, optimizer, kind in runs:
            append(options.parts, train(options, model, dim, optimizer, seed, kind))
    return report(options.parts)


def train(
    options: argparse.Namespace, model: str, dim: int, optimizer: str, seed: int, kind: str
) -> dict[str, Any]:
    """One run of the trainer, in this process; its settings and what the evaluation says."""
    from oe_runtime.train import main as trainer

    settings = {
        "data": options.data,
        "model": model,
        "dim": dim,
        "optimizer": optimizer,
        "seed": seed,
        "epochs": options.epochs,
        "batch-size": options.batch_size,
        "max-cardinality": options.max_cardinality,
    }
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        served = nullcontext() if kind.startswith(STOCK) else server(options.storage, Path(directory))
        with served as one, by_row() if kind == BY_ROW else nullcontext():
            words = ["--stock"] if one is None else ["--servers", one.endpoint]
            for flag, precision in zip(("", "row-", "state-"), PRECISIONS[kind], strict=True):
                words += [f"--{flag}precision", precision]
            words += ["--run-dir", str(run_dir)]
            if options.learning_rate is not None:
                words += ["--learning-rate", str(options.learning_rate)]
            for name, value in settings.items():
                words += [f"--{name}", str(value)]
            if trainer([*words, "--checkpoint-steps", "0"]):
                raise SystemExit("error: the trainer failed")
        events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = next(event for event in events if event["event"] == "eval")
    data = options.data if options.data.startswith("generate:") else Path(options.data).name
    named = kind if options.learning_rate is None else f"{kind}, rate {options.learning_rate:g}"
    return {
        **settings,
        "data": data,
        "kind": named,
        "auc": found["auc"],
        "loss": found["loss"],
        "accuracy": found["accuracy"],
        **measured(),
    }


@contextmanager
def by_row() -> Iterator[None]:
    """The trainer's Adagrad and Adam update embeddings of the model as tables update rows."""
    from oe_runtime.programs import click_model

    make = click_model.make_optimizer

    def make_by_row(name: str, learning_rate: float) -> Any:
        import tensorflow as tf

        from oe_runtime.keras.gradients import each_row_once

        optimizer = make(name, learning_rate)
        apply, update = optimizer.apply, optimizer.update_step

        def update_rows_of_adam(gradient: Any, variable: Any, rate: Any) -> None:
            if not isinstance(gradient, tf.IndexedSlices):
                update(gradient, variable, rate)
                return
            number, rows, g = optimizer._get_variable_index(variable), gradient.indices, gradient.values
            beta_1, beta_2, step = (
                optimizer.beta_1,
                optimizer.beta_2,
                tf.cast(optimizer.iterations + 1, g.dtype),
            )
            momentum, velocity = optimizer._momentums[number].value, optimizer._velocities[number].value
            m = beta_1 * tf.gather(momentum, rows) + (1 - beta_1) * g
            v = beta_2 * tf.gather(velocity, rows) + (1 - beta_2) * g * g
            momentum.scatter_update(tf.IndexedSlices(m, rows))
            velocity.scatter_update(tf.IndexedSlices(v, rows))
            alpha = tf.cast(rate, g.dtype) * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
            variable.scatter_sub(tf.IndexedSlices(alpha * m / (tf.sqrt(v) + optimizer.epsilon), rows))

        optimizer.apply = lambda gradients, *rest: apply([each_row_once(g) for g in gradients], *rest)
        if name == "adam":
            optimizer.update_step = update_rows_of_adam
        return optimizer

    click_model.make_optimizer = make_by_row
    try:
        yield
    finally:
        click_model.make_optimizer = make


def report(parts: Path) -> int:
    """The means of all runs that differ by their seed only, beside both kinds of stock."""
    lines, missed = [], 0
    for (data, model, dim, optimizer, epochs, batch, cap), kinds in sorted(groups(parts).items()):
        for kind, by_seed in sorted(kinds.items(), key=lambda item: (item[0].startswith("served"), item[0])):
            aucs = [one["auc"] for one in by_seed.values()]
            verdicts = [verdict(kinds, kind, base) for base in (STOCK, BY_ROW)]
            missed += verdicts[0].endswith("MISSED")
            numbers = [f"{statistics.mean(aucs):.4f}", f"{statistics.stdev(aucs) if aucs[1:] else 0:.4f}"]
            loss = f"{statistics.mean(one['loss'] for one in by_seed.values()):.4f}"
            # Lines of before 2026-11-24 have none.
            right = [one["accuracy"] for one in by_seed.values() if "accuracy" in one]
            accuracy = f"{statistics.mean(right):.4f}" if right else ""
            name = f"{data}, {model}, dim {dim}, {optimizer}, {epochs} epochs of {batch}, {cap or 'all'} ids"
            days = max(one["day"] for one in by_seed.values())
            lines.append([f"{name}, {kind}", str(len(aucs)), *numbers, *verdicts, accuracy, loss, days])
    text = header("AUC of held-out rows: stock Keras and served embeddings")
    text += f"""\
Means over seeds; ± is the standard deviation of a seed. Served rows begin with values of the same
distribution as TensorFlow's, but other ones, so single seeds differ. Differences are means over the seeds
that both ran. Target: a mean within {TARGET} of stock's.

"Stock by row" is stock Keras whose optimizer does with embeddings what tables do: it sums the gradients of
equal ids before it squares them (Keras 3 squares each, so its Adagrad and Adam take larger steps), and leaves
rows that are not in the batch as they are (Keras's Adam moves all rows of a table in every step, which no
table on servers could). With our initial values in its tables its AUC was that of served embeddings to six
digits (one seed, with Adagrad and with Adam).

"""
    columns = ["data, model, embeddings", "seeds", "AUC", "±", "against stock", "against stock by row"]
    text += table([*columns, "accuracy", "log loss", "measured"], lines)
    parts.with_suffix(".md").write_text(text)
    print(text)
    return MISSED if missed else 0


def groups(parts: Path) -> dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]]:
    """All runs: by what is trained how, by kind, by seed."""
    found: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    names = ("data", "model", "dim", "optimizer", "epochs", "batch-size", "max-cardinality")
    for one in lines_of(parts):
        kinds = found.setdefault(tuple(one[name] for name in names), {})
        kinds.setdefault(one["kind"], {})[one["seed"]] = one
    return found


def means() -> dict[tuple[str, int, int, str], str]:
    """`0.7510 (5)`: mean AUC and number of seeds of GRID, by model, dim, ids a field and kind."""
    return {
        (model, dim, cap, kind): f"{statistics.mean(r['auc'] for r in runs.values()):.4f} ({len(runs)})"
        for (data, model, dim, optimizer, epochs, batch, cap), kinds in groups(PARTS).items()
        if (data, optimizer, epochs, batch) == (GRID, "adagrad", 1, GRID_BATCH)
        for kind, runs in kinds.items()
    }


def verdict(kinds: dict[str, dict[int, dict[str, Any]]], kind: str, base: str) -> str:
    """`-0.0012 met`: the difference of the mean AUCs over the seeds that both have; nothing without any."""
    shared = kinds[kind].keys() & kinds.get(base, {}).keys()
    if not shared or kind == base:
        return ""
    far = statistics.mean(kinds[kind][seed]["auc"] - kinds[base][seed]["auc"] for seed in shared)
    said = "" if not kind.startswith("served") else " MISSED" if abs(far) > TARGET else " met"
    return f"{far:+.4f}{said}"
