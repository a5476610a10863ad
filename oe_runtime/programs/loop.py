"""The steps of a built-in model's run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext

from oe_runtime.data import Batch, Source
from oe_runtime.programs.click_model import KerasTrainee
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.course import Course
from oe_runtime.run.evaluation import Prediction
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import Options
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.stopping import StopRequest


class Loop(Course):
    """One run over the data."""

    def __init__(
        self,
        options: Options,
        source: Source,
        trainee: KerasTrainee,
        checkpoints: Checkpoints | FollowingCheckpoints,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        figures: ServerFigures,
    ) -> None:
        super().__init__(options, trainee.ranks, checkpoints, directory, view, stop, figures)
        self._options = options
        self._rows = self.input = RunInput(options, source)
        self._trainee = trainee
        # Batch sizes for which TensorFlow has compiled since the start or the last return to a checkpoint.
        self._sizes: set[int] = set()

    def window(self) -> tuple[float, float | None]:
        """See Course."""
        return self._trainee.window()

    def train(self, start: Position) -> Position:
        """Train from `start` to the end of the last epoch or to --steps, and checkpoint the end.

        `saved` is the checkpoint of `start`, if there is one.
        """
        self.position = start
        self._begin(start)
        with closing(self.batches(self._trainee.batches_ahead)) as batches:
            for rows, part, following in batches:
                self._step(rows, part, following)
        self._finish(self.position)
        return self.position

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """See Course."""
        super().rolled_back(saved, seconds)
        self._trainee.window()
        self._sizes.clear()  # before the next step some workers skip more input than others

    def predict(self) -> Iterator[Prediction] | None:
        """See Course: of this worker's part of the held-out rows, or of those of --eval-data."""
        return self._predictions() if self._rows.evaluates() else None

    def _predictions(self) -> Iterator[Prediction]:
        for part in self._rows.read_held_out(self._ranks):
            yield part.labels, self._trainee.predict(part) if part.rows else part.labels

    def _step(self, rows: int, part: Batch, following: list[Batch]) -> None:
        every = self._options.timeline

        def run() -> None:
            with self._directory.traced() if every and self.step % every == 0 else nullcontext():
                self._trainee.train(part, *following)

        self._compute(run, compiles=rows not in self._sizes)
        self._sizes.add(rows)
        self._count_step(rows)
