"""Processes of this host, identified by pid and start time, since pids are reused."""

import os
import signal
import time
from typing import Optional


def start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if there is no such process, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may hold spaces and brackets: the fields begin after the last bracket.
            fields = stat.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return 0
    if fields[0] in (b"Z", b"X"):
        return 0
    return int(fields[19])


def alive(pid: int, started: int) -> bool:
    """The process that had this start time still runs."""
    return pid > 0 and started > 0 and start_time(pid) == started


def send(pid: int, started: int, number: int = signal.SIGTERM) -> bool:
    """Signal the process that began at ``started``; False if it has ended."""
    if not alive(pid, started):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_gone(pid: int, started: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for the process to end; True if it has."""
    deadline = time.monotonic() + seconds
    while alive(pid, started):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def resident_bytes(pid: int) -> Optional[int]:
    """Resident bytes of a process; None if they cannot be read."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
