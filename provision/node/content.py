"""Whether a block device without a signature holds data.

Both ends of the device are read, and pieces spread over it, always the same ones. The device is empty if they
are all zero, or if nothing was written since oeprov made it. All else is data, which consent names as
``pmem0/data/DIGEST``. ``filesystem`` handles signatures.
"""

import hashlib
import re
from typing import List, Optional, Tuple

from . import devices, fstab, owned
from .command import CommandError, System
from .state import FileSystem, FstabEntry, Namespace, State

ZERO = "zero"
_END = 1 << 20  # bytes read at either end: headers and their copies
_PIECE = 64 << 10
_PIECES = 62  # between the ends
_PAGE = 4096
_VOLATILE_BUS = "e820"  # of ranges that memmap= names


def spans(size: int) -> List[Tuple[int, int]]:
    """Offset and length of the pieces to read of a device of ``size`` bytes; all of a small one."""
    between = size - 2 * _END - _PIECE
    if between < _PIECES * _PIECE:
        return [(0, size)] if size else []
    middle = [_END + between * number // (_PIECES - 1) // _PAGE * _PAGE for number in range(_PIECES)]
    return [(0, _END)] + [(offset, _PIECE) for offset in middle] + [(size - _END, _END)]


def sample(system: System, path: str) -> str:
    """``ZERO`` if all pieces are zero, else their digest; CommandError when one is unreadable."""
    digest = hashlib.sha256()
    empty, size = True, 0
    for piece in system.pieces(path, spans):
        digest.update(piece)
        empty = empty and piece == bytes(len(piece))
        size += len(piece)
    if not size:
        raise CommandError(f"{path} has no bytes to read")
    return ZERO if empty else digest.hexdigest()[:16]


def why_data(state: State, found: FileSystem) -> str:
    """Why a device without a signature is not empty; empty when it is."""
    item = namespace_on(state, found.device)
    if is_vacant(state, found.device, item) or lost_with_power(state, found):
        return ""
    for entry in _missing(state):
        return f"{fstab.PATH} names {entry.spec} for {entry.where}, and no file system is recognised there"
    for entry in state.fstab:
        if devices.is_on(entry.spec, found.device):
            return f"{fstab.PATH} names it for {entry.where}, and no file system is recognised there"
    if found.sample != ZERO:
        return "no file system is recognised there, and its blocks are not all zero"
    if item and owned.is_ours(state.owned, item):
        return "oeprov made a file system there, and none is recognised any more"
    return ""


def is_vacant(state: State, device: str, item: Optional[Namespace]) -> bool:
    """Nothing was written to the device since oeprov made it or was allowed to erase it."""
    known = next((drive.identity for drive in state.drives if drive.device == device), "")
    words = [_word(device, item, known)] + ([owned.making(item.dev, item.mode)] if item else [])
    return any(word and word in state.owned for word in words)


def vacant_word(system: System, device: str) -> str:
    """The word of the registry (``owned``) for a device; empty for a drive of which nothing is known."""
    item = namespace_on(State(namespaces=devices.namespaces(system)), device)
    return _word(device, item, identity(system, device))


def _word(device: str, item: Optional[Namespace], known: str) -> str:
    """The same; ``known`` is a drive's identity, since the next boot may give the name to another one."""
    if item or device.startswith("pmem"):
        return owned.vacant(device, item.uuid if item else "")
    return owned.vacant(device, known) if known else ""


def identity(system: System, device: str) -> str:
    """What the kernel knows a drive's hardware by, in one word; empty if it knows nothing."""
    base = f"/sys/class/block/{device}"
    whole = base + "/.." if system.exists(base + "/partition") else base
    for name in ("wwid", "device/wwid", "serial", "device/serial", "loop/backing_file"):
        text = "_".join(system.read(f"{whole}/{name}").split())
        if text:
            return text
    return ""


def lost_with_power(state: State, found: FileSystem) -> str:
    """UUID of our file system that was lost in a stop of the instance; empty: none, or not volatile.

    After a stop, memory is all zero. A reboot keeps it, so other content may be a damaged file system or
    foreign data, and needs consent. Type 12 ranges of the firmware are on the same bus and keep their data.
    """
    volatile = [region.dev for region in state.regions if region.bus == _VOLATILE_BUS]
    volatile = volatile if any(map(devices.is_memmap, state.kernel.cmdline)) else []
    there = [item for item in state.namespaces if item.region in volatile]
    unseen = [item.device for item in state.filesystems if item.error]
    if any(not item.enabled or item.blockdev in ["", *unseen] for item in there):
        return ""  # the file system may be on that one
    if found.sample != ZERO or found.device not in [item.blockdev for item in there]:
        return ""
    number = re.sub("^[a-z]+", "", found.device)
    uuids = [
        entry.spec.replace("UUID=", "")
        for entry in _missing(state)
        if re.sub(r"^.*\D", "", entry.where) == number
    ]
    return next((uuid for uuid in uuids if uuid in state.owned), "")


def namespace_on(state: State, device: str) -> Optional[Namespace]:
    """The namespace of a block device."""
    return next((item for item in state.namespaces if item.blockdev == device), None)


def _missing(state: State) -> List[FstabEntry]:
    """Entries with DAX whose file system is on none of the observed devices."""
    there = ["UUID=" + item.uuid for item in state.filesystems if item.uuid]
    return [
        entry
        for entry in state.fstab
        if entry.spec.startswith("UUID=")
        and entry.spec not in there
        and any(word.split("=")[0] == "dax" for word in entry.options)
    ]
