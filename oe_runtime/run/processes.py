"""The processes and files that a user's program leaves to its process."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PATIENCE = 3.0  # seconds between SIGTERM and SIGKILL
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parents end, so that it can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the ids of this process's children that have not ended."""
    found = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(pid) for pid in tasks.read_text().split()}
    return {pid for pid in found if _state(pid) not in ("Z", "X", "")}


def end_children() -> int:
    """End this process's children, and those that it adopts from them; return their number."""
    ended: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while left := children():
        late = time.monotonic() > deadline
        for pid in left if late else left - ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        ended |= left
        time.sleep(0.02)
    for pid in ended:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(ended)


def close_on_exec() -> None:
    """Let no open file but the three standard ones outlive an exec, whoever opened it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):
                fcntl.fcntl(int(name), fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def shut_connections(keep: Collection[int]) -> None:
    """End this process's TCP connections, so that their other ends notice; those of the ports `keep` stay."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    continue
                if not {found.getsockname()[1], found.getpeername()[1]} & set(keep):
                    found.shutdown(socket.SHUT_RDWR)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
