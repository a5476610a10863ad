"""Which input a worker has: names, sizes and digests, by which workers on several hosts compare theirs.

A digest reads a small, fixed part of each file, whatever its size: a file of up to 4 MiB whole, of a larger
one 64 blocks of 64 KiB, which are its head, its tail and others evenly spread between them. Where there are
more than 64 files there are fewer blocks of each, but always head and tail; in all they are about 256 MiB.
So files of other rows differ, as do those that were cut off, or compressed files (whose end has a checksum)
and Parquet files (whose end has the places of all columns) with any change. A change in place that leaves
the size of a plain text file as it is, in none of the blocks, is not seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from oe_runtime.data.errors import DataError

BLOCK = 64 << 10  # bytes
MOST_BLOCKS = 64  # of a file
ALL_BLOCKS = 4096  # of all files, unless that is less than head and tail of each
_THREADS = 8  # that read; a network file system answers them at the same time


class InputFile(NamedTuple):
    """One file of the input, or all of the rows that are generated."""

    name: str  # below the directory that was named, so that it may be another one on each host
    size: int  # bytes; of generated rows, how many
    digest: str


def identify(paths: Sequence[Path], names: Sequence[str]) -> list[InputFile]:
    """What is compared of these files. DataError for one that cannot be read."""
    blocks = max(2, min(MOST_BLOCKS, ALL_BLOCKS // max(1, len(paths))))
    with ThreadPoolExecutor(_THREADS, "digest") as threads:
        return list(threads.map(lambda path, name: _identify(path, name, blocks), paths, names))


def _identify(path: Path, name: str, blocks: int) -> InputFile:
    found = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            starts: Sequence[int] = range(0, size, BLOCK)
            if len(starts) > blocks:
                starts = [(size - BLOCK) * number // (blocks - 1) for number in range(blocks)]
            for start in starts:
                file.seek(start)
                found.update(file.read(BLOCK))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return InputFile(name, size, found.hexdigest())


def difference(
    mine: Sequence[InputFile], theirs: Sequence[InputFile], me: str, other: str, *, unit: str = "bytes"
) -> str:
    """The first file that is another one in words, of ``me`` and the ``other`` worker; empty if none is."""
    for a, b in zip_longest(mine, theirs):
        if a is None or b is None or a.name != b.name:
            has, lacks, name = (me, other, a) if b is None or (a and a.name < b.name) else (other, me, b)
            return f"{name.name} is on {has} and not on {lacks}"
    for a, b in zip(mine, theirs, strict=True):
        if a.size != b.size:
            return f"{a.name} has {a.size:,} {unit} on {me} and {b.size:,} on {other}"
    # Which blocks a digest is of depends on the sizes, so these come first.
    for a, b in zip(mine, theirs, strict=True):
        if a.digest != b.digest:
            return f"{a.name} has the same size on {me} and on {other}, {a.size:,} {unit}, and other content"
    return ""
