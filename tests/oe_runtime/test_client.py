"""The client's own promises, on tables in this process."""

from __future__ import annotations

import gc
import re
import subprocess
import sys

import numpy as np
import pytest

from oe_runtime import (
    Client,
    GradientError,
    KeyRangeError,
    SpecError,
    SpecMismatch,
    StorageError,
    StorageSpec,
    TableSpec,
    _core,
)

SGD = {"name": "sgd"}
ZEROS = {"name": "zeros"}


def train(client: Client, seed: int = 0, steps: int = 20) -> list[np.ndarray]:
    """Many pushes over tables of every kind; all that was pulled, by lookup."""
    tables = [
        client.create_table(TableSpec("wide", 9, optimizer={"name": "adam"})),
        client.create_table(TableSpec("linear", 1, optimizer={"name": "ftrl"})),
        client.create_table(
            TableSpec("words", 9, "array", 500, initializer={"name": "normal", "stddev": 0.1, "seed": 3})
        ),
        client.create_table(TableSpec("deep", 16, optimizer={"name": "sgd", "momentum": 0.9})),
    ]
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(steps):
        ids = [
            rng.integers(-(2**63), 2**63 - 1, 40).repeat(3),
            rng.integers(0, 500, (30, 4)),
            rng.integers(0, 50, 77),
        ]
        # "wide" is looked up with two arrays, whose keys overlap those of neither table beside it.
        lookups = [(tables[0], 1), (tables[1], 1), (tables[2], 1), (tables[0], 2), (tables[3], 0)]
        pulled = client.pull(ids, lookups)
        gradients = []
        for group in pulled.groups:
            seen.append(group.rows[group.inverse])
            gradients.append(rng.normal(size=(len(group.inverse), group.dim)).astype(np.float32))
        client.push(pulled, gradients, 0.05)
    return seen


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_import_does_not_import_tensorflow():
    code = (
        "import sys, oe_runtime; sys.exit(any(m in sys.modules for m in ('tensorflow', 'keras', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_groups_tell_where_every_lookup_lies():
    client = Client.in_process()
    nine = client.create_table(TableSpec("nine", 9))
    one = client.create_table(TableSpec("one", 1))
    other = client.create_table(TableSpec("other", 9))
    ids = [np.array([[5, 6], [5, 5]]), np.array([7, 6])]
    pulled = client.pull(ids, [(nine, 0), (one, 0), (other, 1), (nine, 1)])
    assert [group.dim for group in pulled.groups] == [1, 9]
    first, second = pulled.groups
    assert (first.lookups, first.sizes) == ([1], [4])
    assert (second.lookups, second.sizes) == ([0, 2, 3], [4, 2, 2])
    assert first.rows.shape == (2, 1)
    assert second.rows.shape == (5, 9)  # 5, 6, 7 of "nine" and 7, 6 of "other"
    assert first.rows.dtype == np.float32
    assert first.inverse.dtype == np.int32
    embeddings = second.rows[second.inverse]
    assert np.array_equal(embeddings[:4], client.pull_rows(nine, ids[0].ravel()))
    assert np.array_equal(embeddings[4:6], client.pull_rows(other, ids[1]))
    assert np.array_equal(embeddings[6:], client.pull_rows(nine, ids[1]))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("kinds", [20, 100_000])  # of ids: all come often, or once
def test_embeddings_are_the_rows_of_the_ids(servers, kinds):
    client = Client.in_process(servers=servers)
    rng = np.random.default_rng(1)
    specs = [TableSpec("a", 9), TableSpec("b", 9), TableSpec("c", 3, dtype="float64")]
    tables = [client.create_table(spec) for spec in specs]
    ids = [rng.integers(0, kinds, 9000), rng.integers(0, kinds, 400)]
    lookups = [(0, 0), (1, 0), (2, 1), (0, 1)]
    pulled = client.pull(ids, lookups)
    for group in pulled.groups:
        embeddings = client.embeddings(group)
        assert embeddings.dtype == group.rows.dtype
        assert np.array_equal(embeddings, group.rows[group.inverse])
        for lookup, part in zip(
            group.lookups, np.split(embeddings, np.cumsum(group.sizes)[:-1]), strict=True
        ):
            table, source = lookups[lookup]
            assert np.array_equal(part, client.pull_rows(tables[table], ids[source]))
        out = np.zeros_like(embeddings)
        assert client.embeddings(group, out) is out
        assert np.array_equal(out, embeddings)
        read_only = np.zeros_like(embeddings)
        read_only.flags.writeable = False
        for wrong in (out[1:], out.astype(np.float16), out.T.copy().T, read_only, out.tolist()):
            with pytest.raises(SpecError, match=r"'out' is not a contiguous float(32|64) array of shape \("):
                client.embeddings(group, wrong)
    kept = client.embeddings(pulled.groups[1])
    wanted = kept.copy()
    del group, pulled
    client.close()
    gc.collect()
    assert np.array_equal(kept, wanted)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("kinds", [50, 100_000])
def test_sums_of_ids_that_repeat_and_of_others_have_the_same_bits(servers, kinds):
    client = Client.in_process(servers=servers)
    rng = np.random.default_rng(2)
    tables = [client.create_table(TableSpec(n, 9, optimizer=SGD, initializer=ZEROS)) for n in "ab"]
    ids = rng.integers(0, kinds, 3000)
    pulled = client.pull([ids, ids[:500]], [(tables[0], 0), (tables[1], 1), (tables[0], 1)])
    (group,) = pulled.groups
    gradient = rng.normal(size=(4000, 9)).astype(np.float32)
    gradient[rng.random(gradient.shape) < 0.1] = -0.0
    wanted = np.zeros_like(group.rows)
    np.add.at(wanted, group.inverse, gradient)  # one after the other
    client.push(pulled, [gradient], 1.0)
    client.refresh(pulled)
    assert np.array_equal(pulled.groups[0].rows, -wanted)


def test_rows_are_aligned_views_that_outlive_the_batch():
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 9))
    keys = np.arange(1000)
    group = client.pull([keys], [(table, 0)]).groups[0]
    rows, inverse = group.rows, group.inverse
    assert rows.ctypes.data % 64 == 0
    assert rows.base is not None
    wanted = client.pull_rows(table, keys)
    del group, client
    gc.collect()
    assert np.array_equal(rows[inverse], wanted)


