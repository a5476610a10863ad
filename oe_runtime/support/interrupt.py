"""Ctrl-C in the programs of this package: exit status 130 and no traceback, during imports too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _guard_imports() -> None:
    """End at once on Ctrl-C until `run`, if this process is `python -m oe_runtime.…`.

    A program that imports the package keeps its own handlers.
    """
    ours = sys.argv[:1] == ["-m"] and any(word.startswith("oe_runtime.") for word in sys.orig_argv)
    if not ours:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `oeprov checkpoint` blocks it until here


def run(main: Callable[[], int]) -> int:
    """Return the exit status of `main`, or 130 after Ctrl-C. Later signals do not change it."""
    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        for number in (signal.SIGINT, signal.SIGTERM):  # while the interpreter tidies up
            signal.signal(number, lambda *_: os._exit(code))
        return code
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        # Before 3.12 Python wraps what is raised while a class names its attributes, as in an import.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return 130


_guard_imports()
