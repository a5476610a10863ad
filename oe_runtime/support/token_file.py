"""The file that holds the servers' token."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_token(path: Path) -> str:
    """Read the token from a file that only its owner may read. Raises ValueError naming what is wrong."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the token file {path}: {reason}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"others may read the token file {path}; run: chmod 600 {path}")
    if not token:
        raise ValueError(f"the token file {path} is empty")
    return token
