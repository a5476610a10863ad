"""The speed of a run's steps."""

from __future__ import annotations

import time


class Clock:
    """The speed of the steps, without checkpoints and the first step, in which TensorFlow compiles."""

    def __init__(self) -> None:
        self._began = self._window_began = time.perf_counter()
        self._paused = 0.0
        self._first_ended: float | None = None
        self._rows = 0  # after the first step
        self._window_rows = self._window_steps = 0
        self.pending = False  # steps since the last window

    def add(self, rows: int) -> None:
        """Count a step over `rows` rows."""
        self.pending = True
        if self._first_ended is None:
            self._first_ended = self._window_began = time.perf_counter()
            return
        self._rows += rows
        self._window_rows += rows
        self._window_steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out `seconds` of other work."""
        self._window_began += seconds
        if self._first_ended is None:
            self._began += seconds
        else:
            self._paused += seconds

    def window(self) -> tuple[float | None, float | None]:
        """Return samples per second and seconds per step since the last call; None after only one step."""
        now = time.perf_counter()
        seconds, rows, steps = now - self._window_began, self._window_rows, self._window_steps
        self._window_began, self._window_rows, self._window_steps, self.pending = now, 0, 0, False
        return (rows / seconds, seconds / steps) if steps and seconds > 0 else (None, None)

    @property
    def seconds(self) -> float:
        """The seconds since the start, without pauses."""
        return time.perf_counter() - self._began - self._paused

    def overall(self) -> float:
        """Return samples per second of all steps except the first."""
        if self._first_ended is None or not self._rows:
            return 0.0
        return self._rows / max(time.perf_counter() - self._first_ended - self._paused, 1e-9)
