"""Files and directories that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["rename", "sync"]


def sync(path: Path) -> None:
    """Flush a file, or the names that a directory has, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(new: Path, path: Path) -> None:
    """Give ``new``, a file or a directory in the same file system, its final name.

    Flushes everything in it first, and the name last: without that, a power cut may undo the rename, or leave
    the name without the content. A file at ``path`` is replaced.
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
