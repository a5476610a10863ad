"""Files and directories that are complete or absent, for readers and after a power cut."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["rename", "sync", "write_json"]


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(new: Path, path: Path) -> None:
    """Give ``new``, a file or a directory in the same file system, its final name.

    Flushes its content first and its name last. Without that, a power cut may undo the rename, or leave the
    name without the content. A file at ``path`` is replaced.
    """
    if new.is_dir():
        for folder, _, files in os.walk(new):
            for name in files:
                sync(Path(folder, name))
            sync(Path(folder))
    else:
        sync(new)
    os.replace(new, path)
    sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file, without flushing it: readers see the old file or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # by other users too, as the umask says
    try:
        file = partial.open("x", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with file:
            json.dump(value, file)
            file.write("\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
