"""A training program's view of the job that it is a part of.

    import oe_runtime.job as job
    import oe_runtime.keras as embed

    model = embed.distributed_model(model, job.client())
    model.compile(…)
    model.fit(data, epochs=3, callbacks=[embed.JobCallback(job)])

Under oeprov (`oeprov launch-training --script`, or `python -m oe_runtime.train --script`) the launcher's
settings apply. Elsewhere, as in a notebook or under a debugger, the same program trains by itself, with its
tables in this process; `defaults` says otherwise. Importing this module needs neither TensorFlow nor PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oe_runtime.client import Client
from oe_runtime.data import Batch, Schema
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.session import JobError, Session

__all__ = [
    "JobError",
    "batches",
    "client",
    "current",
    "defaults",
    "eval_batches",
    "step",
    "together",
    "train",
    "training",
]

rank: int
"""This worker's number, from 0."""
workers: int
"""The number of workers."""
local_rank: int
"""This worker's number among those of its host."""
local_workers: int
"""The number of workers on this host."""
data: str | None
"""What `--data` says: one path, directory, glob or URL; a relative path is made whole. None without it."""
eval_data: str | None
"""The rows for the evaluation that `--eval-data` names, likewise. None without it, or if it is a share."""
schema: Schema
"""The columns that `--schema` says, with `--max-cardinality`; for `batches` and other readers of `data`."""
run_dir: Path
"""The directory of the run: checkpoints, metrics, report."""
resume_step: int
"""The step of the checkpoint that this start goes on from; 0 when it begins."""
arguments: Sequence[str]
"""The program's own arguments, also in `sys.argv`."""

_VALUES = (
    *("rank", "workers", "local_rank", "local_workers", "data", "eval_data", "schema", "run_dir"),
    *("resume_step", "arguments"),
)


