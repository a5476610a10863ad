"""A stop request: Ctrl-C, SIGTERM or a closed terminal, which wakes waiting code."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.1  # seconds between two checks while waiting


class StopRequest:
    """Asked to stop, once (orderly) or again (at once)."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.count = 0

    def ask(self, *_: object) -> None:
        """Count one request; fits as a signal handler."""
        self.count += 1
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but wake at a stop request; True if there was ever one."""
        if self._event.is_set():
            time.sleep(min(seconds, TICK))
            return True
        return self._event.wait(seconds)

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
