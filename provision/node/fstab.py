"""Parse /etc/fstab; ``mount`` edits it."""

from typing import List, Optional

from .state import FstabEntry

PATH = "/etc/fstab"
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def unescape(text: str) -> str:
    """Undo the escapes of a path in /etc/fstab or /proc/mounts."""
    for code, character in _ESCAPES:
        text = text.replace(code, character)
    return text


def escape(text: str) -> str:
    """The inverse of ``unescape``."""
    for code, character in reversed(_ESCAPES):
        text = text.replace(character, code)
    return text


def parse(text: str) -> List[FstabEntry]:
    """The entries of the file."""
    return [entry for entry in map(parse_line, text.splitlines()) if entry]


def parse_line(line: str) -> Optional[FstabEntry]:
    """One entry; None for a comment and for anything else."""
    row = line.split()
    if len(row) < 4 or row[0].startswith("#"):
        return None
    return FstabEntry(row[0], unescape(row[1]), row[2], row[3].split(","))