@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_of_equal_keys_are_summed_in_the_order_of_positions(servers):
    client = Client.in_process(servers=servers)
    table = client.create_table(TableSpec("t", 2, optimizer=SGD, initializer=ZEROS))
    ids = np.array([4, 9, 4, 4, 9, -1])
    gradient = np.array([[1e8, 1], [5, 2], [1, 4], [-1e8, 8], [6, 16], [7, 32]], np.float32)
    client.push(client.pull([ids], [(table, 0)]), [gradient], 1.0)
    total = (np.float32(1e8) + np.float32(1)) + np.float32(-1e8)  # not 1: the order shows
    wanted = -np.array([[total, 13], [11, 18], [7, 32]], np.float32)
    assert np.array_equal(client.pull_rows(table, np.array([4, 9, -1])), wanted)


@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_that_are_summed_already(servers):
    client = Client.in_process(servers=servers)
    tables = [client.create_table(TableSpec(n, 2, optimizer=SGD, initializer=ZEROS)) for n in "ab"]
    ids = np.array([4, 9, 4, -1])
    pulled = client.pull([ids], [(table, 0) for table in tables])
    (group,) = pulled.groups
    gradient = np.arange(12, dtype=np.float32).reshape(6, 2)
    client.push(pulled, [gradient], 1.0, summed=True)
    first, second = np.split(group.inverse, 2)
    for table, inverse in zip(tables, (first, second), strict=True):
        assert np.array_equal(client.pull_rows(table, ids), -gradient[inverse])
    with pytest.raises(SpecError, match=r"shape \(8, 2\); expected \(6, 2\)"):
        client.push(pulled, [np.zeros((8, 2), np.float32)], 1.0, summed=True)


