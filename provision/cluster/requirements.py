"""What an extra of the oeprov distribution means, from its own metadata.

Nodes are told the requirements themselves, not ``oeprov[tensorflow]``: pip would look ``oeprov`` up in a
package index when it is not installed, where anybody may have taken the name.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from provision.cluster import share
from provision.cluster.errors import OeprovError

_EXTRA = re.compile(r"""\s*(?:;|\band)\s*\(?\s*extra\s*==\s*['"]([\w-]+)['"]\s*\)?""")


@cache
def extra_requirements(extra: str) -> tuple[str, ...]:
    """PEP 508 requirements of ``extra``, markers kept; none for an empty name."""
    if not extra:
        return ()
    try:
        lines = requires("oeprov") or []
    except PackageNotFoundError:
        return _from_pyproject(extra)
    found = []
    for line in lines:
        match = _EXTRA.search(line)
        if match and match[1] == extra:
            found.append(_EXTRA.sub("", line).strip())
    return tuple(found)


def _from_pyproject(extra: str) -> tuple[str, ...]:
    """A checkout that runs without having been installed."""
    path = share.root() / "pyproject.toml"
    try:
        extras = read_toml(path)["project"]["optional-dependencies"]
    except OSError as error:
        raise OeprovError(f"oeprov is not installed and {path} cannot be read: {error.strerror}") from None
    return tuple(extras[extra])


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says; ValueError says in which line it is none."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found
