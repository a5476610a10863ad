"""Ranges of the input for many workers: every row once an epoch, whoever is lost and whenever it is saved."""

import gzip
import hashlib
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from server_processes import Servers

from oe_runtime.data import DataError, Split, open_source, training_batches
from oe_runtime.data.batch import concatenate
from oe_runtime.data.criteo import COLUMNS
from oe_runtime.data.files import DataFiles
from oe_runtime.data.generate import BLOCK_ROWS, Generator, tables
from oe_runtime.data.shared_queue import QueueRestored, SharedWorkQueue
from oe_runtime.data.work_queue import Range, WorkQueue
from oe_runtime.shared_values import SharedValues

EXCERPT = Path(__file__).with_name("criteo_200.tsv")
RANGES = [Range("a.tsv", 0, 100), Range("a.tsv", 100, 180), Range("b.gz", 0, 50)]


def test_ranges_are_given_out_once_an_epoch() -> None:
    queue = WorkQueue(RANGES, epochs=2)
    works = []
    while work := queue.take("one"):
        works.append(work)
        queue.finish("one", work)
    assert [work.range for work in works] == RANGES * 2
    assert [work.epoch for work in works] == [0, 0, 0, 1, 1, 1]
    assert queue.finished


def test_a_seed_shuffles_each_epoch_anew() -> None:
    ranges = [Range("a.tsv", start, start + 1) for start in range(50)]
    orders = []
    for _ in range(2):
        queue = WorkQueue(ranges, epochs=2, seed=7)
        orders.append([queue.take("one").range for _ in range(100)])  # type: ignore[union-attr]
    assert orders[0] == orders[1]
    first, second = orders[0][:50], orders[0][50:]
    assert sorted(first) == sorted(second) == ranges
    assert first != second
    assert first != ranges


def test_what_a_lost_worker_had_comes_back_from_its_last_report() -> None:
    queue = WorkQueue(RANGES)
    lost, kept = queue.take("lost"), queue.take("kept")
    assert lost is not None
    assert kept is not None
    queue.report("lost", lost, 30)
    assert queue.lost("lost") == 1
    assert queue.lost("lost") == 0
    again = queue.take("kept")
    assert again == lost._replace(done=30)
    with pytest.raises(DataError, match="worker lost does not hold range 0"):
        queue.finish("lost", lost)
    for work in (again, kept, queue.take("kept")):
        assert work is not None
        queue.finish("kept", work)
    assert queue.take("kept") is None
    assert queue.finished


def test_a_saved_queue_goes_on_with_other_workers() -> None:
    queue = WorkQueue(RANGES, epochs=2, seed=1)
    first, second = queue.take("one"), queue.take("two")
    assert first is not None
    assert second is not None
    queue.finish("one", first)
    queue.report("two", second, 5)
    state = json.loads(json.dumps(queue.save()))
    other = WorkQueue(RANGES, epochs=2, seed=1)
    other.restore(state)
    rest = []
    while work := other.take("three"):
        rest.append(work)
        other.finish("three", work)
    assert rest[0] == second._replace(done=5)
    assert Counter([first.range, *(work.range for work in rest)]) == dict.fromkeys(RANGES, 2)
    with pytest.raises(DataError, match="the saved work queue is of other data"):
        WorkQueue(RANGES[:2], epochs=2, seed=1).restore(state)
    with pytest.raises(DataError, match="nothing to read"):
        WorkQueue([])


def test_a_saved_queue_goes_on_for_more_epochs() -> None:
    queue = WorkQueue(RANGES, epochs=1, seed=1)
    while work := queue.take("one"):
        queue.finish("one", work)
    longer = WorkQueue(RANGES, epochs=3, seed=1)
    longer.restore(queue.save())
    rest = []
    while work := longer.take("two"):
        rest.append(work)
        longer.finish("two", work)
    assert Counter(work.range for work in rest) == dict.fromkeys(RANGES, 2)
    assert {work.epoch for work in rest} == {1, 2}
    assert longer.finished
    shorter = WorkQueue(RANGES, epochs=1, seed=1)
    shorter.restore(longer.save())
    assert shorter.take("three") is None
    assert shorter.finished


