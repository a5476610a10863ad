"""The built-in click models, as a program of oe_runtime.job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from oe_runtime import job
from oe_runtime.client import Client
from oe_runtime.errors import ServerLost
from oe_runtime.programs.click_model import (
    Layout,
    build,
    check_backend,
    check_schema,
    export,
    prepare,
    train_step,
)
from oe_runtime.run.connection import refuse_trained
from oe_runtime.run.lifecycle import Program, run_program
from oe_runtime.run.options import Options
from oe_runtime.run.position import RunCheckpoint
from oe_runtime.run.progress import view
from oe_runtime.run.ranks import translating_worker_losses
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.session import Session
from oe_runtime.spec import TableSpec


def run(options: Options) -> int:
    """Train as the options say; return the exit status. Errors are one line on stderr and an event."""
    return run_program(options, _Click, view())


class _Click(Program):
    def prepare(self) -> None:
        """See Program. TensorFlow is not imported yet."""
        options = cast(Options, self.session.options)
        check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
        if options.device != "auto" or options.inter_threads or options.intra_threads:
            prepare(options)  # before a TFRecord file uses it
        self.session.open_rows()
        if options.rank == 0:
            _check_export(options)
        _check_tables(options)
        super().prepare()
        self.session.connect()

    def train(self) -> None:
        """See Program."""
        options = cast(Options, self.session.options)  # with the workers that were found
        self.session.screen.say(_opening(options))
        with translating_worker_losses(options):
            _train(self.session, options)


def _train(session: Session, options: Options) -> None:
    """Train the model, evaluate and export it."""
    check_schema(options, stock=options.stock)
    prepare(options)
    client = None if options.stock else job.client()
    workers = job.together()
    model = build(options, client, jit=options.jit, workers=workers, **options.steps_of_models())
    layout = Layout(options.schema)

    def evaluate() -> Iterator[Any]:
        for x, y, _ in job.eval_batches(layout.data):
            yield y, model.predict_on_batch(x)

    rows = session.open_input()
    if client is not None and not options.rank and not options.resume:
        refuse_trained(client)  # again, because creating the tables opened the servers' storage
    session.say_start(
        options.model,
        data=options.data,
        embeddings=_where(options),
        rows=rows.source.total_rows(),
        steps=rows.steps(),
        batch_size=options.batch_size,
        dim=options.dim,
    )
    job.train(
        partial(train_step, model), model, layout=layout.data, evaluate=evaluate if rows.evaluates() else None
    )
    assert session.course is not None  # noqa: S101 - train
    session.stop.limit(0, None)  # no more waits for other workers
    if options.export is not None and not options.rank:
        _export(session, options.export, options, model, session.course.saved)


def _export(session: Session, path: Path, options: Options, model: Any, saved: RunCheckpoint | None) -> None:
    assert session.directory is not None  # noqa: S101 - open
    rows = None if options.export_rows == "trained" else options.export_rows
    try:
        export(model, path, rows)
    except ServerLost as error:  # the other workers have left, so nobody can go back together
        if saved is None or saved.pool is not None:
            raise
        session.screen.say(f"{str(error).partition(';')[0]}; exporting the rows of {saved.path} instead")
        export(model, path, rows, rows_of=saved.path)
    session.exported = path
    session.directory.event("export", path=str(path))
    session.screen.say(f"exported a SavedModel to {path}")


def _check_export(options: Options) -> None:
    path = options.export
    if path is None or (options.resume and options.run_dir in path.parents):
        return  # an earlier export of this run is replaced
    if os.path.lexists(path):
        raise RunError(f"--export {path} exists already; name a new directory or remove it")


def _check_tables(options: Options) -> None:
    """Refuse options that tables would refuse: too large a dim, invalid policies."""
    if options.stock:
        return
    admission = options.admission
    if admission is not None and "max_element_size" in admission:  # avoid the memory of such a filter
        admission = {**admission, "max_element_size": min(admission["max_element_size"], 1000)}
    elif admission is not None and admission["name"] == "cbf":
        admission = {**admission, "max_element_size": 1000}
    with Client.in_process(servers=max(1, len(options.servers))) as client:
        client.create_table(TableSpec("C1", options.dim, admission=admission, eviction=options.eviction))


def _where(options: Options) -> str:
    if options.stock:
        return "in the stock Keras model"
    if options.in_process:
        return f"in this process ({options.storage})"
    return "on " + ", ".join(options.servers)


def _opening(options: Options) -> str:
    categories = options.schema.limited(options.max_cardinality).categories
    ids = f"{sum(one.rows for one in categories if not one.hashed):,} ids"
    if hashed := sum(one.hashed for one in categories):
        ids += f" and those of {hashed} with 64 bits"
    return (
        f"{options.model}, dim {options.dim}, {options.optimizer}: {ids} in {len(categories)} fields, "
        f"embeddings {_where(options)}\n"
        f"data {options.data}, run directory {options.run_dir}; starting TensorFlow"
    )
