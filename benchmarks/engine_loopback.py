"""Keys a second of pull, push and a whole step, over loopback and in process.

    python benchmarks/engine_loopback.py [--dims 9 64] [--servers 1] [--steps 30] [--tls off on]

A batch is 4096 examples of 26 fields with skewed ids (each field has its own range of keys in one hash
table, as many as Criteo's). Keys count ids, duplicates included, because that is what a trainer has. Servers
are real processes on this machine and share its cores with the client. With --tls off, rows and gradients
lie in memory that both see, and in a second run they are sent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import oe_runtime as oe

CARDINALITIES = (
    *(1396, 553, 2594031, 698469, 290, 23, 12048, 608, 3, 65156, 5309, 2186509, 3128, 26, 12750, 1537323),
    *(10, 5002, 2118, 4, 1902327, 17, 15, 135790, 94, 84305),
)
BATCH = 4096
TOKEN = "a token for the servers of a benchmark"  # noqa: S105


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
def running(servers: int, tls: str) -> Iterator[list[str]]:
    """Real servers on free ports; their endpoints."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text(TOKEN)
        token.chmod(0o600)
        processes = []
        try:
            for index in range(servers):
                command = [sys.executable, "-m", "oe_runtime.server", "--exit-with-parent"]
                command += ["--index", str(index), "--count", str(servers)]
                command += ["--ready-file", f"{folder}/{index}", "--token-file", str(token), "--tls", tls]
                processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))
            endpoints = []
            for index in range(servers):
                while not Path(folder, str(index)).exists():
                    time.sleep(0.01)
                endpoints.append(f"127.0.0.1:{json.loads(Path(folder, str(index)).read_text())['port']}")
            yield endpoints
        finally:
            for process in processes:
                process.terminate()
                process.wait()


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[9, 64])
    parser.add_argument("--servers", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tls", choices=("off", "on"), nargs="+", default=["off"])
    options = parser.parse_args()

    keys = BATCH * len(CARDINALITIES)
    table = Table("where", "dim", "unique", "pull", "push", "step", title=f"Mkeys/s, {os.cpu_count()} cores")
    for column in table.columns[1:]:
        column.justify = "right"

    def add(where: str, client: oe.Client) -> None:
        for dim in options.dims:
            pull, push, step, unique = measure(client, dim, options.steps)
            speeds = [f"{keys / seconds / 1e6:.2f}" for seconds in (pull, push, step)]
            table.add_row(where, str(dim), f"{unique:.0%}", *speeds)

    with oe.Client.in_process() as client:
        add("in process", client)
    for servers in options.servers:
        what = f"loopback, {servers} server{'s' if servers > 1 else ''}"
        for tls in options.tls:
            for share in (True, False) if tls == "off" else (False,):
                by = "TLS" if tls == "on" else "shared memory" if share else "sockets"
                with (
                    running(servers, tls) as endpoints,
                    oe.Client(endpoints, token=TOKEN, tls=tls, share_memory=share) as client,
                ):
                    add(f"{what}, {by}", client)
    Console().print(table)


if __name__ == "__main__":
    main()
