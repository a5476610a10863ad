"""Checkpoint directories, which appear complete or not at all, and describe themselves.

    checkpoints/
      step-0000001000/
        manifest.json        format, step, every file with bytes and SHA-256; for an increment the name of its
                             base with the SHA-256 of that manifest; and the fields that the writer added
        …                    the files: table rows, dense weights

A checkpoint is written under another name beside its place, flushed to the device, and renamed. A crash at
any moment leaves the previous one the latest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

import oe_runtime._core as _core
from oe_runtime.errors import CheckpointError
from oe_runtime.support import durable

T = TypeVar("T")

FORMAT = 1
_FORMAT_OF_PACKS = 2  # of a checkpoint with packs, which earlier versions would take for one without rows
PACK = ".oets"  # the ending of one file with the small table files of a server
WITH_ROWS = (".oet", PACK)
MANIFEST = "manifest.json"
_SMALL = 16 << 20  # bytes
_LARGEST_MANIFEST = 64 << 20  # bytes
_NAME = re.compile(
    r"step-(\d{10})(?:\.(\d+))?"
)  # step-0000001000, and .1 when that step is written once more
_PARTIAL = ".partial-"
_PIN = "pinned-"
_PIN_SECONDS = 600.0  # that a mark without a step file holds


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint."""

    path: Path
    step: int
    manifest: Mapping[str, Any]

    @property
    def base(self) -> Path | None:
        """The path of the checkpoint that this increment builds on; None for a complete one."""
        base = self.manifest.get("base")
        return self.path.parent / base["name"] if base else None


def publish(
    directory: Path,
    step: int,
    write: Callable[[Path], Mapping[str, Any]],
    *,
    keep: int = 3,
    spare: Path | None = None,
    base: Path | None = None,
    patience: float = 0,
) -> Path:
    """Publish the files that `write` makes as the checkpoint of `step`; return its path.

    `write(path)` fills the empty directory `path` and returns additional fields for the manifest. The files
    of its `tables`, which are entries of ``Client.save``, are durable already. The `keep` newest checkpoints
    stay, with `spare`, those that are pinned, and all bases of these; older ones are removed. A second
    checkpoint of the same step is newer than the first. `base` is the checkpoint in the same directory that
    this increment builds on (``Client.save`` with ``since``). Waits up to `patience` seconds for another
    process that publishes there.

    Raises CheckpointError when the file system refuses or another process still publishes there; errors of
    `write` pass through. In both cases nothing is published and earlier checkpoints are untouched.
    """
    return begin(directory, step, write, keep=keep, spare=spare, base=base, patience=patience)()


def begin(
    directory: Path,
    step: int,
    write: Callable[[Path], Mapping[str, Any] | Callable[[], Mapping[str, Any]]],
    *,
    keep: int = 3,
    spare: Path | None = None,
    base: Path | None = None,
    patience: float = 0,
) -> Callable[[], Path]:
    """Do the first half of `publish`; return the second, which is called once, on any thread.

    `write` may leave work to that half: it returns a function then, which ends the files and returns the
    fields. Until the end of the second half nobody else publishes there. Raises as `publish` does, as the
    second half does.
    """
    with contextlib.ExitStack() as begun:
        begun.enter_context(_locked(directory, patience))
        final, partial = _paths(directory, step, base)
        with _removing(final, partial):
            written = write(partial)
            there = {file.name for file in partial.iterdir()}
        rest = begun.pop_all()

    def end() -> Path:
        with rest:
            with _removing(final, partial):
                extra = written() if callable(written) else written
                _complete(partial, step, extra, base, _synced(extra) & there)
                partial.rename(final)
                durable.sync(directory)
            for old in _unneeded(directory, keep, spare):
                _remove(old)
        return final

    return end


