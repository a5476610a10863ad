"""Programs of the runtime that the command line runs as what they are."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys

_SET_DEATH_SIGNAL = 1  # prctl(PR_SET_PDEATHSIG)


def run_program(module: str, *arguments: object) -> int:
    """Run ``python -m MODULE`` on our output; return its exit code. It ends when we end."""
    argv = [sys.executable, "-m", module, *map(str, arguments)]
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        # Ctrl-C while Python itself starts would print a traceback; the program lets it in at its first line.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    code = subprocess.run(argv, check=False, preexec_fn=prepare).returncode
    return code if code >= 0 else 128 - code
