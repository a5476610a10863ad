"""One training run from checked options to exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from functools import partial

from oe_runtime.client import Client
from oe_runtime.data import Source, field_rows, make_split, open_source
from oe_runtime.errors import GradientError, OeError, ServerLost, TornError, WorkerLost
from oe_runtime.spec import StorageSpec, TableSpec, Worker
from oe_runtime.support import horovod
from oe_runtime.support.token_file import read_token
from oe_runtime.training.charts import duration
from oe_runtime.training.checkpoints import Checkpoints, check_resume, newest
from oe_runtime.training.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.training.loop import Interrupted, Loop
from oe_runtime.training.lost_server import ServerRecovery
from oe_runtime.training.options import Options
from oe_runtime.training.position import Position, RunCheckpoint
from oe_runtime.training.progress import View, view
from oe_runtime.training.queue_loop import QueueCheckpoints, QueueLoop
from oe_runtime.training.ranks import Stopped, check_agreement, check_input, translating_worker_losses
from oe_runtime.training.run_directory import RunDirectory, RunError
from oe_runtime.training.server_figures import ServerFigures
from oe_runtime.training.shared_input import HoldingClient, SharedInput
from oe_runtime.training.stopping import StopRequest
from oe_runtime.training.trainee import KerasTrainee, check_backend, prepare
from oe_runtime.training.uploads import Uploads
from oe_runtime.training.uploads import prepare as prepare_uploads
from oe_runtime.training.worker_input import WorkerInput

WORKER_LOST, INTERRUPTED = 3, 130
# Seconds that a worker waits for the others after a stop request. Its own work, a compilation and a
# checkpoint may take longer. A frozen worker would else keep the others waiting for --worker-wait.
_STOP_SECONDS = 20.0


def run(options: Options) -> int:
    """Train as the options say; return the exit status. Errors are one line on stderr and an event."""
    with StopRequest(with_parent=options.exit_with_parent) as stop:
        return _run(options, stop)


def _run(options: Options, stop: StopRequest) -> int:
    directory: RunDirectory | FollowingDirectory | None = None
    first = options.rank == 0
    client: Client | None = None
    uploads: Uploads | None = None
    ended = False  # by its end or a stop request, not by an error
    try:
        # Check everything before TensorFlow is imported and before anything is written.
        check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
        source = open_source(options.data, options.max_cardinality, options.max_bad_rows)
        if options.device != "auto" or options.inter_threads or options.intra_threads:
            prepare(options)  # before a TFRecord file uses it
        source.check()
        if first:
            _check_export(options)
        _check_tables(options)
        fetched = prepare_uploads(options) if options.upload_to and first else ""
        if options.resume and first:
            check_resume(options)
        if options.rendezvous:
            place = horovod.Started(options.rank, options.size, options.rendezvous)
            options = replace(options, workers=horovod.exchange(place, options.worker_wait, stop))
        client = _connect(options)
        if client is not None and first and not options.resume:
            _refuse_trained(client)
        mine = WorkerInput.of(options.rank, source) if options.size > 1 else None
        directory = RunDirectory(options) if first else FollowingDirectory(options)
        if options.size > 1:
            stop.limit(_STOP_SECONDS, partial(_end_at_limit, options, directory, stop))
        with view() as screen:
            if fetched:
                screen.say(fetched)
            if options.upload_to and isinstance(directory, RunDirectory):
                uploads = Uploads(options, directory, screen.say)
            try:
                with translating_worker_losses(options):
                    _train(options, source, mine, client, directory, screen, stop, uploads)
            except Stopped:
                directory.event("interrupted", step=0, path=None)
                screen.say(f"stopped ({stop.reason}) before all workers had started")
                return INTERRUPTED
            except Interrupted as interrupted:
                stop.limit(0, None)
                path = interrupted.path
                directory.event(
                    "interrupted", step=interrupted.position.step, path=None if path is None else str(path)
                )
                screen.say(_interrupted(options, stop, interrupted))
                _leave(client)
                if uploads is not None:
                    try:
                        uploads.finish()
                    except RunError as error:
                        screen.say(f"warning: {error}")
                    ended = True
                return INTERRUPTED
        _leave(client)
        ended = True
        return 0
    except Exception as error:
        message = _message(error, options)
        if directory is not None:
            directory.event("error", message=message or f"{type(error).__name__}: {error}")
        if not message:
            raise  # a bug: show the traceback
        print(f"error: {message}", file=sys.stderr)
        return WORKER_LOST if isinstance(error, WorkerLost) else 1
    finally:
        if uploads is not None:
            uploads.close()
        if directory is not None:
            directory.close()
        if uploads is not None and ended:
            uploads.upload_reports()
        if client is not None:
            client.close()


def _disk_error(error: Exception) -> str:
    """Describe an unreadable or unwritable file; empty for another error."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError) or error.strerror is None:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}"


