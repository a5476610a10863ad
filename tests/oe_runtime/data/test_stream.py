"""Rows that arrive while they are read: places, order, files that came too late or were changed."""

import io
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oe_runtime.data import open_source, row_schema
from oe_runtime.data.files import Pass, file_rows
from oe_runtime.data.row_schema import Category, Schema
from oe_runtime.data.rows import BrokenRows
from oe_runtime.data.stream import Arrived, GrowingDirectory, Place, StandardInput
from oe_runtime.data.text import TextFile
from oe_runtime.errors import DataError

SCHEMA = row_schema.load('{"label": "bought", "numbers": {"nth": "none"}, "categories": {"site": 9}}')


def put(directory: Path, name: str, rows: range, *, header: bool = True) -> None:
    """Write rows, numbered in their column `nth`, and rename the complete file to its name."""
    lines = ["bought,nth,site"] * header + [f"{row % 2},{row},s{row % 5}" for row in rows]
    partial = directory / f".{name}"
    partial.write_text("\n".join(lines) + "\n")
    partial.rename(directory / name)


def numbers(arrived: list[Arrived]) -> list[int]:
    return [int(row) for one in arrived for row in one.batch.dense[:, 0]]


def present(stream: Any, size: int = 10, place: Place | None = None) -> list[Arrived]:
    """The batches that can be had without waiting."""
    found = []
    for arrived in stream.batches(size, place or Place()):
        if arrived is None:
            break
        found.append(arrived)
    return found


def follow(directory: Path, **more: Any) -> GrowingDirectory:
    found = open_source(str(directory), schema=SCHEMA, follow=True, **more)
    assert isinstance(found, GrowingDirectory)
    return found


def test_rows_come_in_order_and_wait_for_whole_batches(tmp_path: Path) -> None:
    for name in (".late.csv", "_notes", "later.csv.tmp"):
        (tmp_path / name).write_text("not rows")
    (tmp_path / "staging").mkdir()
    put(tmp_path, "b.csv", range(7, 25))
    put(tmp_path, "a.csv", range(7))
    stream = follow(tmp_path)
    stream.check()
    batches = stream.batches(10, Place())
    first = [next(batches), next(batches)]
    assert [one.place.rows for one in first if one] == [10, 20]
    assert next(batches) is None
    put(tmp_path, "c.csv", range(25, 33))
    (tmp_path / "_END").touch()
    rest = [one for one in batches if one]
    found = [one for one in first if one] + rest
    assert numbers(found) == list(range(33))
    assert [one.batch.rows for one in found] == [10, 10, 10, 3]
    assert (found[2].place.file, found[2].place.row) == ("c.csv", 5)


@pytest.mark.parametrize("removes", [False, True])
def test_any_place_goes_on_with_the_next_row(tmp_path: Path, removes: bool) -> None:
    """An interruption at any batch, any number of times, with files that arrive meanwhile."""
    rng = random.Random(3)  # noqa: S311
    edges = [0, *sorted(rng.sample(range(1, 300), 8)), 300]
    files = [(f"{n:03}.csv", range(a, b)) for n, (a, b) in enumerate(itertools.pairwise(edges))]
    place, trained = Place(), []
    while files or not (tmp_path / "_END").exists():
        if files:
            put(tmp_path, *files.pop(0))
        else:
            (tmp_path / "_END").touch()
        found = present(follow(tmp_path), 7, place)
        kept = found[: rng.randrange(len(found) + 1)] if files else found
        trained += numbers(kept)
        place = Place.from_json(kept[-1].place.to_json()) if kept else place
        if removes:
            for path in tmp_path.glob("*.csv"):
                if path.name < place.file:
                    path.unlink()
    assert trained == list(range(300))
    assert place.rows == 300
    assert ("000.csv" in place.read) is not removes  # what is gone does not fill up the checkpoints


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("1,5,s\n")


def truncate(path: Path) -> None:
    os.truncate(path, 30)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (append, "a.csv was changed after it was read: it had"),
        (truncate, "a.csv was changed after it was read: it had"),
        (rewrite, "a.csv was changed after it was read: it was written again"),
        (lambda path: put(path.parent, "0.csv", range(3)), "0.csv came after b.csv was read"),
        (lambda path: (path.parent / "b.csv").unlink(), "b.csv is gone"),
    ],
)
def test_what_breaks_the_order_is_named(tmp_path: Path, change: Callable[[Path], Any], said: str) -> None:
    put(tmp_path, "a.csv", range(20))
    put(tmp_path, "b.csv", range(20, 40))
    place = present(follow(tmp_path))[-1].place
    assert place.rows == 40
    assert present(follow(tmp_path), place=place) == []
    change(tmp_path / "a.csv")
    with pytest.raises(DataError, match=said):
        present(follow(tmp_path), place=place)


