"""The packages that a training script asks for, in its requirements.txt or pyproject.toml.

They are installed into an environment of their own over the runtime's, named by what is asked for: jobs that
ask for the same share it, and the host's environment stays as it is. See provision/node/jobscript.py.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.cluster import requirements
from provision.cluster.errors import TrainingError
from provision.jobs import script_files

_FILE = re.compile(r"^(?:-r|-c|--requirement|--constraint)(?:\s+|=)?(\S+)")
_LINKS = re.compile(r"^(?:-f|--find-links)(?:\s+|=)?(?!/|[a-zA-Z][a-zA-Z0-9+.-]*:)(\S+)")
_LOCAL = re.compile(r"^(?:-e\b|--editable\b|\.{1,2}(?:/|$)|file:\.)")
_REQUIREMENTS, _PROJECT = "requirements.txt", "pyproject.toml"


@dataclass(frozen=True)
class Packages:
    """What pip is to install: files with their text, the first one naming the others."""

    source: str  # the file that asks for them
    files: Mapping[str, str] = field(hash=False)

    def key(self, python: str, index: str) -> str:
        """Names the environment with these packages over that of ``python``."""
        text = json.dumps([python, index, self.source, dict(self.files)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def environment(self, path: str, python: str, index: str) -> dict[str, Any]:
        """What ``provision.node.jobscript.make_environment`` needs."""
        return {
            "path": path,
            "python": python,
            "source": self.source,
            "files": dict(self.files),
            "arguments": ["-r", _REQUIREMENTS],
            "index": index,
        }


def collect(directory: Path) -> Packages | None:
    """What the script's directory asks for; None if nothing. TrainingError names file and line."""
    path = directory / _REQUIREMENTS
    if path.is_file():
        files: dict[str, str] = {}
        _read(directory, _REQUIREMENTS, files)
        asked = any(line and not line.startswith("#") for text in files.values() for line in _lines(text))
        return Packages(_REQUIREMENTS, files) if asked else None
    path = directory / _PROJECT
    if not path.is_file():
        return None
    try:
        project = requirements.read_toml(path).get("project", {})
    except ValueError as error:
        raise TrainingError(f"--script: {path}: {error}") from None
    if "dependencies" in project.get("dynamic", []):
        raise TrainingError(
            f"--script: {path}: its dependencies are dynamic, known only when it is built; write them into "
            f"{directory / _REQUIREMENTS}"
        )
    names = project.get("dependencies", [])
    return Packages(_PROJECT, {_REQUIREMENTS: "\n".join([*names, ""])}) if names else None


def check_image(directory: Path, where: str, key: str) -> None:
    """Refuse a script that asks for packages where workers have those of the image that ``key`` names."""
    packages = collect(directory)
    if packages is not None and not script_files.stays_here(directory, packages.source):
        raise TrainingError(
            f"--on {where}: {directory / packages.source} asks for packages, which come with the image "
            f"there; build an image with them ({key}) and name the file in "
            f"{directory / script_files.IGNORE}, or use --on hosts"
        )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _read(directory: Path, name: str, files: dict[str, str]) -> None:
    """Read a file of requirements and those that it names."""
    path = directory / name
    try:
        files[name] = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TrainingError(f"--script: {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(_lines(files[name]), start=1):
        if _LOCAL.match(line):
            raise TrainingError(
                f"--script: {path} line {number}: found {line}; a package of the script's directory needs no "
                "installation, it is imported from there"
            )
        if match := _LINKS.match(line):
            raise TrainingError(
                f"--script: {path} line {number}: found {line}; wheels of the script's directory are not "
                "installed: copy them to a directory on the hosts and set runtime_index to it"
            )
        if (match := _FILE.match(line)) and "://" not in match[1]:
            other = posixpath.normpath((Path(name).parent / match[1]).as_posix())
            if other.startswith(("/", "../")):
                raise TrainingError(
                    f"--script: {path} line {number}: found {line}; it is outside of the script's directory "
                    f"{directory}, which alone travels to the workers"
                )
            if other not in files:
                _read(directory, other, files)
