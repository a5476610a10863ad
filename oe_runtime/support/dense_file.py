"""The file of a checkpoint's dense weights: arrays by name, no pickle."""

from __future__ import annotations

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


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays that `write` wrote. Raises CheckpointError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read as a dense checkpoint: {error}") from error
