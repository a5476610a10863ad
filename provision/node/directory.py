"""Platform local: a directory in place of persistent memory."""

import os
import tempfile
from typing import Any, Dict, List

from .command import CommandError, System
from .state import Directory, State
from .step import Action, Applied, Desired, Step


def observe(system: System, path: str) -> Directory:
    """The directory, or what blocks it; ``free`` is that of the nearest existing parent."""
    if not path:
        return Directory("")
    if system.exists(path):
        nearest = path
    else:
        nearest = os.path.dirname(path)
        while nearest != "/" and not system.exists(nearest):
            nearest = os.path.dirname(nearest)
    real = system.path(nearest)
    is_directory = os.path.isdir(real)
    writable = is_directory and os.access(real, os.W_OK | os.X_OK)
    free = 0
    if is_directory:
        space = os.statvfs(real)
        free = space.f_bavail * space.f_frsize
    return Directory(
        path=path,
        exists=nearest == path,
        is_directory=is_directory and nearest == path,
        writable=writable,
        free=free,
        blocked_by="" if writable else nearest,
    )


def find(state: State, path: str) -> Directory:
    """What was observed of ``path``."""
    for directory in state.directories:
        if directory.path == path:
            return directory
    return Directory(path, writable=True)


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that makes the directory; none if it exists."""
    path = desired.pmem_directory
    if find(state, path).exists:
        return []
    return [
        Step(
            id="directory",
            what=f"make {path}",
            why="a directory stands in for persistent memory here; it is not persistent memory",
            commands=[["mkdir", "-p", "-m", "0700", path]],
            action="make_directory",
            preparing=True,
            args={"path": path, "size": desired.pmem_size},
        )
    ]


def problems(state: State, desired: Desired) -> List[str]:
    """Why the directory cannot be used."""
    path = desired.pmem_directory
    seen = find(state, path)
    if seen.exists and not seen.is_directory:
        return [f"pmem_directory {path}: is a file, not a directory"]
    if not seen.writable:
        where = "" if seen.blocked_by == path else f" ({seen.blocked_by})"
        return [f"pmem_directory {path}: is not writable by this user{where}"]
    # An existing directory passes: the rows of a running job take space of their own directory.
    if not seen.exists and desired.pmem_size and seen.free < desired.pmem_size:
        return [
            f"pmem_directory {path}: has {human(seen.free)} free, pmem_size asks for "
            f"{human(desired.pmem_size)}"
        ]
    return []


def human(size: int) -> str:
    """Bytes as 1.5 GiB."""
    value = float(size)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    unit = units[0]
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def apply(system: System, path: str, size: int) -> bool:
    """Make the directory (mode 0700) and check that it takes files; True if it is new.

    CommandError names the path and what blocks it.
    """
    real = system.path(path)
    new = not os.path.isdir(real)
    try:
        os.makedirs(real, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=real):
            pass
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    free = observe(system, path).free
    if new and size and free < size:
        os.rmdir(real)
        raise CommandError(f"{path}: has {human(free)} free, {human(size)} are asked for")
    return new


def _make_directory(system: System, args: Dict[str, Any]) -> Applied:
    new = apply(system, args["path"], args["size"])
    return Applied(new, f"made {args['path']}" if new else f"{args['path']} is there")


ACTIONS: Dict[str, Action] = {"make_directory": _make_directory}
