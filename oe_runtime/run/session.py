"""One process of a job: its options, client, workers, run directory and course."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from oe_runtime import checkpoint
from oe_runtime.checkpoint.saved import Saved
from oe_runtime.client import Client
from oe_runtime.data import Batch, Schema, open_source
from oe_runtime.data.library import by_column
from oe_runtime.data.stream import STDIN
from oe_runtime.errors import OeError, WorkerLost
from oe_runtime.run import uploads
from oe_runtime.run.checkpoints import check_resume
from oe_runtime.run.connection import connect, connect_values, refuse_trained
from oe_runtime.run.course import Course
from oe_runtime.run.followers import FollowingDirectory
from oe_runtime.run.lost_server import ServerRecovery
from oe_runtime.run.options import RunOptions, outside
from oe_runtime.run.outcome import STOP_SECONDS, end_at_limit
from oe_runtime.run.progress import View
from oe_runtime.run.queue_course import QueueCourse
from oe_runtime.run.ranks import CollectiveRanks, Ranks, Stopped, check_agreement, check_input, join_workers
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.run_input import RunInput, columns_fixed
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.shared_input import HoldingClient, SharedInput
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.worker_input import WorkerInput
from oe_runtime.shared_values import SharedValues
from oe_runtime.support import horovod, job_hooks

_COLUMN_FLAGS = ("--schema", "--label", "--categories", "--numbers", "--max-cardinality")
OF_SCRIPT = "OE_JOB_SCRIPT"  # the environment of what a script of a job starts: the script's name
_POLL = 0.2  # seconds
_STDIN = "standard input, which cannot be read again"
_FIT_ALONE = (
    "fit is no part of the job without its callback, and would have no progress, checkpoints or stop: give "
    "it callbacks=[embed.JobCallback(job)]"
)


class JobError(OeError):
    """Something that a program of a job may not do; the message says what it may."""


def _refuse_strategy() -> None:
    """Refuse a process in which TensorFlow's own cluster, of TF_CONFIG, has been started before."""
    if "tensorflow" not in sys.modules:
        return
    from tensorflow.python.eager import context

    if getattr(context.context(), "_collective_ops_server_def", None) is not None:
        raise JobError(
            "a tf.distribute.MultiWorkerMirroredStrategy was made before the workers of the job have met: "
            "import oe_runtime.keras first, and make models with tables outside of the strategy's scope"
        )


def _is_torch() -> bool:
    """Whether the program trains by PyTorch."""
    return "torch" in sys.modules and "oe_runtime.keras" not in sys.modules