def test_a_queue_that_an_earlier_version_saved_goes_on() -> None:
    text = json.dumps([RANGES, 2, 1])  # it had the epochs in its digest
    old = {"ranges": hashlib.sha256(text.encode()).hexdigest(), "taken": 1, "open": [], "reports": 3}
    queue = WorkQueue(RANGES, epochs=2, seed=1)
    queue.restore(old)
    assert queue.reports == 3
    with pytest.raises(DataError, match="and the same epochs, if an earlier version wrote it"):
        WorkQueue(RANGES, epochs=3, seed=1).restore(old)


def lines_of(name: str, count: int) -> bytes:
    lines = EXCERPT.read_bytes().splitlines()[:count]
    if name == "rows.csv":
        table = [",".join(COLUMNS), *(line.decode().replace("\t", ",") for line in lines)]
        return ("\ufeff" + "".join(line + "\r\n" for line in table)).encode()
    return b"\n".join(lines)  # no end of the last line


@pytest.mark.parametrize(
    ("name", "rows", "target"),
    [
        ("rows.tsv", 3, 1),  # a range a byte, most of them without a line
        ("rows.csv", 3, 1),
        ("rows.tsv", 40, 242),
        ("rows.tsv", 200, 7777),
        ("rows.csv", 200, 7777),
        ("rows.tsv", 200, 1 << 20),
        ("rows.tsv.gz", 200, 7777),
    ],
)
def test_ranges_share_all_lines_out(tmp_path: Path, name: str, rows: int, target: int) -> None:
    path = tmp_path / name
    text = lines_of(name, rows)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    source = DataFiles(str(path))
    ranges = source.ranges(target)
    assert (ranges[0].start, ranges[-1].stop) == (0, path.stat().st_size)
    assert len(ranges) == (1 if path.suffix == ".gz" else -(-len(text) // target))
    check_ranges(source, ranges, rows)


def check_ranges(source: DataFiles | Generator, ranges: list[Range], rows: int) -> None:
    whole = concatenate(list(source.blocks()))
    assert whole.rows == rows
    parts = [list(source.read(part)) for part in ranges]
    np.testing.assert_array_equal(concatenate([b for part in parts for b in part]).ids, whole.ids)
    for part, batches in zip(ranges, parts, strict=True):
        if batches:
            ids = concatenate(batches).ids
            half = len(ids) // 2
            np.testing.assert_array_equal(concatenate(list(source.read(part, half))).ids, ids[half:])
            assert list(source.read(part, len(ids))) == []


def test_ranges_shorter_than_their_lines(tmp_path: Path) -> None:
    lines = [
        line.replace(b"\t68fd1e64\t", b"\t" + b"x" * 5000 + b"\t")
        for line in EXCERPT.read_bytes().splitlines()
    ]
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    source = DataFiles(str(path))
    check_ranges(source, source.ranges(900), 200)


def test_ranges_of_row_groups(tmp_path: Path) -> None:
    generator = Generator(1000, 1)
    (batch,) = tables(generator)
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "a.parquet", row_group_size=150)
    source = DataFiles(str(tmp_path))
    each = source.ranges(1)
    assert [(part.start, part.stop) for part in each][:2] == [(0, 150), (150, 300)]
    assert len(each) == 7
    check_ranges(source, each, 1000)
    check_ranges(
        source, source.ranges(pq.ParquetFile(tmp_path / "a.parquet").metadata.serialized_size * 20), 1000
    )
    assert source.ranges() == [Range(str(tmp_path / "a.parquet"), 0, 1000)]


def test_ranges_of_generated_rows() -> None:
    generator = Generator(BLOCK_ROWS + 5000, 1)
    ranges = generator.ranges(20000)
    assert [part.stop for part in ranges] == [20000, BLOCK_ROWS + 5000]
    check_ranges(generator, ranges, BLOCK_ROWS + 5000)


def test_messages_of_a_range_name_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"\n".join(EXCERPT.read_bytes().splitlines()[:20]) + b"\nbroken\n")
    source = DataFiles(str(path))
    first, second = source.ranges(path.stat().st_size // 2 + 1)
    assert sum(batch.rows for batch in source.read(first)) > 5
    with pytest.raises(DataError, match=rf"rows\.tsv after byte {second.start}, line \d+: found 1 columns"):
        list(source.read(second))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_synchronous_workers_have_the_batches_of_one(workers: int) -> None:
    source, split = open_source(str(EXCERPT)), Split(0.1)
    whole = list(training_batches(source, split, 49))
    assert [batch.rows for batch in whole] == [49, 49, 49, 33]
    for batch in whole:
        parts = [batch.part(rank, workers) for rank in range(workers)]
        assert max(p.rows for p in parts) - min(p.rows for p in parts) <= 1
        np.testing.assert_array_equal(concatenate(parts).ids, batch.ids)
    with pytest.raises(ValueError, match="worker 2 of 2"):
        whole[0].part(2, 2)


WORKER = """
import sys, time
import numpy as np
from oe_runtime.data.files import DataFiles
from oe_runtime.data.shared_queue import SharedWorkQueue
from oe_runtime.shared_values import SharedValues

endpoints, data, log, hang = sys.argv[1:]
source = DataFiles(data)
values = SharedValues(endpoints.split(","), job="train")
queue = SharedWorkQueue(values, source.ranges(20000), epochs=2, seed=3)
with open(log, "a") as out:
    while work := queue.take(0.05):
        done = work.done
        for batch in source.read(work.range, done):
            for start in range(0, batch.rows, 50):
                part = batch.slice(start, start + 50)
                numbers = np.rint(np.expm1(part.dense[:, 0].astype(float))).astype(int)
                out.writelines(f"{work.epoch} {number}\\n" for number in numbers)
                out.flush()
                done += part.rows
                queue.report(work, done)
                if hang == "yes":
                    print("hanging", flush=True)
                    time.sleep(600)
        queue.finish(work)
values.close()
"""


@pytest.fixture
def endpoints(tmp_path: Path) -> Iterator[list[str]]:
    """Two servers, of which the first has the queue."""
    servers = Servers(tmp_path / "servers", 2)
    try:
        yield servers.endpoints
    finally:
        servers.end()


@pytest.mark.process
def test_four_processes_of_which_one_is_killed(tmp_path: Path, endpoints: list[str]) -> None:
    data = tmp_path / "rows.tsv"
    fields = [line.split(b"\t") for line in EXCERPT.read_bytes().splitlines()]
    numbered = (b"\t".join([f[0], b"%d" % i, *f[2:]]) for i, f in enumerate(fields * 10))
    data.write_bytes(b"".join(line + b"\n" for line in numbered))
    ranges = DataFiles(str(data)).ranges(20000)
    values = SharedValues(endpoints, job="train")
    queue = SharedWorkQueue(values, ranges, epochs=2, seed=3)
    queue.save()
    command = [sys.executable, "-c", WORKER, ",".join(endpoints), str(data), str(tmp_path / "log")]
    with subprocess.Popen([*command, "yes"], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"hanging\n"
        workers = [subprocess.Popen([*command, "no"]) for _ in range(3)]
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    seen = Counter(tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines())
    assert seen == {(epoch, row): 1 for epoch in (0, 1) for row in range(2000)}
    assert queue.take() is None
    state = queue.save()
    assert state["open"] == []
    values.close()
    values = SharedValues(endpoints, job="another")
    queue = SharedWorkQueue(values, ranges, epochs=2, seed=3)
    queue.restore(state)
    assert queue.take() is None
    values.close()


@pytest.mark.process
def test_a_shared_queue_takes_back_what_a_closed_worker_had(endpoints: list[str]) -> None:
    ends = [SharedValues(endpoints) for _ in range(2)]
    one, two = (SharedWorkQueue(values, RANGES) for values in ends)
    had = one.take()
    assert had is not None
    one.report(had, 7)
    assert [two.take(), two.take()] != [None, None]
    ends[0].close()
    ends[0].close()
    assert two.take() == had._replace(done=7)
    assert two.take() is None  # all the others are its own
    ends[1].close()


@pytest.mark.process
def test_a_restored_queue_refuses_workers_that_have_not_followed(endpoints: list[str]) -> None:
    ends = [SharedValues(endpoints) for _ in range(2)]
    one, two = (SharedWorkQueue(values, RANGES) for values in ends)
    one.restore(None)
    two.follow()
    had = two.take()
    assert had is not None
    one.restore(None, target={"path": "checkpoint"}, stop=None)
    with pytest.raises(QueueRestored):
        two.report(had, 1)
    two.follow()
    assert two.take() == had
    assert ends[1].object("queue")["target"] == {"path": "checkpoint"}
    for values in ends:
        values.close()