def test_a_change_while_waiting_is_seen(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", range(10))
    batches = follow(tmp_path).batches(10, Place())
    assert next(batches) is not None
    assert next(batches) is None
    append(tmp_path / "a.csv")
    with pytest.raises(DataError, match="was changed after it was read"):
        next(batches)


def test_broken_rows_are_allowed_in_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "a.csv", range(5))
    (tmp_path / "b.csv").write_text("bought,nth,site\n7,0,s\n")
    (tmp_path / "c.csv").write_text("bought,nth,site\n1,5,s\n1,x,s\n0,6,s\n1,7,s\n")
    (tmp_path / "_END").touch()
    with pytest.raises(DataError, match=r"b\.csv line 2: the label is '7'"):
        present(follow(tmp_path), 4)
    found = present(follow(tmp_path, max_bad_rows=1), 6)
    assert numbers(found) == list(range(8))
    assert numbers(present(follow(tmp_path, max_bad_rows=1), 6, found[0].place)) == [6, 7]
    assert "c.csv line 3" in capsys.readouterr().err


def test_a_file_without_rows_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Spark writes one for each partition without rows."""
    put(tmp_path, "a.csv", range(5))
    (tmp_path / "b.csv").touch()
    put(tmp_path, "c.csv", range(5, 6))
    found = present(follow(tmp_path), 3)
    assert numbers(found) == list(range(6))
    assert capsys.readouterr().err == f"warning: {tmp_path / 'b.csv'} has no rows\n"
    assert numbers(present(follow(tmp_path), 3, found[0].place)) == [3, 4, 5]


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no directory"):
        follow(tmp_path / "none")
    put(tmp_path, "a.csv", range(5))
    with pytest.raises(DataError, match=r"a\.csv is in --data too"):
        follow(tmp_path, eval_data=str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"generate:9 are rows that are all there"):
        open_source("generate:9", follow=True)
    (tmp_path / "read.me").touch()
    with pytest.raises(DataError, match="its name does not tell the format"):
        present(follow(tmp_path))


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes, size: int) -> StandardInput:
    """Standard input with this content, which comes in pieces of `size` bytes."""
    file = io.BytesIO(content)
    monkeypatch.setattr("oe_runtime.data.stream.os.read", lambda *_: file.read(size))
    return StandardInput(schema=SCHEMA)


def whole(stream: StandardInput, place: Place) -> list[Arrived]:
    return [one for one in stream.batches(4, place) if one is not None]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_standard_input_is_skipped_up_to_the_place(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    content = b"bought,nth,site\n" + b"".join(b"%d,%d,s\r\n" % (row % 2, row) for row in range(30))
    found = whole(pipe(monkeypatch, content.rstrip(), size), Place())
    assert numbers(found) == list(range(30))
    for one in found:
        place = Place.from_json(one.place.to_json())
        assert numbers(whole(pipe(monkeypatch, content, size), place)) == list(range(place.rows, 30))
    stream = pipe(monkeypatch, content[:100], size)
    with pytest.raises(DataError, match=r"ended after \d+ rows, and the checkpoint counts 30"):
        whole(stream, found[-1].place)
    with pytest.raises(DataError, match="cannot be read again"):
        whole(stream, Place())


def test_a_broken_line_of_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="standard input line 3: nth is 'x'"):
        whole(pipe(monkeypatch, b"bought,nth,site\n1,1,s\n0,x,s\n", 5), Place())
    with pytest.raises(DataError, match="the header of standard input"):
        whole(pipe(monkeypatch, b"bought,nth,place\n1,1,s\n", 5), Place())
    with pytest.raises(DataError, match="standard input line 2"):
        whole(pipe(monkeypatch, b"bought,nth,site\n" + b"1" * (9 << 20), 1 << 20), Place())


class Pieces:
    """A pipe that gives one piece for each read."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, b""]

    def read(self, most: int) -> bytes:
        return self._pieces.pop(0) if len(self._pieces) > 1 else b""

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        pass


COLUMNS = Schema("y", categories=(Category("u"),))


def test_a_piece_of_a_pipe_may_end_within_a_value() -> None:
    file = TextFile(Path("-"), COLUMNS, commas=True, pipe=Pieces(b"y,u\n1,7.0\n0,7.", b"5\n"))
    assert "values such as 7.0" in file.doubts()["u"]


def test_a_bad_row_among_the_skipped_ones_of_a_pipe_is_refused() -> None:
    """A run with --max-bad-rows did not count it, so one that goes on without must not either."""
    file = TextFile(Path("-"), COLUMNS, commas=True, pipe=Pieces(b"y,u\n1,a\nx,b\n0,c\n1,d\n"))
    with pytest.raises(DataError, match="line 3"):
        list(file_rows(Path("-"), file, Pass(2), BrokenRows(0)))
