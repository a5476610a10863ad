"""Rows that are still arriving, for online training: a directory that grows, or standard input.

A stream is read once, in order, and its place is in each checkpoint: a resumed run reads on from there, so
that each row is trained on once as far as the model remembers. There are no epochs and no rows held out.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from oe_runtime.data.batch import Batch, rebatch
from oe_runtime.data.files import DataFiles, Pass, file_kind, file_rows, open_file
from oe_runtime.data.row_schema import CRITEO, Schema
from oe_runtime.data.rows import BrokenRows, reading
from oe_runtime.data.source import Source
from oe_runtime.data.text import TextFile
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

STDIN = "-"
END = "_END"  # a file of this name in a directory: no others will come
_LOOK = 1.0  # seconds between two looks at a directory; and the longest wait for rows
_BATCHES = 32  # of standard input that wait to be trained on

_Found = queue.Queue[tuple[Batch | None, int] | BaseException]
_Stamp = tuple[int, int]  # bytes and time of the last change, in ns


@dataclass(frozen=True)
class Place:
    """Up to where a stream was read."""

    rows: int = 0  # in all
    file: str = ""  # the file of the last row
    row: int = 0  # rows of this file that were read
    read: Mapping[str, _Stamp] = field(default_factory=dict)  # files that were read and are still there

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        read = {name: list(stamp) for name, stamp in self.read.items()}
        return {"rows": self.rows, "file": self.file, "row": self.row, "read": read}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Place:
        """Return the inverse of `to_json`; None is the start."""
        if values is None:
            return cls()
        read = {str(name): (int(stamp[0]), int(stamp[1])) for name, stamp in values["read"].items()}
        return cls(int(values["rows"]), str(values["file"]), int(values["row"]), read)


class Arrived(NamedTuple):
    """Rows that have arrived, and the place after them."""

    batch: Batch
    place: Place


class Stream(Source):
    """A Source without an end that is known."""

    indivisible = "is still growing"
    waiting: int | None = None  # files that have arrived and are not being read yet, if that is known
    pause = _LOOK  # seconds after which a look for more makes sense

    def __init__(self, schema: Schema, max_cardinality: int, max_bad_rows: int) -> None:
        self._schema = schema.limited(max_cardinality)
        self._max_bad_rows = max_bad_rows

    def evaluate_on(self, source: DataFiles) -> None:
        """Take the rows of files for the evaluation."""
        self._evaluation = source

    def blocks(self, start_row: int = 0) -> Iterator[Batch]:
        """See Source: wait for rows until the stream ends."""
        for arrived in self.arrivals(Place()):
            if arrived is None:
                time.sleep(self.pause)
                continue
            skipped = min(arrived.batch.rows, max(0, start_row - arrived.place.rows + arrived.batch.rows))
            yield arrived.batch.slice(skipped, arrived.batch.rows)

    @abstractmethod
    def arrivals(self, start: Place) -> Generator[Arrived | None, None, None]:
        """Yield the rows after `start` in order, in blocks of any size; None where there are none yet."""

    def batches(self, batch_size: int, start: Place) -> Generator[Arrived | None, None, None]:
        """Yield batches after `start`, None where there is no whole one yet; the last may be short."""
        place = start

        def blocks(arrivals: Generator[Arrived | None, None, None]) -> Iterator[Batch | None]:
            nonlocal place
            for arrived in arrivals:
                if arrived is not None:
                    place = arrived.place
                yield arrived and arrived.batch

        with contextlib.closing(self.arrivals(start)) as arrivals:
            for batch, after in rebatch(blocks(arrivals), batch_size):
                here = replace(place, rows=place.rows - after, row=place.row - after)
                yield None if batch is None else Arrived(batch, here)


class GrowingDirectory(Stream):
    """The files of a directory, in the order of their names, and those that are renamed into it later.

    A file is complete when it has its name. Names that begin with . or _ or end in .tmp are not read. A file
    that was read may be removed once a checkpoint is in a later one.
    """

    def __init__(
        self, name: str, max_cardinality: int = 0, max_bad_rows: int = 0, schema: Schema = CRITEO
    ) -> None:
        super().__init__(schema, max_cardinality, max_bad_rows)
        self.name = name
        try:
            self._directory = remote_files.path(name)
            there = self._directory.is_dir()
        except remote_files.InvalidUrl as error:
            raise DataError(f"--data: {error}") from error
        except OSError as error:
            raise DataError(f"--data: {name}: {remote_files.reason(error)}") from error
        if not there:
            raise DataError(f"--follow: {name} is no directory; make it, and rename complete files into it")
        self._ended = False  # whether the sender has said so

    def evaluate_on(self, source: DataFiles) -> None:
        """Take the rows of files for the evaluation. Raises DataError for one that would be trained on."""
        mine = self._directory.resolve()
        if inside := [path for path in source.files if path.resolve().parent == mine]:
            raise DataError(
                f"--eval-data {source.describe()}: {inside[0]} is in --data too, and rows for the evaluation "
                "must not be trained on; move it to another directory"
            )
        super().evaluate_on(source)

    def check(self, *, tensorflow: bool = True) -> None:
        """See Source: read the first rows of the newest file, if there is one."""
        if names := self._look():
            newest = self._directory / max(names)
            broken = BrokenRows(self._max_bad_rows)
            DataFiles(str(newest), broken=broken, schema=self._schema).check(tensorflow=tensorflow)
        if self._evaluation is not None:
            self._evaluation.check(tensorflow=tensorflow)

    def arrivals(self, start: Place) -> Generator[Arrived | None, None, None]:
        """See Stream. DataError names a file that came too late or was changed."""
        place = start
        names: list[str] = []
        looked = 0.0
        resumed = bool(place.file)
        if resumed and place.file not in self._look():
            raise DataError(
                f"{self._directory / place.file} is gone, and the checkpoint is in its row {place.row:,}; "
                "put it back: a file may be removed when a checkpoint is in a later one"
            )
        while True:
            if not names or time.monotonic() - looked > _LOOK:
                place, names = self._unread(place)
                looked = time.monotonic()
            if resumed:
                names.insert(0, place.file)
            if not names:
                if self._ended:
                    return
                yield None
                looked = 0.0
                continue
            self.waiting = len(names) - 1
            path = self._directory / names.pop(0)
            begin = place.row if resumed else 0
            resumed = False
            stamp = self._stamp(path)
            if stamp is None:
                raise DataError(f"{path} was removed before it was read")
            place = Place(place.rows, path.name, begin, {path.name: stamp, **place.read})
            for batch in self._rows(path, begin):
                if batch.rows:
                    place = replace(place, rows=place.rows + batch.rows, row=place.row + batch.rows)
                    yield Arrived(batch, place)
            self._compare(path, stamp)
            self.waiting = len(names)

    def _rows(self, path: Path, begin: int) -> Generator[Batch, None, None]:
        """Yield a file's rows from `begin` on, in blocks that may be empty."""
        pass_ = Pass(begin)
        with contextlib.closing(open_file(path, self._schema)) as file:
            yield from file_rows(path, file, pass_, BrokenRows(self._max_bad_rows))
        if not (pass_.rows or pass_.broken):
            print(f"warning: {path} has no rows", file=sys.stderr)

    def _unread(self, place: Place) -> tuple[Place, list[str]]:
        """Return the place without files that were removed, and the names to read after it, in order."""
        found = self._look()
        for name in sorted(found):
            if name in place.read:
                self._compare(self._directory / name, place.read[name])
            elif name <= place.file:
                raise DataError(
                    f"{self._directory / name} came after {place.file} was read, and sorts before it; name "
                    "files so that each sorts after all before it, such as by their time"
                )
        if gone := place.read.keys() - found - {place.file}:
            place = replace(place, read={k: v for k, v in place.read.items() if k not in gone})
        return place, sorted(name for name in found if name > place.file)

    def _look(self) -> set[str]:
        """Return the names of all complete files."""
        try:
            before = {path.name for path in self._directory.iterdir()}
            # A listing may miss a name that came while it was made, and have a later one: so make two. Names
            # up to the first one's last are all in the second one.
            last = max((name for name in before if _is_read(name)), default="")
            found = {
                path.name: path
                for path in self._directory.iterdir()
                if _is_read(path.name) and path.name <= last and not path.is_dir()
            }
        except OSError as error:
            raise DataError(
                f"cannot read {error.filename or self.name}: {remote_files.reason(error)}"
            ) from error
        for path in found.values():
            if file_kind(path) is None:
                raise DataError(
                    f"{path}: its name does not tell the format of its rows (.tsv, .csv, .parquet, …, also "
                    ".gz, .zst); a name that begins with . or _ is not read"
                )
        self._ended = END in before
        return set(found)

    def _compare(self, path: Path, stamp: _Stamp) -> None:
        """Raise DataError for a file that is there and was changed."""
        now = self._stamp(path)
        if now is None or now == stamp:
            return
        what = (
            f"it had {stamp[0]:,} bytes and has {now[0]:,}" if now[0] != stamp[0] else "it was written again"
        )
        raise DataError(
            f"{path} was changed after it was read: {what}; write a file under a name that begins with . and "
            "rename it when it is complete"
        )

    def _stamp(self, path: Path) -> _Stamp | None:
        with reading(path):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
        return found.st_size, getattr(found, "st_mtime_ns", 0)  # stores keep no such time