@contextlib.contextmanager
def _locked(directory: Path, patience: float) -> Iterator[None]:
    """Let nobody else publish in the directory, which is made if it is missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    end = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise CheckpointError(
                        f"another process is writing a checkpoint under {directory}"
                    ) from error
                time.sleep(0.1)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it, too
        os.close(lock)


@contextlib.contextmanager
def _removing(final: Path, partial: Path) -> Iterator[None]:
    """Remove what was written after an error. Raises CheckpointError instead of OSError."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {final}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _paths(directory: Path, step: int, base: Path | None) -> tuple[Path, Path]:
    """Make a directory for the next checkpoint of `step`; return its final path and the present one."""
    if base is not None and base.parent.resolve() != directory.resolve():
        raise CheckpointError(f"{base} does not lie in {directory}; its increments must")
    again = max((n + 1 for found, n in map(_order, published(directory)) if found == step), default=0)
    final = directory / (f"step-{step:010d}.{again}" if again else f"step-{step:010d}")
    partial = directory / f"{_PARTIAL}{final.name}"
    try:
        for leftover in directory.glob(f"{_PARTIAL}*"):  # of a process that died while writing
            shutil.rmtree(leftover)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    return final, partial


def _complete(
    partial: Path, step: int, extra: Mapping[str, Any], base: Path | None, synced: set[str]
) -> None:
    """Write the manifest, and flush all files but those that are `synced`."""
    if reserved := {"format", "step", "base", "files"} & extra.keys():
        raise ValueError(f"the manifest has {sorted(reserved)} of its own")
    names = sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file())
    folders = [partial, *(p for p in partial.rglob("*") if p.is_dir())]
    sums = map_files(_sum, [partial / name for name in names])
    manifest = {
        "format": _FORMAT_OF_PACKS if any(name.endswith(PACK) for name in names) else FORMAT,
        "step": step,
        **({"base": {"name": base.name, "sha256": _digest(base, stamp(base / MANIFEST))}} if base else {}),
        "files": {
            n: {"bytes": size, "sha256": digest} for n, (size, digest) in zip(names, sums, strict=True)
        },
        **extra,
    }
    # With an indent it would be written 30 times slower.
    (partial / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    with ThreadPoolExecutor() as pool:  # at once, because a file system commits them together
        files = [partial / name for name in (*names, MANIFEST) if name not in synced]
        list(pool.map(durable.sync, (*files, *folders)))


def _remove(path: Path) -> None:
    # A partly removed checkpoint must not look complete; the next publish removes the rest.
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(path.with_name(f"{_PARTIAL}{path.name}")))


def remove_from(directory: Path, step: int) -> None:
    """Remove the checkpoints of `step` and of later steps."""
    for path in published(directory):
        if _order(path)[0] >= step:
            _remove(path)


def latest(directory: Path) -> Checkpoint | None:
    """Return the newest checkpoint under `directory`, or None. Raises CheckpointError for a bad manifest."""
    found = published(directory)
    return read(found[-1]) if found else None


def read(path: Path) -> Checkpoint:
    """Read the manifest of the checkpoint at `path`. Raises CheckpointError naming file and field."""
    file = path / MANIFEST
    try:
        with _open(file) as stream:
            text = stream.read(_LARGEST_MANIFEST + 1)
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {file.name}: {error.strerror}") from error
    return Checkpoint(path, *parse(text, str(file)))


@lru_cache(maxsize=1)
def read_once(path: Path, _stamp: object) -> Checkpoint:
    """Return the same of the manifest that has the stamp. Its readers in this process parse it once."""
    return read(path)


def parse(text: bytes, file: str) -> tuple[int, Mapping[str, Any]]:
    """Return the step and the content of a manifest. Raises CheckpointError naming `file` and field."""
    if len(text) > _LARGEST_MANIFEST:
        raise CheckpointError(f"{file} is damaged: it has more than {_LARGEST_MANIFEST} bytes")
    try:
        manifest = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file} is damaged: it lists no files")
    if manifest.get("format") not in (FORMAT, _FORMAT_OF_PACKS):
        raise CheckpointError(
            f"{file}: format is {manifest.get('format')!r}; this version reads {FORMAT} and "
            f"{_FORMAT_OF_PACKS}"
        )
    step = manifest.get("step")
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise CheckpointError(f"{file} is damaged: step is {str(step)[:40]!r}")
    for name, wanted in manifest["files"].items():
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{file} is damaged: files: {name} lies elsewhere")
        if not isinstance(wanted, dict) or not isinstance(wanted.get("bytes"), int):
            raise CheckpointError(f"{file} is damaged: files: {name}: bytes is missing")
        if not isinstance(wanted.get("sha256"), str):
            raise CheckpointError(f"{file} is damaged: files: {name}: sha256 is missing")
    base = manifest.get("base")
    if base is not None and not (
        isinstance(base, dict)
        and isinstance(base.get("sha256"), str)
        and isinstance(base.get("name"), str)
        and _NAME.fullmatch(base["name"])
    ):
        raise CheckpointError(f"{file} is damaged: base is {base!r}")
    return step, manifest


