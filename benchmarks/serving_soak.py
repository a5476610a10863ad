"""Serving under a steady load, beside training: memory, replicas that come and go, and many connections.

    python benchmarks/serving_soak.py [--minutes 30] [--requests 100000] [--connections 10000]

DeepFM trains on rows that arrive, a batch and an incremental checkpoint per second. Two replicas follow its
checkpoints, a third asks its server for rows. First all three answer a steady load for so many minutes. Then
one of the first two after the other gets SIGTERM and starts again, until so many requests were sent one
behind the other over 16 connections, which take another replica when theirs ends. At last one replica has so
many connections, with 500 requests per second over all. A request is lost if it was sent and got no answer,
or another status than 200.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))

import numpy as np
from processes import server
from reporting import MISSED, RESULTS, header, table
from vocabularies import FIELDS

BATCH = 256  # rows per second that training gets
RATE = 50  # requests per second to each replica of the steady load
CONNECTIONS = 16
RESTARTS = 4  # at least
CROWD_RATE = 500  # requests per second over many connections
ROUNDS = 3  # of a request over each of them
LEAST = 3  # ids of the smallest of Criteo's fields
FLAT = 0.01  # most growth of memory in the second half
OUT_OF_SERVICE = 0.2  # seconds from SIGTERM until a balancer sends a replica no more connections


class Ends(Exception):
    """The connection was refused, or ended before a request was sent."""


@dataclass
class Replica:
    """A process that answers, on the same port each time it starts."""

    name: str
    arguments: list[str]
    place: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        ready = self.place / f"{self.name.replace(' ', '-')}.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "oe_runtime.serve", *self.arguments, "--name", "ctr"]
        command += ["--port", str(self.port), "--ready-file", str(ready), "--exit-with-parent"]
        log = ready.with_suffix(".log")
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=self.place
            )
        while not ready.exists():
            if self.process.poll() is not None:
                raise SystemExit(f"error: {self.name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.port = json.loads(ready.read_text())["port"]

    def stop(self) -> None:
        """End it by SIGTERM; raises if it does not end in order."""
        if not self.process:
            return
        self.process.terminate()
        if status := self.process.wait(60):
            raise SystemExit(f"error: {self.name} ended with status {status}")


@dataclass
class Count:
    """What became of requests."""

    answered: int = 0
    refused: int = 0  # connections
    lost: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def percentiles(self) -> str:
        """p50 and p99 in milliseconds."""
        p50, p99 = np.percentile(self.seconds or [np.nan], [50, 99]) * 1000
        return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection. Ends: it was refused."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError as error:
        raise Ends(f"a connection was refused: {error}") from error
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, count: Count) -> bool:
    """Send a request and count its answer; whether the connection goes on."""
    if reader.at_eof():
        raise Ends("a connection ended before a request was sent")
    began = time.monotonic()
    head = f"POST /v1/models/ctr:predict HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length: ")[2].partition("\r\n")[0])
        said = await reader.readexactly(length)
    except (OSError, EOFError) as error:
        count.lost.append(f"{type(error).__name__}: {error}")
        return False
    if answer.split()[1] != "200":
        count.lost.append(f"{answer.splitlines()[0]}: {said.decode()[:200]}")
        return False
    count.answered += 1
    count.seconds.append(time.monotonic() - began)
    return "connection: close" not in answer


async def steadily(replica: Replica, sent: list[bytes], until: float, period: float, count: Count) -> None:
    """Ask over one connection, at most once per period."""
    await asyncio.sleep(random.random() * period)
    bodies = itertools.cycle(sent)
    while time.monotonic() < until:
        try:
            async with connected(replica.port) as (reader, writer):
                goes_on = True
                while goes_on and time.monotonic() < until:
                    began = time.monotonic()
                    goes_on = await ask(reader, writer, next(bodies), count)
                    await asyncio.sleep(max(0.0, period - (time.monotonic() - began)))
        except Ends as error:
            count.lost.append(str(error))
            await asyncio.sleep(period)


async def soak(replicas: Sequence[Replica], sent: list[bytes], seconds: float) -> Count:
    """The steady load."""
    count, until, each = Count(), time.monotonic() + seconds, 8
    await asyncio.gather(
        *(steadily(one, sent, until, each / RATE, count) for one in replicas for _ in range(each))
    )
    return count


async def rolling(replicas: Sequence[Replica], sent: list[bytes], requests: int) -> tuple[Count, int]:
    """Ask while one replica after the other ends and starts again; also how often they did."""
    count, serving, restarts, ends = Count(), list(replicas), 0, asyncio.Event()

    def enough() -> bool:
        return count.answered + len(count.lost) >= requests and restarts >= RESTARTS

    async def client(number: int) -> None:
        bodies = itertools.cycle(sent[number:] + sent[:number])
        while not enough():
            one = random.choice(serving)
            try:
                async with connected(one.port) as (reader, writer):
                    while one in serving and await ask(reader, writer, next(bodies), count):
                        if enough():
                            return
            except Ends:
                count.refused += 1
                await asyncio.sleep(0.01)

    async def restart() -> None:
        nonlocal restarts
        for one in itertools.cycle(replicas):
            if ends.is_set():
                return
            ending = asyncio.create_task(asyncio.to_thread(one.stop))
            await asyncio.sleep(OUT_OF_SERVICE)
            serving.remove(one)
            await ending
            await asyncio.to_thread(one.start)
            serving.append(one)
            restarts += 1
            await asyncio.sleep(1)

    restarting = asyncio.create_task(restart())
    await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
    ends.set()
    await restarting
    return count, restarts


async def crowd(replica: Replica, sent: list[bytes], connections: int) -> Count:
    """Many connections, all open at once."""
    count, opening, all_open = Count(), asyncio.Semaphore(200), asyncio.Event()
    waiting, period = 0, connections / CROWD_RATE

    async def one(number: int) -> None:
        nonlocal waiting
        async with AsyncExitStack() as stack:
            try:
                async with opening:
                    reader, writer = await stack.enter_async_context(connected(replica.port))
            finally:
                waiting += 1
                if waiting == connections:
                    all_open.set()
            await all_open.wait()
            for _ in range(ROUNDS):
                await asyncio.sleep(random.random() * period)
                if not await ask(reader, writer, sent[number % len(sent)], count):
                    return

    for ended in await asyncio.gather(
        *(one(number) for number in range(connections)), return_exceptions=True
    ):
        if ended is not None:
            count.lost.append(repr(ended))
    return count


def anonymous(pid: int) -> int:
    """Resident bytes of a process without files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


