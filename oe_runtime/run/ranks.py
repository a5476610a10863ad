"""The workers of a run: agreement on more than gradients and rows."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import OeError, ServerLost, TornError, WorkerLost
from oe_runtime.run.options import RunOptions
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.worker_input import WorkerInput

if TYPE_CHECKING:
    from oe_runtime.run.tensorflow_workers import TensorFlowWorkers

_FIRST_SUM = 16  # oe_runtime.run.tensorflow_workers uses the numbers below
_CHUNK = 1 << 18  # int32 values per message; all have this size
_LOST = 1024.0  # a stop request of this size: its worker has lost servers
_CHECKPOINT = 0.5  # besides a stop request: worker 0 wants a checkpoint after the step
_ENDED = 65536.0  # in place of a stop request: its worker has ended an epoch
_POLL = 0.2  # seconds
_LEAST_SILENCE = 20.0  # seconds that another worker's host may be unreachable


class Ranks:
    """The workers of a run: here a single one, which waits for nobody. CollectiveRanks are several.

    All workers call the same methods in the same order; each waits for all. A worker that has lost a server
    calls `report_loss` and goes on without asking servers. Then the next `any_stop_request`, `stop_requested`
    or `barrier` raises ServerLost in all workers.
    """

    rank = 0
    count = 1
    in_place = True  # each worker of a step that cannot be done comes to the next agreement
    wants_checkpoint = False  # of worker 0, whose clock counts; set before a step
    checkpoint_due = False  # in all workers: what worker 0 wanted when they last agreed on stop requests

    @property
    def lost(self) -> bool:
        """Whether this worker has lost servers, perhaps unknown to the others."""
        return False

    def report_loss(self, error: OeError) -> None:
        """Report lost servers, or that servers take this worker for lost. A single worker raises it."""
        raise error

    def send_stop_request(self, stop: StopRequest) -> None:
        """Before a step: send this worker's stop request, if any, to the others."""

    def any_stop_request(self, stop: StopRequest) -> bool:
        """After the step: whether any worker sent one; sets `checkpoint_due` too."""
        return self.stop_requested(stop)

    def stop_requested(self, stop: StopRequest) -> bool:
        """Between steps: whether any worker was asked to stop; sets `checkpoint_due` too."""
        self.checkpoint_due = self.wants_checkpoint
        return bool(stop)

    def barrier(self) -> None:
        """Wait until all workers have come here, with all they did before."""

    def end_epoch(self) -> None:
        """After an epoch's last step. Raises RunError in all workers if some have more steps in it."""

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum all workers' float32, float64, int32 or int64 arrays of one shape."""
        return values

    def share(self, value: bytes, origin: int = 0) -> bytes:
        """Return the `value` of worker `origin` in all workers."""
        return value

    def break_off(self, keep: Collection[int]) -> None:
        """After the loss of a server, which a worker finds alone: let the others find it too.

        Connections to or from the ports `keep` stay.
        """

    def wait_to_start_anew(self) -> None:
        """Before an exec of all workers: wait until no process that comes anew can meet an old one.

        Raises WorkerLost when the others do not come, Stopped after a stop request.
        """


