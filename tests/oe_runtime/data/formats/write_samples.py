"""Writes the samples beside it: `python write_samples.py DIRECTORY`, with the runtime whose format they show.

Those that are committed are never written again: they are what later versions must go on reading. A new
format gets new samples.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np

from oe_runtime import Client, StorageSpec, TableSpec, checkpoint

SPECS = (
    {
        "name": "wide/emb",
        "dim": 3,
        "optimizer": {"name": "adagrad"},
        "initializer": {"name": "uniform", "seed": 7, "minval": -0.5, "maxval": 0.5},
    },
    {
        "name": "known",
        "dim": 2,
        "index": "array",
        "input_dim": 50,
        "optimizer": {"name": "adam"},
        "initializer": {"name": "zeros"},
    },
)
KEYS = {"wide/emb": [0, 1, -1, 2**63 - 1, -(2**63), 17, 4711], "known": [0, 1, 2, 3, 17, 48, 49]}


def train(client: Client) -> dict[str, list[list[float]]]:
    """Three pushes to two tables, and the rows that they leave."""
    rows = {}
    for spec in SPECS:
        table = client.create_table(TableSpec.from_json(json.dumps(spec)))
        keys = np.array(KEYS[spec["name"]], np.int64)
        for step in range(3):
            pulled = client.pull([keys[: 5 + step]], [(table, 0)])
            gradients = np.arange((5 + step) * spec["dim"], dtype=np.float32).reshape(-1, spec["dim"])
            client.push(pulled, [(gradients - 4) / 8], 0.5)
        rows[spec["name"]] = client.pull_rows(table, keys).tolist()
    return rows


def main(directory: Path) -> None:
    """A checkpoint of two servers, an increment on it, a pool, and the rows that are in each."""
    directory.mkdir(parents=True)
    checkpoints = directory / "checkpoints"
    with Client.in_process(servers=2) as client:
        rows = train(client)

        def write(path: Path):
            (path / "dense.bin").write_bytes(bytes(range(64)))
            return {"tables": client.save(path, since=base)}

        base = None
        base = checkpoint.publish(checkpoints, 3, write)
        push_once_more(client)
        checkpoint.publish(checkpoints, 4, write, base=base)
        later = {
            spec["name"]: client.pull_rows(table, np.array(KEYS[spec["name"]], np.int64)).tolist()
            for table, spec in enumerate(SPECS)
        }
    (directory / "rows.json").write_text(json.dumps({"3": rows, "4": later}) + "\n")
    pool = directory / "pool"
    storage = StorageSpec("pmem_libpmem", str(pool), kept_checkpoints=2)
    pool.mkdir()
    with Client.in_process(storage) as client:
        assert train(client) == rows
        client.checkpoint(3, wait=True)
    with tarfile.open(directory / "pool.tar.xz", "w:xz") as archive:
        archive.add(pool, "pool")
    shutil.rmtree(pool)


def push_once_more(client: Client) -> None:
    """To two rows of each table."""
    for table, spec in enumerate(SPECS):
        pulled = client.pull([np.array(KEYS[spec["name"]][1:3], np.int64)], [(table, 0)])
        client.push(pulled, [np.ones((2, spec["dim"]), np.float32)], 0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