@contextmanager
def sampled(pids: dict[str, int], seconds: float) -> Iterator[dict[str, list[int]]]:
    """Note the memory of the processes meanwhile."""
    found: dict[str, list[int]] = {name: [] for name in pids}
    ended = threading.Event()

    def note() -> None:
        while not ended.wait(max(0.2, seconds / 200)):
            for name, pid in pids.items():
                found[name].append(anonymous(pid))

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@contextmanager
def training(place: Path, endpoint: str, rows: int, dim: int) -> Iterator[int]:
    """A process that trains on what arrives; its pid, once it has published."""
    command = [sys.executable, "-m", "oe_runtime.train", "--data", "-", "--servers", endpoint]
    command += ["--dim", str(dim), "--batch-size", str(BATCH), "--max-cardinality", str(rows)]
    command += ["--run-dir", str(place / "run"), "--no-eval", "--checkpoint-steps", "1"]
    command += ["--checkpoint-increments", "60", "--keep-checkpoints", "2"]
    lines = [_criteo(random.Random(number)) for number in range(16)]
    log = place / "train.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
    assert process.stdin
    ended = threading.Event()

    def feed() -> None:
        assert process.stdin
        for part in itertools.cycle(lines):
            with suppress(BrokenPipeError):
                process.stdin.write(part)
                process.stdin.flush()
            if ended.wait(1):
                return

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        while len(list((place / "run" / "checkpoints").glob("step-*"))) < 2:
            if process.poll() is not None:
                raise SystemExit(f"error: training ended: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid
        if process.poll() is not None:
            raise SystemExit(f"error: training ended: {log.read_text()[-2000:]}")
    finally:
        ended.set()
        thread.join()
        process.kill()
        process.wait()


def _criteo(chance: random.Random) -> bytes:
    """A batch in Criteo's form."""
    return b"".join(
        "\t".join(
            [
                str(chance.randrange(2)),
                *(str(chance.randrange(100)) for _ in range(13)),
                *(f"{int(chance.paretovariate(1)) % 2**32:08x}" for _ in range(FIELDS)),
            ]
        ).encode()
        + b"\n"
        for _ in range(BATCH)
    )


def bodies(port: int) -> list[bytes]:
    """Sixteen requests of one example, of the inputs that the model says it has."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/ctr/metadata") as answer:
        signatures = json.load(answer)["metadata"]["signature_def"]["signature_def"]
    chance, found = random.Random(0), []
    for _ in range(16):
        example = {}
        for name, facts in signatures["serving_default"]["inputs"].items():
            count = int(np.prod([int(dim["size"]) for dim in facts["tensor_shape"]["dim"][1:]]))
            example[name] = [chance.randrange(LEAST) for _ in range(count)]
        found.append(json.dumps({"instances": [example]}).encode())
    return found


def main() -> int:
    """Measure and print the table; MISSED where a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/serving_soak.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=30, help="of the steady load")
    parser.add_argument("--requests", type=int, default=100_000, help="while replicas come and go")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--rows", type=int, default=40_000, help="a field")
    parser.add_argument("--out", type=Path, help="the file of the table")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < options.connections + 100:
        raise SystemExit(f"error: {options.connections} connections need ulimit -Hn above it; it is {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    seconds = 60 * options.minutes
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows_server = stack.enter_context(server("dram", place))
        trainer = stack.enter_context(training(place, rows_server.endpoint, options.rows, options.dim))
        run = str(place / "run")
        replicas = [Replica(f"follower {number}", [run], place) for number in (1, 2)]
        replicas.append(Replica("rows at the server", [run, "--servers", rows_server.endpoint], place))
        for one in replicas:
            stack.callback(one.stop)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Replica.start, replicas))
        sent = bodies(replicas[0].port)
        pids = {one.name: one.process.pid for one in replicas if one.process}
        pids |= {"the server": rows_server.pid, "training": trainer}
        with sampled(pids, seconds) as memory:
            steady = asyncio.run(soak(replicas, sent, seconds))
        print(f"steady: {steady.answered} answered, {len(steady.lost)} lost", file=sys.stderr, flush=True)
        moved, restarts = asyncio.run(rolling(replicas[:2], sent, options.requests))
        print(f"rolling: {moved.answered} answered, {len(moved.lost)} lost", file=sys.stderr, flush=True)
        pid = {"follower 1": replicas[0].process.pid} if replicas[0].process else {}
        with sampled(pid, 30) as crowded:
            many = asyncio.run(crowd(replicas[0], sent, options.connections))
    return report(options, steady, memory, moved, restarts, many, max(crowded["follower 1"]))


