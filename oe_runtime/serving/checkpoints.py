"""The checkpoint to serve, and its rows in a store of this process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import oe_runtime._core as _core
from oe_runtime import checkpoint
from oe_runtime.checkpoint.remote import locate
from oe_runtime.checkpoint.saved import Saved
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError, ServingError
from oe_runtime.freshness import is_run
from oe_runtime.spec import StorageSpec, TableSpec
from oe_runtime.support import dense_file, remote_files
from oe_runtime.support.remote_files import RemotePath

_HELD = 4  # increments in memory before they are applied
_TAKEN: set[Path | None] = set()  # directories of rows of this process
_TAKING = threading.Lock()


class NotKept(CheckpointError):
    """A step that the checkpoints do not have."""


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint on disk; `chain` are the directories of its bases and its own, the newest last."""

    chain: Sequence[Path]
    step: int
    digests: Sequence[str]  # of the chain's manifests, because a run that went back reuses names
    taken: float | None = None  # when its step ended, as `time.time()` of the host that trains; if it says so

    @property
    def path(self) -> Path:
        """The directory of the checkpoint itself."""
        return self.chain[-1]

    @property
    def dense(self) -> Path | None:
        """The file of the dense weights, if it has one."""
        file = self.path / dense_file.FILE
        return file if file.exists() else None

    @property
    def published(self) -> float:
        """When it was published, as `time.time()` of the host that trains."""
        for file in (self.path / checkpoint.MANIFEST, self.path):
            with contextlib.suppress(OSError):  # who loads it says what is missing
                return file.stat().st_mtime
        return time.time()

    def since(self, other: ServedCheckpoint | None) -> Sequence[Path] | None:
        """Return the increments from `other` to this one; None where they do not lead here."""
        n = 0 if other is None else len(other.digests)
        return self.chain[n:] if other is not None and self.digests[:n] == other.digests else None


