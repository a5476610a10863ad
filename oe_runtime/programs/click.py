"""One training run from checked options to exit status."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import cast

from oe_runtime.client import Client
from oe_runtime.data import Source, make_split, open_source
from oe_runtime.errors import ServerLost
from oe_runtime.programs.click_model import KerasTrainee, check_backend, prepare
from oe_runtime.programs.loop import Loop
from oe_runtime.programs.queue_loop import QueueCheckpoints, QueueFollower, QueueLoop
from oe_runtime.run.charts import duration
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.connection import connect, connect_values, refuse_trained
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.lifecycle import carry_out
from oe_runtime.run.lost_server import ServerRecovery
from oe_runtime.run.options import Options
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View, view
from oe_runtime.run.ranks import Stopped, check_agreement, check_input, translating_worker_losses
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.session import Session
from oe_runtime.run.shared_input import HoldingClient, SharedInput
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.uploads import Uploads
from oe_runtime.run.worker_input import WorkerInput
from oe_runtime.spec import TableSpec


def run(options: Options) -> int:
    """Train as the options say; return the exit status. Errors are one line on stderr and an event."""
    with StopRequest(with_parent=options.exit_with_parent) as stop:
        session = Session(options, stop, view(), launched=True)
        return carry_out(session, partial(_run, session, options))


def _run(session: Session, options: Options) -> None:
    # Check everything before TensorFlow is imported and before anything is written.
    check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
    source = open_source(
        options.data,
        options.max_cardinality,
        options.max_bad_rows,
        options.schema,
        options.eval_data,
        follow=options.follow,
    )
    if options.device != "auto" or options.inter_threads or options.intra_threads:
        prepare(options)  # before a TFRecord file uses it
    source.check()
    if options.rank == 0:
        _check_export(options)
    _check_tables(options)
    session.prepare()
    options = cast(Options, session.options)
    client = session.connect()
    mine = WorkerInput.of(options.rank, source) if options.size > 1 else None
    session.open_directory()
    assert session.directory is not None  # noqa: S101 - open
    with translating_worker_losses(options):
        _train(
            options, source, mine, client, session.directory, session.screen, session.stop, session.uploads
        )


def _train(
    options: Options,
    source: Source,
    mine: WorkerInput | None,
    client: Client | None,
    directory: RunDirectory | FollowingDirectory,
    screen: View,
    stop: StopRequest,
    uploads: Uploads | None,
) -> None:
    screen.say(_opening(options))
    trainee = KerasTrainee(options, client, stop)
    figures = ServerFigures(None if options.rank else client, directory, options.stats_seconds)
    start, resumed = Position(), None
    loop: Loop
    if isinstance(client, HoldingClient):
        client.values = connect_values(options)
        split = make_split(source, options.holdout)
        shared = SharedInput(options, source, split, stop, client.values, client, mine)
        checkpoints: Checkpoints | FollowingCheckpoints
        checkpoints, resumed = _begin_asynchronous(options, client, trainee, shared, stop)
        parts = (options, source, trainee, checkpoints, directory, screen, stop, figures)
        loop = QueueLoop(*parts, shared=shared, dense=trainee.dense)
        start = resumed.position
    else:
        checkpoints, start, resumed = _begin_in_step(options, mine, client, trainee, screen, stop)
        loop = Loop(options, source, trainee, checkpoints, directory, screen, stop, figures)
    if uploads is not None and isinstance(checkpoints, Checkpoints):
        checkpoints.upload_to(uploads, resumed)
    directory.event(
        "start",
        pid=os.getpid(),
        model=options.model,
        data=options.data,
        embeddings=_where(options),
        rows=source.total_rows(),
        steps=loop.steps(),
        batch_size=options.batch_size,
        dim=options.dim,
    )
    if resumed is not None:
        loop.saved = resumed
    if resumed is not None and options.resume:
        directory.event("resume", step=start.step, path=str(resumed.path))
        screen.say(f"going on from step {start.step}, {resumed.path}")
    screen.total(loop.steps(), start.step)
    began = time.perf_counter()
    if trainee.ranks.stop_requested(stop):
        raise loop.interrupted()
    servers = ServerRecovery(options, client, checkpoints, directory, screen, stop, trainee.ranks)
    end = position = start
    while True:
        try:
            end = loop.train(position)
            directory.event("trained", step=end.step)
            seconds, speed = loop.speed()
            rate = f", {speed:,.0f} samples/s" if speed else ""
            screen.say(f"trained {end.step - start.step} steps in {duration(seconds)}{rate}")
            if loop.input is not None and loop.input.evaluates() and not (options.workqueue and options.rank):
                apart = source.evaluation()
                screen.say(f"evaluating on {apart.describe() if apart else 'the held-out rows'}")
            auc = loop.evaluate(end.step)
            break
        except ServerLost as error:
            position = servers.recover(error, loop)
    stop.limit(0, None)  # no more waits for other workers
    if auc.rows:
        loop.evaluation.say(end.step, auc)
    if options.export is not None and options.rank == 0:
        try:
            trainee.export(options.export, stock=options.stock)
        except ServerLost as error:  # the other workers have left, so nobody can go back together
            if loop.saved is None or loop.saved.pool is not None:
                raise
            screen.say(f"{str(error).partition(';')[0]}; exporting the rows of {loop.saved.path} instead")
            trainee.export(options.export, stock=False, rows_of=loop.saved.path)
        directory.event("export", path=str(options.export))
        screen.say(f"exported a SavedModel to {options.export}")
    if uploads is not None:
        uploads.finish()
        if options.export is not None:
            screen.say(f"uploaded the SavedModel to {uploads.upload_directory(options.export, 'export')}")
    directory.event(
        "end",
        steps=end.step,
        seconds=round(seconds, 3),
        total_seconds=round(time.perf_counter() - began, 3),
        samples_per_s=round(speed, 1),
    )
    if not options.rank:
        screen.say(f"run directory {directory.path}, with report.html")


def _begin_in_step(
    options: Options,
    mine: WorkerInput | None,
    client: Client | None,
    trainee: KerasTrainee,
    screen: View,
    stop: StopRequest,
) -> tuple[Checkpoints | FollowingCheckpoints, Position, RunCheckpoint | None]:
    """Begin with one worker, or several in step: same position, same weights and rows."""
    check_agreement(options, trainee.ranks)
    if mine is not None:
        check_input(mine, trainee.ranks)
    if client is not None and options.rank == 0 and not options.resume:
        refuse_trained(client)  # again, because creating the tables opened the servers' storage
    checkpoints: Checkpoints | FollowingCheckpoints
    start, resumed = Position(), None
    if client is not None and options.rank:
        checkpoints = FollowingCheckpoints(trainee.state, client, trainee.ranks)
    else:
        checkpoints = Checkpoints(options, trainee.state, client, trainee.ranks)
    if options.resume:
        with stop.without_time_limit():
            resumed, lost = checkpoints.roll_back()
        start = resumed.position
        if lost:
            screen.say(lost)
    trainee.ranks.barrier()  # before the first push
    return checkpoints, start, resumed


def _begin_asynchronous(
    options: Options, client: Client, trainee: KerasTrainee, shared: SharedInput, stop: StopRequest
) -> tuple[Checkpoints | FollowingCheckpoints, RunCheckpoint]:
    """Begin with asynchronous workers, which wait for each other by going back to a checkpoint."""

    def excuse(rank: int) -> None:
        if (there := connect(replace(options, rank=rank))) is not None:
            with there:
                there.leave()

    checkpoints: Checkpoints | FollowingCheckpoints
    state = trainee.state
    if options.rank:
        checkpoints = QueueFollower(state, client, trainee.ranks, shared)
    else:
        first = QueueCheckpoints(options, state, client, trainee.ranks, shared, excuse)
        checkpoints = first
        if not options.resume:
            refuse_trained(client)
            first.take_files(Position(queue=shared.fresh))
    try:
        saved, _ = checkpoints.roll_back()
    except ServerLost:
        if stop:
            raise Stopped from None
        raise
    trainee.dense.rebase()
    return checkpoints, saved


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