def __getattr__(name: str) -> Any:
    if name in _VALUES:
        return getattr(current(), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def current() -> Session:
    """Return the job of this process; without a launcher, one of its own."""
    return Session.current()


def defaults(**options: Any) -> None:
    """Set what a start without a launcher uses, before anything else here is called.

    By the names of the trainer's flags: run_dir, resume, checkpoint_steps, log_every, data, servers (a list
    of "host:port") with token_file, … Under a launcher this has no effect, because its settings apply.
    """
    Session.set_defaults(options)


def client() -> Client:
    """Return this process's client of the job's servers, connected at the first call; closed with the job."""
    return current().client()


def together() -> Any:
    """Return the workers of the job for `distributed_model(workers=…)`; None for a single one.

    `distributed_model(model, job.client())` takes them by itself.
    """
    return current().together()


@contextmanager
def training(
    model: Any,
    optimizer: Any = None,
    *,
    evaluate: Callable[[], Iterable[tuple[Any, Any]]] | None = None,
    **others: Any,
) -> Iterator[Any]:
    """Train in a loop of one's own: a PyTorch module with its optimizers, or a compiled Keras model.

        with job.training(model, optimizer) as loop:
            for epoch in loop.epochs(3):
                for x, y in loop.batches(data):
                    …
                    job.step(loss=loss)

    `others` are objects with state_dict() and load_state_dict(), which checkpoints include, and callbacks of
    a library, of which they include the numbers and texts that training changes. Several optimizers are
    given as a list, always in the same order. Their schedulers are found without a name.
    A resumed loop begins after the batch of its checkpoint. `loop.fit` trains by a library's function, such
    as `model.fit`. Raises JobError for what jobs cannot do.

    `evaluate` yields pairs of labels (0 or 1) and probabilities, both shaped (B,) or (B, 1): those of this
    worker's part of rows that nobody trains on. The job calls it every --eval-every steps and after the
    block, and reports AUC, accuracy and log loss over all workers' pairs.
    """
    from oe_runtime.run.loops import begin

    loop = begin(current(), _state(model, optimizer, others), evaluate)
    yield loop
    loop.end()


def batches(layout: Callable[[Batch], Any] | None = None) -> Iterator[Any]:
    """Yield this worker's part of each batch of `--data`, in a block of `training`.

        with job.training(model, evaluate=evaluate):
            for features, labels in job.batches():
                loss = …
                job.step(loss=loss)

    --schema, --batch-size, --epochs, --steps, --holdout, --eval-data, --max-bad-rows, --max-cardinality and
    --follow choose the rows, as for built-in models. All epochs are in it. A resumed loop begins after the
    batch of its checkpoint. The rows of the next batch are prefetched: those of a Keras model whose
    `train_on_batch` is given the batch as it comes, and those that a PyTorch module looks up in it.

    A batch is (features, labels), or (features, labels, weights) if the schema has them, as
    `oe_runtime.data.dataset` has them; or what `layout` makes of an `oe_runtime.data.Batch`. A last batch
    with fewer rows than workers is left out. Raises DataError for data that do not fit.
    """
    return current().batches(layout)


def train(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any = None,
    *,
    layout: Callable[[Batch], Any] | None = None,
    evaluate: Callable[[], Iterable[tuple[Any, Any]]] | None = None,
    **others: Any,
) -> None:
    """Call `step` with this worker's part of each batch of `--data`, as `batches` yields them in `training`.

        def step(batch):
            features, labels = batch
            return model.train_on_batch(features, labels, return_dict=True)

        job.train(step, model)

    It also reads `--data -`, and with `--workqueue` takes ranges of the data from the workers' queue. The
    gradients of a PyTorch step are those at its `optimizer.step()`.

    `step` returns the mean loss of its rows, or the metrics of a Keras model as above: then loss and AUC are
    those metrics' over all workers' rows since the last line of progress. After the loss of a
    server, all go back to the newest checkpoint and on from there, where a loop of one's own has to start its
    program anew. `layout` is that of `batches`; for the others see `training`.
    """
    from oe_runtime.run.loops import begin

    session = current()
    loop = begin(session, _state(model, optimizer, others, windows=True), evaluate, by_train=True)
    loop.train(session.open_input(), layout or session.columns, step)


def eval_batches(layout: Callable[[Batch], Any] | None = None) -> Iterator[Any]:
    """Yield this worker's part of the batches to evaluate on: held-out rows, or those of --eval-data.

    As `batches`; a worker leaves out batches of which its part is empty.
    """
    return current().eval_batches(layout)


def _state(model: Any, optimizer: Any, others: Mapping[str, Any], *, windows: bool = False) -> ScriptState:
    """Return what a checkpoint holds of `model`, by the library that it is of."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module) and optimizer is not None:
        from oe_runtime.torch.job_state import TorchScriptState

        how = current().options.steps_of_models()
        if how["micro_batches"] != Client.steps["micro_batches"]:
            raise JobError(
                "--micro-batch is of Keras models: leave it out for PyTorch, and call backward for parts of "
                "a batch in the program"
            )
        if current().options.timeline:
            raise JobError("--timeline traces by TensorFlow's profiler: leave it out for PyTorch")
        return TorchScriptState(
            model, optimizer, others, pipeline=how["pipeline"], staleness=how["staleness"]
        )
    known = hasattr(model, "served") or current().options.stock
    if not known or optimizer is not None or others:
        raise JobError(
            "job.training takes a PyTorch module and its optimizer, or a compiled Keras model of "
            f"distributed_model alone, not a {type(model).__name__}"
        )
    from oe_runtime.keras.job_state import KerasScriptState

    return KerasScriptState(model, windows=windows)


def step(loss: Any, rows: int | None = None) -> None:
    """End a step of `training`: log and take checkpoints where they are due, and stop if that was asked for.

    `loss` is the step's mean loss over its `rows`, by default those of the batch.
    """
    current().step(loss, rows)


def __dir__() -> list[str]:
    return sorted([*__all__, *_VALUES])
