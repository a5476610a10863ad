"""A worker's input as names, sizes and digests, which workers on several hosts compare.

A digest reads a small, fixed part of each file. A file of up to 4 MiB is read completely. From a larger one
it reads 64 blocks of 64 KiB: head, tail, and others evenly spread between them. More than 64 files have fewer
blocks each, but always head and tail; about 256 MiB in all. So files with other rows differ, as do truncated
files, and compressed files (whose end has a checksum) and Parquet files (whose end has the places of all
columns) with any change. A change inside a plain text file is missed if it keeps the size and touches none of
the blocks. An object in a store that gives it a tag (S3's ETag) has this tag as its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from oe_runtime.data.rows import reading
from oe_runtime.support.remote_files import RemotePath

BLOCK = 64 << 10  # bytes
MOST_BLOCKS = 64  # of a file
ALL_BLOCKS = 4096  # of all files, but at least head and tail of each
_THREADS = 8  # readers; a network file system serves them in parallel


class InputFile(NamedTuple):
    """One file of the input, or all generated rows."""

    name: str  # relative to the named directory, which may differ between hosts
    size: int  # bytes; for generated rows, their number
    digest: str


def identify(paths: Sequence[Path], names: Sequence[str]) -> list[InputFile]:
    """Return the entries of these files for the comparison. Raises DataError for an unreadable one."""
    blocks = max(2, min(MOST_BLOCKS, ALL_BLOCKS // max(1, len(paths))))
    with ThreadPoolExecutor(_THREADS, "digest") as threads:
        return list(threads.map(lambda path, name: _identify(path, name, blocks), paths, names))


def _identify(path: Path, name: str, blocks: int) -> InputFile:
    found = hashlib.blake2b(digest_size=16)
    with reading(path):
        if isinstance(path, RemotePath) and (tag := path.etag()):
            return InputFile(name, path.stat().st_size, tag)
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            starts: Sequence[int] = range(0, size, BLOCK)
            if len(starts) > blocks:
                starts = [(size - BLOCK) * number // (blocks - 1) for number in range(blocks)]
            for start in starts:
                file.seek(start)
                found.update(file.read(BLOCK))
    return InputFile(name, size, found.hexdigest())


def difference(
    mine: Sequence[InputFile], theirs: Sequence[InputFile], me: str, other: str, *, unit: str = "bytes"
) -> str:
    """Describe the first file that differs between worker ``me`` and the ``other``; empty if none does."""
    for a, b in zip_longest(mine, theirs):
        if a is None or b is None or a.name != b.name:
            has, lacks, name = (me, other, a) if b is None or (a and a.name < b.name) else (other, me, b)
            return f"{name.name} is on {has} and not on {lacks}"
    for a, b in zip(mine, theirs, strict=True):
        if a.size != b.size:
            return f"{a.name} has {a.size:,} {unit} on {me} and {b.size:,} on {other}"
    # Compare sizes first, because a digest's blocks depend on them.
    for a, b in zip(mine, theirs, strict=True):
        if a.digest != b.digest:
            return f"{a.name} has the same size on {me} and on {other}, {a.size:,} {unit}, and other content"
    return ""
