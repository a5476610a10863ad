"""Checkpoints on disk: a directory that appears whole or not at all, and describes itself.

    checkpoints/
      step-0000001000/
        manifest.json        format, step, every file with bytes and SHA-256, and what the writer added
        …                    the files: table rows, dense weights

A checkpoint is written beside its place under another name, flushed to the device, and renamed into place,
so that a crash at any moment leaves the previous one the latest. Nothing here needs a server or TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oe_runtime.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(
    r"step-(\d{10})(?:\.(\d+))?"
)  # step-0000001000, and .1 when that step is written once more
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint."""

    path: Path
    step: int
    manifest: Mapping[str, Any]


def publish(
    directory: Path,
    step: int,
    write: Callable[[Path], Mapping[str, Any]],
    *,
    keep: int = 3,
    spare: Path | None = None,
) -> Path:
    """Publish what `write` puts into a directory as the checkpoint of `step`; its path.

    `write(path)` fills the empty directory `path` and returns what the manifest shall hold besides the files.
    The `keep` newest checkpoints and `spare` stay, older ones are removed. A second checkpoint of the same
    step is newer than the first.
    Raises CheckpointError when the file system refuses or another process publishes there; what `write`
    raises passes through. Either way nothing is published and the earlier checkpoints are untouched.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        final = _publish(directory, step, write)
        _prune(directory, keep, spare)
        return final
    except BlockingIOError as error:
        raise CheckpointError(f"another process is writing a checkpoint under {directory}") from error
    finally:
        os.close(lock)


def _publish(directory: Path, step: int, write: Callable[[Path], Mapping[str, Any]]) -> Path:
    again = max((n + 1 for found, n in map(_order, _published(directory)) if found == step), default=0)
    final = directory / (f"step-{step:010d}.{again}" if again else f"step-{step:010d}")
    partial = directory / f"{_PARTIAL}{final.name}"
    try:
        for leftover in directory.glob(f"{_PARTIAL}*"):  # of a run that died while writing
            shutil.rmtree(leftover)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint under {directory}: {error.strerror}") from error
    try:
        extra = write(partial)
        if reserved := {"format", "step", "files"} & extra.keys():
            raise ValueError(f"the manifest has {sorted(reserved)} of its own")
        names = sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file())
        with ThreadPoolExecutor() as pool:
            sums = list(pool.map(lambda name: _sync_and_sum(partial / name), names))
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {
                n: {"bytes": size, "sha256": digest} for n, (size, digest) in zip(names, sums, strict=True)
            },
            **extra,
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _sync(partial / MANIFEST)
        for folder in {partial, *(p for p in partial.rglob("*") if p.is_dir())}:
            _sync(folder)
        partial.rename(final)
        _sync(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {final}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _prune(directory: Path, keep: int, spare: Path | None) -> None:
    for old in _published(directory)[:-keep]:
        if old != spare:
            _remove(old)


def _remove(path: Path) -> None:
    # Half a removed checkpoint must not be taken for a whole one; the next publish clears what is left.
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(path.with_name(f"{_PARTIAL}{path.name}")))


def remove_from(directory: Path, step: int) -> None:
    """Remove the checkpoints of `step` and of later ones."""
    for path in _published(directory):
        if _order(path)[0] >= step:
            _remove(path)


def published(directory: Path) -> list[Checkpoint]:
    """All checkpoints under `directory`, oldest first. CheckpointError when a manifest cannot be read."""
    return [read(path) for path in _published(directory)]


def latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint under `directory`, or None. CheckpointError when its manifest cannot be read."""
    published = _published(directory)
    return read(published[-1]) if published else None


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, its files not looked at. Raises CheckpointError naming file and field."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {file.name}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file} is damaged: it lists no files")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{file}: format is {manifest.get('format')!r}; this version reads format {FORMAT}"
        )
    if not isinstance(manifest.get("step"), int):
        raise CheckpointError(f"{file} is damaged: step is {manifest.get('step')!r}")
    return Checkpoint(path, manifest["step"], manifest)


def verify(path: Path) -> Checkpoint:
    """Compare every file with its size and SHA-256 in the manifest. CheckpointError names the file."""
    found = read(path)
    for name, wanted in found.manifest["files"].items():
        file = path / name
        try:
            size, digest = _sum(file)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}; the checkpoint is not whole") from error
        if size != wanted["bytes"]:
            raise CheckpointError(
                f"{file} is damaged: it has {size} bytes, the manifest says {wanted['bytes']}"
            )
        if digest != wanted["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's")
    return found


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match  # noqa: S101 - only called on names that matched
    return int(match[1]), int(match[2] or 0)


def _published(directory: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        return sorted(found, key=_order)
    return []


def _sum(file: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _sync_and_sum(file: Path) -> tuple[int, str]:
    _sync(file)
    return _sum(file)


def _sync(path: Path) -> None:
    """Flush a file or a directory's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
