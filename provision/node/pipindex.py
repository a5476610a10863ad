"""How pip is told of the inventory's index, which is an address, maybe with a password, or a directory."""

import re
from typing import Dict, List

_PASSWORD = re.compile(r"://[^/\s]*@")


def words(index: str) -> List[str]:
    """Arguments of pip; none for PyPI, and none for an address with a password, which others could read."""
    if index.startswith("/"):
        return ["--no-index", "--find-links", index]
    return ["--index-url", index] if index and not _PASSWORD.search(index) else []


def environment(index: str) -> Dict[str, str]:
    """Environment variables of pip, which only its user can read: an address with a password."""
    return {"PIP_INDEX_URL": index} if _PASSWORD.search(index) else {}
