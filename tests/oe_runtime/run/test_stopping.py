"""A worker that is asked to stop is ended while it waits for others, never while it works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from training_runs import SMALL, ServerProcess

from oe_runtime.data import Batch, make_split, open_source
from oe_runtime.errors import ServerLost
from oe_runtime.run.course import Course, Interrupted
from oe_runtime.run.loops import Loop
from oe_runtime.run.lost_server import ServerRecovery
from oe_runtime.run.options import Options, parse
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.queue_course import QueueCourse
from oe_runtime.run.ranks import CollectiveRanks, Ranks
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.session import Session
from oe_runtime.run.shared_input import SharedInput
from oe_runtime.run.stopping import StopRequest
from oe_runtime.shared_values import SharedValues

LIMIT, LONG = 0.3, 2.0  # the watcher looks once a second


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """Once asked to stop, its `ended` is set when a wait lasts longer than LIMIT."""
    with StopRequest(with_parent=False) as found:
        found.ended = threading.Event()  # type: ignore[attr-defined]
        found.limit(LIMIT, found.ended.set)  # type: ignore[attr-defined]
        yield found
        found.limit(0, None)


def ended(stop: StopRequest, seconds: float = 0) -> bool:
    return bool(stop.ended.wait(seconds))  # type: ignore[attr-defined]


def test_only_waits_have_a_time_limit_after_a_stop_request(stop: StopRequest) -> None:
    stop.ask("SIGTERM")
    time.sleep(LONG)
    with stop.waiting(), stop.without_time_limit():
        time.sleep(LONG)
    for _ in range(40):  # longer together than the watcher looks away; a busy machine may make one longer
        with stop.waiting(), stop.waiting():
            time.sleep(LIMIT / 10)
    assert not ended(stop)
    with stop.waiting():
        assert ended(stop, 10)


def test_a_stop_request_wakes_the_watcher(stop: StopRequest) -> None:
    with stop.waiting():
        time.sleep(0.2)  # the watcher sleeps, without an end
        stop.ask("the loss does not fall")
        assert ended(stop, 10)


def test_the_signal_to_go_on_with_other_servers_wants_files_and_is_a_stop_request(stop: StopRequest) -> None:
    """However often it comes: only a second request of another kind ends the process."""
    stop.limit(0, None)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
    stop.wait(10)
    assert stop
    assert stop.in_files
    assert stop.reason == "to go on with other servers"


def test_a_sum_of_all_workers_is_a_wait(stop: StopRequest) -> None:
    class Frozen:
        rank, count = 0, 2

        def sum(self, values: Any, _what: int) -> Any:
            return values if ended(stop, 10) else None

    stop.ask("SIGTERM")
    workers: Any = Frozen()
    assert CollectiveRanks(workers, stop).stop_requested(stop)
    assert ended(stop)


class Quiet:
    """A model's state, a run directory, a view, checkpoints and a client that do nothing."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None


def saved(position: Position) -> RunCheckpoint:
    return RunCheckpoint(Path("checkpoint"), position, None)


class State(ScriptState):
    """That of a model without weights and tables."""

    batches_ahead = 2

    def __init__(self) -> None:
        super().__init__(None, Quiet(tables={}, values=dict))  # type: ignore[arg-type]

    def bind(self, workers: Any) -> None:
        pass

    def window(self, ranks: Ranks, metrics: Mapping[str, Any]) -> tuple[float, float | None]:
        return 0.5, 0.5


def train_in(course: Course, stop: StopRequest, options: Options, train: Callable[..., None]) -> None:
    """Train on the options' rows, as job.train does."""

    def step(batch: Batch) -> dict[str, float]:
        train(batch)
        return {"loss": 0.5}

    quiet: Any = Quiet()
    session = Session(options, stop, quiet, launched=True)
    session.directory, session.course, session._ranks = quiet, course, Ranks()
    course.begin_part()
    loop = Loop(session, course, course.state, done=False)
    loop.train(RunInput(options, open_source(options.data)), lambda batch: batch, step)


def in_step(kind: type[Course], stop: StopRequest, options: Options) -> Course:
    quiet: Any = Quiet()
    checkpoints: Any = Quiet(take_now=saved)
    return kind(options, Ranks(), None, quiet, quiet, stop, State(), checkpoints)


def options(tmp_path: Path, *flags: str) -> Options:
    return parse([*SMALL, "--run-dir", str(tmp_path / "run"), "--data", "generate:1000:1", *flags])


