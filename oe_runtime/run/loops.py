"""Training step by step: the epochs and batches that are left, and what follows a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from oe_runtime.data import Batch
from oe_runtime.data.batches import with_following
from oe_runtime.errors import ServerLost
from oe_runtime.run.course import Course
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.session import JobError, Session


class StepBatches:
    """The batches of a loop. The program calls job.step before it takes the next one."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> StepBatches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class Loop:
    """What `with job.training(…) as loop` gives."""

    def __init__(self, session: Session, course: Course, state: ScriptState, *, done: bool) -> None:
        self._session = session
        self._course = course
        self._state = state
        self.skipped = True  # the whole block was done before the checkpoint
        self._epochs = 0  # that the script asks for
        self._sum, self._rows = 0.0, 0
        self._accumulated = 0, 0, 0  # rows and batches whose gradients wait for a step, and their epoch
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
        if self._are_left(count):
            yield from self._each_epoch(count)

    def fit(self, fit: Callable[[int], Any], epochs: int) -> Any:
        """Let a library's function train so many `epochs`; return its result, None if they were done.

            loop.fit(lambda first: model.fit(x, y, epochs=3, initial_epoch=first), epochs=3)

        `fit` gets the number, from 0, of the first epoch that is left, and trains from there: a resumed run
        begins in the middle of it. The job follows the DataLoader of PyTorch that `fit` reads with gradients
        enabled: between two of its batches it counts the optimizer's step, takes checkpoints, and stops.
        There it leaves out the batches that were trained before the checkpoint. The loss is what
        `backward` is called of, summed over the batches of a step. Raises JobError for a loop that it cannot
        follow.
        """
        if not self._are_left(epochs):
            self._session.screen.say("fit was done before the checkpoint: skipped")
            return None
        self._session.refuse_input_flags()
        return self._state.fit(self, self._course, fit, epochs)

    def _are_left(self, epochs: int) -> bool:
        """Whether some of so many epochs are left, in the present part."""
        self._course.agree_on_epochs(epochs)
        self._epochs = max(self._epochs, epochs)
        if self.skipped and self._course.reopen_part(epochs):
            self._open()
            self._state.skipped()
        return not self.skipped

    def _each_epoch(self, count: int) -> Iterator[int]:
        for epoch in range(self._course.position.epoch, count):
            self._course.begin_epoch(epoch)
            yield epoch
            self._course.end_epoch(epoch, {})

    def batches(self, data: Any) -> StepBatches:
        """Return the batches of an epoch that are left; the same data must be given at every start."""
        return StepBatches(self._left_of(data))

    def _left_of(self, data: Any) -> Iterator[Any]:
        if self.skipped:
            return
        self._session.refuse_input_flags()
        at = self._course.position
        done = at.batch
        self._course.agree_on_batches(at.epoch, length(data))
        self._state.begin_epoch(data, done or None)
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

    def read(self, rows: RunInput, layout: Callable[[Batch], Any]) -> StepBatches:
        """Return this worker's part, in its `layout`, of the batches of the job's rows that are left.

        A last batch with fewer rows than there are workers is left out.
        """
        return StepBatches(self._read(rows, layout))

    def _read(self, rows: RunInput, layout: Callable[[Batch], Any]) -> Iterator[Any]:
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
            self.note(loss, rows)

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
            rows = count_rows(self._batch) if self._batch_rows is None else self._batch_rows
        self._stepped = True
        self.note(loss, rows)
        before, batches, epoch = self._accumulated
        now = self._course.position.epoch
        rows, batches = before + rows, batches + 1 if epoch == now else 1
        self._accumulated = rows, batches, now
        if self._state.has_stepped():  # else a checkpoint would lack the gradients
            self._accumulated = 0, 0, now
            self._course.own_step(rows, batches)

    def note(self, loss: Any, rows: int) -> None:
        """Add a step's mean loss over its rows."""
        self._sum += float(loss.item() if hasattr(loss, "item") else loss) * rows
        self._rows += rows

    def measure(self) -> tuple[float, int]:
        """Return the sum of losses times rows, and the rows, since the last call."""
        found = self._sum, self._rows
        self._sum, self._rows = 0.0, 0
        return found

    def warn_of_callbacks(self, unsaved: Sequence[str]) -> None:
        """Say once what keeps callbacks out of checkpoints."""
        self._session.warn_of_callbacks(unsaved)

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


def length(data: Any) -> int | None:
    """Return the number of batches in a program's data; None where it is unknown."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a DataLoader of an iterable dataset
        return None


def count_rows(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first array."""
    while not hasattr(batch, "shape") and not hasattr(batch, "stride_per_key"):
        parts = batch if isinstance(batch, (tuple, list)) else None
        if isinstance(batch, Mapping):
            parts = list(batch.values())
        elif is_dataclass(batch):  # TorchRec's Batch
            found = [getattr(batch, field.name, None) for field in fields(batch)]
            parts = [one for one in found if one is not None]
        if not parts:
            return 1
        batch = parts[0]
    if hasattr(batch, "stride_per_key"):  # a KeyedJaggedTensor
        return int(batch.stride())
    return int(batch.shape[0]) if batch.shape else 1
