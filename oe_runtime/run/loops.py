"""Training step by step: the epochs and batches that are left, and what follows a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from functools import partial
from typing import Any

from oe_runtime.data import Batch
from oe_runtime.data.batches import with_following
from oe_runtime.errors import ServerLost
from oe_runtime.run.course import Course
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.session import JobError, Session


class Loop:
    """What `with job.training(…) as loop` gives."""

    def __init__(self, session: Session, course: Course, state: ScriptState, *, done: bool) -> None:
        self._session = session
        self._course = course
        self._state = state
        self.skipped = True  # the whole block was done before the checkpoint
        self._epochs = 0  # that the script asks for
        self._sum, self._rows = 0.0, 0
        self._batch: Any = None
        self._batch_rows: int | None = None
        self._stepped = True
        self._left_early = False  # the rows of `read`
        if not done:
            self._open()

    def _open(self) -> None:
        self.skipped = False
        self._course.measure = self.measure

    @property
    def step_number(self) -> int:
        """The number of steps so far, those before the checkpoint included."""
        return self._course.position.step

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers, from 0, of the epochs that are left of `count`."""
        self._course.agree_on_epochs(count)
        self._epochs = max(self._epochs, count)
        if self.skipped and self._course.reopen_part(count):
            self._open()
            self._state.skipped()
        if self.skipped:
            return
        for epoch in range(self._course.position.epoch, count):
            self._course.begin_epoch(epoch)
            yield epoch
            self._course.end_epoch(epoch, {})

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield the batches of an epoch that are left; the same data must be given at every start."""
        if self.skipped:
            return
        self._session.refuse_input_flags()
        at = self._course.position
        done = at.batch
        self._course.agree_on_batches(at.epoch, len(data) if isinstance(data, Sized) else None)
        self._state.begin_epoch(resumed=done > 0)
        iterator = iter(data)
        for _ in range(done):
            next(iterator, None)
        if done:
            self._state.skipped()
        for batch, following in with_following(iterator, int(self._state.reads_ahead(data))):
            self._state.announce(batch, following)
            yield from self._stepped_by(batch, None)

    def _stepped_by(self, batch: Any, rows: int | None) -> Iterator[Any]:
        """Yield a batch, of `rows` rows; refuse a loop that takes the next one without a step."""
        self._batch, self._batch_rows, self._stepped = batch, rows, False
        with self._course.tracing():
            yield batch
        if not self._stepped:
            raise JobError("the loop has taken the next batch without job.step(loss=…): call it in each step")

    def read(self, rows: RunInput, layout: Callable[[Batch], Any]) -> Iterator[Any]:
        """Yield this worker's part, in its `layout`, of the batches of the job's rows that are left.

        A last batch with fewer rows than there are workers is left out.
        """
        if self._epochs:
            raise JobError(
                "job.batches() has all epochs of --epochs: leave loop.epochs out of this block, and "
                "give --epochs"
            )
        self._read_from(rows)
        if self.skipped:
            return
        self._left_early = True
        for _, part, batch, following in self._laid_out(layout):
            self._state.announce(batch, [data for _, data in following])
            yield from self._stepped_by(batch, part.rows)
        self._left_early = False

    def train(self, rows: RunInput, layout: Callable[[Batch], Any], step: Callable[[Any], Any]) -> None:
        """Call `step` with this worker's part, in its `layout`, of each batch of the rows that is left.

        After the loss of a server, all workers go back to a checkpoint, in place; those of PyTorch, which may
        wait for each other's gradients, by new processes.
        """
        course, session = self._course, self._session
        if not session.ranks.in_place:
            for batch in self.read(rows, layout):
                self.step(step(batch), None)
            self.end()
            return
        self._read_from(rows)
        recovery = session.recovery()
        session.goes_back = True
        course.summed(self._state.gradients())
        self._state.begin_window()
        while True:
            try:
                with course.sharing_losses():
                    if not self.skipped:
                        self._take_steps(layout, step)
                    self.end()
                break
            except ServerLost as error:
                course.position = recovery.recover(error, course)
                if self.skipped and course.reopen_part(0):  # its end is lost
                    self._open()
        session.goes_back = False

    def _take_steps(self, layout: Callable[[Batch], Any], step: Callable[[Any], Any]) -> None:
        course, state = self._course, self._state

        def run(batch: Any, following: Sequence[tuple[Batch, Any]]) -> Any:
            state.announce(batch, [data for _, data in following])
            return step(batch)

        with closing(self._laid_out(layout)) as batches:
            for size, part, batch, following in batches:
                loss = course.compute(partial(run, batch, following), size)
                if not course.lost:  # else the step has not ended, and all workers go back
                    self._note_loss(loss, part.rows)
                course.count(size)

    def _note_loss(self, loss: Any, rows: int) -> None:
        """Note what a program's step has returned."""
        if loss is None or (isinstance(loss, Mapping) and "loss" not in loss):
            raise JobError(
                "step returns no loss: return the mean loss of its rows, or what Keras's "
                "train_on_batch(…, return_dict=True) returns"
            )
        self._course.metrics = loss if isinstance(loss, Mapping) else None
        if self._course.metrics is None:
            self._note(loss, rows)

    def _read_from(self, rows: RunInput) -> None:
        """Let the rows be the course's, from its position on."""
        course = self._course
        if course.input is None:
            self._session.say_input()
        course.input = rows
        course.keep_settings(self._session.row_settings(rows))
        if self.skipped and course.reopen_reading_part():
            self._open()
        if not self.skipped:
            self._session.screen.total(course.steps(), course.position.step)

    def _laid_out(
        self, layout: Callable[[Batch], Any]
    ) -> Generator[tuple[int, Batch, Any, list[tuple[Batch, Any]]], None, None]:
        """Yield the batches that are left: rows, this worker's part, its layout, and the next ones' both."""
        course, state = self._course, self._state
        if course.goes_on():
            state.skipped()
        known: list[tuple[Batch, Any]] = []

        def laid_out(batch: Batch) -> Any:
            for one, data in known:
                if one is batch:
                    return data
            return layout(batch)

        with closing(course.batches(state.batches_ahead)) as batches:
            for size, part, following in batches:
                batch = laid_out(part)
                known = state.lay_out_ahead(partial(_both, following, laid_out))
                yield size, part, batch, known

    def step(self, loss: Any, rows: int | None) -> None:
        """See oe_runtime.job.step."""
        self._session.refuse_input_flags()
        if rows is None:
            rows = _rows(self._batch) if self._batch_rows is None else self._batch_rows
        self._stepped = True
        self._note(loss, rows)
        self._course.own_step(rows)

    def _note(self, loss: Any, rows: int) -> None:
        """Add a step's mean loss over its rows."""
        self._sum += float(loss.item() if hasattr(loss, "item") else loss) * rows
        self._rows += rows

    def measure(self) -> tuple[float, int]:
        """Return the sum of losses times rows, and the rows, since the last call."""
        found = self._sum, self._rows
        self._sum, self._rows = 0.0, 0
        return found

    def end(self) -> None:
        """After the block."""
        self._session.loop = None
        if not self.skipped:
            rows, at = self._course.input, self._course.position
            more = self._left_early and rows is not None and not rows.has_ended(at)
            self._course.end_part(self._epochs, left_early=more)
        else:
            self._course.skip_part()


def begin(
    session: Session,
    state: ScriptState,
    evaluate: Callable[[], Iterable[Any]] | None,
    *,
    by_train: bool = False,
) -> Loop:
    """See oe_runtime.job.training, and `by_train` oe_runtime.job.train; `state` is of what is trained."""
    course = session.begin(state, by_train=by_train)

    def predict() -> Iterator[Any]:
        for pair in evaluate() if evaluate is not None else ():
            session.refuse_unread_eval_data()  # now that the program has asked for its rows
            yield pair

    course.evaluate_by(
        None if evaluate is None else predict,
        "give job.training(evaluate=…) what predicts, or leave the flag out",
    )
    session.loop = loop = Loop(session, course, course.state, done=not course.begin_part())
    return loop


def _both(batches: Sequence[Batch], layout: Callable[[Batch], Any]) -> list[tuple[Batch, Any]]:
    return [(one, layout(one)) for one in batches]


def _rows(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first array."""
    while isinstance(batch, (tuple, list, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if hasattr(batch, "stride_per_key"):  # a KeyedJaggedTensor
        return int(batch.stride())
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else 1