class ServedCheckpoints:
    """The checkpoints of a run or of a directory of published ones, or a fixed directory of saved tables.

    Those at a URL are fetched to a temporary directory, the newest only. With `step` set, the checkpoint of
    that step counts as the newest.
    """

    def __init__(self, name: str | os.PathLike[str], step: int | None = None) -> None:
        self.step = step
        self._remote: RemotePath | None = None
        self._fetched = ""  # the digest of the newest manifest there
        self._known: ServedCheckpoint | None = None
        self._stamp: object = None  # of its manifest, which need not be read again
        self._times: object = None  # of the directories at the last look of `stamp`
        self._look_again = False
        self._newest_stamp: object = None
        self._without_rows: dict[Path, object] = {}  # the same of checkpoints whose rows are not in files
        if remote_files.is_remote(name):
            self._remote = RemotePath(str(name).rstrip("/"))
            self._copies = tempfile.TemporaryDirectory(prefix="oeprov-serve-")
            self.directory = Path(self._copies.name)
        else:
            self.directory = Path(name)

    def newest(self) -> ServedCheckpoint:
        """Return the newest checkpoint whose rows are files, or that of `step`.

        Raises CheckpointError where there is none or one cannot be read.
        """
        for _ in range(5):  # training may remove one while it is read
            try:
                return self._newest()
            except CheckpointError as error:
                last = error
        raise last

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run whose checkpoints these are; None for others, and for those at a URL."""
        if self._remote is not None:
            return None
        return next((one for one in (self.directory, self.directory.parent) if is_run(one)), None)

    def stamp(self) -> object:
        """Return what differs once another checkpoint is the newest; None for a URL, which is asked instead.

        A checkpoint under way, the removal of old ones, and other files of a run change the directories too.
        """
        if self._remote is not None:
            return None
        places = (self.directory, self.directory / "checkpoints")
        times = [checkpoint.stamp(path) for path in places]
        if times != self._times or self._look_again:
            # A second time, because a file system's clock ticks: there may be two changes at one time.
            self._look_again = times != self._times
            self._times = times
            newest = [place / name for place in places for name in checkpoint.published_names(place)[-1:]]
            self._newest_stamp = [(path, checkpoint.stamp(path / checkpoint.MANIFEST)) for path in newest]
        return self._newest_stamp

    def _fetch(self, remote: RemotePath) -> None:
        there, names = locate(remote)
        names = self._chosen(names, str(remote))
        try:
            digest, _ = there.manifest(names[-1])
        except OSError as error:
            raise CheckpointError(f"cannot read {remote_files.describe(error)}") from error
        if digest == self._fetched:
            return
        path = there.fetch(names[-1], self.directory)
        for old in {*checkpoint.published(self.directory)} - {*checkpoint.chain(path)}:
            shutil.rmtree(old, ignore_errors=True)
        self._fetched = digest

    def _newest(self) -> ServedCheckpoint:
        if self._remote is not None:
            self._fetch(self._remote)
        for directory in (self.directory, self.directory / "checkpoints"):
            if there := checkpoint.published_names(directory):
                kept = {*there}
                self._without_rows = {path: s for path, s in self._without_rows.items() if path.name in kept}
                names = self._chosen(there, str(directory))
                for path in (directory / name for name in reversed(names)):
                    if served := self._with_rows(path):
                        return served
                raise CheckpointError(
                    f"none of the {len(names)} checkpoints in {directory} has its rows in files: train with "
                    "--checkpoint-rows files or --export-checkpoints, or ask the running servers (--servers)"
                )
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: there is no such directory")
        if self._known is None:
            saved = Saved.open(self.directory).require()
            chain = [Path(part) for part in saved.directories]
            step = 1 if saved.found is None else saved.found.step
            self._known = ServedCheckpoint(chain, step, [str(part) for part in chain])
        if self.step not in (None, self._known.step):
            raise NotKept(f"{self.directory} has no step {self.step}: it is step {self._known.step}")
        return self._known

    def _chosen(self, names: Sequence[str], directory: str) -> list[str]:
        """Return those of `step` of these checkpoints, oldest first; all without a `step`."""
        if self.step is None:
            return list(names)
        steps = [(checkpoint.order(name) or (0, 0))[0] for name in names]
        chosen = [name for name, step in zip(names, steps, strict=True) if step == self.step]
        if not chosen:
            kept = ", ".join(map(str, dict.fromkeys(steps)))
            raise NotKept(f"step {self.step} is not kept in {directory}: it has {kept}")
        return chosen

    def _with_rows(self, path: Path) -> ServedCheckpoint | None:
        """Return the checkpoint at `path`, or None if its rows are not in files.

        Reads neither what is unchanged since the last call nor the bases of an increment on what is known.
        """
        stamp, known = checkpoint.stamp(path / checkpoint.MANIFEST), self._known
        if stamp is not None and stamp == self._without_rows.get(path):
            return None
        if known is None or known.path != path or stamp is None or stamp != self._stamp:
            found = checkpoint.read(path) if stamp is None else checkpoint.read_once(path, stamp)
            if not any(name.endswith(checkpoint.WITH_ROWS) for name in found.manifest["files"]):
                self._without_rows[path] = stamp
                return None
            links = [] if known is None else list(zip(known.chain, known.digests, strict=True))
            chain, digests = zip(*checkpoint.links(path, links), strict=True)
            taken = _taken(found.manifest.get("training"))
            self._known, self._stamp = ServedCheckpoint(chain, found.step, digests, taken), stamp
        return self._known


class ServedRows:
    """The tables of a model, filled from checkpoints and otherwise unchanged."""

    def __init__(self, specs: Sequence[TableSpec], storage: StorageSpec, threads: int) -> None:
        self._specs = specs
        self._storage = storage
        self._threads = threads
        self.client: Client | None = None
        self._directory: Path | None = None
        self._read: dict[Path, _core.Increment] = {}  # what `read_ahead` has for `apply`

    def load(self, chosen: ServedCheckpoint) -> tuple[Client, Path | None]:
        """Load `chosen` beside the present rows; return a client and the directory that it takes."""
        servers = _servers(chosen.path, self._specs)
        storage, directory = replace(self._storage, weights_only=True), None
        if storage.type != "dram" and storage.path:
            directory = _take_directory(Path(storage.path))
            storage = replace(storage, path=str(directory))
        try:
            # The storage removes rows of an earlier process, and refuses a directory with a checkpoint.
            client = Client.in_process(storage, servers, self._threads)
        except BaseException:
            _TAKEN.discard(directory)
            raise
        try:
            for spec in self._specs:
                client.create_table(spec)
            client.restore(*chosen.chain)
        except BaseException:
            client.close()
            _remove_directory(directory)
            raise
        return client, directory

    def read_ahead(self, increments: Sequence[Path]) -> None:
        """Read the files for `apply` while requests go on. Raises CheckpointError naming one."""
        read = ((path, self._read_increment(path)) for path in increments)
        self._read = dict(itertools.islice(read, _HELD))
        for _ in read:  # many are verified now, and read again
            pass

    def _read_increment(self, path: Path) -> _core.Increment:
        assert self.client is not None  # noqa: S101 - there is something to apply it to
        try:
            names = [spec.name for spec in self._specs]
            precision = self._storage.row_precision
            return _core.read_increment(str(path.absolute()), names, self.client.servers, precision)
        except CheckpointError as error:
            if checkpoint.find_tables(path):
                raise
            gone = f"{path} has no tables any more; the next refresh takes a newer one"
            raise CheckpointError(gone) from error

    def apply(self, increments: Sequence[Path]) -> None:
        """Apply increments to the present rows. After an error the rows are closed."""
        assert self.client is not None  # noqa: S101 - see above
        try:
            for path in increments:
                self.client.apply_increment(path, self._read.pop(path, None) or self._read_increment(path))
        except BaseException:
            self.close()
            raise

    def use(self, loaded: tuple[Client, Path | None]) -> None:
        """Replace the present rows."""
        self.close()
        self.client, self._directory = loaded

    def close(self) -> None:
        """Free the memory."""
        if self.client is not None:
            self.client.close()
        _remove_directory(self._directory)
        self.client = self._directory = None


def _take_directory(parent: Path) -> Path:
    """Return a directory for rows that no others of this process have."""
    with _TAKING:  # the lowest number, so that rows which an earlier process left are found
        numbered = (parent / f"serving-{number}" for number in itertools.count(1))
        directory = next(one for one in numbered if one not in _TAKEN)
        directory.mkdir(parents=True, exist_ok=True)
        _TAKEN.add(directory)
    return directory


def _remove_directory(directory: Path | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        _TAKEN.discard(directory)


def _taken(training: object) -> float | None:
    """Return when a step ended, from what training wrote to a manifest."""
    taken = training.get("taken") if isinstance(training, dict) else None
    return float(taken) if isinstance(taken, (int, float)) else None


def _servers(path: Path, specs: Sequence[TableSpec]) -> int:
    """Return how many servers saved it: its increments need as many parts."""
    saved = Saved.open(path).require()
    missing = [spec.name for spec in specs if spec.name not in saved.files]
    if missing:
        raise ServingError(f"{path} has no table {', '.join(missing)}, which the model needs")
    return max((files[0]["servers"] for files in saved.files.values()), default=1)
