"""Parse /etc/fstab as libmount does, which mount, findmnt and systemd use; ``mount`` edits it."""

import re
from typing import List, Optional

from .state import FstabEntry

PATH = "/etc/fstab"
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
_LEAST = 3  # source, mount point, type; without options the defaults hold


def unescape(text: str) -> str:
    """Undo the escapes of a path in /etc/fstab or /proc/mounts."""
    # Each escape is a byte; a letter of UTF-8 may have several.
    undone = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8) & 0xFF]), text.encode())
    return undone.decode("utf-8", "replace")


def escape(text: str) -> str:
    """The inverse of ``unescape``."""
    for code, character in reversed(_ESCAPES):
        text = text.replace(character, code)
    return text


def lines(text: str) -> List[str]:
    """The lines of the file, each with its end."""
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def parse(text: str) -> List[FstabEntry]:
    """The entries of the file."""
    return [entry for entry in map(parse_line, lines(text)) if entry]


def parse_line(line: str) -> Optional[FstabEntry]:
    """One entry; None for a comment and for a line that mount ignores."""
    row = re.split("[ \t]+", line.strip(" \t\r\n"))
    if len(row) < _LEAST or row[0].startswith("#") or not all(item.isdigit() for item in row[4:6]):
        return None
    where = unescape(row[1])
    if where.startswith("/"):
        where = re.sub("/+", "/", where).rstrip("/") or "/"
    return FstabEntry(row[0], where, row[2], row[3].split(",") if len(row) > _LEAST else ["defaults"])
