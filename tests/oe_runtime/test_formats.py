"""Checkpoints and pools that earlier versions wrote are read by this one (data/formats/write_samples.py)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, StorageSpec, TableSpec, checkpoint

FORMATS = Path(__file__).parent / "data" / "formats"
KEYS = {"wide/emb": [0, 1, -1, 2**63 - 1, -(2**63), 17, 4711], "known": [0, 1, 2, 3, 17, 48, 49]}


def create(client: Client, sample: Path) -> dict[str, int]:
    found = checkpoint.latest(sample / "checkpoints")
    assert found is not None
    specs = {entry["table"]: TableSpec.from_json(entry["spec"]) for entry in found.manifest["tables"]}
    return {name: client.create_table(spec) for name, spec in specs.items()}


def check(client: Client, tables: dict[str, int], sample: Path, step: int) -> None:
    wanted = json.loads((sample / "rows.json").read_text())[str(step)]
    assert set(tables) == set(wanted) == set(KEYS)
    for name, rows in wanted.items():
        keys = np.array(KEYS[name], np.int64)
        np.testing.assert_array_equal(client.pull_rows(tables[name], keys), np.array(rows, np.float32))
        assert set(client.export_rows(tables[name])[0]) == set(keys)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(("name", "steps"), [("table-1-pool-1", [3]), ("table-2", [3, 4])])
def test_checkpoints_of_an_earlier_version(name, steps, servers):
    sample = FORMATS / name
    paths = checkpoint.published(sample / "checkpoints")
    assert [checkpoint.verify(path).step for path in paths] == steps
    with Client.in_process(servers=servers) as client:
        tables = create(client, sample)
        for step, path in zip(steps, paths, strict=True):
            client.restore(*checkpoint.chain(path))
            check(client, tables, sample, step)


def test_a_pool_of_an_earlier_version(tmp_path):
    sample = FORMATS / "table-1-pool-1"
    with tarfile.open(sample / "pool.tar.xz") as archive:
        archive.extractall(tmp_path)  # noqa: S202 - our own; Python 3.11.2 has no filters
    storage = StorageSpec("pmem_libpmem", str(tmp_path / "pool"), recover=True)
    with Client.in_process(storage) as client:
        tables = create(client, sample)
        assert client.checkpoints() == [3]
        assert client.recover() == 3
        check(client, tables, sample, 3)
