"""What of a training script's directory travels to other hosts: its files, as one archive with a digest.

The archive is the same for the same content, whatever the files' times and owners. ``.oeprovignore`` (the
syntax of .gitignore) names what stays here.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pathspec
from rich.filesize import decimal

from provision.cluster.errors import TrainingError

IGNORE = ".oeprovignore"
# Never of use on a worker; `!NAME` in .oeprovignore takes one back.
ALWAYS = (
    *(".git/", ".hg/", ".svn/", "__pycache__/", "*.pyc", ".venv/", "venv/", ".oeprov/", ".DS_Store"),
    *(".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/"),
)
MOST_BYTES = 64 << 20
MOST_FILES = 5000
_NAMED = 5  # files in a message
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device"}


@dataclass(frozen=True)
class Entry:
    """A file or a symbolic link, by its path below the directory."""

    name: str
    size: int
    executable: bool = False
    link: str = ""  # where it points, below the directory and relative to itself


@dataclass(frozen=True)
class ScriptFiles:
    """The directory of a script, as it travels."""

    directory: Path
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    def largest(self) -> str:
        """The largest files with their sizes, for a message."""
        found = sorted(self.entries, key=lambda entry: -entry.size)[:_NAMED]
        return ", ".join(f"{entry.name} ({decimal(entry.size)})" for entry in found)

    @cached_property
    def archive(self) -> bytes:
        """A tar archive of the files; TrainingError names one that cannot be read."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for entry in self.entries:
                info = tarfile.TarInfo(entry.name)
                info.mode = 0o700 if entry.executable else 0o600
                if entry.link:
                    info.type, info.linkname = tarfile.SYMTYPE, entry.link
                    archive.addfile(info)
                    continue
                content = _content(self.directory / entry.name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return buffer.getvalue()

    @cached_property
    def digest(self) -> str:
        """Names the content."""
        return hashlib.sha256(self.archive).hexdigest()


def collect(script: Path) -> ScriptFiles:
    """The files of the script's directory; TrainingError names those that cannot travel, and what to do."""
    directory = script.parent
    ignored = _ignored(directory)
    entries = []
    for path in _walk(directory, ignored):
        entries.append(_entry(directory, path))
        if len(entries) > MOST_FILES:
            raise TrainingError(
                f"--script: {directory} has more than {MOST_FILES} files, which would all travel to the "
                f"workers; give the script a directory of its own, or name in {directory / IGNORE} "
                "what stays here"
            )
    found = ScriptFiles(directory, tuple(sorted(entries, key=lambda entry: entry.name)))
    if script.name not in {entry.name for entry in found.entries}:
        raise TrainingError(
            f"--script: {directory / IGNORE} keeps {script.name} itself from the workers; add the line "
            f"!{script.name} at its end"
        )
    if found.size > MOST_BYTES:
        raise TrainingError(
            f"--script: {directory} has {decimal(found.size)}, and at most {decimal(MOST_BYTES)} travel to "
            f"the workers; the largest files: {found.largest()}; name what the script does not need in "
            f"{directory / IGNORE}, and keep data where the workers read it (--data)"
        )
    return found


def stays_here(directory: Path, name: str) -> bool:
    """Whether ``.oeprovignore`` names a file of the directory."""
    return _ignored(directory).match_file(name)


def _ignored(directory: Path) -> pathspec.GitIgnoreSpec:
    path = directory / IGNORE
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return pathspec.GitIgnoreSpec.from_lines([*ALWAYS, *lines])
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: {error}") from None


def _walk(directory: Path, ignored: pathspec.GitIgnoreSpec) -> Iterator[Path]:
    """Every file and link that is not ignored; directories that are ignored are not looked into."""

    def fail(error: OSError) -> None:
        raise TrainingError(f"--script: {error.filename}: {error.strerror}; name it in {directory / IGNORE}")

    for place, folders, files in os.walk(directory, onerror=fail):
        here = Path(place)
        below = PurePosixPath(here.relative_to(directory))
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = sorted(
            name for name in folders if name not in links and not ignored.match_file(f"{below / name}/")
        )
        for name in sorted([*files, *links]):
            if not ignored.match_file(str(below / name)):
                yield here / name


def _entry(directory: Path, path: Path) -> Entry:
    name = path.relative_to(directory).as_posix()
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Entry(name, 0, link=_link(directory, path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise TrainingError(
            f"--script: {path} is {kind}, which cannot travel to the workers; name it in {directory / IGNORE}"
        )
    return Entry(name, found.st_size, executable=bool(found.st_mode & 0o100))


def _link(directory: Path, path: Path) -> str:
    """Where a link points, relative to itself; TrainingError where that does not travel."""
    target = Path(os.path.realpath(path))
    top = Path(os.path.realpath(directory))
    if not target.exists() or not target.is_relative_to(top):
        why = "points to nothing" if not target.exists() else f"points out of the directory, to {target}"
        raise TrainingError(
            f"--script: {path} is a link that {why}; the workers would not have that: put a copy there, or "
            f"name it in {directory / IGNORE}"
        )
    return os.path.relpath(target, os.path.realpath(path.parent))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainingError(f"--script: {path}: {error.strerror}; name it in {IGNORE}") from None
