"""Keys a second of pull, push and a whole step, over loopback and in process.

    python benchmarks/engine_loopback.py [--dims 9 64] [--servers 1] [--steps 30] [--tls off on]
        [--by-key 1000000] [--precisions 1000000] [--save]

A batch is 4096 examples of 26 fields with skewed ids (each field has its own range of keys in one hash
table, as many as Criteo's). Keys count ids, duplicates included, because that is what a trainer has. Servers
are real processes on this machine and share its cores with the client. With --tls off, rows and gradients
lie in memory that both see, and in a second run they are sent.

With --by-key, rows with Adam's state are read and written as they are, as under a cache of another library:
so many, in random order, all in one call and 50,000 per call. The last line is what the memory allows: the
same bytes, copied one after the other by a thread per core.

With --precisions, a table with rows, state and gradients in bfloat16 is compared with one in float32, step by
step in turns: Adagrad, so many rows, uniform ids without repetition. The ratios are medians of steps.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from processes import server
from reporting import RESULTS, header, table

import oe_runtime as oe
from oe_runtime.data.criteo import CARDINALITIES

BATCH = 4096


def batches(count: int, seed: int) -> list[list[NDArray[np.int64]]]:
    """`count` batches of 26 arrays of ids; a few ids of each field take most of the draws."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        fields = []
        for field, size in enumerate(CARDINALITIES):
            ids = (size * rng.random(BATCH) ** 6).astype(np.int64)
            fields.append(ids + (field << 40))
        made.append(fields)
    return made


@contextmanager
def running(servers: int, tls: str, token: str) -> Iterator[list[str]]:
    """Real servers on free ports; their endpoints."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started = []
        for index in range(servers):
            flags = ("--index", str(index), "--count", str(servers), "--tls", tls)
            started.append(stack.enter_context(server("dram", Path(folder), *flags, token=token)))
        yield [one.endpoint for one in started]


def measure(client: oe.Client, dim: int, steps: int) -> tuple[float, float, float, float]:
    """Seconds of pull, push, both, a step; and unique keys over ids."""
    table = client.create_table(oe.TableSpec(f"dim{dim}", dim))
    lookups = [(table, field) for field in range(len(CARDINALITIES))]
    rng = np.random.default_rng(1)
    pulls, pushes, unique = [], [], []
    gradient = rng.normal(size=(BATCH * len(CARDINALITIES), dim)).astype(np.float32)
    for step, ids in enumerate(batches(steps + 5, 0)):
        start = time.perf_counter()
        pulled = client.pull(ids, lookups)
        middle = time.perf_counter()
        client.push(pulled, [gradient], 0.01)
        end = time.perf_counter()
        if step >= 5:
            pulls.append(middle - start)
            pushes.append(end - middle)
            unique.append(len(pulled.groups[0].rows) / len(gradient))
    pull, push = float(np.median(pulls)), float(np.median(pushes))
    return pull, push, pull + push, float(np.mean(unique))


def measure_by_key(client: oe.Client, dim: int, count: int, per_call: int) -> tuple[float, float]:
    """Rows per second that are found, and that are put, with Adam's state; medians of five."""
    table = client.create_table(oe.TableSpec(f"rows{dim}.{per_call}", dim, optimizer={"name": "adam"}))
    values = client.new_array(table, min(per_call, count), 3 * dim)
    values[:] = np.random.default_rng(0).random(values.shape, np.float32)
    rows, state = values[:, :dim], values[:, dim:]
    keys = np.arange(count) * 7919
    order = np.random.default_rng(1).permutation(keys)
    seconds: list[tuple[float, float]] = []
    for _ in range(6):
        calls = [order[begin : begin + per_call] for begin in range(0, count, per_call)]
        start = time.perf_counter()
        for some in calls:
            client.assign(table, some, rows[: len(some)], state=state[: len(some)])
        middle = time.perf_counter()
        for some in calls:
            found = client.read_rows(table, some, out=rows[: len(some)], state=state[: len(some)]).found
        seconds.append((time.perf_counter() - middle, middle - start))
        assert found.all()
        order = np.random.default_rng(len(seconds)).permutation(keys)
    client.drop_table(table)
    find, put = np.median(seconds[1:], axis=0)
    return count / float(find), count / float(put)