class Session:
    """The job as one process sees it. `launched`: by the trainer; else by the program itself."""

    _current: ClassVar[Session | None] = None
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: RunOptions, stop: StopRequest, screen: View, *, launched: bool) -> None:
        self.options = options
        self.stop = stop
        self.screen = screen
        self.launched = launched
        self.directory: RunDirectory | FollowingDirectory | None = None
        self.course: Course | None = None
        self.loop: Any = None  # of the present block of job.training
        self._input: RunInput | None = None
        self._input_agreed = False  # compared with the other workers'
        self.goes_back = False  # after the loss of a server, in place
        self._reads_eval_data = False  # the program has asked for its name or its rows
        self._uses_schema = False  # the program reads rows of these columns, by job.batches or by itself
        self.uploads: uploads.Uploads | None = None  # of worker 0
        self.seeds: tuple[int, int | None] | None = None  # the script's, and the one set for the last part
        self.told_of_callbacks = False  # that some begin anew after a resume
        self.told_of_random = False  # layers whose random numbers are not in checkpoints
        self.exported: Path | None = None  # a SavedModel, which uploads include
        self._client: Client | None = None
        self._workers: Any = None
        self._values: SharedValues | None = None  # of asynchronous workers
        self._ranks: Ranks | None = None
        self._resume_step: int | None = None
        self._saved_optimizers: Mapping[str, Mapping[str, Any]] | None = None
        self._fetched = ""  # what to say of a checkpoint that the upload store had
        self._process = os.getpid()

    @classmethod
    def current(cls) -> Session:
        """Return the session of this process; without a launcher, make it."""
        if Session._current is None:
            if (script := os.environ.get(OF_SCRIPT)) is not None:
                raise JobError(
                    f"a process that {script} has started is no part of its job, and its tables would be "
                    "others: the launcher starts several workers (--workers); leave torchrun, horovodrun and "
                    "multiprocessing to it"
                )
            path = Path(str(getattr(sys.modules.get("__main__"), "__file__", None) or "notebook"))
            options = outside(path.absolute(), **Session._defaults)
            Session._current = cls(options, StopRequest(with_parent=False), View(), launched=False)
        return Session._current

    @classmethod
    def install(cls, session: Session | None) -> None:
        """Make `session` the one of this process."""
        Session._current = session
        if session is None or not session.launched:
            job_hooks.install(None, None)
        else:
            job_hooks.install(session.together if session.workers > 1 else None, session.client)

    @classmethod
    def set_defaults(cls, options: Mapping[str, Any]) -> None:
        """See oe_runtime.job.defaults."""
        session = Session._current
        if session is not None and session.launched:
            return
        if session is not None:
            raise JobError("job.defaults comes first: this job has begun with other settings")
        Session._defaults = dict(options)

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.options.rank

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.options.size

    @property
    def local_rank(self) -> int:
        """The rank of this worker among those of its host."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self.launched else 0

    @property
    def local_workers(self) -> int:
        """The number of workers on this host."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", str(self.workers))) if self.launched else 1

    @property
    def data(self) -> str | None:
        """The data as the launcher was given it."""
        return self.options.data or None

    @property
    def eval_data(self) -> str | None:
        """The name of rows for the evaluation as the launcher was given it; None for a share of the data."""
        self._reads_eval_data = True
        return self.options.eval_path

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self.options.run_dir

    @property
    def resume_step(self) -> int:
        """The step of the checkpoint that this start goes on from."""
        if not self.options.resume:
            return 0
        if self._resume_step is None and self.rank:
            self._meet()  # worker 0 says it: this one may not see its run directory
        if self._resume_step is None:
            found = checkpoint.latest(self.run_dir / "checkpoints")
            self._resume_step = 0 if found is None else found.step
        return self._resume_step

    @property
    def saved_optimizers(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizers of the tables in the files of the checkpoint that this start goes on from."""
        if self._saved_optimizers is None:
            found = checkpoint.latest(self.run_dir / "checkpoints") if self.options.resume else None
            files = {} if found is None else Saved.open(found.path).files
            self._saved_optimizers = {name: parts[0]["spec"]["optimizer"] for name, parts in files.items()}
        return self._saved_optimizers

    @property
    def arguments(self) -> Sequence[str]:
        """The program's own arguments."""
        return self.options.arguments if self.launched else sys.argv[1:]

    def prepare(self, *, anew: bool = False) -> None:
        """Check that the run can go on and upload, fetch what it goes on from, and find the other workers.

        `anew`: this process has taken the place of one that did so. Raises RunError and CheckpointError.
        """
        options = self.options
        if options.upload_to and options.rank == 0 and not anew:
            self._fetched = uploads.prepare(options)
        if options.resume and options.rank == 0:
            check_resume(options)
        if options.rendezvous:
            place = horovod.Started(options.rank, options.size, options.rendezvous)
            workers = horovod.exchange(place, options.worker_wait, self.stop)
            self.options = replace(options, workers=workers)

    def connect(self) -> Client | None:
        """Connect to the servers, whether or not the other workers are there; None for stock Keras.

        Raises RunError for servers that hold another run's rows.
        """
        client = connect(self.options)
        if client is not None and self.rank == 0 and not self.options.resume:
            try:
                refuse_trained(client)
            except BaseException:
                client.close()
                raise
        self._client = client
        return client

    def client(self) -> Client:
        """Return the one client of this process."""
        self._refuse_child("job.client()")
        if self._client is None:
            self._meet()
            client = self.connect()
            assert client is not None  # noqa: S101 - only stock models have none
            # Asynchronous workers begin with the rows that worker 0 has saved.
            client.restores = self.options.resume or (self.options.workqueue and self.rank > 0)
            client.workers = self.together()
            client.saved_optimizers = self.saved_optimizers
            client.steps = self.options.steps_of_models()
            client.fit_alone = _FIT_ALONE if self.launched else ""
            return client
        return self._client

    @property
    def connected(self) -> Client | None:
        """The client, if the program has asked for it."""
        return self._client

    def join(self) -> None:
        """Wait for the other workers, before TensorFlow's first operation."""
        if self._ranks is not None:
            return
        if self.workers == 1 or self.options.workqueue:  # which agree by the queue
            self._ranks = Ranks()
            if self.workers > 1 and self.options.resume:
                self._share_resume()
            return
        _refuse_strategy()
        self._workers = join_workers(self.options, self.stop)
        self._ranks = CollectiveRanks(self._workers, self.stop)
        self._agree(self._ranks)

    def _meet(self) -> None:
        """Wait for the other workers, by the library that the script trains with."""
        if self._ranks is not None or self.workers == 1 or self.options.workqueue or not _is_torch():
            self.join()
            return
        from oe_runtime.run.torch_ranks import TorchRanks

        try:
            self._ranks = TorchRanks(self.options, self.stop)
        except ValueError as error:
            raise JobError(str(error)) from error
        self._agree(self._ranks)

    def _agree(self, ranks: Ranks) -> None:
        check_agreement(self.options, ranks)
        step = 0 if self.rank else self.resume_step
        self._resume_step = int(ranks.share(str(step).encode()))
        saved = {} if self.rank else self.saved_optimizers
        self._saved_optimizers = json.loads(ranks.share(json.dumps(saved).encode()))

    def _share_resume(self) -> None:
        """Let asynchronous workers that do not see the run directory know what the run goes on from."""
        values = self._values = connect_values(self.options)
        name = f"resume-{self.options.generation}"
        if self.rank == 0:
            values.write(name, json.dumps([self.resume_step, self.saved_optimizers]).encode())
            return
        deadline = time.monotonic() + self.options.worker_wait
        while not (found := values.read_written(name)):
            if self.stop:
                raise Stopped
            if time.monotonic() > deadline:
                raise WorkerLost(f"worker 0 did not come within {self.options.worker_wait} s")
            self.stop.wait(_POLL)
        self._resume_step, self._saved_optimizers = json.loads(found)

    def together(self) -> Any:
        """See oe_runtime.job.together."""
        self.join()
        if self._workers is None and self.options.workqueue and self._client is not None:
            if _is_torch():
                from oe_runtime.run.server_workers import ServerWorkers as Workers
            else:
                from oe_runtime.run.tensorflow_workers import TensorFlowServerWorkers as Workers
            # A single worker acts as one of two, the other without work.
            self._workers = Workers(self._client, self.rank, max(2, self.workers))
        return self._workers

    @property
    def ranks(self) -> Ranks:
        """The agreement with the other workers."""
        self._meet()
        assert self._ranks is not None  # noqa: S101 - join
        return self._ranks

    def begin(self, state: ScriptState, *, by_train: bool = False) -> Course:
        """Return the course of the run that trains `state`; at its begin, go back to the checkpoint.

        `by_train`: the job itself takes the batches, by job.train.
        """
        self._refuse_child("training")
        if self.options.workqueue and not by_train:
            raise JobError(
                "--workqueue: asynchronous workers take ranges of --data from a queue: train by "
                "job.train(step, model), or leave the flag out"
            )
        if self.course is None:
            if self.directory is None:
                self.open_directory()
                self.say_start(self.options.program)
            assert self.directory is not None  # noqa: S101 - open
            _ = self.resume_step  # before there are newer checkpoints
            client = None if self.options.stock else self.client()
            if isinstance(client, HoldingClient):
                course: Course = self._queue_course(client, state)
            else:
                course = Course(
                    self.options, self.ranks, client, self.directory, self.screen, self.stop, state
                )
            course.begin(self.uploads, columns_fixed(self.options) if self._uses_schema else {})
            if client is not None:
                client.restores, client.fit_alone = False, ""
            self.course = course
        elif not self.course.is_of(state):
            raise JobError(
                "a job trains one model, and this is another one: its checkpoints would hold a part only; "
                "join both in one model, or train the other by a job of its own"
            )
        return self.course

    def _queue_course(self, client: HoldingClient, state: ScriptState) -> Course:
        """Return the course of one of asynchronous workers, with its end of their work queue."""
        options, rows = self.options, self.open_input()
        assert self.directory is not None  # noqa: S101 - begin
        client.values = self._values or connect_values(options)
        mine = WorkerInput.read(self.rank, rows.source) if self.workers > 1 else None
        shared = SharedInput(options, rows.source, rows.split, self.stop, client.values, client, mine)
        rows.shared = shared
        return QueueCourse(
            options,
            client,
            self.directory,
            self.screen,
            self.stop,
            state,
            rows=rows,
            shared=shared,
            dense=self.together(),
        )

    def open_directory(self) -> None:
        """Make the run directory. Raises RunError for one that cannot be used."""
        options = self.options
        self.directory = RunDirectory(options) if options.rank == 0 else FollowingDirectory(options)
        if options.size > 1:
            self.stop.limit(STOP_SECONDS, partial(end_at_limit, options, self.directory, self.stop))
        if self._fetched:
            self.screen.say(self._fetched)
        if options.upload_to and isinstance(self.directory, RunDirectory):
            self.uploads = uploads.Uploads(options, self.directory, self.screen.say)

    def say_start(self, model: str, **facts: Any) -> None:
        """Write the first event of the run, with what is known of its size."""
        options = self.options
        assert self.directory is not None  # noqa: S101 - its run
        known = {
            "data": options.data or None,
            "embeddings": "in this process" if options.in_process else "on " + ", ".join(options.servers),
            **dict.fromkeys(("rows", "steps", "batch_size", "dim")),
        }
        self.directory.event("start", pid=os.getpid(), model=model, **known | facts)

    def say_input(self) -> None:
        """Write that the program reads the rows of --data, so the flags say how long it trains."""
        assert self.directory is not None  # noqa: S101 - its run
        if self.options.program:  # of built-in models everybody knows it
            self.directory.event("input", data=self.options.data, batch_size=self.options.batch_size)

    def row_settings(self, rows: RunInput) -> dict[str, Any]:
        """Return what checkpoints hold of the rows; those of built-in models have it from the start."""
        return rows.fixed() if self.options.program else {}

    def recovery(self) -> ServerRecovery:
        """Return what takes the course back, in place, after the loss of a server."""
        assert self.course is not None and self.directory is not None  # noqa: S101, PT018 - begin
        return ServerRecovery(
            self.options,
            self._client,
            self.course.checkpoints,
            self.directory,
            self.screen,
            self.stop,
            self.ranks,
        )

    def step(self, loss: Any, rows: int | None) -> None:
        """See oe_runtime.job.step."""
        if self.loop is None or self.loop.skipped:
            raise JobError("job.step() belongs into a loop of `with job.training(model, …)`")
        self.loop.step(loss, rows)

    def batches(self, layout: Callable[[Batch], Any] | None) -> Iterator[Any]:
        """See oe_runtime.job.batches."""
        if self.loop is None:
            raise JobError("job.batches() belongs into a block of `with job.training(model, …)`")
        if self.options.data == STDIN:
            raise JobError(
                f"job.batches() reads --data, which is {_STDIN}: name files, or train by job.train(step, "
                "model), which needs no new process after the loss of a server"
            )
        found: Iterator[Any] = self.loop.read(self.open_input(), layout or self.columns)
        return found

    def eval_batches(self, layout: Callable[[Batch], Any] | None) -> Iterator[Any]:
        """See oe_runtime.job.eval_batches."""
        self._reads_eval_data = True
        rows, layout = self.open_input(), layout or self.columns
        return (
            (layout(part) for part in rows.read_held_out(self.ranks) if part.rows)
            if rows.evaluates()
            else iter(())
        )

    @property
    def schema(self) -> Schema:
        """The columns of the rows, which `batches` or the program itself reads."""
        self._uses_schema = True
        return self.options.schema.limited(self.options.max_cardinality)

    def columns(self, batch: Batch) -> tuple[Any, ...]:
        """Return a batch as oe_runtime.data.dataset has it: features by column, labels, weights if any."""
        return by_column(batch, self.schema)

    def open_input(self) -> RunInput:
        """Return the rows of --data, opened at the first call; all workers make it together.

        Raises DataError for data that do not fit, and RunError for workers with different ones.
        """
        rows = self.open_rows()
        if self.workers > 1 and not self._input_agreed and not self.options.workqueue:
            check_input(WorkerInput.read(self.rank, rows.source), self.ranks)
            self._input_agreed = True
        return rows

    def open_rows(self) -> RunInput:
        """Return the rows of --data, as this worker has them. Raises DataError and JobError."""
        options = self.options
        if self._input is not None:
            return self._input
        if not options.data:
            raise JobError(
                "job.batches() reads --data, which is not given: name files, or a directory with --follow"
            )
        if options.program and options.batch_size < self.workers:
            raise JobError(
                f"--batch-size is {options.batch_size}, expected at least a row for each of "
                f"{self.workers} workers"
            )
        source = open_source(
            options.data,
            options.max_cardinality,
            options.max_bad_rows,
            options.schema,
            options.eval_data,
            follow=options.follow,
        )
        source.check()
        self._input = RunInput(options, source)
        return self._input

    def warn_of_callbacks(self, unsaved: Sequence[str]) -> None:
        """Say once which attributes keep callbacks of a fit out of checkpoints."""
        if unsaved and not self.told_of_callbacks:
            self.told_of_callbacks = True
            self.screen.say(
                f"warning: {', '.join(unsaved)} of fit's callbacks is no number or text: after a resume, "
                "such callbacks begin anew"
            )

    def refuse_input_flags(self) -> None:
        """Before steps on rows that the program reads itself: refuse flags that say how to read them.

        Those of the columns are for a program that has used `schema`.
        """
        options = self.options
        if self.course is not None and self.course.input is not None:
            return
        used = _COLUMN_FLAGS if self._uses_schema else ()
        if unused := [flag for flag in options.input_flags if flag not in used]:
            raise JobError(
                f"{unused[0]} is of rows that job.batches() reads, but {options.program} "
                "reads its own: leave the flag out (give what the program decides after --)"
            )

    def refuse_unread_eval_data(self) -> None:
        """In an evaluation: refuse --eval-data if the program has other rows than those."""
        options = self.options
        if options.program and options.eval_data and not self._reads_eval_data:
            raise RunError(
                f"--eval-data {options.eval_data}: {options.program} evaluates on other rows, because it "
                "asks for neither job.eval_data nor job.eval_batches(): leave the flag out"
            )

    def _refuse_child(self, what: str) -> None:
        if os.getpid() != self._process:
            raise JobError(
                f"{what} is of process {self._process}, and this one was forked from it: two processes "
                "cannot share its connections; several workers are started by the launcher (--workers)"
            )