class SeveralRanks(Ranks):
    """Several workers; subclasses sum."""

    def __init__(self, rank: int, count: int, stop: StopRequest) -> None:
        """`stop` learns when this worker waits for others."""
        self._stop = stop
        self.rank, self.count = rank, count
        self._error: OeError | None = None

    @property
    def lost(self) -> bool:
        """See Ranks."""
        return self._error is not None

    def report_loss(self, error: OeError) -> None:
        """See Ranks."""
        self._error = self._error or error

    def stop_requested(self, stop: StopRequest) -> bool:
        """See Ranks."""
        return self._agreed(stop, float(self.sum(np.array([self._value(stop)], np.float32))[0]))

    def barrier(self) -> None:
        """See Ranks."""
        self._agreed(None, float(self.sum(np.array([self._value(None)], np.float32))[0]))

    def end_epoch(self) -> None:
        """See Ranks. The others may be in `stop_requested`, after a further step."""
        self._check_ended(float(self.sum(np.array([_ENDED], np.float32))[0]))

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Ranks."""
        raise NotImplementedError

    def share(self, value: bytes, origin: int = 0) -> bytes:
        """See Ranks."""
        mine = self.rank == origin
        size = int(self.sum(np.array([len(value) if mine else 0], np.int64))[0])
        parts = []
        for begin in range(0, size, 4 * _CHUNK):
            chunk = np.zeros(_CHUNK, np.int32)
            if mine:
                piece = np.frombuffer(value[begin : begin + 4 * _CHUNK], np.uint8)
                chunk.view(np.uint8)[: piece.size] = piece
            parts.append(self.sum(chunk).tobytes())
        return b"".join(parts)[:size]

    def _value(self, stop: StopRequest | None) -> float:
        if self.lost:
            return _LOST
        return float(bool(stop)) + (_CHECKPOINT if stop is not None and self.wants_checkpoint else 0.0)

    def _check_ended(self, requests: float) -> None:
        ended = int(requests // _ENDED)
        if 0 < ended < self.count:
            raise RunError(
                f"the workers have different numbers of batches: {ended} of {self.count} have ended an epoch "
                "before the others; give each as many as the others"
            )

    def _agreed(self, stop: StopRequest | None, requests: float) -> bool:
        self._check_ended(requests)
        if requests >= _LOST:
            error, self._error = self._error, None
            if isinstance(error, ServerLost):
                raise error
            raise ServerLost("", "another worker has lost a server") from error
        if stop is not None:
            self.checkpoint_due = requests % 1 == _CHECKPOINT
            if requests >= 1 and not stop:
                stop.reason = stop.reason or "another worker was asked to"
        return requests >= 1


class CollectiveRanks(SeveralRanks):
    """Several workers, through TensorFlow's collectives."""

    def __init__(self, workers: TensorFlowWorkers, stop: StopRequest) -> None:
        super().__init__(workers.rank, workers.count, stop)
        self._workers = workers
        self.gradients = 0  # values of dense gradients per step
        self._sent = 0.0
        self._sums: dict[tuple[str, int], int] = {}  # each number is for one type and size

    def send_stop_request(self, stop: StopRequest) -> None:
        """See Ranks. Goes with the step's gradients."""
        value = self._value(stop)
        if value != self._sent:
            self._sent = value
            self._workers.stop_request.assign(value)
        self._workers.stop_requests.assign(-1.0)

    def any_stop_request(self, stop: StopRequest) -> bool:
        """See Ranks."""
        requests = float(self._workers.stop_requests.numpy())
        if requests < 0:  # the step did not reach the sum of gradients, in which the others wait
            requests = self._sum_of_gradients(self._value(stop))
        return self._agreed(stop, requests)

    def end_epoch(self) -> None:
        """See Ranks. The others may be in the sum of gradients of a further step."""
        if not self.gradients:
            super().end_epoch()
            return
        self._check_ended(self._sum_of_gradients(_ENDED))

    def _sum_of_gradients(self, request: float) -> float:
        """Take part in a step's sum of gradients, with none; return the sum of requests."""
        from oe_runtime.run.tensorflow_workers import GRADIENTS

        nothing = np.zeros(self.gradients + 2, np.float32)
        nothing[-1] = request
        with self._stop.waiting():
            return float(self._workers.sum(nothing, GRADIENTS)[-1])

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Ranks."""
        flat = np.ascontiguousarray(values).reshape(-1)
        what = self._sums.setdefault((flat.dtype.name, flat.size), _FIRST_SUM + len(self._sums))
        with self._stop.waiting():
            total: NDArray[Any] = np.asarray(self._workers.sum(flat, what))
        return total.reshape(values.shape)


def join_workers(options: RunOptions, stop: StopRequest) -> TensorFlowWorkers:
    """Wait until all workers have started; before TensorFlow's first operation.

    Raises RunError where this one cannot listen, WorkerLost when others do not come, Stopped after a stop
    request.
    """
    from oe_runtime.run.tensorflow_workers import TensorFlowWorkers

    found: list[TensorFlowWorkers | Exception] = []

    def connect() -> None:
        try:
            made = TensorFlowWorkers(
                options.workers,
                options.rank,
                timeout=options.worker_wait,
                silence=max(_LEAST_SILENCE, options.server_wait),  # as long as for a server
            )
            made.sum(np.zeros(1, np.float32), _FIRST_SUM - 1)
            found.append(made)
        except Exception as error:
            found.append(error)

    # In a thread, because TensorFlow waits forever and handles nothing meanwhile.
    threading.Thread(target=connect, name="meet-workers", daemon=True).start()
    deadline = time.monotonic() + options.worker_wait
    while not found:
        if stop:
            raise Stopped
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"the {len(options.workers)} workers did not all come within {options.worker_wait} s: start "
                "one for each of --workers, with the same list, and read the errors of those that failed"
            )
        stop.wait(_POLL)
    stop.listen()  # TensorFlow's servers take SIGTERM for themselves
    if isinstance(found[0], Exception):
        raise RunError(
            f"worker {options.rank} cannot take part at {options.workers[options.rank]}: "
            f"{str(found[0]).strip().splitlines()[0]} (is the port taken?)"
        ) from found[0]
    return found[0]


class Stopped(Exception):
    """A stop request before all workers had started."""


# RunOptions that may differ between workers.
_OWN = {
    "rank",
    "script",  # its place; that models fit is checked later
    "data",  # compared by content, see check_input
    "eval_data",
    "input_flags",  # a default value may be given too
    "token_file",
    "run_dir",
    "export",
    "export_rows",
    "exit_with_parent",
    "inter_threads",
    "intra_threads",
    "tls",
    "checkpoint_transfer",
}


def check_agreement(options: RunOptions, ranks: Ranks) -> None:
    """Refuse workers that were not started with the same flags."""
    values = {name: value for name, value in asdict(options).items() if name not in _OWN}
    mine = json.loads(json.dumps(values, default=str))
    problem = ""
    for name, value in json.loads(ranks.share(json.dumps(mine).encode())).items():
        if mine[name] != value:
            problem = problem or (
                f"--{name.replace('_', '-')} is {mine[name]} in worker {ranks.rank} and {value} in worker 0: "
                "start all workers with the same flags"
            )
    refuse_together(ranks, problem)


def check_input(input_: WorkerInput, ranks: Ranks) -> None:
    """Refuse workers without the same input; all of them raise the same RunError."""
    first = WorkerInput.from_json(ranks.share(input_.to_json().encode()).decode())
    refuse_together(ranks, input_.problem(first))


def refuse_together(ranks: Ranks, problem: str) -> None:
    """Raise RunError in all workers if any has a problem, with the message of the first."""
    has = np.zeros(ranks.count, np.int32)
    has[ranks.rank] = bool(problem)
    found = np.flatnonzero(ranks.sum(has))
    if found.size:
        raise RunError(ranks.share(problem.encode(), int(found[0])).decode())


@contextlib.contextmanager
def deferring_losses(ranks: Ranks) -> Iterator[None]:
    """Report lost servers to `ranks` instead of raising; the rest of the block is skipped."""
    try:
        yield
    except (ServerLost, TornError, WorkerLost) as error:
        ranks.report_loss(error)


@contextlib.contextmanager
def translating_worker_losses(options: RunOptions) -> Iterator[None]:
    """Raise WorkerLost for TensorFlow's errors about lost workers."""
    try:
        yield
    except Exception as error:
        if not options.workers:
            raise
        words = _loss(error, options)
        if words is None:
            raise
        raise WorkerLost(words) from error


def _loss(error: Exception, options: RunOptions) -> str | None:
    if isinstance(error, WorkerLost):
        return str(error).partition(";")[0]
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(error, tf.errors.OpError):
        return None
    tasks = {int(task) for task in re.findall(r"/job:worker/replica:0/task:(\d+)", str(error))}
    for rank in sorted(tasks - {options.rank}):
        return f"worker {rank} ({options.workers[rank]}) was lost"
    if isinstance(error, tf.errors.DeadlineExceededError):
        return f"another worker has kept this one waiting for {options.worker_wait} s"
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)):
        return "another worker was lost"
    return None