def _end_at_limit(options: Options, directory: RunDirectory | FollowingDirectory, stop: StopRequest) -> None:
    """End this process, whose main thread still waits for other workers."""
    error = WorkerLost(
        f"asked to stop ({stop.reason}), but the other workers did not agree within "
        f"{stop.seconds:.0f} s: ended without a new checkpoint"
    )
    message = _message(error, options)
    directory.event("error", message=message)
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(WORKER_LOST)


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
        shared = SharedInput(options, source, make_split(source, options.holdout), stop, client, mine)
        checkpoints: Checkpoints | FollowingCheckpoints
        checkpoints, resumed = _begin_asynchronous(options, client, trainee, shared, stop)
        parts = (options, source, trainee, checkpoints, directory, screen, stop, figures)
        loop = QueueLoop(*parts, shared=shared, dense=trainee.dense)
        start = resumed.position
    else:
        checkpoints, start, resumed = _begin_in_step(options, mine, client, trainee, screen, stop)
        loop = Loop(options, source, trainee, checkpoints, directory, screen, stop, figures)
    if uploads is not None and isinstance(checkpoints, Checkpoints):
        checkpoints.uploads = uploads
        if checkpoints.in_pools and not options.export_checkpoints:
            screen.say("checkpoints in pools are not uploaded, except the last; see --export-checkpoints")
        if resumed is not None and resumed.pool is None:
            uploads.offer(resumed.path)
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
            if options.holdout and options.eval and not (options.workqueue and options.rank):
                apart = source.evaluation()
                screen.say(f"evaluating on {apart.describe() if apart else 'the held-out rows'}")
            auc = loop.evaluate()
            break
        except ServerLost as error:
            position = servers.recover(error, loop)
    stop.limit(0, None)  # no more waits for other workers
    if auc.rows:
        directory.event("eval", rows=auc.rows, loss=auc.log_loss(), auc=auc.result())
        directory.scalars(end.step, {"eval/loss": auc.log_loss(), "eval/auc": auc.result()})
        screen.say(f"held-out rows {auc.rows:,}: AUC {auc.result():.4f}, log loss {auc.log_loss():.4f}")
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
        _refuse_trained(client)  # again, because creating the tables opened the servers' storage
    checkpoints: Checkpoints | FollowingCheckpoints
    start, resumed = Position(), None
    if client is not None and options.rank:
        checkpoints = FollowingCheckpoints(trainee.model, client, trainee.ranks)
    else:
        checkpoints = Checkpoints(options, trainee.model, client, trainee.ranks)
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
) -> tuple[Checkpoints, RunCheckpoint]:
    """Begin with asynchronous workers, which wait for each other by going back to a checkpoint."""

    def excuse(rank: int) -> None:
        if (there := _connect(replace(options, rank=rank))) is not None:
            with there:
                there.leave()

    checkpoints = QueueCheckpoints(options, trainee.model, client, trainee.ranks, shared, excuse)
    if options.rank:
        deadline = time.monotonic() + options.worker_wait
        while newest(options.run_dir) is None:
            if stop:
                raise Stopped
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"worker 0 has written no checkpoint to {options.run_dir} within "
                    f"{options.worker_wait} s: with --workqueue all workers must see the run directory"
                )
            stop.wait(0.1)
    elif not options.resume:
        _refuse_trained(client)
        shared.begin(None)
        with shared.paused_queue() as state:
            checkpoints.take_files(Position(queue=state))
    saved, _ = checkpoints.begin()
    trainee.dense.rebase()
    return checkpoints, saved


