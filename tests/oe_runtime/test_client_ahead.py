"""Rows pulled ahead and brought up to date: what is pulled again, and that nothing is missed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from oe_runtime import Client, TableSpec
from oe_runtime.errors import CheckpointError, KeyRangeError, SpecError

DIMS = (4, 4, 1)
LOOKUPS = [(0, 0), (1, 1), (1, 0), (2, 0), (2, 2)]


def _client(servers=3, **options):
    client = Client.in_process(servers=servers)
    for number, dim in enumerate(DIMS):
        client.create_table(TableSpec(f"t{number}", dim, **options))
    return client


def _batch(seed, size=60, keys=150):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, keys, size) for _ in range(3)]


def _push(client, pulled, lookups=LOOKUPS):
    client.push(pulled, [np.ones((len(g.inverse), g.dim), np.float32) for g in pulled.groups], 0.1)


def _pulled_keys(client):
    return sum(server["pulls"]["keys"] for server in client.stats()["servers"])


def _rows(pulled):
    return [np.array(group.rows) for group in pulled.groups]


def _assert_fresh(client, pulled, ids, lookups=LOOKUPS):
    for ours, theirs in zip(_rows(pulled), _rows(client.pull(ids, lookups)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("servers", [1, 3])
def test_only_rows_of_both_batches_are_pulled_again(servers):
    client = _client(servers)
    one, two = _batch(1), _batch(2)
    before = client.pull(one, LOOKUPS[:4])  # table 2 with fewer ids than in the second batch
    pulled = client.plan(two, LOOKUPS)
    client.refresh(pulled)
    client.follow(pulled, before)
    _push(client, before)
    asked = _pulled_keys(client)
    client.refresh(pulled)
    of = lambda batch, *which: set(np.concatenate([batch[i] for i in which]))  # noqa: E731
    both = [of(one, 0) & of(two, 0), of(one, 0, 1) & of(two, 0, 1), of(one, 0) & of(two, 0, 2)]
    assert _pulled_keys(client) - asked == sum(len(keys) for keys in both)
    _assert_fresh(client, pulled, two)
    asked = _pulled_keys(client)
    client.refresh(pulled)
    assert _pulled_keys(client) == asked


def test_everything_is_pulled_again_after_other_changes(tmp_path):
    client = _client()
    one, two = _batch(1), _batch(2)
    client.save(tmp_path)

    def restore():
        client.restore(tmp_path)

    def push_twice():
        _push(client, client.pull(one, LOOKUPS))

    for change in (restore, push_twice):
        before, pulled = client.pull(one, LOOKUPS), client.plan(two, LOOKUPS)
        client.refresh(pulled)
        client.follow(pulled, before)
        _push(client, before)
        change()
        client.refresh(pulled)
        _assert_fresh(client, pulled, two)


def test_rows_that_a_push_evicted():
    client = _client(1, eviction=[{"name": "cap", "max_rows": 50, "policy": "lru"}])
    for seed in range(6):
        ids = _batch(seed)
        before, pulled = client.pull(ids, LOOKUPS), client.plan(_batch(seed + 1), LOOKUPS)
        client.refresh(pulled)
        client.follow(pulled, before)
        _push(client, before)
        client.refresh(pulled)
        _assert_fresh(client, pulled, _batch(seed + 1))


def test_staleness_leaves_rows_that_lack_so_many_pushes():
    client = _client()
    one, two = _batch(1), _batch(1)
    before, pulled = client.pull(one, LOOKUPS), client.pull(two, LOOKUPS)
    old = _rows(pulled)
    _push(client, before)
    client.refresh(pulled, staleness=1)
    for a, b in zip(_rows(pulled), old, strict=True):
        np.testing.assert_array_equal(a, b)
    _push(client, before)
    client.refresh(pulled, staleness=1)
    _assert_fresh(client, pulled, two)


def test_a_later_push_is_waited_for_and_its_error_is_raised():
    client = _client()
    pulled = client.pull(_batch(1), LOOKUPS)
    ones = [np.ones((len(g.inverse), g.dim), np.float32) for g in pulled.groups]
    with ThreadPoolExecutor(1) as thread:
        client.push_later(thread, pulled, ones, 0.1)
        versions = [t["version"] for s in client.stats()["servers"] for t in s["tables"].values()]
        assert set(versions) == {1}
        client.push_later(thread, pulled, ones[:1], 0.1)
        with pytest.raises(SpecError, match="1 gradients for 2 groups"):
            client.push_later(thread, pulled, ones, 0.1)
        client.settle()
        client.push_later(thread, pulled, ones[:1], 0.1)
    client.close()


def test_a_later_save_has_no_later_push_and_its_error_is_its_own(tmp_path):
    client = _client()
    pulled = client.pull(_batch(1), LOOKUPS)
    begin = threading.Event()

    def work(save):
        assert begin.wait(60)
        return save(tmp_path)

    with ThreadPoolExecutor(3) as threads:
        saved = client.save_later(threads, work)
        ahead = threads.submit(client.pull, _batch(2), LOOKUPS)  # the first to wait does not wait for others
        wait([ahead], 0.05)  # it pulls, if nothing holds it
        pushed = threads.submit(_push, client, pulled)
        wait([pushed], 0.05)
        begin.set()
        pushed.result()
        assert {entry["version"] for entry in saved.result()} == {0}
        failed = client.save_later(threads, lambda save: save(tmp_path / "none"))
        assert {entry["version"] for entry in client.save(tmp_path)} == {1}
        with pytest.raises(CheckpointError, match="cannot save tables"):
            failed.result()
    client.close()


def test_plans_are_checked():
    client = Client.in_process()
    client.create_table(TableSpec("words", 4, index="array", input_dim=10))
    with pytest.raises(KeyRangeError, match="'words': key 10"):
        client.plan([np.array([10])], [(0, 0)])
    other = _client()
    with pytest.raises(SpecError, match="another client"):
        other.refresh(client.plan([np.array([1])], [(0, 0)]))