@pytest.mark.parametrize("servers", [1, 3])
def test_gradients_of_rows_and_of_ids_by_example(servers):
    client = Client.in_process(servers=servers)
    tables = [client.create_table(TableSpec(n, 2, optimizer=SGD, initializer=ZEROS)) for n in "ab"]
    ids = np.array([4, 9, 4])
    pulled = client.pull([ids], [(table, 0) for table in tables])
    (group,) = pulled.groups
    of_ids = np.arange(12, dtype=np.float32).reshape(6, 2)
    of_rows = 100 * (1 + np.arange(8, dtype=np.float32).reshape(4, 2))
    by_example = of_ids.reshape(2, 3, 2).transpose(1, 0, 2)
    wanted = of_rows.copy()
    np.add.at(wanted, group.inverse, of_ids)
    client.push(pulled, [by_example], 1.0, of_rows=[of_rows])
    for table, inverse in zip(tables, np.split(group.inverse, 2), strict=True):
        assert np.array_equal(client.pull_rows(table, ids), -wanted[inverse])
    client.push(pulled, [None], 1.0, of_rows=[-wanted])
    assert not any(client.pull_rows(table, ids).any() for table in tables)
    with pytest.raises(SpecError, match=r"of 3 lookups; the group has 2"):
        client.push(pulled, [of_ids.reshape(2, 3, 2)], 1.0)
    with pytest.raises(SpecError, match="group 0 has no gradients"):
        client.push(pulled, [None], 1.0)


@pytest.mark.parametrize("servers", [1, 3])
def test_pairs_of_lookup_and_row(servers):
    client = Client.in_process(servers=servers)
    table = client.create_table(TableSpec("t", 2))
    ids = [np.array([7, 5, 7, 6]), np.array([5, 5, 9, 7])]
    (group,) = client.pull(ids, [(table, 0), (table, 1)]).groups
    pairs = client.pairs(group)
    assert pairs.sizes.tolist() == [3, 3]
    assert pairs.of_ids.reshape(4, 2).tolist() == [[0, 3], [1, 3], [0, 4], [2, 5]]
    assert np.array_equal(pairs.rows[pairs.of_ids.reshape(4, 2).T.ravel()], group.inverse)
    assert pairs.pairs.tolist() == [0, 0, 1, 2, 3, 3, 4, 5]
    assert pairs.examples.tolist() == [0, 2, 1, 3, 0, 1, 2, 3]
    (uneven,) = client.pull([ids[0], ids[1][:2]], [(table, 0), (table, 1)]).groups
    with pytest.raises(SpecError, match="different numbers of ids"):
        client.pairs(uneven)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_gradient_that_is_not_finite_changes_no_table_of_the_push(servers):
    client = Client.in_process(servers=servers)
    tables = [client.create_table(TableSpec(n, dim, optimizer=SGD)) for n, dim in (("a", 1), ("b", 2))]
    ids = np.array([5, -3])
    pulled = client.pull([ids], [(table, 0) for table in tables])
    good, bad = np.ones((2, 1), np.float32), np.ones((2, 2), np.float32)
    bad[1, 0] = -np.inf
    with pytest.raises(GradientError, match=r"table 'b': the gradient of key -3 is not finite"):
        client.push(pulled, [good, bad], 1.0)
    for server in client.stats()["servers"]:
        assert [server["tables"][n]["version"] for n in "ab"] == [0, 0]
    client.push(pulled, [good, np.ones((2, 2), np.float32)], 1.0)
    with pytest.raises(SpecError, match="nonfinite_gradients"):
        client.create_table(TableSpec("c", 1, nonfinite_gradients="ignore"))


def test_one_table_with_two_ids_arrays_gets_one_update_per_key():
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 1, optimizer={"name": "adagrad"}, initializer=ZEROS))
    pulled = client.pull([np.array([1, 2]), np.array([2, 3])], [(table, 0), (table, 1)])
    client.push(pulled, [np.ones((4, 1), np.float32)], 1.0)
    alone = Client.in_process()
    same = alone.create_table(TableSpec("t", 1, optimizer={"name": "adagrad"}, initializer=ZEROS))
    alone.push(alone.pull([np.array([1, 2, 3])], [(same, 0)]), [np.array([[1], [2], [1]], np.float32)], 1.0)
    keys = np.array([1, 2, 3])
    assert np.array_equal(client.pull_rows(table, keys), alone.pull_rows(same, keys))