def measure_precisions(client: oe.Client, dim: int, count: int, steps: int) -> list[str]:
    """Millions of keys per second of pull in float32 and bfloat16, their ratio, and the same of push."""
    half = {"dtype": "bfloat16", "state_dtype": "bfloat16", "exchange_dtype": "bfloat16"}
    kinds: tuple[dict[str, str], ...] = ({}, half)
    tables = [
        client.create_table(oe.TableSpec(f"two{dim}.{number}", dim, optimizer={"name": "adagrad"}, **kind))
        for number, kind in enumerate(kinds)
    ]
    rng = np.random.default_rng(1)
    per_call = min(count, BATCH * len(CARDINALITIES))
    gradient = rng.normal(size=(per_call, dim)).astype(np.float32)

    def run(table: int, keys: NDArray[np.int64]) -> tuple[float, float]:
        start = time.perf_counter()
        pulled = client.pull([keys], [(table, 0)])
        middle = time.perf_counter()
        client.push(pulled, [gradient[: len(keys)]], 0.01)
        return middle - start, time.perf_counter() - middle

    keys = np.arange(count) * 7919
    for begin in range(0, count, per_call):
        for one in tables:
            run(one, keys[begin : begin + per_call])
    seconds = np.empty((steps, 2, 2))  # by step, table, pull or push
    for step in range(steps):
        some = rng.choice(keys, per_call, replace=False)
        for number in (0, 1) if step % 2 else (1, 0):
            seconds[step, number] = run(tables[number], some)
    for one in tables:
        client.drop_table(one)
    cells = []
    for of in range(2):
        speeds = per_call / np.median(seconds[..., of], axis=0) / 1e6
        ratio = float(np.median(seconds[:, 0, of] / seconds[:, 1, of]))
        cells += [*(f"{speed:.2f}" for speed in speeds), f"{ratio:.2f}"]
    return cells


def copied(count: int, row_bytes: int) -> float:
    """Rows per second of `row_bytes` that a thread per core copies."""
    cores = len(os.sched_getaffinity(0))
    source = np.ones((cores, count * row_bytes // cores), np.uint8)
    target = np.zeros_like(source)
    seconds = []
    with ThreadPoolExecutor(cores) as threads:
        for _ in range(5):
            start = time.perf_counter()
            list(threads.map(np.copyto, target, source))
            seconds.append(time.perf_counter() - start)
    return count / float(np.median(seconds))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--servers", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tls", choices=("off", "on"), nargs="+", default=["off"])
    parser.add_argument("--by-key", type=int, default=0, metavar="ROWS", help="measure rows by key, too")
    parser.add_argument("--precisions", type=int, default=0, metavar="ROWS", help="compare bfloat16, too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/engine_loopback.md")
    options = parser.parse_args()

    keys = BATCH * len(CARDINALITIES)
    rows: list[list[str]] = []
    by_key: list[list[str]] = []
    precisions: list[list[str]] = []
    token = secrets.token_hex()

    def add(where: str, client: oe.Client) -> None:
        for dim in options.dims:
            pull, push, step, unique = measure(client, dim, options.steps)
            speeds = [f"{keys / seconds / 1e6:.2f}" for seconds in (pull, push, step)]
            rows.append([where, str(dim), f"{unique * 100:.0f} %", *speeds])
            if options.precisions:
                cells = measure_precisions(client, dim, options.precisions, options.steps)
                precisions.append([where, str(dim), *cells])
            for per_call in (50_000, options.by_key) if options.by_key else ():
                read = measure_by_key(client, dim, options.by_key, per_call)
                by_key.append([where, str(dim), f"{per_call:,}", *(f"{speed / 1e6:.2f}" for speed in read)])

    with oe.Client.in_process() as client:
        add("in process", client)
    for servers in options.servers:
        what = f"loopback, {servers} server{'s' if servers > 1 else ''}"
        for tls in options.tls:
            for share in (True, False) if tls == "off" else (False,):
                by = "TLS" if tls == "on" else "shared memory" if share else "sockets"
                with (
                    running(servers, tls, token) as endpoints,
                    oe.Client(endpoints, token=token, tls=tls, share_memory=share) as client,
                ):
                    add(f"{what}, {by}", client)
    columns = ["where", "dim", "unique", "pull", "push", "step"]
    page = header("The engine over loopback and in process") + "Mkeys/s.\n\n" + table(columns, rows)
    if options.by_key:
        for dim in options.dims:
            speed = f"{copied(options.by_key, 3 * 4 * dim) / 1e6:.2f}"
            by_key.append([f"copied, {3 * 4 * dim} bytes per row", str(dim), "", speed, speed])
        columns = ["where", "dim", "keys per call", "found", "put"]
        page += "\nRows by key with Adam's state, Mrows/s.\n\n" + table(columns, by_key)
    if options.precisions:
        columns = ["where", "dim"]
        for what in ("pull", "push"):
            columns += [f"{what}, float32", "bfloat16", "ratio"]
        page += f"\n{options.precisions:,} rows, Adagrad, uniform ids, in turns; Mkeys/s.\n\n"
        page += table(columns, precisions)
    print(page)
    if options.save:
        (RESULTS / "engine_loopback.md").write_text(page)


if __name__ == "__main__":
    main()
