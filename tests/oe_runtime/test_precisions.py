"""Rows and optimizer's states in two bytes: every tier, optimizer and precision gives the rows of DRAM."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_processes import CACHES, Relay, Server

from oe_runtime import Client, StorageSpec, TableSpec, _core
from oe_runtime.checkpoint import store
from oe_runtime.checkpoint.saved import Saved
from oe_runtime.errors import CheckpointError, SpecError, StorageError
from oe_runtime.spec import DURABLE, OPTIMIZERS, STORAGES, Worker

DIM = 9
KEYS = np.arange(2000, dtype=np.int64) * 7
COUNTS = ("adagrad_decay",)  # in its state
DTYPES = [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "bfloat16")]
RULES = {name: {"name": name} for name in OPTIMIZERS if name not in COUNTS}
RULES["amsgrad"] = {"name": "adam", "amsgrad": 1}
RULES["momentum"] = {"name": "sgd", "momentum": 0.9}


def specs(dtype, state_dtype):
    return [
        TableSpec(name, DIM, dtype=dtype, state_dtype=state_dtype, optimizer=rule)
        for name, rule in RULES.items()
    ]


def train(client, tables, first, last):
    """Push each batch to every table: gradients that depend on nothing but its number."""
    for step in range(first, last + 1):
        random = np.random.default_rng(step)
        ids = random.choice(KEYS, 900)
        pulled = client.pull([ids], [(table, 0) for table in tables])
        (group,) = pulled.groups
        gradients = random.normal(0, 0.1, (len(group.inverse), DIM)).astype(group.rows.dtype)
        client.push(pulled, [gradients], 0.05)


def content(client, tables):
    """Every row and state of every table."""
    found = []
    for table in tables:
        read = client.read_rows(table, KEYS)
        found += [read.rows, *(read.slots[name] for name in sorted(read.slots))]
    return found


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(left, right)


def open_tables(kind, path, dtypes, **settings):
    storage = StorageSpec(kind, "" if kind == "dram" else path, cache_bytes=CACHES.get(kind, 0), **settings)
    client = Client.in_process(storage, servers=2)
    return client, [client.create_table(spec) for spec in specs(*dtypes)]


@pytest.mark.filterwarnings("ignore:.*not persistent")
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_tier_and_optimizer_has_the_rows_of_dram(dtypes, tmp_path):
    """After a second start too, and after a restore of a checkpoint and an increment."""
    model, tables = open_tables("dram", "", dtypes)
    train(model, tables, 1, 4)
    at_4 = content(model, tables)
    (tmp_path / "full").mkdir()
    model.save(tmp_path / "full")
    train(model, tables, 5, 6)
    at_6 = content(model, tables)
    for values in at_6[1:2]:  # Adadelta's state: bfloat16 has the upper half of a float32
        assert not (values.view(np.uint32) & 0xFFFF).any()
        assert values.any()
    for kind in STORAGES[1:]:
        (tmp_path / kind).mkdir()
        client, tables = open_tables(kind, tmp_path / kind, dtypes)
        train(client, tables, 1, 4)
        assert_equal(content(client, tables), at_4)
        if kind in DURABLE:
            client.checkpoint(1, wait=True)
            train(client, tables, 99, 99)  # lost
            client.close()
            client, tables = open_tables(kind, tmp_path / kind, dtypes, recover=True)
        train(client, tables, 5, 6)
        assert_equal(content(client, tables), at_6)
        client.close()
    other, tables = open_tables("dram", "", dtypes)
    other.restore(tmp_path / "full")
    train(other, tables, 5, 6)
    assert_equal(content(other, tables), at_6)


@pytest.mark.filterwarnings("ignore:.*is not persistent memory")
@pytest.mark.parametrize("kind", ["dram", "pmem_libpmem"])
def test_rows_take_half_of_their_bytes(kind, tmp_path):
    client = Client.in_process(StorageSpec(kind, "" if kind == "dram" else tmp_path))
    for dim in (9, 16, 32, 64, 128):
        of = []
        for dtype in ("float32", "bfloat16"):
            spec = TableSpec(f"{dtype}-{dim}", dim, dtype=dtype, state_dtype=dtype)
            table = client.create_table(spec)
            for first in range(0, 100_000, 20_000):
                pulled = client.pull([np.arange(first, first + 20_000)], [(table, 0)])
                client.push(pulled, [np.zeros_like(pulled.groups[0].rows)], 0.1)
            of.append(client.stats()["servers"][0]["tables"][spec.name]["bytes"])
        assert of[1] <= 0.56 * of[0], dim


@pytest.mark.filterwarnings("ignore:.*depends on the number of pushes")
def test_rows_go_through_files_and_resharding(tmp_path):
    client = Client.in_process(servers=2)
    spec = TableSpec("t", DIM, dtype="bfloat16", state_dtype="bfloat16", optimizer={"name": "adam"})
    table = client.create_table(spec)
    train(client, [table], 1, 3)
    before = content(client, [table])
    (tmp_path / "saved").mkdir()
    client.save(tmp_path / "saved")
    client.export("t", tmp_path / "t.parquet")
    (tmp_path / "three").mkdir()
    _core.reshard_table(Saved.open(tmp_path / "saved").chains("t"), "t", str(tmp_path / "three"), 3)
    inspect = [sys.executable, "-m", "oe_runtime.checkpoint", "inspect", str(tmp_path / "three")]
    told = subprocess.run(inspect, check=True, capture_output=True, text=True).stdout
    assert "bfloat16 (state bfloat16)" in told
    other = Client.in_process()
    other.create_table(spec)
    other.restore(tmp_path / "three")
    assert_equal(content(other, [table]), before)
    other.erase("t", KEYS)
    other.import_rows("t", tmp_path / "t.parquet")
    assert_equal(content(other, [table]), before)
    trained = client.read_rows("t", KEYS).found
    assert trained.sum() > 1000
    single = Client.in_process()  # their values, in a table of the other type
    single.create_table(TableSpec("t", DIM, optimizer={"name": "adam"}))
    single.import_rows("t", tmp_path / "t.parquet")
    for left, right in zip(content(single, [table]), before, strict=True):
        np.testing.assert_array_equal(left[trained], right[trained])


@pytest.mark.filterwarnings("ignore:.*not persistent")
def test_what_cannot_be_is_refused_by_name(tmp_path):
    client = Client.in_process()
    for fields, message in [
        ({"dtype": "float64"}, "table 't': 'state_dtype' of a float64 table must be float64, not 'bfloat16'"),
        ({"state_dtype": "float16"}, "table 't': 'state_dtype' must be float32 or bfloat16, not 'float16'"),
        (
            {"optimizer": {"name": "adagrad_decay"}},
            "table 't': 'state_dtype' must be float32, because 'adagrad_decay' counts in "
            "'accumulator_decays' and bfloat16 counts to 256 only",
        ),
    ]:
        with pytest.raises(SpecError) as refused:
            client.create_table(TableSpec("t", 4, **{"state_dtype": "bfloat16", **fields}))
        assert str(refused.value) == message
    # Another type in a checkpoint, and in a pool.
    half, single = (TableSpec("t", 4, state_dtype=dtype) for dtype in ("bfloat16", None))
    client.create_table(half)
    (tmp_path / "saved").mkdir()
    client.save(tmp_path / "saved")
    other = Client.in_process()
    other.create_table(single)
    with pytest.raises(CheckpointError, match="'state_dtype' was \"bfloat16\" when table 't' was saved, but"):
        other.restore(tmp_path / "saved")
    for fields, message in [
        ({"dtype": "float64"}, "'exchange_dtype' of a float64 table must be float64, not 'bfloat16'"),
        ({"exchange_dtype": "float16"}, "'exchange_dtype' must be float32 or bfloat16, not 'float16'"),
    ]:
        with pytest.raises(SpecError, match=f"^table 'u': {message}$"):
            client.create_table(TableSpec("u", 4, **{"exchange_dtype": "bfloat16", **fields}))
    for first, second, names in (
        (half, single, '"bfloat16".*not set'),
        (single, half, 'not set.*"bfloat16"'),
    ):
        with Client.in_process(StorageSpec("pmem_libpmem", tmp_path / names[:3], fresh=True)) as pooled:
            pooled.create_table(first)
            pooled.checkpoint(1, wait=True)
        again = Client.in_process(StorageSpec("pmem_libpmem", tmp_path / names[:3], recover=True))
        with pytest.raises(StorageError, match=f"'table.state_dtype' is {names}"):
            again.create_table(second)


@pytest.mark.filterwarnings("ignore:.*not persistent")
def test_a_checkpoint_is_converted(tmp_path):
    """To the nearest numbers; the policies' facts stay, and what they decide."""
    rules = {"optimizer": {"name": "adam"}, "eviction": [{"name": "global_step", "steps_to_live": 2}]}
    client = Client.in_process(servers=2)
    table = client.create_table(TableSpec("t", DIM, **rules))
    train(client, [table], 1, 4)

    def write(target):
        return {"tables": client.save(target)}

    path = store.publish(tmp_path / "run", 4, write, keep=1)
    before = content(client, [table])
    reshard = [
        sys.executable,
        "-m",
        "oe_runtime.checkpoint",
        "reshard",
        str(path),
        "--servers",
        "3",
        "--json",
    ]
    for dtype, state_dtype in (*DTYPES, ("float64", ""), ("float32", "float32")):
        flags = ["--dtype", dtype, *(["--state-dtype", state_dtype] if state_dtype else [])]
        said = subprocess.run(
            [*reshard, "--output", str(tmp_path / f"{dtype}-{state_dtype}"), *flags],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        other = Client.in_process()
        other.create_table(TableSpec("t", DIM, dtype=dtype, state_dtype=state_dtype or None, **rules))
        other.restore(json.loads(said)["path"])
        found = other.read_rows("t", KEYS).found
        for now, was, type_of in zip(
            content(other, [table]), before, (dtype, state_dtype, state_dtype), strict=True
        ):
            tolerance = {"bfloat16": 2**-8, "float16": 2**-10}.get(type_of, 0)
            np.testing.assert_allclose(now[found], was[found], rtol=tolerance, atol=tolerance and 1e-7)
        train(other, [table], 5, 6)
        assert 0 < other.evict() < found.sum()
    client.assign("t", KEYS[:1], np.full((1, DIM), 1e6, np.float32))
    path = store.publish(tmp_path / "run", 5, write, keep=2)
    for flags, message in [
        (["--dtype", "float16"], "table 't': the row of key 0 has 1000000, and the largest number of the"),
        (["--dtype", "float64", "--state-dtype", "bfloat16"], "'state_dtype' of a float64 table must be"),
    ]:
        ended = subprocess.run(
            [*reshard[:4], str(path), *reshard[5:], *flags], capture_output=True, text=True
        )
        assert ended.returncode == 1
        assert message in ended.stderr


def test_tables_without_it_are_described_as_before(tmp_path):
    """So that files and pools of earlier versions are of the same table."""
    client = Client.in_process()
    for dtype, state_dtype in (("float32", None), ("float32", "float32"), ("float64", "float64")):
        spec = TableSpec(f"{dtype} {state_dtype}", 4, dtype=dtype, state_dtype=state_dtype)
        table = client.create_table(spec)
        assert client.spec(table).state_dtype is None
        assert "state_dtype" not in json.loads(client.spec(table).to_json())


@pytest.mark.parametrize("kind", DURABLE)
def test_a_killed_server_goes_on_with_the_same_bits(kind, tmp_path):
    cache = ["--storage-cache", str(CACHES[kind])] if kind in CACHES else []
    flags = ["--storage", kind, "--storage-path", str(tmp_path / "pool"), *cache]
    tables = list(range(len(RULES)))
    model, _ = open_tables("dram", "", DTYPES[0])
    train(model, tables, 1, 3)
    at_3 = content(model, tables)
    for life in (1, 2):
        server = Server(tmp_path / str(life), *flags, *(["--storage-recover"] if life == 2 else []))
        try:
            with Client([server.endpoint]) as client:
                for spec in specs(*DTYPES[0]):
                    client.create_table(spec)
                if life == 1:
                    train(client, tables, 1, 3)
                    client.checkpoint(3, wait=True)
                    train(client, tables, 4, 5)  # lost
                else:
                    assert client.recover() == 3
                    assert_equal(content(client, tables), at_3)
                    train(client, tables, 4, 6)
                    train(model, tables, 4, 6)
                    assert_equal(content(client, tables), content(model, tables))
        finally:
            server.end()  # kill -9


def wire_specs(dim, **fields):
    """Tables of every precision, some with counts or with rows that are no halves, in one batch."""
    counted = {"name": "counter", "filter_freq": 2}
    more = [
        {"dtype": "bfloat16", "exchange_dtype": "bfloat16", "admission": counted},
        {"dtype": "bfloat16", "admission": {**counted, "default_value": 0.1}},
        {"dtype": "float16", "exchange_dtype": "bfloat16", "admission": {**counted, "default_value": 0.25}},
        {"exchange_dtype": "bfloat16"},
        {"dtype": "float16"},
        {"admission": counted},
        {"dtype": "float64"},
        {"dtype": "bfloat16", "state_dtype": "bfloat16", "exchange_dtype": "bfloat16"},
    ]
    return [
        TableSpec(f"t{i}", dim + i % 2, optimizer={"name": "adam"}, **one, **fields)
        for i, one in enumerate(more)
    ]


def train_batches(client, tables, steps=4):
    for step in range(steps):
        random = np.random.default_rng(step)
        ids = [random.choice(KEYS, 900), random.choice(KEYS, 77)]
        pulled = client.pull(ids, [(table, i % 2) for i, table in enumerate(tables)])
        gradients = [
            random.normal(0, 0.1, (len(g.inverse), g.rows.shape[1])).astype(g.rows.dtype)
            for g in pulled.groups
        ]
        client.push(pulled, gradients, 0.05)


@pytest.mark.parametrize("dim", [1, 9, 64])
def test_two_bytes_on_the_wire_change_no_row(dim, tmp_path):
    """Over TCP, in shared memory, in one process, and of servers that know only float32."""
    local = Client.in_process()
    tables = [local.create_table(spec) for spec in wire_specs(dim)]
    train_batches(local, tables)
    wanted = content(local, tables) + [local.pull_rows(table, KEYS) for table in tables]
    for count, settings in [(1, {}), (2, {}), (1, {"share_memory": False}), (3, {"share_memory": False})]:
        name = f"{count}-{len(settings)}"
        servers = [Server(tmp_path / name, index=i, count=count) for i in range(count)]
        try:
            with Client([server.endpoint for server in servers], **settings) as client:
                assert [client.create_table(spec) for spec in wire_specs(dim)] == tables
                train_batches(client, tables)
                found = content(client, tables) + [client.pull_rows(table, KEYS) for table in tables]
                assert_equal(found, wanted)
        finally:
            for server in servers:
                server.end()


@pytest.mark.parametrize(("dim", "most"), [(16, 0.56), (64, 0.52)])
def test_bytes_on_the_wire(dim, most, tmp_path):
    """As the servers count them; without exchange_dtype, pulls alone are halved."""
    server = Server(tmp_path)
    try:
        used = []
        for fields in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "exchange_dtype": "bfloat16"}):
            with Client([server.endpoint], share_memory=False, job=str(len(used))) as client:
                table = client.create_table(TableSpec("t", dim, **fields))
                ids = np.arange(20_000)

                def traffic(client=client):
                    return np.array(
                        [client.stats()["servers"][0]["traffic"][f"bytes_{way}"] for way in ("in", "out")]
                    )

                before = traffic()
                pulled = client.pull([ids], [(table, 0)])
                client.push(pulled, [np.ones_like(pulled.groups[0].rows)], 0.1)
                used.append(traffic() - before)
        single, rows, both = used
        assert rows[1] <= 0.52 * single[1]
        assert abs(rows[0] - single[0]) < 200
        assert both.sum() <= most * single.sum()
    finally:
        server.end()


