"""One thread that does work in its order, and does not keep a program from ending."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

_EXIT_SECONDS = 20.0  # that work may take at the end of the process, such as a push
_Work = tuple[Future[Any], Callable[[], Any]]


class Background(Executor):
    """A thread that begins with the first work and ends with this object.

    The end of the process waits for its work, as for ThreadPoolExecutor, but not for ever: a request may wait
    for a worker that is gone, and an iterator for data that do not come.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._work.put, None)
        self._finalizer.atexit = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Do `function(…)` after the work before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._work,), name=self._name, daemon=True)
            self._thread.start()
            _USED.add(self)
        future: Future[Any] = Future()
        self._work.put((future, lambda: function(*arguments, **named)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its work; `cancel_futures` drops what has not begun."""
        while cancel_futures and not self._work.empty():
            if (work := self._work.get()) is not None:
                work[0].cancel()
        self._work.put(None)
        if wait and self._thread is not None:
            self._thread.join()
        self._thread = None

    def _end(self, until: float) -> None:
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))


_USED: weakref.WeakSet[Background] = weakref.WeakSet()


def _run(work: SimpleQueue[_Work | None]) -> None:
    """Do the work of a queue; it does not keep the Background alive."""
    while (one := work.get()) is not None:
        future, function = one
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:  # it is raised where the result is wanted
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del one, future, function


def _end_all() -> None:
    until = time.monotonic() + _EXIT_SECONDS
    for one in list(_USED):
        one._end(until)


atexit.register(_end_all)
