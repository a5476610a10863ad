"""The steps of a run over a stream: rows that arrive while it trains, and no epochs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from oe_runtime.data import Stream
from oe_runtime.data.batches import with_following
from oe_runtime.data.stream import Place
from oe_runtime.programs.loop import Loop
from oe_runtime.run.position import Position
from oe_runtime.run.run_directory import RunError


class StreamLoop(Loop):
    """One worker's run, to the end of the stream, to --steps or to a stop request."""

    def __init__(self, *arguments: Any, stream: Stream) -> None:
        super().__init__(*arguments)
        self._stream = stream
        self._waits = False

    def train(self, start: Position) -> Position:
        """See Loop."""
        position = start
        self._begin(position)
        batches = self._stream.batches(self._options.batch_size, Place.from_json(position.stream))
        with contextlib.closing(batches):
            for now, following in with_following(batches, self._trainee.batches_ahead):
                if self._finished(position):  # --steps were done before this run
                    break
                if now is None:
                    self._wait(position)
                    continue
                self._waits = False
                position = replace(position, stream=now.place.to_json())
                known = [later.batch for later in following if later is not None]
                position = self._step(position, now.batch.rows, now.batch, known)
                if self._finished(position):
                    break
        if not position.step:
            raise RunError(f"{self._stream.describe()} ended without a row to train on")
        self._finish(position)
        return position

    def facts(self, position: Position) -> dict[str, Any]:
        """See Course: the rows so far, their last file, and the files that have not been read."""
        place = Place.from_json(position.stream)
        return {"rows": place.rows, "file": place.file, "waiting": self._stream.waiting}

    def _wait(self, position: Position) -> None:
        """Between two steps, where no whole batch has arrived. Raises Interrupted after a stop request."""
        if not self._waits:
            if self._clock.pending:
                self._log(position)
            self._view.say(f"waiting for rows in {self._stream.describe()}")
            self._waits = True
        self._publish(lambda _: self._checkpoints.settle(), position, self._next_checkpoint(position))
        if self._ranks.stop_requested(self._stop):
            if position.step and (self.saved is None or self.saved.position.step != position.step):
                self._take(self._checkpoints.take_now, position)
            raise self.interrupted()
        if (
            self._is_time()
            and position.step
            and (self.saved is None or self.saved.position.step != position.step)
        ):
            self._take(self._due_take(position, timed=True), position, self._next_checkpoint(position))
        started = time.perf_counter()
        self._stop.wait(self._stream.pause)
        self._clock.pause(time.perf_counter() - started)
