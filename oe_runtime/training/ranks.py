"""The workers of a run, as far as they must agree on more than gradients and rows."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import OeError, ServerLost, TornError, WorkerLost
from oe_runtime.training.options import Options
from oe_runtime.training.run_directory import RunError
from oe_runtime.training.stopping import StopRequest
from oe_runtime.training.worker_input import WorkerInput

if TYPE_CHECKING:
    from oe_runtime.keras.workers import TensorFlowWorkers

_FIRST_SUM = 16  # oe_runtime.keras.workers has the numbers below
_CHUNK = 1 << 18  # int32 values of a message: all have one size
_LOST = 1024.0  # a wish of this size says that its worker has lost servers
_POLL = 0.2  # seconds
_LEAST_SILENCE = 20.0  # seconds that another worker's host may be out of reach


class Ranks(Protocol):
    """All workers call the same methods in the same order; each waits for all.

    A worker that has lost a server says so with `lose` and goes on, asking no server, to where all meet:
    there `wished`, `asked` and `meet` raise ServerLost in all of them.
    """

    @property
    def rank(self) -> int:
        """Which worker this is."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def lost(self) -> bool:
        """Whether this one has lost servers, which the others may not know yet."""
        ...

    def lose(self, error: OeError) -> None:
        """Servers are lost, or they hold another worker for lost. One worker alone raises it at once."""
        ...

    def wish(self, stop: StopRequest) -> None:
        """Before a step: tell the others whether this one was asked to stop."""
        ...

    def wished(self, stop: StopRequest) -> bool:
        """After the step: whether any was."""
        ...

    def asked(self, stop: StopRequest) -> bool:
        """Between steps: whether any was."""
        ...

    def meet(self) -> None:
        """Wait until all have come here, with what they did before."""
        ...

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Of all workers' float32, float64, int32 or int64 arrays of one shape."""
        ...

    def share(self, value: bytes, origin: int = 0) -> bytes:
        """What that worker has given."""
        ...


