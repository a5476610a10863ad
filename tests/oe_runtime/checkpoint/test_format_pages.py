"""The programs in the pages on formats read by hand what a client has written."""

import re
from pathlib import Path

import numpy as np
import pytest

from oe_runtime import Client, StorageSpec, TableSpec

PAGES = Path(__file__).parents[3] / "docs" / "design"


def run_program_of(page, **names):
    (program,) = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(program, page, "exec"), names)  # noqa: S102 - a page of ours
    return names


@pytest.fixture
def client(tmp_path):
    with pytest.warns(UserWarning, match="not persistent memory"):
        client = Client.in_process(StorageSpec("pmem_libpmem", tmp_path / "pool"))
    with client:
        yield client


def push(client, table, keys):
    pulled = client.pull([np.array(keys)], [(table, 0)])
    client.push(pulled, [np.ones((len(pulled.groups[0].rows), 4), np.float32)], learning_rate=0.1)


def test_pool_by_hand(client, tmp_path):
    table = client.create_table(TableSpec("C1", 4))
    push(client, table, [1, 2, 3])
    client.checkpoint(1, wait=True)
    push(client, table, [2, 5])
    client.erase(table, [3])
    client.checkpoint(2, wait=True)
    wanted = dict(zip([1, 2, 5], client.pull_rows(table, [1, 2, 5]), strict=True))
    push(client, table, [1, 9])  # of no checkpoint
    found = run_program_of("pool-format.md", directory=tmp_path / "pool")
    assert (found["checkpoint"], found["pushes"]) == (2, 2)
    assert sorted(found["table"]) == [1, 2, 5]
    for key, row in wanted.items():
        np.testing.assert_array_equal(found["table"][key], row)


def test_table_file_by_hand(client, tmp_path):
    table = client.create_table(TableSpec("C1", 4))
    push(client, table, [1, 2, 3])
    for name in ("full", "more"):
        (tmp_path / name).mkdir()
    client.save(tmp_path / "full")
    push(client, table, [3])
    client.erase(table, [1])
    client.save(tmp_path / "more", since=tmp_path / "full")
    full = run_program_of("checkpoint-format.md", file=tmp_path / "full" / "server-0-of-1.C1.oet")
    more = run_program_of("checkpoint-format.md", file=tmp_path / "more" / "server-0-of-1.C1.oet")
    assert (full["format_"], sorted(full["table"]), len(full["erased"])) == (1, [1, 2, 3], 0)
    assert (more["format_"], sorted(more["table"]), more["erased"].tolist()) == (2, [3], [1])
    np.testing.assert_array_equal(more["table"][3][:4], client.pull_rows(table, [3])[0])
