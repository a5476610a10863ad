"""The processes and files that a user's program leaves to its process."""

from __future__ import annotations

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


def children() -> set[int]:
    """Return the ids of this process's children that have not ended."""
    found = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(pid) for pid in tasks.read_text().split()}
    return {pid for pid in found if _state(pid) not in ("Z", "X", "")}


def end_children() -> int:
    """End this process's children; return their number."""
    left = children()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE
    while (rest := left & children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in rest:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in left:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0 if pid in rest else os.WNOHANG)
    return len(left)


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