def test_rows_do_not_depend_on_servers_threads_or_storage(tmp_path):
    wanted = train(Client.in_process(threads=1))
    assert equal(train(Client.in_process(servers=3)), wanted)
    assert equal(train(Client.in_process(servers=2, threads=4)), wanted)
    pmem = StorageSpec("pmem_libpmem", str(tmp_path / "pool"))
    assert equal(train(Client.in_process(pmem)), wanted)
    cached = StorageSpec("dram_pmem", str(tmp_path / "cached"), cache_bytes=1 << 20)
    assert equal(train(Client.in_process(cached)), wanted)
    memkind = StorageSpec("pmem_memkind", str(tmp_path / "memkind"))
    assert equal(train(Client.in_process(memkind)), wanted)
    assert equal(
        train(Client.in_process(StorageSpec("pmem_libpmem", str(tmp_path / "3")), servers=3)), wanted
    )


def test_a_learning_rate_for_each_group():
    client = Client.in_process()
    specs = [TableSpec(f"t{dim}", dim, optimizer=SGD, initializer=ZEROS) for dim in (1, 2)]
    tables = [client.create_table(spec) for spec in specs]
    pulled = client.pull([np.array([0])], [(tables[1], 0), (tables[0], 0)])
    client.push(pulled, [np.ones((1, 1), np.float32), np.ones((1, 2), np.float32)], [0.5, 0.25])
    assert client.pull_rows(tables[0], np.array([0])).tolist() == [[-0.5]]
    assert client.pull_rows(tables[1], np.array([0])).tolist() == [[-0.25, -0.25]]


def test_an_empty_batch_and_empty_ids():
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 4))
    assert client.pull([], []).groups == []
    group = client.pull([np.empty(0, np.int64)], [(table, 0)]).groups[0]
    assert group.rows.shape == (0, 4)
    assert group.sizes == [0]


def test_a_pull_creates_nothing():
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 4))
    client.pull([np.arange(100)], [(table, 0)])
    assert client.stats()["servers"][0]["tables"]["t"]["rows"] == 0


@pytest.mark.parametrize("servers", [1, 3])
def test_export_rows_has_every_trained_key_once(servers):
    client = Client.in_process(servers=servers)
    table = client.create_table(TableSpec("words", 5, optimizer=SGD, initializer=ZEROS))
    assert [a.shape for a in client.export_rows(table)] == [(0,), (0, 5)]
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    pulled = client.pull([keys], [(table, 0)])
    client.push(pulled, [np.ones((1000, 5), np.float32)], 0.5)
    client.pull([np.arange(7)], [(table, 0)])  # a pull makes no row
    found, rows = client.export_rows(table)
    assert sorted(found) == sorted(set(keys.tolist()))
    assert np.array_equal(rows, client.pull_rows(table, found))
    with pytest.raises(SpecError, match="table id 9 does not exist"):
        client.export_rows(9)


def test_create_table_is_idempotent_and_names_what_differs():
    client = Client.in_process(servers=2)
    spec = TableSpec("t", 4, optimizer={"name": "adam", "beta_1": 0.8})
    assert client.create_table(spec) == client.create_table(spec) == 0
    assert client.create_table(TableSpec("u", 4)) == 1
    assert client.spec(0).optimizer["beta_2"] == 0.999
    with pytest.raises(SpecMismatch, match=r"'t'.*dim 4.*8"):
        client.create_table(TableSpec("t", 8, optimizer=spec.optimizer))
    with pytest.raises(SpecMismatch, match=r"optimizer\.beta_1 0\.8.*0\.9"):
        client.create_table(TableSpec("t", 4, optimizer={"name": "adam"}))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TableSpec("t", 0), "dim"),
        (TableSpec("", 4), "name"),
        (TableSpec("x" * 300, 4), "too long"),
        (TableSpec("t", 4, "tree"), "index"),
        (TableSpec("t", 4, "array"), "input_dim"),
        (TableSpec("t", 4, optimizer={"name": "lamb"}), "lamb"),
        (TableSpec("t", 4, optimizer={"name": "adam", "beta": 1}), "beta"),
        (TableSpec("t", 4, initializer={"name": "uniform", "minval": float("nan")}), "'t'"),
        (TableSpec("t", 4, initializer={"name": "uniform", "seed": object()}), "'t'"),
    ],
)
def test_a_wrong_specification_names_the_field(spec, message):
    with pytest.raises(SpecError, match=message):
        Client.in_process().create_table(spec)


