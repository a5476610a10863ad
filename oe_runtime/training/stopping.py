"""Ctrl-C, SIGTERM and the end of the parent: finish the step, then stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class StopRequest:
    """Becomes true once the run was asked to stop; a second request ends it at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.reason = ""

    def install(self, *, with_parent: bool) -> None:
        """Listen to SIGINT and SIGTERM, and to the end of stdin if the run belongs to a parent."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        if with_parent:
            threading.Thread(target=self._watch_stdin, name="watch-stdin", daemon=True).start()

    def ask(self, reason: str) -> None:
        """Ask the run to stop after its current step."""
        self.reason = self.reason or reason
        self._asked.set()

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self:
            # The user means it: the default action, without another checkpoint.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.ask(signal.Signals(number).name)

    def _watch_stdin(self) -> None:
        while os.read(0, 4096):
            pass
        self.ask("the parent process ended")
