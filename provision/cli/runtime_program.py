"""Programs of the runtime that the command line runs as what they are."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys

_DEATH_SIGNAL = 1  # prctl


def run_program(module: str, *arguments: object) -> int:
    """Run ``python -m MODULE``, which ends when we do; the exit status."""
    libc = ctypes.CDLL(None)
    code = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        check=False,
        preexec_fn=lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0),
    ).returncode
    return code if code >= 0 else 128 - code