def test_bad_arguments():
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 4, "array", 10))
    with pytest.raises(KeyRangeError, match=r"'t': key 10 is not in \[0, 10\)"):
        client.pull([np.array([3, 10])], [(table, 0)])
    with pytest.raises(KeyRangeError, match="key -1"):
        client.pull_rows(table, np.array([-1]))
    with pytest.raises(SpecError, match=r"ids\[0\] must be int64, not float32"):
        client.pull([np.zeros(3, np.float32)], [(table, 0)])
    with pytest.raises(SpecError, match="table id 7"):
        client.pull([np.zeros(3, np.int64)], [(7, 0)])
    with pytest.raises(SpecError, match="ids 1 of 1"):
        client.pull([np.zeros(3, np.int64)], [(table, 1)])
    pulled = client.pull([np.array([1, 2, 2])], [(table, 0)])
    with pytest.raises(SpecError, match=r"\(2, 4\); expected \(3, 4\)"):
        client.push(pulled, [np.zeros((2, 4), np.float32)], 0.1)
    with pytest.raises(SpecError, match="2 gradients for 1 groups"):
        client.push(pulled, [np.zeros((3, 4), np.float32)] * 2, 0.1)
    with pytest.raises(SpecError, match="learning rate"):
        client.push(pulled, [np.zeros((3, 4), np.float32)], float("nan"))
    with pytest.raises(SpecError, match="another client"):
        Client.in_process().push(pulled, [np.zeros((3, 4), np.float32)], 0.1)
    assert client.stats()["servers"][0]["tables"]["t"]["version"] == 0


def test_storage_errors_say_what_is_full_or_where(tmp_path):
    client = Client.in_process(StorageSpec(capacity_bytes=1 << 20))
    table = client.create_table(TableSpec("t", 64))
    pulled = client.pull([np.arange(100_000)], [(table, 0)])
    with pytest.raises(StorageError, match="'t'"):
        client.push(pulled, [np.zeros((100_000, 64), np.float32)], 0.1)
    with pytest.raises(StorageError, match="missing"):
        Client.in_process(StorageSpec("pmem_libpmem", str(tmp_path / "missing" / "pool")))
    with pytest.raises(SpecError, match="tape"):
        Client.in_process(StorageSpec("tape"))


def test_save_and_restore_in_process(tmp_path):
    source = Client.in_process(servers=3)
    train(source, 1)
    saved = source.save(tmp_path)
    assert {(e["table"], e["server"]) for e in saved} == {
        (t, s) for t in ("wide", "linear", "words", "deep") for s in range(3)
    }
    for entry in saved:
        assert (tmp_path / entry["file"]).stat().st_size == entry["bytes"]
        assert entry["version"] == 20
        assert TableSpec.from_json(entry["spec"]).name == entry["table"]
    target = Client.in_process()
    train(target, 99, steps=1)  # what was there before must be gone
    target.restore(tmp_path)
    assert equal(train(target, 2), train(source, 2))


def test_files_that_are_left_to_the_caller_restore_as_others(tmp_path):
    source, contents = Client.in_process(servers=2), {}
    train(source, 1)
    base, more = tmp_path / "base", tmp_path / "more"
    base.mkdir()
    more.mkdir()
    saved = source.save(base, contents=contents)
    assert not list(base.iterdir())
    assert sorted(contents) == ["server-0-of-2.oets", "server-1-of-2.oets"]
    assert not any((base / entry["file"]).exists() for entry in saved)
    for name, content in contents.items():
        (base / name).write_bytes(content)
    train(source, 3)
    assert all("base" in entry for entry in source.save(more, since=base, contents=contents))
    wanted = train(source, 2)
    for name, content in contents.items():
        (more / name).write_bytes(content)
    target = Client.in_process()
    train(target, 99, steps=1)
    target.restore(base, more)
    assert equal(train(target, 2), wanted)


def test_closed():
    client = Client.in_process()
    client.create_table(TableSpec("t", 4))
    with client:
        pass
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.pull([np.array([1])], [(0, 0)])


