"""Files of rows as one table: text, Parquet, Arrow or TFRecord; a file, a directory or a glob.

Files are read in the order of their names. So the row order, the held-out rows and a resumed position are the
same each time. A file's name tells its format.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oe_runtime.data.batch import Batch
from oe_runtime.data.identity import InputFile, identify
from oe_runtime.data.row_schema import CRITEO, Schema
from oe_runtime.data.rows import BrokenRows, RowFile, read_ahead, reading
from oe_runtime.data.source import Source
from oe_runtime.data.text import CODECS, TextFile
from oe_runtime.data.work_queue import Range
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

RANGE_BYTES = 64 << 20

_ENOUGH = 1000  # rows to say that a label is constant
_CHECKS = 8  # files checked at the same time
# First bytes by kind; zstd files may also begin with a skippable frame (RFC 8878).
_MAGIC: dict[str, tuple[str, tuple[bytes, ...]]] = {
    ".gz": ("gzip", (b"\x1f\x8b",)),
    ".zst": ("zstd", (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))),
    "parquet": ("Parquet", (b"PAR1", b"PARE")),
    "arrow": ("Arrow", (b"ARROW1",)),
}
_ARROW_STREAM = b"\xff\xff\xff\xff"  # the first message
_KINDS = {
    ".tsv": "tabs",
    ".txt": "tabs",
    "": "tabs",  # day_0.gz
    ".csv": "commas",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


class DataFiles(Source):
    """The rows of files of any schema as one table; ids are hashed into `max_cardinality`-capped fields.

    Broken rows up to the limit of `broken` are skipped and have no number: row n is the nth row read.
    """

    def __init__(
        self,
        name: str | Sequence[str],
        max_cardinality: int = 0,
        broken: BrokenRows | None = None,
        schema: Schema = CRITEO,
    ) -> None:
        names = [name] if isinstance(name, str) else name
        self.name = ", ".join(names)
        self._files = [path for one in names for path in find_files(one)]
        self._roots = [_root(one) for one in names]
        counts = Counter(path.resolve() for path in self._files) if len(names) > 1 else Counter()
        if twice := [path for path in self._files if counts[path.resolve()] > 1]:
            raise DataError(f"{self.name} names the file {twice[0]} twice")
        apart = _evaluation_file(self.name)
        if apart is not None:  # as in DeepRec's data
            self._files.remove(apart)
            self._evaluation = DataFiles(str(apart), max_cardinality, schema=schema)
        self._schema = schema.limited(max_cardinality)
        self.broken = broken or BrokenRows()
        # Exact once a pass has reached the end; before that an estimate from the share of bytes read.
        self._total: int | None = None

    @property
    def files(self) -> Sequence[Path]:
        """The files, in the order in which they are read."""
        return self._files

    def check(self, *, tensorflow: bool = True) -> None:
        """Read the first rows of every file, to refuse a wrong one before anything starts.

        Without `tensorflow`, TFRecord files are only opened.
        """
        from oe_runtime.data.tfrecord import check_opens

        files = [path for path in self._files if tensorflow or file_kind(path) != "tfrecord"]
        without = []
        for path in self._files:
            if path not in files:
                _check_magic(path, "tfrecord", self._schema)
                check_opens(path)
                without += [] if path.stat().st_size else [path]
        with ThreadPoolExecutor(_CHECKS, "check") as threads:
            firsts = list(threads.map(self._first_rows, files))
        # Spark writes a part without rows for each partition without rows.
        without += [path for path, first in zip(files, firsts, strict=True) if first.is_empty]
        if without and len(without) == len(self._files):
            raise empty_file(without[0], self._schema)
        if without:
            print(
                f"warning: {self.name}: {len(without)} of {len(self._files)} files have no rows, such as "
                f"{without[0]}",
                file=sys.stderr,
            )
        broken = BrokenRows(self.broken.limit, say=lambda _: None)  # reported when they are skipped
        for path, first in zip(files, firsts, strict=True):
            if not (first.rows or first.is_empty):
                broken.limit = 0  # not a file of rows at all
            for place, problem in first.problems:
                broken.add(path, place, problem)
        size = sum(path.stat().st_size for path in files)
        rows, ones = sum(first.rows for first in firsts), sum(first.ones for first in firsts)
        self._guess(rows, sum(first.read for first in firsts), size)
        doubts: dict[str, str] = {}  # one per column, with the value of the first file
        for path, first in zip(files, firsts, strict=True):
            for column, doubt in first.doubts.items():
                doubts.setdefault(column, f"{path}: {doubt}")
        for doubt in doubts.values():
            print(f"warning: {doubt}", file=sys.stderr)
        if rows >= _ENOUGH and ones in (0, rows):
            print(
                f"warning: {self.name}: the label {self._schema.label} is {int(ones > 0)} in the first "
                f"{rows:,} rows; from a constant label a model learns nothing",
                file=sys.stderr,
            )
        if self._evaluation is not None:
            self._evaluation.check(tensorflow=tensorflow)

    def _first_rows(self, path: Path) -> _First:
        """Return what the file's first rows have."""
        with contextlib.closing(open_file(path, self._schema)) as file:
            doubts = file.doubts()
            task = next(file.pieces(), None)
            if task is None:
                return _First(0, 0, 0, [], {})
            batch, broken, read = task()
            problems = [(f"{file.unit} {file.first + row}", problem) for row, problem in broken]
            return _First(batch.rows, int(batch.labels.sum()), read, problems, doubts)

    def evaluate_on(self, source: DataFiles) -> None:
        """Take other rows for the evaluation. Raises DataError for a file that is trained on."""
        mine = {_file_identity(path) for path in self._files}
        if both := [path for path in source.files if _file_identity(path) in mine]:
            raise DataError(
                f"--eval-data {source.describe()}: {both[0]} is in --data too, and rows for the evaluation "
                "must not be trained on; name other files, or a share to hold out, such as 0.1"
            )
        self._evaluation = source

    def identity(self) -> list[InputFile]:
        """See Source: one entry per file, by its path below the named directory."""
        root = os.path.commonpath([str(root) for root in self._roots])
        mine = identify(self._files, [os.path.relpath(str(path), root) for path in self._files])
        return [*mine, *(self._evaluation.identity() if self._evaluation else [])]

    def total_rows(self) -> int | None:
        """Return the rows of one epoch: exact after a pass, before that estimated from the bytes read."""
        return self._total

    def blocks(self, start_row: int = 0) -> Generator[Batch, None, None]:
        """Yield all rows from `start_row` on, in order. DataError names the file and line of a broken row."""
        sizes = [f.stat().st_size for f in self._files]
        before = 0  # rows in earlier files
        self.broken.start()
        for number, path in enumerate(self._files):
            pass_ = Pass(max(0, start_row - before))
            with contextlib.closing(open_file(path, self._schema)) as file:
                for batch in file_rows(path, file, pass_, self.broken):
                    self._guess(before + pass_.rows, sum(sizes[:number]) + pass_.read, sum(sizes))
                    if batch.rows:
                        yield batch
            before += pass_.rows
        if before == 0 and self.broken.count == 0:
            raise empty_file(self._files[0], self._schema)
        if before == 0:
            raise DataError(f"{self.name} has no row that is not broken")
        self._total = before

    def ranges(self, target_bytes: int = RANGE_BYTES) -> list[Range]:
        """Return parts of about `target_bytes` for a work queue: bytes of plain text, row groups of Parquet.

        Other files, which can only be read from their start, are one part each.
        """
        found = []
        for path in self._files:
            with contextlib.closing(open_file(path, self._schema)) as file:
                found += [Range(str(path), *part) for part in file.parts(target_bytes)]
        return found

    def read(self, part: Range, start_row: int = 0) -> Generator[Batch, None, None]:
        """Yield the rows of a range from its row `start_row` on, in order."""
        path = remote_files.path(part.file)
        with contextlib.closing(open_file(path, self._schema)) as file:
            file.narrow(part.start, part.stop)
            for batch in file_rows(path, file, Pass(start_row), self.broken):
                if batch.rows:
                    yield batch

    def _guess(self, rows: int, read: int, size: int) -> None:
        if read:
            self._total = max(rows, rows * size // read)


class _First(NamedTuple):
    """The first rows of a file."""

    rows: int  # good ones
    ones: int  # of them, those with label 1
    read: int  # bytes
    problems: list[tuple[str, str]]  # of broken ones: place, what is wrong
    doubts: dict[str, str]  # see RowFile

    @property
    def is_empty(self) -> bool:
        """Whether the file has no row."""
        return not (self.rows or self.problems)


@dataclass
class Pass:
    """The progress of reading a file."""

    start: int  # the first wanted row
    rows: int = 0
    broken: int = 0
    read: int = 0  # bytes


def file_rows(path: Path, file: RowFile, pass_: Pass, broken: BrokenRows) -> Generator[Batch, None, None]:
    """Yield a file's rows after the skipped ones: one batch per piece, perhaps empty."""
    if broken.limit == 0 and not file.is_pipe:  # else skipped lines must be parsed, too
        pass_.rows = file.skip(pass_.start)
    line = file.first + pass_.rows
    parsed = (task() for task in file.pieces()) if file.is_pipe else read_ahead(file.pieces())
    with contextlib.closing(parsed) as pieces:
        for batch, problems, pass_.read in pieces:
            for row, problem in problems:
                broken.add(path, f"{file.unit} {line + row}", problem)
            pass_.broken += len(problems)
            line += batch.rows + len(problems)
            skipped = min(batch.rows, max(0, pass_.start - pass_.rows))
            pass_.rows += batch.rows
            yield batch.slice(skipped, batch.rows)


def empty_file(path: Path, schema: Schema) -> DataError:
    """Return the error for a file without rows."""
    return DataError(f"{path} is empty: it has no row of {schema.shown}")


def _check_magic(path: Path, kind: str, schema: Schema) -> None:
    """Raise DataError for a file that is not what its name says. TFRecord files have no magic bytes."""
    ending = path.suffix.lower()
    name = ending if ending in CODECS else kind
    if name not in _MAGIC or (kind == "tfrecord" and name == ".zst"):  # the latter is refused elsewhere
        return
    what, magics = _MAGIC[name]
    with reading(path), path.open("rb") as file:
        found = file.read(16)
    if not found:
        raise empty_file(path, schema)
    if name == "arrow" and found.startswith(_ARROW_STREAM):
        raise DataError(
            f"{path} has Arrow's streaming format, which must be read from its start; write it as a file, "
            "with pyarrow.ipc.new_file or pyarrow.feather.write_feather"
        )
    if not found.startswith(magics):
        raise DataError(f"{path} is not a {what} file, as its name says: it begins with {found!r:.40}")


def open_file(path: Path, schema: Schema) -> RowFile:
    """Open a file of rows by the kind that its name tells."""
    kind = file_kind(path) or "tabs"
    _check_magic(path, kind, schema)
    if kind == "parquet":
        from oe_runtime.data.arrow import ParquetRows

        return ParquetRows(path, schema)
    if kind == "arrow":
        from oe_runtime.data.arrow import ArrowRows

        return ArrowRows(path, schema)
    if kind == "tfrecord":
        from oe_runtime.data.tfrecord import RecordFile

        return RecordFile(path, schema)

    return TextFile(path, schema, commas=kind == "commas")


def file_kind(path: Path) -> str | None:
    """Return the kind of a file by its name; None if the name does not tell."""
    name = Path(path.name.lower())
    compressed = name.suffix in CODECS
    if compressed:
        name = Path(name.stem)
    elif not name.suffix:
        return None
    if ".tfrecord-" in name.name:  # train.tfrecord-00003-of-00010
        return "tfrecord"
    return _KINDS.get(name.suffix)


def _file_identity(path: Path) -> object:
    """Return what is the same for all names of a file, hard links included."""
    found = path.stat()
    return (found.st_dev, found.st_ino) if hasattr(found, "st_ino") else path.resolve()


def _evaluation_file(name: str) -> Path | None:
    path = remote_files.path(name)
    both = path / "train.csv", path / "eval.csv"
    return both[1] if all(file.is_file() for file in both) else None


def _root(name: str) -> Path:
    """Return the directory above all files of `name`: for a glob, the part before its first pattern."""
    path = remote_files.path(name)
    if path.is_dir():
        return path
    while glob.has_magic(str(path.parent)):
        path = path.parent
    return path.parent


def find_files(name: str) -> list[Path]:
    """Return the files of `name` (file, directory or glob), sorted. Raises DataError when there are none."""
    try:
        files = _find_files(name)
    except remote_files.InvalidUrl as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"cannot read {error.filename or name}: {error.strerror}") from error
    for path in files:
        if remote_files.is_remote(path) and file_kind(path) == "tfrecord":
            raise DataError(
                f"{path}: TFRecord files are read from local disks only; copy it to the workers, or store "
                "the rows as Parquet or text"
            )
    return files


def _find_files(name: str) -> list[Path]:
    path = remote_files.path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_")) and file_kind(p)
        )
        if not files:
            kinds = ", ".join([k for k in _KINDS if k] + [f"those with {', '.join(CODECS)}"])
            raise DataError(f"{name} is a directory without data files ({kinds})")
        return files
    if not remote_files.is_remote(path):
        files = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
    else:
        files = remote_files.match(str(path)) if glob.has_magic(name) else []
    if not files:
        what = "no file matches" if glob.has_magic(name) else "there is no file or directory"
        raise DataError(
            f"{what} {name}; --data takes a file, a directory or a glob of rows, or generate:ROWS"
        )
    return files
