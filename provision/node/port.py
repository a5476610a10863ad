"""Which process listens on a port of this host."""

import errno
import os
import re
import socket
from typing import Optional

from .command import System, printable

_LISTEN = "0A"


def blocked(address: str, port: int) -> str:
    """Why a server cannot listen there; empty when it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except socket.gaierror as error:
            return error.strerror or "the address is not known"
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "the host has no such address"
            return error.strerror or str(error)
    return ""


def holder(system: System, port: int) -> str:
    """The process that listens on a TCP port: program, pid and unit; empty if it cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in system.read(table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in system.list("/proc") if inodes else []:
        if pid.isdigit() and any(
            system.link(f"/proc/{pid}/fd/{name}") in inodes for name in system.list(f"/proc/{pid}/fd")
        ):
            return _describe(system, pid)
    return ""


def _describe(system: System, pid: str) -> str:
    unit = unit_of(system, pid)
    program = printable(system.read(f"/proc/{pid}/comm").strip()) or "a process"
    return "{} (pid {}{})".format(program, pid, ", " + unit if unit else "")


def unit_of(system: System, pid: str) -> Optional[str]:
    """The systemd service that a process belongs to."""
    for line in system.read(f"/proc/{pid}/cgroup").splitlines():
        match = re.search(r"/([^/]+\.service)$", line)
        if match:
            return os.path.basename(match.group(1))
    return None
