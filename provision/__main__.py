"""The program ``oeprov``: Ctrl-C ends it with 130 and no traceback, also while its imports are not done.

What it does is in ``provision.cli.main``; nothing is imported here that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)


def main() -> None:
    """Entry point of the program."""
    asked = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored: nohup
    if asked:
        signal.signal(signal.SIGINT, _end)
    from provision.cli import main as cli

    try:
        if asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = cli.run()
        if asked:
            # While the interpreter tidies up, what was printed is the answer.
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
