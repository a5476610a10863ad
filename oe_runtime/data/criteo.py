"""Files in Criteo's shape as one table: text, Parquet or TFRecord; a file, a directory or a glob, also mixed.

Files are read in the order of their names, so the row order, and with it the hold-out and a resumed position,
is the same each time. What a file is, its name says.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from oe_runtime.data.errors import DataError
from oe_runtime.data.rows import BrokenRows, RowFile, read_ahead
from oe_runtime.data.schema import Batch, field_cardinalities
from oe_runtime.data.work_queue import Range

RANGE_BYTES = 64 << 20

_COMPRESSED = (".gz", ".zst")
_KINDS = {
    ".tsv": "tabs",
    ".txt": "tabs",
    "": "tabs",  # day_0.gz
    ".csv": "commas",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


class CriteoFiles:
    """The rows of some Criteo files as one table; ids are hashed into `max_cardinality`-capped fields.

    Broken rows up to the limit of `broken` are left out and have no number: row n is the nth that is read.
    """

    def __init__(self, name: str, max_cardinality: int = 0, broken: BrokenRows | None = None) -> None:
        self._name = name
        self._files = find_files(name)
        self._cardinalities = field_cardinalities(max_cardinality)
        self.broken = broken or BrokenRows()
        # Known once a pass has reached the end; before that a guess from the share of bytes read.
        self._total: int | None = None

    def describe(self) -> str:
        """How the data was named on the command line."""
        return self._name

    def check(self) -> None:
        """Read the first rows, so that a wrong file is refused before anything starts."""
        with contextlib.closing(self.blocks()) as blocks:
            next(blocks, None)

    def total_rows(self) -> int | None:
        """Rows of one epoch: exact after a whole pass, else judged from the bytes read; None before any."""
        return self._total

    def blocks(self, start_row: int = 0) -> Generator[Batch, None, None]:
        """All rows from `start_row` on, in order. DataError names the file and line of a broken row."""
        sizes = [f.stat().st_size for f in self._files]
        before = 0  # rows in the files that were passed
        self.broken.start()
        for number, path in enumerate(self._files):
            pass_ = _Pass(max(0, start_row - before))
            with contextlib.closing(_open(path, self._cardinalities)) as file:
                for batch in self._rows(path, file, pass_):
                    self._guess(before + pass_.rows, sum(sizes[:number]) + pass_.read, sum(sizes))
                    if batch.rows:
                        yield batch
            if pass_.rows == 0 and pass_.broken == 0:
                raise DataError(f"{path} is empty: it has no row of label, I1 … I13 and C1 … C26")
            before += pass_.rows
        if before == 0:
            raise DataError(f"{self._name} has no row that is not broken")
        self._total = before

    def ranges(self, target_bytes: int = RANGE_BYTES) -> list[Range]:
        """Parts of about `target_bytes` for a work queue: of plain text bytes, of Parquet whole row groups.

        Other files, which can only be read from their begin, are a part each.
        """
        found = []
        for path in self._files:
            with contextlib.closing(_open(path, self._cardinalities)) as file:
                found += [Range(str(path), *part) for part in file.parts(target_bytes)]
        return found

    def read(self, part: Range, start_row: int = 0) -> Generator[Batch, None, None]:
        """The rows of a range from its row `start_row` on, in order."""
        path = Path(part.file)
        with contextlib.closing(_open(path, self._cardinalities)) as file:
            file.narrow(part.start, part.stop)
            for batch in self._rows(path, file, _Pass(start_row)):
                if batch.rows:
                    yield batch

    def _rows(self, path: Path, file: RowFile, pass_: _Pass) -> Generator[Batch, None, None]:
        """What follows the first rows, which are passed over; a batch for each piece, which may be empty."""
        if self.broken.limit == 0:  # else which of them are rows must be seen
            pass_.rows = file.skip(pass_.start)
        line = file.first + pass_.rows
        with contextlib.closing(read_ahead(file.pieces())) as pieces:
            for batch, problems, pass_.read in pieces:
                for row, problem in problems:
                    self.broken.add(path, f"{file.unit} {line + row}", problem)
                pass_.broken += len(problems)
                line += batch.rows + len(problems)
                skipped = min(batch.rows, max(0, pass_.start - pass_.rows))
                pass_.rows += batch.rows
                yield batch.slice(skipped, batch.rows)

    def _guess(self, rows: int, read: int, size: int) -> None:
        if read:
            self._total = max(rows, rows * size // read)


@dataclass
class _Pass:
    """How far a file was read."""

    start: int  # the first row that is wanted
    rows: int = 0
    broken: int = 0
    read: int = 0  # bytes


def _open(path: Path, cardinalities: tuple[int, ...]) -> RowFile:
    kind = file_kind(path) or "tabs"
    if kind == "parquet":
        from oe_runtime.data.parquet import ParquetRows

        return ParquetRows(path, cardinalities)
    if kind == "tfrecord":
        from oe_runtime.data.tfrecord import RecordFile

        return RecordFile(path, cardinalities)
    from oe_runtime.data.text import TextFile

    return TextFile(path, cardinalities, commas=kind == "commas")


def file_kind(path: Path) -> str | None:
    """What a file is by its name; None if the name does not say."""
    compressed = path.suffix in _COMPRESSED
    name = Path(path.stem) if compressed else path
    if not name.suffix and not compressed:
        return None
    if ".tfrecord-" in name.name:  # train.tfrecord-00003-of-00010
        return "tfrecord"
    return _KINDS.get(name.suffix)


def find_files(name: str) -> list[Path]:
    """The files that `name` (file, directory or glob) stands for, sorted; DataError when there are none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_")) and file_kind(p)
        )
        if not files:
            kinds = ", ".join([k for k in _KINDS if k] + [f"those with {', '.join(_COMPRESSED)}"])
            raise DataError(f"{name} is a directory without data files ({kinds})")
        return files
    files = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
    if not files:
        what = "no file matches" if glob.has_magic(name) else "there is no file or directory"
        raise DataError(
            f"{what} {name}; --data takes a file, a directory or a glob of Criteo rows, or generate:ROWS"
        )
    return files