def report(
    options: argparse.Namespace,
    steady: Count,
    memory: dict[str, list[int]],
    moved: Count,
    restarts: int,
    many: Count,
    crowded: int,
) -> int:
    """Print and keep the table."""
    lines, missed = [], False
    for name, found in memory.items():
        tenth, half, last = (float(np.median(part)) for part in _parts(found))
        grown = last / half - 1
        missed |= grown > FLAT
        shown = " / ".join(f"{size / 2**20:.1f}" for size in (tenth, half, last))
        lines.append([f"memory of {name}, MiB", f"{shown}, {grown:+.1%} in the second half"])
    for what, count in (
        (f"steady load, {RATE} per second and replica", steady),
        (f"{restarts} times a replica ended and started again", moved),
        (f"{options.connections:,} connections, {CROWD_RATE} requests per second", many),
    ):
        missed |= bool(count.lost)
        shown = f"{count.answered:,} answered, {len(count.lost)} lost; {count.percentiles()}"
        lines.append([what, shown])
    lines.append(["memory of a replica with those connections, MiB", f"{crowded / 2**20:.1f}"])
    text = header("Serving: half an hour, replicas that come and go, many connections")
    text += f"""\
DeepFM of dim {options.dim} over {FIELDS} fields, {BATCH} rows and an incremental checkpoint per second,
requests of one example. {options.minutes:g} minutes of steady load; memory is what is resident without files,
the median after a tenth, at the half and at the end. Clients, training and all replicas share the machine, so
latencies are those of a loaded one. Asked: no request lost, memory flat (at most {FLAT:.0%} more in the
second half).

"""
    text += table(["what", "found"], lines)
    for why in sorted({*steady.lost, *moved.lost, *many.lost})[:5]:
        text += f"\nLost: {why}\n"
    (options.out or RESULTS / "serving_soak.md").write_text(text)
    print(text)
    return MISSED if missed else 0


def _parts(found: Sequence[int]) -> Iterator[Sequence[int]]:
    """What was noted around a tenth, the half and the end."""
    window = max(1, len(found) // 20)
    for share in (0.1, 0.5, 1.0):
        end = max(window, round(share * len(found)))
        yield found[end - window : end]


if __name__ == "__main__":
    sys.exit(main())