def _is_read(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.endswith(".tmp")


class StandardInput(Stream):
    """Lines of text from standard input, to its end.

    It cannot be read again: a resumed run skips the rows that its checkpoint counts, so the sender sends
    them again, from the first one on.
    """

    name = "standard input"
    pause = 0.2

    def __init__(self, max_cardinality: int = 0, max_bad_rows: int = 0, schema: Schema = CRITEO) -> None:
        super().__init__(schema, max_cardinality, max_bad_rows)
        self._begun = False

    def check(self, *, tensorflow: bool = True) -> None:
        """See Source: its rows are checked as they come."""
        if sys.stdin is None or sys.stdin.isatty():
            raise DataError("--data -: standard input is a terminal; send rows into it: … | python -m …")
        if self._evaluation is not None:
            self._evaluation.check(tensorflow=tensorflow)

    def arrivals(self, start: Place) -> Generator[Arrived | None, None, None]:
        """See Stream."""
        if self._begun:
            raise DataError(
                "--data -: standard input cannot be read again; start the run with --resume, and send all "
                "rows from the first one on: those of the checkpoint are skipped"
            )
        self._begun = True
        found: _Found = queue.Queue(_BATCHES)
        # A daemon: it may wait for rows when the program ends.
        threading.Thread(target=self._put, args=(start.rows, found), name="read-stdin", daemon=True).start()
        place = Place(file=STDIN)
        while True:
            try:
                one = found.get(timeout=0.05)  # one read of a pipe has fewer rows than most batches
            except queue.Empty:
                yield None
                continue
            if isinstance(one, BaseException):
                raise one
            batch, rows = one
            place = replace(place, rows=rows, row=rows)
            if batch is None:
                break
            if batch.rows:
                yield Arrived(batch, place)
        if place.rows < start.rows:
            raise DataError(
                f"standard input ended after {place.rows:,} rows, and the checkpoint counts {start.rows:,}; "
                "send all rows again, from the first one on"
            )

    def _put(self, skipped: int, found: _Found) -> None:
        """Put the batches after the `skipped` rows, None at the end; each with the rows up to there."""
        path, pass_ = Path(self.name), Pass(skipped)
        try:
            file = TextFile(path, self._schema, commas=True, pipe=_Pipe())
            for doubt in file.doubts().values():
                print(f"warning: {path}: {doubt}", file=sys.stderr)
            for batch in file_rows(path, file, pass_, BrokenRows(self._max_bad_rows)):
                found.put((batch, pass_.rows))
            found.put((None, pass_.rows))
        except BaseException as error:
            found.put(error)


class _Pipe:
    """Standard input, which gives what has arrived."""

    def __init__(self) -> None:
        self._at = 0

    def read(self, most: int) -> bytes:
        data = os.read(0, most)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        """Leave it open."""