@dataclass(frozen=True)
class Alone:
    """One worker."""

    rank: int = 0
    count: int = 1
    lost: bool = False

    def lose(self, error: OeError) -> None:
        """See Ranks."""
        raise error

    def wish(self, stop: StopRequest) -> None:
        """See Ranks."""

    def wished(self, stop: StopRequest) -> bool:
        """See Ranks."""
        return bool(stop)

    def asked(self, stop: StopRequest) -> bool:
        """See Ranks."""
        return bool(stop)

    def meet(self) -> None:
        """See Ranks."""

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Ranks."""
        return values

    def share(self, value: bytes, origin: int = 0) -> bytes:
        """See Ranks."""
        return value


class Together:
    """Several workers, through TensorFlow's collectives."""

    def __init__(self, workers: TensorFlowWorkers, stop: StopRequest) -> None:
        """`stop` knows from here when this worker waits for others."""
        self._workers = workers
        self._stop = stop
        self.rank, self.count = workers.rank, workers.count
        self.gradients = 0  # how many values of dense gradients a step has
        self._error: OeError | None = None
        self._wish = 0.0
        self._sums: dict[tuple[str, int], int] = {}  # each number is for one type and size

    @property
    def lost(self) -> bool:
        """See Ranks."""
        return self._error is not None

    def lose(self, error: OeError) -> None:
        """See Ranks."""
        self._error = self._error or error

    def wish(self, stop: StopRequest) -> None:
        """See Ranks. Goes along with the step's gradients."""
        wish = self._value(stop)
        if wish != self._wish:
            self._wish = wish
            self._workers.wish.assign(wish)
        self._workers.wishes.assign(-1.0)

    def wished(self, stop: StopRequest) -> bool:
        """See Ranks."""
        from oe_runtime.keras.workers import GRADIENTS

        wishes = float(self._workers.wishes.numpy())
        if wishes < 0:  # the step did not come to the sum of the gradients, in which the others wait
            nothing = np.zeros(self.gradients + 2, np.float32)
            nothing[-1] = self._value(stop)
            with self._stop.waiting():
                wishes = float(self._workers.sum(nothing, GRADIENTS)[-1])
        return self._agreed(stop, wishes)

    def asked(self, stop: StopRequest) -> bool:
        """See Ranks."""
        return self._agreed(stop, float(self.sum(np.array([self._value(stop)], np.float32))[0]))

    def meet(self) -> None:
        """See Ranks."""
        self._agreed(None, float(self.sum(np.array([self._value(None)], np.float32))[0]))

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Ranks."""
        flat = np.ascontiguousarray(values).reshape(-1)
        what = self._sums.setdefault((flat.dtype.name, flat.size), _FIRST_SUM + len(self._sums))
        with self._stop.waiting():
            total: NDArray[Any] = np.asarray(self._workers.sum(flat, what))
        return total.reshape(values.shape)

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
        return _LOST if self.lost else float(bool(stop))

    def _agreed(self, stop: StopRequest | None, wishes: float) -> bool:
        if wishes >= _LOST:
            error, self._error = self._error, None
            if isinstance(error, ServerLost):
                raise error
            raise ServerLost("", "another worker has lost a server") from error
        if wishes and stop is not None and not stop:
            stop.reason = stop.reason or "another worker was asked to"
        return wishes > 0


def meet(options: Options, stop: StopRequest) -> TensorFlowWorkers:
    """Wait until all workers are there; before TensorFlow's first operation.

    Raises RunError where this one cannot listen, WorkerLost when others do not come, Stopped when asked to.
    """
    from oe_runtime.keras.workers import TensorFlowWorkers

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

    # TensorFlow waits for ever, and nothing else is heard meanwhile.
    threading.Thread(target=connect, name="meet-workers", daemon=True).start()
    deadline = time.monotonic() + options.worker_wait
    while not found:
        if stop:
            raise Stopped
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"the {len(options.workers)} workers did not all come within {options.worker_wait} s: start "
                "one for each of --workers, with the same list, and see what those that failed have said"
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
    """Asked to stop while the workers were not all there."""


# What may differ from worker to worker.
_OWN = {
    "rank",
    "data",  # compared itself, see check_input
    "token_file",
    "run_dir",
    "export",
    "exit_with_parent",
    "inter_threads",
    "intra_threads",
    "tls",
    "checkpoint_transfer",
}


def check_agreement(options: Options, ranks: Ranks) -> None:
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
    _refuse_together(ranks, problem)


def check_input(input_: WorkerInput, ranks: Ranks) -> None:
    """Refuse workers that have not all the same input; all of them raise the same RunError."""
    first = WorkerInput.from_json(ranks.share(input_.to_json().encode()).decode())
    _refuse_together(ranks, input_.problem(first))


def _refuse_together(ranks: Ranks, problem: str) -> None:
    """RunError in all workers if any has a problem, with the words of the first one that has."""
    has = np.zeros(ranks.count, np.int32)
    has[ranks.rank] = bool(problem)
    found = np.flatnonzero(ranks.sum(has))
    if found.size:
        raise RunError(ranks.share(problem.encode(), int(found[0])).decode())


@contextlib.contextmanager
def asking(ranks: Ranks) -> Iterator[None]:
    """What is done in it asks servers: if one is lost, `ranks` has it, and it is not done to the end."""
    try:
        yield
    except (ServerLost, TornError, WorkerLost) as error:
        ranks.lose(error)


@contextlib.contextmanager
def losses_of_workers(options: Options) -> Iterator[None]:
    """Raises WorkerLost for what TensorFlow says of workers that are lost."""
    try:
        yield
    except Exception as error:
        if not options.workers:
            raise
        words = _loss(error, options)
        if words is None:
            raise
        raise WorkerLost(words) from error


def _loss(error: Exception, options: Options) -> str | None:
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
