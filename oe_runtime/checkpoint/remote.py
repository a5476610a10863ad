"""Checkpoints in an object store, laid out as in a local directory.

An object store has no rename. So a checkpoint counts as published when its manifest is there. The manifest is
written last and removed first. What a killed upload left has no manifest, and the next upload removes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from oe_runtime.checkpoint import store
from oe_runtime.checkpoint.store import MANIFEST
from oe_runtime.errors import CheckpointError
from oe_runtime.support import durable, remote_files
from oe_runtime.support.remote_files import Bandwidth, RemotePath

T = TypeVar("T")
_FETCHING = ".partial-fetch-"
_FILES = 4  # transferred at the same time
_HEAD = 64 << 10  # bytes of a table's file that have its header, but for a table with a very long description
_SIZE = slice(12, 16)  # of the header's length in them
_FIXED = 24  # bytes before the header and of its checksum


class RemoteCheckpoints:
    """The checkpoints in one folder; the only writer there."""

    def __init__(self, root: RemotePath) -> None:
        self.root = root

    def list(self) -> tuple[list[str], list[str]]:
        """Return the names of published checkpoints, oldest first, and of unfinished ones. Raises OSError."""
        try:
            files = self.root.files()
        except FileNotFoundError as error:
            if "bucket" in (error.strerror or ""):
                raise
            files = []
        inside = [file.relative_to(self.root).split("/") for file in files]
        whole = {name for name, *rest in inside if rest == [MANIFEST]}
        orders = {name: order for name, *_ in inside if (order := store.order(name))}
        known = sorted(orders, key=orders.__getitem__)
        return [name for name in known if name in whole], [name for name in known if name not in whole]

    def manifest(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return SHA-256 and content of a manifest. Raises OSError, and CheckpointError naming its field."""
        file = self.root / name / MANIFEST
        text = file.read_bytes()
        return hashlib.sha256(text).hexdigest(), store.parse(text, str(file))[1]

    def has(self, local: Path) -> bool:
        """Return whether this very checkpoint is published."""
        try:
            return self.manifest(local.name)[0] == _digest(local / MANIFEST)
        except FileNotFoundError:
            return False

    def upload(self, local: Path, limit: Bandwidth | None = None) -> int:
        """Publish a local checkpoint whose bases are published; return its bytes.

        Raises OSError and CheckpointError; then it is not published, and others are untouched.
        """
        found = store.read(local)
        self._require_base(found.manifest.get("base"), local.name)
        _, unfinished = self.list()
        for name in {*unfinished, local.name}:
            self.remove(name)

        def send(name: str, wanted: Mapping[str, Any]) -> int:
            if (self.root / local.name / name).upload(local / name, limit) != wanted["sha256"]:
                raise CheckpointError(f"{local / name} is damaged: its SHA-256 is not the manifest's")
            return int(wanted["bytes"])

        sent = sum(_each(send, found.manifest["files"]))
        (self.root / local.name / MANIFEST).upload(local / MANIFEST, limit)
        return sent

    def _require_base(self, base: Mapping[str, str] | None, name: str) -> None:
        """Raise CheckpointError unless an increment's base is published."""
        if base is None:
            return
        place = self.root / base["name"]
        try:
            same = self.manifest(base["name"])[0] == base["sha256"]
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is an increment on {place}, which is not there") from error
        if not same:
            raise CheckpointError(f"{name} is an increment on another {base['name']} than {place}")

    def remove(self, name: str) -> None:
        """Remove a checkpoint: it is unpublished first."""
        (self.root / name / MANIFEST).unlink()
        (self.root / name).remove()

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest `keep` and their bases."""

        def base(name: str) -> str | None:
            found = self.manifest(name)[1].get("base")
            return found["name"] if found else None

        names, _ = self.list()
        for name in store.unneeded(names, names[-keep:], base):
            self.remove(name)

    def fetch(self, name: str, directory: Path, increments: tuple[str, ...] = ()) -> Path:
        """Bring a checkpoint and its bases to a local directory, and verify them; return its path there.

        One that is there already, whole, is not fetched again. `increments` are those on this one that are
        being fetched. Raises CheckpointError naming the URL.
        """
        if name in increments:
            raise CheckpointError(f"{self.root / name} is damaged: it is an increment on itself")
        target = directory / name
        try:
            digest, manifest = self.manifest(name)
            if base := manifest.get("base"):
                self.fetch(base["name"], directory, (*increments, name))
            if not _is_whole(target, digest):
                self._fetch(name, manifest, directory)
        except OSError as error:
            raise CheckpointError(
                f"cannot fetch {self.root / name} to {directory}: {remote_files.describe(error)}"
            ) from error
        return target

    def fetch_headers(self, name: str, directory: Path) -> None:
        """Bring what `inspect` reads: the manifest, and begin and end of each table's file, the rest a hole.

        Raises CheckpointError naming the URL, also of a file of another size, or another checksum at its end.
        """
        target = directory / name
        target.mkdir(parents=True)

        def get(file: str, wanted: Mapping[str, Any]) -> None:
            if file.endswith(store.PACK):  # it is small
                self._download(name, file, wanted, target)
                return
            url = self.root / name / file
            with url.open(buffering=0) as source, (target / file).open("wb") as local:
                size = source.seek(0, os.SEEK_END)
                if size != wanted["bytes"]:
                    said = f"it has {size} bytes, the manifest says {wanted['bytes']}"
                    raise CheckpointError(f"{url} is damaged: {said}")
                source.seek(0)
                head = source.read(_HEAD)
                if (length := int.from_bytes(head[_SIZE], "little") + _FIXED) > len(head):
                    source.seek(0)
                    head = source.read(min(length, size))
                local.write(head)
                local.truncate(size)
                local.seek(source.seek(-8, os.SEEK_END))
                end = source.read(8)
                local.write(end)
            checksum = f"{int.from_bytes(end, 'little'):016x}"
            if checksum != checksums.get(file, checksum):
                raise CheckpointError(f"{url} is damaged: its checksum is not the manifest's")

        try:
            manifest = self.manifest(name)[1]
            checksums = {entry["file"]: entry["checksum"] for entry in manifest.get("tables", ())}
            files = manifest["files"].items()
            _each(get, {file: wanted for file, wanted in files if file.endswith(store.WITH_ROWS)})
            (self.root / name / MANIFEST).download(target / MANIFEST)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.root / name}: {remote_files.describe(error)}"
            ) from error

    def _download(self, name: str, file: str, wanted: Mapping[str, Any], directory: Path) -> None:
        """Bring a file to a directory. Raises CheckpointError for another than the manifest has, OSError."""
        url = self.root / name / file
        size, digest = url.download(directory / file)
        if size != wanted["bytes"]:
            said = f"it has {size} bytes, the manifest says {wanted['bytes']}"
            raise CheckpointError(f"{url} is damaged: {said}")
        if digest != wanted["sha256"]:
            raise CheckpointError(f"{url} is damaged: its SHA-256 is not the manifest's")

    def _fetch(self, name: str, manifest: Mapping[str, Any], directory: Path) -> None:
        partial = directory / f"{_FETCHING}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

        def get(file: str, wanted: Mapping[str, Any]) -> None:
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            self._download(name, file, wanted, partial)

        try:
            _each(get, manifest["files"])
            (self.root / name / MANIFEST).download(partial / MANIFEST)
            shutil.rmtree(directory / name, ignore_errors=True)
            durable.rename(partial, directory / name)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def locate(path: RemotePath) -> tuple[RemoteCheckpoints, list[str]]:
    """Return the checkpoints of a run, of its ``checkpoints`` folder, or the single one at `path`.

    Raises CheckpointError if there is none.
    """
    try:
        for folder in (path, path / "checkpoints"):
            found = RemoteCheckpoints(folder)
            if names := found.list()[0]:
                return found, names
        if store.order(path.name) and (path / MANIFEST).exists():
            return RemoteCheckpoints(path.parent), [path.name]
    except OSError as error:
        raise CheckpointError(f"cannot read {remote_files.describe(error)}") from error
    raise CheckpointError(f"{path} has no checkpoint: no step-…/{MANIFEST} is there")


class Mirror:
    """Local copies of remote checkpoints for commands, in ~/.cache/oeprov; local paths stay what they are."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}  # by local directory

    def newest(self, name: str) -> Path:
        """Return a checkpoint: the one that a URL names, or the newest there. Raises CheckpointError."""
        if not remote_files.is_remote(name):
            return Path(name)
        found, names, directory = self._prepare(name)
        return found.fetch(names[-1], directory)

    def all(self, name: str) -> tuple[Path, list[str]]:
        """Return a directory with all checkpoints at a URL, and why some of them cannot be fetched."""
        if not remote_files.is_remote(name):
            return Path(name), []
        found, names, directory = self._prepare(name)
        problems = []
        for one in names:
            try:
                found.fetch(one, directory)
            except CheckpointError as error:
                problems.append(str(error))
        single = RemotePath(name.rstrip("/")) == found.root / names[0]
        return (directory / names[0] if single else directory), problems

    def headers(self, name: str) -> Path:
        """Return a directory with all checkpoints at a URL, as far as `inspect` reads them, kept to the end.

        Raises CheckpointError.
        """
        if not remote_files.is_remote(name):
            return Path(name)
        found, names = locate(RemotePath(name.rstrip("/")))
        self._temporary = tempfile.TemporaryDirectory(prefix="oeprov-inspect-")
        directory = Path(self._temporary.name)
        self._urls[str(directory)] = found.root.url
        for one in names:
            found.fetch_headers(one, directory)
        single = RemotePath(name.rstrip("/")) == found.root / names[0]
        return directory / names[0] if single else directory

    def with_urls(self, text: str) -> str:
        """Return a message with the URLs in place of the copies' paths."""
        for local, url in self._urls.items():
            text = text.replace(local, url)
        return text

    def _prepare(self, name: str) -> tuple[RemoteCheckpoints, list[str], Path]:
        found, names = locate(RemotePath(name.rstrip("/")))
        digest = hashlib.sha256(found.root.url.encode()).hexdigest()[:16]
        directory = _cache() / digest
        try:
            directory.mkdir(parents=True, exist_ok=True)
            there = {name for part in found.list() for name in part}
        except OSError as error:
            raise CheckpointError(f"cannot read {remote_files.describe(error)}") from error
        for path in store.published(directory):
            if path.name not in there:
                shutil.rmtree(path, ignore_errors=True)
        self._urls[str(directory)] = found.root.url
        return found, names, directory


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oeprov" / "checkpoints"


def _each(work: Callable[[str, Mapping[str, Any]], T], files: Mapping[str, Mapping[str, Any]]) -> list[T]:
    """Return the results for all files, some at a time; after an error, those not yet begun are left out."""
    with ThreadPoolExecutor(_FILES, "transfer") as threads:
        tasks = [threads.submit(work, name, wanted) for name, wanted in files.items()]
        try:
            return [task.result() for task in tasks]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return _digest(path / MANIFEST) == digest and bool(store.verify(path))
    except (OSError, CheckpointError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
