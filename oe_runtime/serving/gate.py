"""Many who read, or one who changes; whoever wants to change goes first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Requests pass together; a change waits for those inside and lets nobody in until it is done."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """For a request."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """For a change. One at a time: the caller sees to it."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()
