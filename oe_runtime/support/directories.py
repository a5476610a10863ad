"""Directories that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oe_runtime.support import durable


@contextlib.contextmanager
def published(path: Path, *, overwrite: bool, ours: str = "") -> Iterator[Path]:
    """Yield a temporary directory that becomes `path`; `overwrite` replaces a directory with `ours`."""
    if os.path.lexists(path) and not (overwrite and (path / ours).is_file()):
        what = f"is not a directory with {ours}" if overwrite else "exists already"
        raise FileExistsError(f"{path} {what}; choose another path or remove it")
    with replacing(path) as new:
        new.mkdir()
        yield new


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for the block to make; it then becomes `path`, in place of what was there before."""
    replaces = os.path.lexists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that one rename publishes it.
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary / "new"
        if replaces:
            os.rename(path, temporary / "old")
        if os.path.lexists(path):
            raise FileExistsError(f"{path} was created by another process in the meantime")
        durable.rename(temporary / "new", path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
