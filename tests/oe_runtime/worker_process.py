"""One of several workers of a job, as a process: trains its share of fixed batches.

python worker_process.py ENDPOINTS RANK OF BEGIN END [SAVE]: batches BEGIN to END - 1, then the digest of all
rows on standard output; SAVE is a directory to save to after the last one. With BEGIN above 0, all workers
first restore from the directory in the environment variable RESTORE.
"""

from __future__ import annotations

import hashlib
import os
import sys

import numpy as np

from oe_runtime import Client, TableSpec, Worker

KEYS = np.arange(300, dtype=np.int64)
SPECS = (
    TableSpec("wide", 9, optimizer={"name": "adam"}),
    TableSpec("narrow", 1, optimizer={"name": "ftrl"}),
)


def share(batch: int, rank: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Ids, and gradients by dim, of a worker; now and then it has none."""
    random = np.random.default_rng(batch * 100 + rank)
    n = 0 if (batch + rank) % 5 == 4 else 200 + rank
    gradients = [random.normal(size=(n, dim)).astype(np.float32) for dim in (1, 9)]
    return random.integers(0, len(KEYS), n), gradients


def tables(client: Client) -> list[int]:
    """The tables' ids."""
    return [client.create_table(spec) for spec in SPECS]


def push(client: Client, ids: np.ndarray, gradients: list[np.ndarray]) -> None:
    """A step."""
    pulled = client.pull([ids], [(0, 0), (1, 0)])
    client.push(pulled, gradients, 0.05)


def rows(client: Client) -> np.ndarray:
    """All rows of both tables."""
    return np.concatenate([client.pull_rows(table, KEYS).ravel() for table in (0, 1)])


def main(endpoints: str, rank: str, of: str, begin: str, end: str, save: str = "") -> None:
    """See above."""
    with Client(endpoints.split(","), job="many", worker=Worker(int(rank), int(of), wait=120)) as client:
        tables(client)
        if int(begin):
            client.restore(os.environ["RESTORE"])
        for batch in range(int(begin), int(end)):
            push(client, *share(batch, int(rank)))
        if save:
            client.save(save)
        print(hashlib.sha256(rows(client).tobytes()).hexdigest(), flush=True)
        sys.stdin.read()  # until the test has seen all


if __name__ == "__main__":
    main(*sys.argv[1:])