def test_spec_json_round_trip():
    spec = TableSpec("t", 4, "array", 12, optimizer={"name": "adam", "beta_1": 0.5})
    assert TableSpec.from_json(spec.to_json()) == spec
    with pytest.raises(SpecError, match="height"):
        TableSpec.from_json('{"name": "t", "dim": 4, "height": 3}')


def test_hash_strings_is_the_published_xxh3():
    data = np.frombuffer(b"abc", np.uint8)
    for offsets in (np.array([0, 0, 3], np.int32), np.array([0, 0, 3], np.int64)):
        hashes = _core.hash_strings(offsets, data)
        # XXH3-64 with seed 0 of "" and "abc", from the xxHash distribution.
        assert hashes.tolist() == [0x2D06800538D394C2, 0x78AF5F94892F3950]
    assert _core.hash_strings(np.array([0, 3], np.int32), data, 1)[0] != 0x78AF5F94892F3950
    assert _core.hash_strings(np.array([], np.int32), data).tolist() == []
    with pytest.raises(SpecError, match="string 0 lies from 0 to 4 in 3 bytes"):
        _core.hash_strings(np.array([0, 4], np.int32), data)
    with pytest.raises(TypeError):
        _core.hash_strings(np.array([0.0, 3.0]), data)


def test_float64_tables_have_groups_of_their_own():
    client = Client.in_process(servers=2)
    specs = {
        dtype: TableSpec(dtype, 3, dtype=dtype, optimizer={"name": "sgd"})
        for dtype in ("float32", "bfloat16", "float64", "float16")
    }
    tables = {dtype: client.create_table(spec) for dtype, spec in specs.items()}
    assert client.spec(tables["bfloat16"]).dtype == "bfloat16"
    ids = np.arange(50)
    pulled = client.pull([ids], [(table, 0) for table in tables.values()])
    assert [(g.dim, g.rows.dtype, g.lookups) for g in pulled.groups] == [
        (3, np.float64, [2]),
        (3, np.float32, [0, 1, 3]),
    ]
    before = {dtype: client.pull_rows(table, ids) for dtype, table in tables.items()}
    tiny = 2.0**-40  # beside weights of 0.05 too small for float32
    client.push(pulled, [np.full((len(g.inverse), 3), tiny, g.rows.dtype) for g in pulled.groups], 1.0)
    for dtype, table in tables.items():
        rows = client.pull_rows(table, ids)
        assert rows.dtype == (np.float64 if dtype == "float64" else np.float32)
        keys, exported = client.export_rows(table)
        np.testing.assert_array_equal(exported[np.argsort(keys)], rows)
        if dtype == "float64":
            np.testing.assert_allclose(rows, before[dtype] - tiny, rtol=0, atol=1e-17)
        elif dtype == "bfloat16":  # the lower half of its float32 is zero
            assert not (rows.view(np.uint32) & 0xFFFF).any()
        elif dtype == "float16":
            np.testing.assert_array_equal(rows, rows.astype(np.float16))


def test_gradients_of_another_dtype_are_refused():
    client = Client.in_process()
    a = client.create_table(TableSpec("a", 2))
    b = client.create_table(TableSpec("b", 2, dtype="float16"))
    wide = client.create_table(TableSpec("wide", 2, dtype="float64"))
    pulled = client.pull([np.array([1])], [(a, 0), (b, 0), (wide, 0)])
    single, double = np.ones((2, 2), np.float32), np.ones((1, 2))
    for gradients, message in [
        (
            [double, single.astype(np.float64)],
            "group 1 are float64; expected float32 (table 'a' of float32, ",
        ),
        ([double, single.astype(np.float16)], "group 1 are float16; expected float32"),
        (
            [double.astype(np.float32), single],
            "group 0 are float32; expected float64 (table 'wide' of float64)",
        ),
        ([double.astype(np.int64), single], "group 0 are int64; expected float64"),
    ]:
        with pytest.raises(SpecError, match=re.escape(f"gradients of {message}")):
            client.push(pulled, gradients, 1.0)
    assert client.stats()["servers"][0]["tables"]["a"]["version"] == 0
    with pytest.raises(SpecError, match="'dtype' must be float32, float64, bfloat16 or float16, not 'half'"):
        client.create_table(TableSpec("other", 2, dtype="half"))
