"""The label area of an emulated module, empty but formatted.

A module whose label area was never written counts as one without labels: its region is one namespace, there
from the start. Optane modules come out of an App Direct goal with formatted labels and no namespace, and so
do these. Layout: UEFI specification, "NVDIMM Label Protocol", version 1.1.
"""

from __future__ import annotations

import struct
from pathlib import Path

_SIGNATURE = b"NAMESPACE_INDEX\0"
_LABEL = 128  # bytes of one label of version 1.1
_UNIT = 256  # index blocks are multiples of this
_HEAD = struct.Struct("<16s3sBIQQQQIHHQ")


def write(module: Path, area: int) -> None:
    """Format the last ``area`` bytes of a module's file as an empty label area."""
    with module.open("r+b") as file:
        file.seek(-area, 2)
        file.write(_index(0, 1, area) + _index(1, 2, area))


def _index(which: int, sequence: int, area: int) -> bytes:
    """One of the two index blocks; the one with the higher sequence is in force."""
    size = _UNIT * -(-(_HEAD.size + area // _LABEL // 8) // _UNIT)
    slots = (area - 2 * size) // _LABEL
    free = ((1 << slots) - 1).to_bytes(-(-slots // 8), "little")

    def block(checksum: int) -> bytes:
        mine, other, labels = which * size, (1 - which) * size, 2 * size
        fields = (_SIGNATURE, bytes(3), 0, sequence, mine, size, other, labels, slots, 1, 1, checksum)
        return (_HEAD.pack(*fields) + free).ljust(size, b"\0")

    return block(_fletcher64(block(0)))


def _fletcher64(data: bytes) -> int:
    low = high = 0
    for (word,) in struct.iter_unpack("<I", data):
        low = (low + word) & 0xFFFFFFFF
        high = (high + low) & 0xFFFFFFFFFFFFFFFF
    return (high << 32 | low) & 0xFFFFFFFFFFFFFFFF
