"""A stop request: Ctrl-C, SIGTERM or a closed terminal, which wakes waiting code."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

TICK = 0.1  # seconds between two checks while waiting


class StopRequest:
    """Asked to stop, once (orderly) or again (at once)."""

    def __init__(self) -> None:
        # Not an Event: a signal handler that sets one deadlocks if it interrupts the beginning of a wait.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.count = 0

    def ask(self, *_: object) -> None:
        """Count one request; fits as a signal handler."""
        self.count += 1
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Sleep, but wake at a stop request; True if there was ever one."""
        if self.count:
            time.sleep(min(seconds, TICK))
            return True
        try:
            self._wake.get(timeout=seconds)
        except Empty:
            return bool(self.count)
        self._wake.put(None)  # for other threads that wait
        return True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Count Ctrl-C, SIGTERM and a closed terminal as requests inside (main thread only)."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self.ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
