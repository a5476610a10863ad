"""Ctrl-C, SIGTERM and the end of the parent: finish the step, then stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Becomes true once the run was asked to stop; a second request ends the process at once.

    A context manager: listens to SIGINT and SIGTERM inside, and `with_parent` to the end of stdin.
    """

    def __init__(self, *, with_parent: bool) -> None:
        self._asked = threading.Event()
        self._with_parent = with_parent
        self.reason = ""

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        if self._with_parent:
            threading.Thread(target=self._watch_stdin, name="watch-stdin", daemon=True).start()
        return self

    def listen(self) -> None:
        """Listen to the signals, again after a library has taken them."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the run is asked to stop."""
        self._asked.wait(seconds)

    def ask(self, reason: str) -> None:
        """Ask the run to stop after its current step."""
        self.reason = self.reason or reason
        self._asked.set()

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