def _connect(options: Options) -> Client | None:
    if options.stock:
        return None
    if options.in_process:
        storage = StorageSpec(
            options.storage, options.storage_path, options.storage_size, cache_bytes=options.storage_cache
        )
        return Client.in_process(storage)
    token = ""
    if options.token_file is not None:
        try:
            token = read_token(options.token_file)
        except ValueError as error:
            raise RunError(str(error)) from error
    worker = None
    if options.workers or options.generation:  # a single remaining worker must take the others' places
        worker = Worker(
            options.rank,
            options.size,
            "async" if options.workqueue else "sync",
            options.staleness if options.workqueue else None,
            options.on_worker_lost,
            float(options.worker_wait),
            options.generation,
        )
    return (HoldingClient if options.workqueue else Client)(
        options.servers,
        token=token,
        tls=options.tls,
        checkpoint_transfer=options.checkpoint_transfer,
        job=options.job,
        worker=worker,
    )


def _leave(client: Client | None) -> None:
    """Tell the servers that this is an end, not a loss."""
    if client is not None:
        with contextlib.suppress(OeError):
            client.leave()


def _refuse_trained(client: Client) -> None:
    """Refuse servers with rows of another run, with which this run would silently begin."""
    for server in client.stats()["servers"]:
        for name, table in server["tables"].items():
            if table["rows"]:
                raise RunError(
                    f"server {server['index']} already holds {table['rows']:,} trained rows of table {name}; "
                    "start fresh servers, or continue the run that trained them with --resume"
                )
    kept = client.checkpoints()
    if kept and kept != [0]:  # one of step 0 has no rows
        raise RunError(
            f"the storage of the servers already holds checkpoint {kept[-1]} of another run; start them with "
            "another --storage-path, or continue that run with --resume"
        )


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


def _memory_error(error: Exception) -> str:
    """Describe a model that does not fit into memory; empty for another error."""
    if not isinstance(error, MemoryError) and type(error).__name__ != "ResourceExhaustedError":
        return ""
    lines = str(getattr(error, "message", error)).strip().splitlines()
    return (
        "not enough memory for the model on this host"
        + (f" ({lines[0]})" if lines else "")
        + "; try a smaller --batch-size (or --micro-batch), --dim or --max-cardinality"
    )


def _where(options: Options) -> str:
    if options.stock:
        return "in the stock Keras model"
    if options.in_process:
        return f"in this process ({options.storage})"
    return "on " + ", ".join(options.servers)


def _opening(options: Options) -> str:
    ids = sum(field_rows(options.max_cardinality))
    return (
        f"{options.model}, dim {options.dim}, {options.optimizer}: {ids:,} ids in 26 fields, "
        f"embeddings {_where(options)}\n"
        f"data {options.data}, run directory {options.run_dir}; starting TensorFlow"
    )


def _interrupted(options: Options, stop: StopRequest, interrupted: Interrupted) -> str:
    if options.rank:
        return f"stopped ({stop.reason}); worker 0 says after which step"
    if interrupted.path is None:
        return f"stopped ({stop.reason}) before the first step; there is nothing to resume"
    return (
        f"stopped ({stop.reason}) after step {interrupted.position.step}, checkpoint {interrupted.path}; "
        f"go on with --run-dir {options.run_dir} --resume"
    )


def _message(error: Exception, options: Options) -> str:
    """Describe an error to the user; empty for a bug."""
    if not isinstance(error, OeError):
        return _memory_error(error) or _disk_error(error)
    if isinstance(error, GradientError):
        return f"{str(error).partition(';')[0]}; try a smaller --learning-rate"
    if not isinstance(error, (ServerLost, TornError, WorkerLost)):
        return str(error)
    whom = "the servers and run" if isinstance(error, ServerLost) else "all workers"
    if options.size == 1 and isinstance(error, TornError):
        whom = "the run"
    if options.rank:
        return f"{error} (start all workers again with --resume)"
    last = newest(options.run_dir)
    if last is None:
        return f"{error} (no checkpoint was written yet: start {whom} again)"
    return f"{error} (the last checkpoint is {last.path.name}: start {whom} again with --resume)"
