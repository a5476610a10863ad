"""Clients of object stores: pyarrow.fs, obstore and s3fs against an S3 server on loopback (moto's).

Each contender does each job in a process of its own, in turns. The seconds include the server's, which is
slow and the same for all; the client's processor time does not. Contenders that are not installed are
left out; all of them: pip install moto flask flask-cors obstore s3fs
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reporting import RESULTS, header, table

HERE = Path(__file__).resolve().parent
SERVER = HERE.parent / "tests/oe_runtime/object_store.py"
BUCKET = "test-bucket"
LARGE, MIDDLE, SMALL, RANGES = 128 << 20, 16 << 20, 400, 200  # bytes; files of 4 KiB; ranges of 64 KiB
PART = 8 << 20
CONTENDERS = ("pyarrow", "obstore", "s3fs")


class Arrow:
    """pyarrow.fs.S3FileSystem, which the Parquet reader brings along."""

    def __init__(self) -> None:
        from pyarrow import fs

        self._fs = fs.S3FileSystem(
            endpoint_override=os.environ["AWS_ENDPOINT_URL"],
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=5),
        )

    def up(self, key: str, pieces: list[bytes]) -> None:
        """Write an object piece by piece."""
        with self._fs.open_output_stream(f"{BUCKET}/{key}") as stream:
            for piece in pieces:
                stream.write(piece)

    def down(self, key: str) -> int:
        """Read an object from front to end."""
        with self._fs.open_input_file(f"{BUCKET}/{key}") as file:
            starts = range(0, file.size(), PART)
            with ThreadPoolExecutor(4) as threads:
                return sum(threads.map(lambda start: len(file.read_at(PART, start)), starts))

    def ranges(self, key: str, starts: list[int]) -> int:
        """Read ranges of 64 KiB."""
        with self._fs.open_input_file(f"{BUCKET}/{key}") as file:
            return sum(len(file.read_at(65536, start)) for start in starts)


class Obstore:
    """obstore, a binding of Rust's object_store."""

    def __init__(self) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        self._store = S3Store(
            BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True}
        )

    def up(self, key: str, pieces: list[bytes]) -> None:
        """Write an object piece by piece."""
        self._obstore.put(self._store, key, iter(pieces), chunk_size=PART)

    def down(self, key: str) -> int:
        """Read an object from front to end."""
        size = self._obstore.head(self._store, key)["size"]

        def part(start: int) -> int:
            return len(self._obstore.get_range(self._store, key, start=start, end=min(size, start + PART)))

        with ThreadPoolExecutor(4) as threads:
            return sum(threads.map(part, range(0, size, PART)))

    def ranges(self, key: str, starts: list[int]) -> int:
        """Read ranges of 64 KiB."""
        return sum(
            len(self._obstore.get_range(self._store, key, start=start, length=65536)) for start in starts
        )


class S3fs:
    """s3fs, fsspec's file system on aiobotocore."""

    def __init__(self) -> None:
        import s3fs

        self._fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def up(self, key: str, pieces: list[bytes]) -> None:
        """Write an object piece by piece."""
        with self._fs.open(f"{BUCKET}/{key}", "wb", block_size=PART) as file:
            for piece in pieces:
                file.write(piece)

    def down(self, key: str) -> int:
        """Read an object from front to end."""
        size = self._fs.size(f"{BUCKET}/{key}")

        def part(start: int) -> int:
            return len(self._fs.cat_file(f"{BUCKET}/{key}", start=start, end=min(size, start + PART)))

        with ThreadPoolExecutor(4) as threads:
            return sum(threads.map(part, range(0, size, PART)))

    def ranges(self, key: str, starts: list[int]) -> int:
        """Read ranges of 64 KiB."""
        return sum(
            len(self._fs.cat_file(f"{BUCKET}/{key}", start=start, end=start + 65536)) for start in starts
        )


def _work(name: str, job: str) -> None:
    """Do one job and print its figures as JSON."""
    began, processor = time.perf_counter(), time.process_time()
    store = {"pyarrow": Arrow, "obstore": Obstore, "s3fs": S3fs}[name]()
    store.up("warm", [b"x"])
    imports = time.perf_counter() - began
    pieces = [os.urandom(PART)] * (LARGE // PART)
    if job == "down":
        store.up("large", pieces)
    elif job == "ranges":
        store.up("middle", pieces[: MIDDLE // PART])
    starts = [number * 65536 * 3 % (MIDDLE - 65536) for number in range(RANGES)]

    def small() -> int:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: store.up(f"small/{number}", [b"x" * 4096]), range(SMALL)))
        return SMALL

    jobs: dict[str, Callable[[], Any]] = {
        "up": lambda: store.up("large", pieces),
        "down": lambda: store.down("large"),
        "ranges": lambda: store.ranges("middle", starts),
        "small": small,
    }
    began, processor = time.perf_counter(), time.process_time()
    problem = ""
    try:
        jobs[job]()
    except Exception as error:  # what it says is a result
        problem = f"{type(error).__name__}: {error}"
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - began,
                "processor": time.process_time() - processor,
                "start": imports,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "problem": problem,
            }
        )
    )


def _run(name: str, job: str, *server_words: str) -> dict[str, Any]:
    server = subprocess.Popen(
        [sys.executable, str(SERVER), *server_words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout
    try:
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--work", name, job],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            return {"problem": done.stderr.strip().splitlines()[-1]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        server.stdin.close()
        server.wait()


def _installed() -> list[str]:
    return [name for name in CONTENDERS if importlib.util.find_spec(name)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="these jobs")
    parser.add_argument("--no-faults", dest="faults", action="store_false", help="leave out bad servers")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/object_stores.md")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return _work(*given.work)
    names = _installed()
    rows: list[list[str]] = []
    labels = {
        "up": f"{LARGE >> 20} MiB up, parts of {PART >> 20} MiB",
        "down": f"{LARGE >> 20} MiB down, 4 ranges at a time",
        "small": f"{SMALL} files of 4 KiB up, 8 at a time",
        "ranges": f"{RANGES} ranges of 64 KiB, one after the other",
    }
    for job, label in labels.items():
        if given.only is not None and job not in given.only:
            continue
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(given.repeat):
            for name in names:
                found[name].append(_run(name, job))
        for name in names:
            runs = found[name]
            if problem := "".join(one["problem"] for one in runs)[:200]:
                cells = [problem, "", ""]
            else:
                seconds, processor, peak = (
                    statistics.median(one[key] for one in runs) for key in ("seconds", "processor", "peak")
                )
                cells = [f"{seconds:.2f}", f"{processor:.2f}", f"{peak:.0f}"]
            rows.append([name, importlib.metadata.version(name), label, *cells])
    columns = ["client", "version", "job", "seconds", "client's processor seconds", "peak MiB"]
    page = header("Clients of object stores") + table(columns, rows)
    page += "".join(f"\n{name} is not installed.\n" for name in CONTENDERS if name not in names)
    if given.faults:
        rows = []
        for name in names:
            faults = [_run(name, "up", "--errors", "4"), _run(name, "down", "--stall", "9:20")]
            rows.append([name, *(one["problem"] or f"done in {one['seconds']:.1f} s" for one in faults)])
        columns = ["client", "each 4th request 503, up", "each 9th request stalls 20 s, down"]
        page += f"\n{table(columns, rows)}"
    print(page)
    if given.save:
        (RESULTS / "object_stores.md").write_text(page)
    return None


if __name__ == "__main__":
    main()