def chain(path: Path) -> list[Path]:
    """Return the checkpoints that make up the one at `path`: its bases, oldest first, and itself.

    Raises CheckpointError naming a base that is missing or was replaced.
    """
    return [part for part, _ in links(path)]


def links(path: Path, known: Sequence[tuple[Path, str]] = ()) -> list[tuple[Path, str]]:
    """Return the same, each with the SHA-256 of its manifest. Reads a manifest once, however often asked.

    Looks at no bases below the checkpoint of which `known` is the result, if `path` builds on that.
    """
    below = _base(path, stamp(path / MANIFEST))
    try:
        parts = [(path, _digest(path, stamp(path / MANIFEST)))]
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {MANIFEST}: {error.strerror}") from error
    names = {path.name}
    while below is not None:
        above, base = parts[-1][0], path.parent / below["name"]
        try:
            digest = _digest(base, stamp(base / MANIFEST))
        except OSError as error:
            raise CheckpointError(
                f"{above} is an increment on {base}, which is missing: {error.strerror}"
            ) from error
        if digest != below["sha256"]:
            raise CheckpointError(
                f"{above} is an increment on another {base} than the one there: the SHA-256 of its "
                f"{MANIFEST} is not {below['sha256']}"
            )
        if base.name in names:
            raise CheckpointError(f"{path} is an increment on itself, through {base}")
        names.add(base.name)
        parts.append((base, digest))
        if known and parts[-1] == known[-1]:
            return [*known, *reversed(parts[:-1])]
        below = _base(base, stamp(base / MANIFEST))
    return parts[::-1]


def stamp(path: Path) -> object:
    """Return what differs when the file at `path`, or a directory's names, are others; None if it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=10_000)
def _base(path: Path, stamp: object) -> Mapping[str, str] | None:
    """Return the base of the checkpoint at `path`, whose manifest has the stamp."""
    return read_once(path, stamp).manifest.get("base")


@lru_cache(maxsize=10_000)
def _digest(path: Path, _stamp: object) -> str:
    """Return the SHA-256 of the manifest, which has the stamp."""
    return _sum(path / MANIFEST)[1]


def problems(found: Checkpoint) -> Iterator[str]:
    """Yield one line per file that differs from the manifest; each names the file and the field."""
    for name, wanted in found.manifest["files"].items():
        file = found.path / name
        try:
            size, digest = _sum(file, expected=wanted["bytes"])
        except OSError as error:
            yield f"{file}: {error.strerror}; the checkpoint is not whole"
            continue
        if size != wanted["bytes"]:
            yield f"{file} is damaged: it has {size} bytes, the manifest says {wanted['bytes']}"
        elif digest != wanted["sha256"]:
            yield f"{file} is damaged: its SHA-256 is not the manifest's"


def verify(path: Path) -> Checkpoint:
    """Compare every file with the manifest. Raises CheckpointError naming the file."""
    found = read(path)
    for problem in problems(found):
        raise CheckpointError(problem)
    return found


def published(directory: Path) -> list[Path]:
    """Return the checkpoints under `directory`, oldest first."""
    return [directory / name for name in published_names(directory)]


def published_names(directory: Path) -> list[str]:
    """Return the names of the same, which costs a follower of many a quarter of the time."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        found = [(order(one.name), one.name) for one in entries if one.is_dir()]
        return [name for _, name in sorted((place, name) for place, name in found if place is not None)]
    return []


def pin(path: Path, step_file: Path | None = None) -> None:
    """Let `publish` keep the checkpoint at `path` as long as `step_file` names its step. Raises OSError.

    Without a file: for ten minutes; call it again before.
    """
    if step_file is None:
        (path / f"{_PIN}until").touch()
        return
    mark = path / f"{_PIN}{hashlib.sha256(os.fsencode(step_file.absolute())).hexdigest()[:16]}"
    if not mark.exists():
        mark.write_text(f"{step_file.absolute()}\n", encoding="utf-8")


