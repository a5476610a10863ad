"""Checkpoints and pools that earlier versions wrote are read by this one (data/formats/write_samples.py)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, StorageSpec, TableSpec, checkpoint

FORMATS = Path(__file__).parents[1] / "data" / "formats"
ANY = [0, 1, -1, 2**63 - 1, -(2**63), 17, 4711]
KEYS = {"wide/emb": ANY, "known": [0, 1, 2, 3, 17, 48, 49], "counted": ANY, "bloom": ANY}


def create(client: Client, sample: Path) -> dict[str, int]:
    found = checkpoint.latest(sample / "checkpoints")
    assert found is not None
    specs = {entry["table"]: TableSpec.from_json(entry["spec"]) for entry in found.manifest["tables"]}
    return {name: client.create_table(spec) for name, spec in specs.items()}


def check(client: Client, tables: dict[str, int], sample: Path, step: int) -> None:
    """Rows and keys are those of the sample; where policies have counted, a push more makes the same rows."""
    said = json.loads((sample / "rows.json").read_text())
    kept = said["kept"][str(step)] if "kept" in said else KEYS
    equal(client, tables, said.get("rows", said)[str(step)])
    for name, table in tables.items():
        assert set(client.export_rows(table)[0]) == set(kept[name])
    if "next" not in said:
        return
    for name, table in tables.items():
        keys, dim = np.array(KEYS[name], np.int64), client.spec(table).dim
        dtype = np.float64 if client.spec(table).dtype == "float64" else np.float32
        pulled = client.pull([keys], [(table, 0)])
        client.push(pulled, [(np.arange(len(keys) * dim, dtype=dtype).reshape(-1, dim) - 4) / 8], 0.5)
    # What a push makes of the rows may differ in rounding; that it makes some is what was counted before.
    equal(client, tables, said["next"][str(step)], atol=0.02)


def equal(
    client: Client, tables: dict[str, int], wanted: dict[str, list[list[float]]], atol: float = 0
) -> None:
    assert set(tables) == set(wanted) <= set(KEYS)
    for name, rows in wanted.items():
        found = client.pull_rows(tables[name], np.array(KEYS[name], np.int64))
        np.testing.assert_allclose(found, np.array(rows, found.dtype), rtol=0, atol=atol)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "steps"), [("table-1-pool-1", [3]), ("table-2", [3, 4]), ("policies-1", [3, 4])]
)
def test_checkpoints_of_an_earlier_version(name, steps, servers):
    sample = FORMATS / name
    paths = checkpoint.published(sample / "checkpoints")
    assert [checkpoint.verify(path).step for path in paths] == steps
    for step, path in zip(steps, paths, strict=True):
        with Client.in_process(servers=servers) as client:
            tables = create(client, sample)
            client.restore(*checkpoint.chain(path))
            check(client, tables, sample, step)


@pytest.mark.parametrize("name", ["table-1-pool-1", "policies-1"])
@pytest.mark.parametrize(
    ("kind", "files"), [("pmem_libpmem", "pool"), ("dram_pmem", "pool"), ("dram_ssd", "log")]
)
def test_a_pool_of_an_earlier_version(tmp_path, kind, files, name):
    sample = FORMATS / name
    with tarfile.open(sample / f"{files}.tar.xz") as archive:
        archive.extractall(tmp_path)  # noqa: S202 - our own; Python 3.11.2 has no filters
    cache = 0 if kind == "pmem_libpmem" else 1 << 20
    storage = StorageSpec(kind, str(tmp_path / files), recover=True, cache_bytes=cache)
    with Client.in_process(storage) as client:
        tables = create(client, sample)
        assert client.checkpoints() == [3]
        assert client.recover() == 3
        check(client, tables, sample, 3)
