"""The file of a checkpoint's dense weights: arrays by name, no pickle."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Container, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError
from oe_runtime.support import durable

FILE = "dense.npz"
_MAGIC = 10  # bytes of an array's magic text, version and the length of its header


def write(arrays: Mapping[str, NDArray[Any]], directory: Path, name: str = FILE) -> Path:
    """Write the arrays to `directory`/`name`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    durable.rename(temporary, path)
    return path


def read(
    path: Path, content: bytes | None = None, *, names: Container[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays that `write` wrote, or those of `names` among them.

    `content` is that of the file, where another process has read it. Raises CheckpointError, which names the
    path.
    """
    try:
        with zipfile.ZipFile(path if content is None else io.BytesIO(content)) as file:
            found = {member.removesuffix(".npy"): member for member in file.namelist()}
            return {
                name: _array(file.read(member))
                for name, member in found.items()
                if names is None or name in names
            }
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read as a dense checkpoint: {error}") from error


def _array(content: bytes) -> NDArray[Any]:
    """Return a member of the file, as np.load does, which parses equal headers again and again."""
    length = _MAGIC + int.from_bytes(content[_MAGIC - 2 : _MAGIC], "little")
    shape, is_fortran, dtype = _described(content[:length])
    count = math.prod(shape)
    if len(content) != length + count * dtype.itemsize:
        raise ValueError(f"an array of {shape} has {len(content) - length} bytes")
    flat = np.frombuffer(content, dtype, count, length)
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


@lru_cache(maxsize=4096)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(header)
    if (version := np.lib.format.read_magic(stream)) != (1, 0):
        raise ValueError(f"an array has the format {version}")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject:
        raise ValueError("an array has objects")
    return shape, is_fortran, dtype
