"""The program ``oeprov``: Ctrl-C ends it with 130 and no traceback, also while its imports are not done.

What it does is in ``provision.cli.main``; nothing is imported here that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _interrupt_again(swallowed: UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that came where nothing can raise, as while pydantic compiles a model's pattern."""
    if not issubclass(swallowed.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(swallowed)
        return
    import threading

    # A little later: what is raised in this hook is swallowed too.
    main_thread = threading.main_thread().ident or 0
    again = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
    again.daemon = True
    again.start()


def main() -> None:
    """Entry point of the program."""
    asked = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored: nohup
    if asked:
        signal.signal(signal.SIGINT, _end)
    from provision.cli import main as cli

    try:
        if asked:
            sys.unraisablehook = _interrupt_again
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = cli.run()
        if asked:
            # While the interpreter tidies up, what was printed is the answer.
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        # Before 3.12 Python wraps what is raised while a class names its attributes, as in an import.
        # Pydantic's SchemaError, raised while it builds a model, keeps the name alone.
        was_interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        if not was_interrupted and not str(error).endswith("KeyboardInterrupt: "):
            raise
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
