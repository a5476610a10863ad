"""Writes samples: `python write_samples.py DIRECTORY plain|policies`, with the runtime whose format they are.

"plain" has tables of float32; "policies" has what tables of other dtypes with admission and eviction keep.

Those that are committed are never written again: they are what later versions must go on reading. A new
format gets new samples.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from dataclasses import replace
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
# Rows are made at a key's third push, and at its second; they go when two pushes did not bring them, and when
# they are small.
POLICIES = (
    {
        "name": "counted",
        "dim": 2,
        "dtype": "float64",
        "optimizer": {"name": "adam"},
        "initializer": {"name": "uniform", "seed": 3, "minval": -0.5, "maxval": 0.5},
        "admission": {"name": "counter", "filter_freq": 3},
        "eviction": [
            {"name": "global_step", "steps_to_live": 2},
            {"name": "cap", "max_rows": 1000, "policy": "lfu"},
        ],
    },
    {
        "name": "bloom",
        "dim": 5,
        "dtype": "bfloat16",
        "optimizer": {"name": "adagrad"},
        "initializer": {"name": "uniform", "seed": 5, "minval": -0.5, "maxval": 0.5},
        "admission": {
            "name": "cbf",
            "filter_freq": 2,
            "max_element_size": 500,
            "false_positive_probability": 0.01,
        },
        "eviction": [{"name": "l2_weight", "threshold": 0.2}],
    },
)
ANY = [0, 1, -1, 2**63 - 1, -(2**63), 17, 4711]
KEYS = {"wide/emb": ANY, "known": [0, 1, 2, 3, 17, 48, 49], "counted": ANY, "bloom": ANY}
PARTS = {"plain": SPECS, "policies": POLICIES}


def push(client: Client, table: int, keys: np.ndarray) -> None:
    """Gradients that are fractions of 8, at a rate of 0.5."""
    dim, dtype = client.spec(table).dim, np.float64 if client.spec(table).dtype == "float64" else np.float32
    pulled = client.pull([keys], [(table, 0)])
    client.push(pulled, [(np.arange(len(keys) * dim, dtype=dtype).reshape(-1, dim) - 4) / 8], 0.5)


def rows_of(client: Client, specs: tuple[dict, ...]) -> dict[str, list[list[float]]]:
    """Of all keys."""
    return {
        spec["name"]: client.pull_rows(table, np.array(KEYS[spec["name"]], np.int64)).tolist()
        for table, spec in enumerate(specs)
    }


def kept(client: Client, specs: tuple[dict, ...]) -> dict[str, list[int]]:
    """Keys with a row."""
    return {spec["name"]: sorted(client.export_rows(t)[0].tolist()) for t, spec in enumerate(specs)}


def train(client: Client, specs: tuple[dict, ...]) -> None:
    """Three pushes to two tables."""
    for spec in specs:
        table = client.create_table(TableSpec.from_json(json.dumps(spec)))
        for step in range(3):
            push(client, table, np.array(KEYS[spec["name"]][: 5 + step], np.int64))
    client.evict()


def train_more(client: Client, times: int) -> None:
    """Pushes to two keys of each table."""
    for table in range(2):
        for _ in range(times):
            push(client, table, np.array(KEYS[client.spec(table).name][1:3], np.int64))
    client.evict()


def touch(client: Client) -> None:
    """A push of all keys: whoever was counted before gets its row."""
    for table in range(2):
        push(client, table, np.array(KEYS[client.spec(table).name], np.int64))


def main(directory: Path, part: str) -> None:
    """A checkpoint of two servers, an increment, a pool, a log; their rows, also after a push more."""
    specs = PARTS[part]
    directory.mkdir(parents=True)
    checkpoints = directory / "checkpoints"
    found: dict[str, dict] = {"rows": {}, "kept": {}, "next": {}}
    with Client.in_process(servers=2) as client:
        train(client, specs)

        def write(path: Path):
            (path / "dense.bin").write_bytes(bytes(range(64)))
            return {"tables": client.save(path, since=base)}

        base = None
        base = checkpoint.publish(checkpoints, 3, write)
        found["rows"]["3"], found["kept"]["3"] = rows_of(client, specs), kept(client, specs)
        train_more(client, 3)
        checkpoint.publish(checkpoints, 4, write, base=base)
        found["rows"]["4"], found["kept"]["4"] = rows_of(client, specs), kept(client, specs)
        touch(client)
        found["next"]["4"] = rows_of(client, specs)
    for kind, name, size in (("pmem_libpmem", "pool", 0), ("dram_ssd", "log", 4 << 20)):
        files = directory / name
        cache = 1 << 20 if kind == "dram_ssd" else 0
        storage = StorageSpec(kind, str(files), size, kept_checkpoints=2, cache_bytes=cache)
        files.mkdir()
        with Client.in_process(storage) as client:
            train(client, specs)
            assert rows_of(client, specs) == found["rows"]["3"]
            client.checkpoint(3, wait=True)
        with tarfile.open(directory / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(files, name)
        with Client.in_process(replace(storage, recover=True)) as client:
            for spec in specs:
                client.create_table(TableSpec.from_json(json.dumps(spec)))
            assert client.recover() == 3
            touch(client)
            found["next"]["3"] = rows_of(client, specs)
        shutil.rmtree(files)
    (directory / "rows.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