@pytest.mark.parametrize("where", ["first step", "input", "smaller batch"])
def test_a_busy_worker_ends_its_step_with_a_checkpoint(tmp_path: Path, stop: StopRequest, where: str) -> None:
    slow = {"first step": 1, "input": 3, "smaller batch": 4}[where]
    steps = 0

    class Slow(Course):
        def batches(self, ahead: int) -> Generator[tuple[int, Batch, list[Batch]], None, None]:
            for part in super().batches(ahead):
                if where == "input" and steps == slow - 1:
                    stop.ask("SIGTERM")
                    time.sleep(LONG)
                yield part

    def train(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if where != "input" and steps == slow:  # TensorFlow compiles
            stop.ask("SIGTERM")
            time.sleep(LONG)

    given = options(tmp_path, "--stock", "--batch-size", "300", "--holdout", "0", "--epochs", "2")
    with pytest.raises(Interrupted) as caught:
        train_in(in_step(Slow, stop, given), stop, given, train)
    assert not ended(stop)
    assert (caught.value.position.step, caught.value.path) == (slow, Path("checkpoint"))
    # A slow input is what the others wait for in their step, now and the next time.
    assert stop.seconds > LONG if where == "input" else stop.seconds < LONG


def test_a_worker_that_waits_in_a_step_is_ended(tmp_path: Path, stop: StopRequest) -> None:
    steps = 0

    def train(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:  # another one is frozen
            stop.ask("SIGTERM")
            assert ended(stop, 10)

    given = options(tmp_path, "--stock", "--batch-size", "100", "--holdout", "0")
    with pytest.raises(Interrupted):
        train_in(in_step(Course, stop, given), stop, given, train)
    assert steps == 3


def test_a_restore_takes_as_long_as_it_takes(tmp_path: Path, stop: StopRequest) -> None:
    def roll_back() -> tuple[RunCheckpoint, str]:
        stop.ask("SIGTERM")
        with stop.waiting():  # for the others, who restore too
            time.sleep(LONG)
        return saved(Position(5)), ""

    loop: Any = Quiet(saved=saved(Position(5)))
    given = options(tmp_path, "--servers", "a:1")
    quiet: Any = Quiet()
    waiter = ServerRecovery(given, quiet, Quiet(roll_back=roll_back), quiet, quiet, stop, Ranks())  # type: ignore[arg-type]
    assert waiter.recover(ServerLost("a:1", "gone"), loop).step == 5
    assert not ended(stop)


Queue = Callable[..., tuple[Options, SharedInput, SharedValues]]


@pytest.fixture
def queue(tmp_path: Path, stop: StopRequest) -> Iterator[Queue]:
    """Worker 0's end of a queue that has begun, and the connection of another worker."""
    server = ServerProcess(tmp_path / "server")
    ends: list[SharedValues] = []

    def begin(*flags: str) -> tuple[Options, SharedInput, SharedValues]:
        given = options(
            *(tmp_path, "--servers", "a:1", "--workqueue", "--batch-size", "100"),
            *("--checkpoint-rows", "files", *flags),
        )
        source = open_source(given.data)
        ends.extend(SharedValues([server.endpoint]) for _ in range(2))
        shared = SharedInput(given, source, make_split(source, given.holdout), stop, ends[0])
        shared.begin(None)
        return given, shared, ends[1]

    yield begin
    for values in ends:
        values.close()
    server.stop()


def hold(other: SharedValues) -> None:
    other.change("queue", lambda found: found.setdefault("holds", []).append(other.me))


def let_go(other: SharedValues) -> None:
    """End its push: a worker that ends in it takes all back to a checkpoint."""
    other.change("queue", lambda found: found["holds"].remove(other.me))


@pytest.mark.process
@pytest.mark.parametrize("staleness", [[], ["--staleness", "8"]])
def test_worker_0_of_a_queue_takes_its_checkpoint_however_slow_the_steps(
    queue: Queue, stop: StopRequest, staleness: list[str]
) -> None:
    given, shared, other = queue(*staleness)

    def train(*_: Any) -> None:
        # Both compile; the other one holds off checkpoints for longer.
        hold(other)
        stop.ask("SIGTERM")
        time.sleep(LONG)
        threading.Timer(LONG, let_go, [other]).start()
        shared.hold()

    quiet: Any = Quiet(stats=lambda: {"servers": []})
    rows = RunInput(given, open_source(given.data))
    course = QueueCourse(given, quiet, quiet, quiet, stop, State(), rows=rows, shared=shared, dense=quiet)
    course.checkpoints, course.saved = Quiet(take_now=saved), saved(Position())  # type: ignore[assignment]
    with pytest.raises(Interrupted) as caught:
        train_in(course, stop, given, train)
    assert not ended(stop)
    assert caught.value.path == Path("checkpoint")


@pytest.mark.process
def test_worker_0_of_a_queue_does_not_wait_for_a_frozen_step(queue: Queue, stop: StopRequest) -> None:
    _, shared, other = queue()
    hold(other)

    def go_on() -> None:
        ended(stop, 10)
        let_go(other)

    stop.ask("SIGTERM")
    thread = threading.Thread(target=go_on)
    thread.start()
    with shared.between_steps():
        assert ended(stop)
    thread.join()


@pytest.mark.process
def test_a_push_waits_for_a_checkpoint(queue: Queue, stop: StopRequest) -> None:
    _, shared, other = queue()
    other.change("queue", lambda found: found.update(gate=other.me))
    threading.Timer(LONG, other.close).start()
    stop.ask("SIGTERM")
    began = time.monotonic()
    with stop.waiting():  # a step, in which pulls wait
        shared.hold()
    assert time.monotonic() - began > LIMIT
    assert not ended(stop)