def _is_pinned(path: Path) -> bool:
    for mark in path.glob(f"{_PIN}*"):
        with contextlib.suppress(OSError, ValueError):  # the step file is gone, or names no step
            name = mark.read_text(encoding="utf-8").removesuffix("\n")
            if not name and time.time() < mark.stat().st_mtime + _PIN_SECONDS:
                return True
            words = Path(name).read_text(encoding="utf-8").split() if name else []
            if any(word.isdecimal() and int(word) == _order(path)[0] for word in words):
                return True
    return False


def _unneeded(directory: Path, keep: int, spare: Path | None) -> list[Path]:
    """Return all checkpoints except the newest, `spare`, pinned ones, and the bases of these."""

    def base(name: str) -> str | None:
        path = directory / name
        with contextlib.suppress(CheckpointError):  # a damaged one needs nothing
            if found := _base(path, stamp(path / MANIFEST)):
                return found["name"]
        return None

    names = published_names(directory)
    needed = [*names[-keep:], *([] if spare is None else [spare.name])]
    gone = unneeded(names, needed, base)
    # Where pins do not matter, as for the bases of a long chain, nobody looks for them.
    if pinned := [name for name in gone if _is_pinned(directory / name)]:
        gone = unneeded(names, [*needed, *pinned], base)
    return [directory / name for name in gone]


def unneeded(names: Sequence[str], needed: Sequence[str], base: Callable[[str], str | None]) -> list[str]:
    """Return those of all checkpoints, oldest first, that are neither `needed` nor bases of these."""
    keep = set(needed)
    for name in reversed(names):
        if name in keep and (below := base(name)) is not None:
            keep.add(below)
    return [name for name in names if name not in keep]


def order(name: str) -> tuple[int, int] | None:
    """Return what to sort a checkpoint's name by; None for another name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _order(path: Path) -> tuple[int, int]:
    found = order(path.name)
    assert found  # noqa: S101 - only called on names that matched
    return found


def _open(file: Path) -> BinaryIO:
    """Open a regular file. Raises OSError for a pipe or a device in its place, without waiting for it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except BlockingIOError:  # somebody has a lease (NFS, Samba), which only regular files have
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def _sum(file: Path, expected: int | None = None) -> tuple[int, str]:
    """Return bytes and SHA-256; a file of another size than `expected` is not read."""
    digest, size = hashlib.sha256(), 0
    with _open(file) as stream:
        if expected is not None and (there := os.fstat(stream.fileno()).st_size) != expected:
            return there, ""
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def map_files(work: Callable[[Path], T], files: Sequence[Path]) -> list[T]:
    """Return what `work` returns for each file. Small files get no threads, which take longer to begin."""
    sizes = [0]
    with contextlib.suppress(OSError):  # `work` says what is wrong with it
        sizes = [file.stat().st_size for file in files]
    if sum(sizes) < _SMALL:
        return [work(file) for file in files]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, files))


def table_files(directory: Path) -> tuple[list[Path], list[str]]:
    """Return the table files in a directory, and what is wrong with its packs.

    A file in a pack has the path that it would have beside the pack.
    """
    names, problems = {file.name for file in directory.glob("*.oet")}, []
    for pack in sorted(directory.glob(f"*{PACK}")):
        try:
            names.update(_core.packed_files(str(pack)))
        except CheckpointError as error:
            problems.append(str(error))
    return [directory / name for name in sorted(names)], problems


def find_tables(directory: Path) -> set[str]:
    """Return the tables whose files are in a directory, as their names say: server-0-of-1.TABLE.oet.

    Raises CheckpointError for a damaged pack.
    """
    files, problems = table_files(directory)
    for problem in problems:
        raise CheckpointError(problem)
    return {unquote(file.name.split(".")[1]) for file in files}


def _synced(extra: Mapping[str, Any]) -> set[str]:
    """Return the files that are durable already: those that the core says it saved."""
    entries = extra.get("tables", ())
    return {part["file"] for entry in entries for part in (entry, entry.get("filter")) if part}