def test_servers_that_know_only_float32(tmp_path):
    """They serve halves as before, and are named where gradients would be."""
    server = Server(tmp_path)
    relay = Relay(server.endpoint, change=lambda data: data.replace(b'"halves"', b'"halfes"'))
    specs = [spec for spec in wire_specs(9) if spec.exchange_dtype is None]
    local = Client.in_process()
    tables = [local.create_table(spec) for spec in specs]
    train_batches(local, tables)
    try:
        with Client([relay.endpoint], share_memory=False) as client:
            for spec in specs:
                client.create_table(spec)
            train_batches(client, tables)
            assert_equal(content(client, tables), content(local, tables))
            with pytest.raises(SpecError) as refused:
                client.create_table(TableSpec("t", 9, exchange_dtype="bfloat16"))
        assert str(refused.value) == (
            f"server {relay.endpoint} is of a version that takes no bfloat16 gradients; update it, or leave "
            "out the 'exchange_dtype' of the tables"
        )
    finally:
        relay.close()
        server.end()


def test_workers_with_gradients_in_two_bytes(tmp_path):
    """The rows of one worker with each gradient once, whichever comes first."""
    server = Server(tmp_path)
    spec = TableSpec("t", 9, dtype="bfloat16", exchange_dtype="bfloat16")
    local = Client.in_process()
    table = local.create_table(spec)
    gradients = np.random.default_rng(1).normal(0, 0.1, (len(KEYS), 9)).astype(np.float32)
    ids = [KEYS[::2], KEYS[1::2]]
    for _ in range(3):
        pulled = local.pull([np.concatenate(ids)], [(table, 0)])
        local.push(pulled, [np.concatenate([gradients[::2], gradients[1::2]])], 0.05)
    try:
        workers = [
            Client([server.endpoint], worker=Worker(rank, 2), share_memory=False, job="two")
            for rank in range(2)
        ]

        def work(rank):
            client = workers[rank]
            client.create_table(spec)
            for _ in range(3):
                pulled = client.pull([ids[rank]], [(table, 0)])
                client.push(pulled, [gradients[rank::2]], 0.05)
            return client.pull_rows(table, KEYS)

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(work, range(2)))
        assert_equal(found, [local.pull_rows(table, KEYS)] * 2)
    finally:
        server.end()


