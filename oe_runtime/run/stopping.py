"""Ctrl-C, SIGTERM, SIGUSR1 and the end of the parent: finish the step, then stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

IN_FILES = signal.SIGUSR1  # stop at a checkpoint with its rows in files, which other servers can restore
_SIGNALS = (signal.SIGINT, signal.SIGTERM, IN_FILES)


class StopRequest:
    """Becomes true once the run was asked to stop; a second request ends the process at once.

    A context manager that listens to SIGINT, SIGTERM and IN_FILES, and, `with_parent`, to the end of stdin. A
    thread takes the signals: Python calls no handler while the main thread is in TensorFlow or waits for a
    server.
    """

    def __init__(self, *, with_parent: bool) -> None:
        self._asked = threading.Event()
        self._with_parent = with_parent
        self._late: Callable[[], None] | None = None
        self.seconds = 0.0  # limit of a wait for other workers after a request
        self._since = 0.0  # time of the request
        self._waiting: float | None = None  # start of the present wait for other workers
        self._unhurried = 0
        self._write: socket.socket | None = None
        self.reason = ""
        self.in_files = False  # the last checkpoint's rows are wanted in files
        # What the main thread does at a signal, besides; it may raise.
        self.at_signal: Callable[[], None] = lambda: None

    def __enter__(self) -> StopRequest:
        self._read, write = socket.socketpair()
        write.setblocking(False)
        self._write = write
        self._old_fd = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGURG)}
        self.listen()
        self._watcher = threading.Thread(target=self._watch, name="watch-signals", daemon=True)
        self._watcher.start()
        if self._with_parent:
            self._stdin = os.dup(0)  # a script that reads its standard input finds it at its end
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            threading.Thread(target=self._watch_stdin, name="watch-stdin", daemon=True).start()
        return self

    def listen(self) -> None:
        """Listen to the signals; call it again after a library has taken them."""
        for number in (*_SIGNALS, signal.SIGURG):
            signal.signal(number, self._heard)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self.return_stdin()
        if self._write is not None:
            # Closing alone does not end the watcher: a forked process may have this socket too.
            with contextlib.suppress(OSError):  # the script may have closed it
                self._write.shutdown(socket.SHUT_WR)
            self._write.close()
        self._watcher.join()
        self._read.close()

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, at most until the run is asked to stop."""
        self._asked.wait(seconds)

    def forget(self) -> None:
        """In a forked process: leave the signals to what was there before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def return_stdin(self) -> None:
        """Make standard input the parent's again, for the program that takes this one's place."""
        if self._with_parent:
            os.dup2(self._stdin, 0)

    def ask(self, reason: str) -> None:
        """Ask the run to stop after its current step."""
        self.reason = self.reason or reason
        if not self:
            self._since = time.monotonic()
        self._asked.set()
        self._wake()

    def limit(self, seconds: float, late: Callable[[], None] | None) -> None:
        """Call `late`, in another thread, when a wait lasts `seconds` after a request; None: never.

        Only waits marked by `waiting` count: a process that computes, reads or restores goes on.
        """
        self.seconds, self._late, self._since = seconds, late, time.monotonic()
        self._wake()

    def raise_limit(self, seconds: float) -> None:
        """Raise the limit of a wait to `seconds`, which healthy workers may take."""
        self.seconds = max(self.seconds, seconds)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as a wait for other workers."""
        outer = self._waiting
        if outer is None:
            self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = outer

    @contextlib.contextmanager
    def without_time_limit(self) -> Iterator[None]:
        """Allow any wait in the block, because the others take or restore a checkpoint."""
        self._unhurried += 1
        try:
            yield
        finally:
            self._since = time.monotonic()
            self._unhurried -= 1

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], 1.0 if self and self._late else None)
            if ready:
                numbers = self._read.recv(64)
                if not numbers:
                    return
                for number in numbers:
                    self._take(number)
            late, waiting = self._late, self._waiting
            if not (late and self) or waiting is None or self._unhurried:
                continue
            if time.monotonic() - max(waiting, self._since) > self.seconds:
                late()

    def _take(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        if number == IN_FILES:
            self.in_files = True
        elif self:
            # The second request: the default action, without another checkpoint. `signal.signal` only works
            # in the main thread, which may wait.
            ctypes.CDLL(None).signal(number, None)
            os.kill(os.getpid(), number)
        self.ask(_reason(number))

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread; the watcher hears of one only if it has a handler."""
        if number in _SIGNALS:
            self.reason = self.reason or _reason(number)
            self.in_files = self.in_files or number == IN_FILES
        self.at_signal()

    def _watch_stdin(self) -> None:
        while os.read(self._stdin, 4096):
            pass
        self.ask("the parent process ended")
        self.interrupt()

    def interrupt(self) -> None:
        """Let the main thread do `at_signal`, after a request that no signal made."""
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGURG)  # ignored by default

    def _wake(self) -> None:
        if self._write is not None:
            with contextlib.suppress(OSError):  # the run may be over
                self._write.send(b"\0")


def _reason(number: int) -> str:
    return "to go on with other servers" if number == IN_FILES else signal.Signals(number).name
