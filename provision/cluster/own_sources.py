"""The sources of this oeprov's runtime, their digest, and the key of the wheels that this machine builds."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import platform
import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from provision.cluster import share
from provision.cluster.errors import WheelError
from provision.node.build import wheel_key
from provision.node.command import System
from provision.node.observe import observe_os

# What is compiled, and what decides how: hosts do not use the rest of the wheel.
RUNTIME = ("CMakeLists.txt", "pyproject.toml", "oe_runtime")
# Tables of pyproject.toml, each to the next one; the others are for tests and linters.
_DECIDING = re.compile(rb"^\[(?:build-system|project|tool\.scikit-build)\]\n(?:(?!\[).*\n?)*", re.MULTILINE)


@cache
def own_key() -> str:
    """The key of the wheels that this machine makes."""
    return wheel_key(observe_os(System()), platform.python_version())


@cache
def digest() -> str:
    """SHA-256 of all that the runtime in the wheel is made of; the same for each process of a run."""
    root = checkout()
    if root is None:
        rows = [row for row in installed_files() if row[0].startswith("oe_runtime/") and row[1]]
        return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()
    return digest_of(root)


def digest_of(root: Path) -> str:
    """SHA-256 of what is compiled in a checkout, names and contents."""
    total = hashlib.sha256()
    for path in files(root, RUNTIME):
        content = path.read_bytes()
        if path.name == "pyproject.toml":
            content = b"".join(_DECIDING.findall(content))
        total.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def checkout() -> Path | None:
    """The checkout that this oeprov runs from; None where it was installed from a wheel."""
    root = share.root()
    return root if (root / "pyproject.toml").is_file() else None


def files(root: Path, names: tuple[str, ...]) -> list[Path]:
    """All files below ``names`` that belong to the sources, in a fixed order; links are not followed."""
    found: list[Path] = []
    for name in names:
        top = root / name
        if top.is_file():
            found.append(top)
        for directory, folders, files in os.walk(top):
            folders[:] = [folder for folder in folders if folder != "__pycache__" and folder[0] != "."]
            kept = [file for file in files if file[0] != "." and not file.endswith((".so", ".pyc"))]
            found += [Path(directory) / file for file in kept]
    return sorted(found)


def installed_files() -> list[list[str]]:
    """Path, digest and size of every installed file of oeprov; WheelError when it is not installed."""
    try:
        text = Distribution.from_name("oeprov").read_text("RECORD")
    except PackageNotFoundError:
        text = None
    if not text:
        raise WheelError(
            "oeprov is neither a checkout nor installed by pip; hosts cannot be given its runtime"
        )
    return list(csv.reader(io.StringIO(text)))