@pytest.mark.parametrize("where", ["process", "shared", "wire"])
def test_a_restore_converts(where, tmp_path):
    rules = {"optimizer": {"name": "adam"}, "eviction": [{"name": "global_step", "steps_to_live": 2}]}
    client = Client.in_process(servers=2)
    table = client.create_table(TableSpec("t", DIM, **rules))
    saves = [tmp_path / "full", tmp_path / "increment"]
    train(client, [table], 1, 3)
    saves[0].mkdir()
    client.save(saves[0])
    train(client, [table], 4, 4)
    saves[1].mkdir()
    client.save(saves[1], since=saves[0])
    converted = TableSpec("t", DIM, dtype="bfloat16", state_dtype="bfloat16", **rules)
    flags = ["--checkpoint-dir", str(tmp_path / "scratch")] if where == "wire" else []
    server = None if where == "process" else Server(tmp_path / "server", *flags)
    transfer = {"checkpoint_transfer": "wire"} if where == "wire" else {}
    other = Client.in_process() if server is None else Client([server.endpoint], **transfer)
    try:
        other.create_table(converted)
        with pytest.raises(
            CheckpointError, match=r"'dtype' was \"float32\" when table 't' was saved, but table 't' has"
        ):
            other.restore(*saves)
        other.restore(*saves, convert=True)
        for now, was in zip(content(other, [table]), content(client, [table]), strict=True):
            np.testing.assert_allclose(now, was, rtol=2**-8, atol=1e-7)
        assert {path.name for path in tmp_path.iterdir()} <= {"full", "increment", "server", "scratch"}
        train(other, [table], 5, 6)
        kept = content(other, [table])
        for bad, text in ((np.nan, "nan"), (1e39, "1e\\+39")):
            wide = Client.in_process()
            of_bad = {"dtype": "float64", "nonfinite_gradients": "pass"}
            wide.create_table(TableSpec("t", DIM, **rules, **of_bad))
            wide.assign("t", [-7], np.full((1, DIM), bad))
            (tmp_path / text[:2]).mkdir()
            wide.save(tmp_path / text[:2])
            with pytest.raises(
                CheckpointError, match=f"^table 't': the row of key -7 has {text}, and the largest"
            ):
                other.restore(tmp_path / text[:2], convert=True)
        assert_equal(content(other, [table]), kept)
    finally:
        other.close()
        if server is not None:
            server.end()


def test_workers_do_not_convert(tmp_path):
    server = Server(tmp_path)
    named = "not for workers; convert the checkpoint once, by oeprov reshard"
    try:
        client = Client([server.endpoint], worker=Worker(0, 1))
        with pytest.raises(SpecError, match=named):
            client.restore(tmp_path, convert=True)
    finally:
        server.end()
