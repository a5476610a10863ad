"""Files that hold a token, or another secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_token(path: Path, *, by_group: bool = False) -> str:
    """Read a token; see `read_secret`."""
    return read_secret(path, "token", by_group=by_group).strip()


def read_secret(path: Path, what: str, *, by_group: bool = False) -> str:
    """Read a file that only its owner may read, or with `by_group` also its group.

    Raises ValueError naming what is wrong.
    """
    text, mode = _read(path, what)
    if mode & (stat.S_IRWXO | (stat.S_IWGRP if by_group else stat.S_IRWXG)):
        may = "may read or change" if by_group else "may read"
        raise ValueError(f"others {may} the {what} file {path}; run: chmod 600 {path}")
    if not text.strip():
        raise ValueError(f"the {what} file {path} is empty")
    return text


def read_text(path: Path, what: str) -> str:
    """Read a file of text. Raises ValueError."""
    return _read(path, what)[0]


def _read(path: Path, what: str) -> tuple[str, int]:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(), os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the {what} file {path}: {reason}") from None
