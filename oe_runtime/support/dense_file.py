"""The file of a checkpoint's dense weights: arrays by name, no pickle."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError
from oe_runtime.support import durable

FILE = "dense.npz"


def write(arrays: Mapping[str, NDArray[Any]], directory: Path, name: str = FILE) -> Path:
    """Write the arrays to `directory`/`name`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    durable.rename(temporary, path)
    return path


def read(path: Path, content: bytes | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays that `write` wrote. Raises CheckpointError, which names the path.

    `content` is that of the file, where another process has read it.
    """
    try:
        with np.load(path if content is None else io.BytesIO(content), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read as a dense checkpoint: {error}") from error
