"""Checkpoints in the servers' own storage: real servers on directories, killed and started again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_processes import CACHES, Server, Servers

from oe_runtime import (
    CheckpointError,
    Client,
    OeError,
    ServerLost,
    SpecError,
    StorageError,
    StorageSpec,
    TableSpec,
)

KEYS = np.arange(500, dtype=np.int64)
KINDS = ["pmem_libpmem", "dram_pmem", "dram_ssd"]
SPEC = TableSpec("t", 4, optimizer={"name": "sgd"}, initializer={"name": "zeros"})


def push(client: Client, table: int) -> None:
    """One more push to every key: each weight counts them."""
    pulled = client.pull([KEYS], [(table, 0)])
    client.push(pulled, [np.full((len(KEYS), 4), -1, np.float32)], 1.0)


def count(client: Client, table: int) -> float:
    """How many pushes there were; all rows must agree."""
    rows = client.pull_rows(table, KEYS)
    assert (rows == rows[0, 0]).all()
    return float(rows[0, 0])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each storage whose rows outlive the process: what it promises is the same."""
    return request.param


def storage_of(kind: str, path: Path, **settings: bool | int) -> StorageSpec:
    return StorageSpec(kind, str(path), cache_bytes=CACHES.get(kind, 0), **settings)


def flags_of(kind: str, path: Path) -> list[str]:
    cache = ["--storage-cache", str(CACHES[kind])] if kind in CACHES else []
    return ["--storage", kind, "--storage-path", str(path), "--storage-recover", *cache]


@contextlib.contextmanager
def running(directory: Path, kind: str, *flags: str) -> Iterator[tuple[Servers, Client]]:
    servers = Servers(directory, 2, *flags, storage=kind)
    try:
        with Client(servers.endpoints) as client:
            yield servers, client
    finally:
        servers.end()  # kill -9
        for server in servers.servers:
            server.ready_file.unlink(missing_ok=True)


def test_killed_servers_go_on_from_the_newest_checkpoint(tmp_path, kind):
    with running(tmp_path, kind, "--storage-checkpoints", "3") as (_, client):
        table = client.create_table(SPEC)
        for batch in range(1, 8):
            push(client, table)
            if batch % 2 == 0:
                client.checkpoint(batch, wait=True)
        assert client.checkpoints() == [2, 4, 6]
    with running(tmp_path, kind, "--storage-recover", "--storage-checkpoints", "3") as (_, client):
        table = client.create_table(SPEC)
        assert client.checkpoints() == [2, 4, 6]
        assert client.recover() == 6
        assert count(client, table) == 6
        push(client, table)
        assert client.recover(4) == 4
        assert count(client, table) == 4
        with pytest.raises(
            CheckpointError, match="not every table of every server has checkpoint 6; all have 2, 4"
        ):
            client.recover(6)
        push(client, table)
        client.checkpoint(5)
        with pytest.raises(SpecError, match="checkpoint 5 is not after the last one, 5"):
            client.checkpoint(5)
    with running(tmp_path, kind, "--storage-fresh") as (_, client):
        table = client.create_table(SPEC)
        assert client.checkpoints() == []
        assert count(client, table) == 0


# Ends of a process: as it was asked to, killed, and of a script whose servers are in it.
IN_PROCESS = """
import sys, numpy
from oe_runtime import Client, StorageSpec, TableSpec
kind, path, cache, wanted = sys.argv[1:]
storage = StorageSpec(kind, path, cache_bytes=int(cache), **({wanted: True} if wanted else {}))
client = Client.in_process(storage)
table = client.create_table(TableSpec("t", 4, optimizer={"name": "sgd"}, initializer={"name": "zeros"}))
keys = numpy.arange(500)
pulled = client.pull([keys], [(table, 0)])
client.push(pulled, [numpy.full((500, 4), -1, numpy.float32)], 1.0)
client.checkpoint(client.checkpoints()[-1] + 1 if client.checkpoints() else 1, wait=True)
print(client.pull_rows(table, keys).min())
"""


def run_in_process(kind: str, path: Path, wanted: str = "") -> str:
    """A push and a checkpoint by a process whose servers are in it; what the rows are then, or its error."""
    command = [sys.executable, "-c", IN_PROCESS, kind, str(path), str(CACHES.get(kind, 0)), wanted]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]


def refusal(path: Path, *tables: str) -> str:
    return (
        f"the storage directory {path} has checkpoints of table{'' if len(tables) == 1 else 's'} "
        f"{', '.join(tables)}: start with recovery (--storage-recover) to go on from them, or fresh "
        "(--storage-fresh) to remove them"
    )


def files_in(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("oe-*")}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_says_nothing_of_rows_there_removes_none(tmp_path, kind, end):
    pool = tmp_path / "pool-0"
    servers = Servers(tmp_path, 1, storage=kind)
    try:
        with Client(servers.endpoints) as client:
            push(client, client.create_table(SPEC))
            client.create_table(TableSpec("u", 2))
            client.checkpoint(1, wait=True)
        with Client(servers.endpoints, job="daily") as client:
            client.create_table(SPEC)
            client.checkpoint(1, wait=True)
        servers.servers[0].process.send_signal(end)
        assert servers.servers[0].process.wait(60) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    finally:
        servers.end()
    before = files_in(pool)

    again = Servers(tmp_path, 1, storage=kind)
    status, errors = again.servers[0].wait()
    again.end()
    assert status == 1
    assert refusal(pool, "'t'", "'t' of job 'daily'", "'u'") in errors
    assert "Traceback" not in errors
    assert files_in(pool) == before

    servers.servers[0].ready_file.unlink(missing_ok=True)
    again = Servers(tmp_path, 1, "--storage-recover", storage=kind)
    try:
        with Client(again.endpoints) as client:
            table = client.create_table(SPEC)
            assert client.recover() == 1
            assert count(client, table) == 1
    finally:
        again.end()


def test_a_process_with_servers_in_it_goes_on_or_begins_anew_as_it_is_told(tmp_path, kind):
    path = tmp_path / "rows"
    assert run_in_process(kind, path) == "1.0"
    before = files_in(path)
    assert (
        run_in_process(kind, path)
        == f"oe_runtime.errors.StorageError: {refusal(path, chr(39) + 't' + chr(39))}"
    )
    assert files_in(path) == before
    assert run_in_process(kind, path, "recover") == "2.0"
    assert run_in_process(kind, path, "fresh") == "1.0"


def test_rows_without_a_checkpoint_are_of_no_use_to_a_new_process(tmp_path, kind):
    with running(tmp_path, kind) as (_, client):
        push(client, client.create_table(SPEC))
    with running(tmp_path, kind) as (_, client):
        assert count(client, client.create_table(SPEC)) == 0


def test_a_start_on_files_that_cannot_be_read_removes_none(tmp_path, kind):
    with Client.in_process(storage_of(kind, tmp_path)) as client:
        push(client, client.create_table(SPEC))
        client.checkpoint(1, wait=True)
    (file,) = [*tmp_path.glob("oe-*-super.pool"), *tmp_path.glob("oe-*.log")]
    content = bytearray(file.read_bytes())
    step = 4096  # the headers, and both copies of the list of checkpoints
    for at in range(0, min(len(content), 1 << 20), step):
        content[at + 24 : at + 64] = b"x" * 40
    file.write_bytes(content)
    before = files_in(tmp_path)
    with pytest.raises(StorageError, match=f"{file} is damaged: .*start fresh"):
        Client.in_process(storage_of(kind, tmp_path))
    assert files_in(tmp_path) == before
    with Client.in_process(storage_of(kind, tmp_path, fresh=True)) as client:
        assert count(client, client.create_table(SPEC)) == 0


@pytest.mark.parametrize("wanted", ["", "recover"])
def test_a_pool_that_lost_its_magic_keeps_its_segments(tmp_path, wanted):
    """A superblock whose magic is missing was never finished, unless there are segments."""
    with Client.in_process(storage_of("pmem_libpmem", tmp_path)) as client:
        push(client, client.create_table(SPEC))
        client.checkpoint(1, wait=True)
    (file,) = tmp_path.glob("oe-*-super.pool")
    whole = file.read_bytes()
    for robbed in (bytes(8) + whole[8:], b""):
        file.write_bytes(robbed)
        before = files_in(tmp_path)
        with pytest.raises(StorageError, match=f"{file} is damaged: 'magic' is missing, but there is oe-"):
            Client.in_process(storage_of("pmem_libpmem", tmp_path, **({wanted: True} if wanted else {})))
        assert files_in(tmp_path) == before


def test_recovery_and_a_fresh_start_exclude_each_other(tmp_path, kind):
    with pytest.raises(SpecError, match=r"'recover' .* and 'fresh' .*; give one of the two"):
        Client.in_process(storage_of(kind, tmp_path, recover=True, fresh=True))
    with Client.in_process(storage_of(kind, tmp_path)) as client:
        push(client, client.create_table(SPEC))
        with pytest.raises(StorageError, match="is open in this process, so its tables are not removed"):
            Client.in_process(storage_of(kind, tmp_path, fresh=True))


def test_checkpoints_that_follow_each_other_leave_one_that_all_servers_have(tmp_path, kind):
    """A server that is slow to make one durable, and is then lost, is not too far behind the other one."""
    with running(tmp_path, kind, "--storage-recover") as (servers, client):
        table = client.create_table(SPEC)
        push(client, table)
        client.checkpoint(1, wait=True)
        lost = []

        def marks():
            try:
                for batch in range(2, 50):
                    pulled = client.pull([many], [(table, 0)])
                    client.push(pulled, [np.ones((len(many), 4), np.float32)], 1.0)
                    client.checkpoint(batch)
            except ServerLost as error:
                lost.append(error)

        many = np.arange(100_000, dtype=np.int64)
        thread = threading.Thread(target=marks)
        thread.start()
        time.sleep(0.2)
        servers.servers[1].process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # the other one does what it was asked
        port = servers.servers[1].ready()["port"]
        servers.servers[1].end()
        thread.join()
        assert lost
        servers.servers[1].ready_file.unlink()
        flags = flags_of(kind, tmp_path / "pool-1")
        servers.servers[1] = Server(tmp_path, *flags, "--port", str(port), index=1, count=2)
        servers.servers[1].ready()
        client.reconnect()
        assert client.recover() >= 1


def test_the_checkpoint_before_is_durable_in_all_tables_first(tmp_path, kind):
    with Client.in_process(storage_of(kind, tmp_path), servers=2) as client:
        large = client.create_table(TableSpec("large", 64))
        client.create_table(TableSpec("small", 1))
        keys = np.arange(20_000)
        for batch in range(1, 6):
            pulled = client.pull([keys], [(large, 0)])
            client.push(pulled, [np.ones((len(keys), 64), np.float32)], 0.5)
            client.checkpoint(batch)
            assert batch == 1 or batch - 1 in client.checkpoints()


def test_a_client_reconnects_to_a_server_that_came_back(tmp_path, kind):
    with running(tmp_path, kind, "--storage-recover") as (servers, client):
        table = client.create_table(SPEC)
        push(client, table)
        client.checkpoint(1, wait=True)
        push(client, table)
        pulled = client.pull([KEYS], [(table, 0)])
        port = servers.servers[1].ready()["port"]
        servers.servers[1].end()
        servers.servers[1].ready_file.unlink()
        for request in (lambda: client.pull_rows(table, KEYS), client.reconnect, client.checkpoints):
            with pytest.raises(ServerLost):
                request()
        flags = flags_of(kind, tmp_path / "pool-1")
        servers.servers[1] = Server(tmp_path, *flags, "--port", str(port), index=1, count=2)
        servers.servers[1].ready()
        client.reconnect()
        assert client.recover() == 1
        assert count(client, table) == 1
        with pytest.raises(SpecError, match="pulled by another client"):
            client.push(pulled, [np.zeros((len(KEYS), 4), np.float32)], 1.0)
        push(client, table)
        assert count(client, table) == 2
    with pytest.raises(SpecError, match="no servers to connect to"):
        Client.in_process().reconnect()


def test_another_table_of_that_name_is_refused(tmp_path, kind):
    storage = storage_of(kind, tmp_path / "pool", recover=True)
    with Client.in_process(storage) as client:
        push(client, client.create_table(SPEC))
        client.checkpoint(1, wait=True)
    with (
        Client.in_process(storage) as client,
        pytest.raises(
            StorageError, match=r"\.(pool|log): 'table.dim' is 4 in this pool, but table 't' has 8"
        ),
    ):
        client.create_table(TableSpec("t", 8, optimizer={"name": "sgd"}, initializer={"name": "zeros"}))


def test_dram_keeps_no_checkpoints():
    with Client.in_process() as client:
        client.create_table(SPEC)
        with pytest.raises(SpecError, match="its storage is dram, which keeps no checkpoints"):
            client.checkpoint(1)
        assert client.checkpoints() == []
        with pytest.raises(OeError, match="there is no checkpoint"):
            client.recover()
        with pytest.raises(SpecError, match="dram cannot recover"):
            Client.in_process(StorageSpec(recover=True))


def test_one_kept_checkpoint_is_enough_for_a_single_table_on_a_single_server_only(tmp_path, kind):
    storage = storage_of(kind, tmp_path / "one", kept_checkpoints=1)
    with Client.in_process(storage) as client:
        table = client.create_table(SPEC)
        push(client, table)
        client.checkpoint(1, wait=True)
        client.checkpoint(2, wait=True)
        assert client.checkpoints() == [2]
        assert client.create_table(SPEC) == table
        with pytest.raises(SpecError, match=r"table 'u': its storage keeps one checkpoint .*several tables"):
            client.create_table(TableSpec("u", 4))
    storage = storage_of(kind, tmp_path / "two", kept_checkpoints=1)
    with (
        Client.in_process(storage, servers=2) as client,
        pytest.raises(SpecError, match=r"keeps one checkpoint .*but 2 servers .*keep 2 or more"),
    ):
        client.create_table(SPEC)


def remove_files(directory: Path) -> None:
    for file in directory.glob("oe-*"):
        file.unlink()


def rename(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


@pytest.mark.parametrize("vanish", [remove_files, shutil.rmtree, rename])
def test_a_checkpoint_in_files_that_are_gone_is_not_acknowledged(tmp_path, kind, vanish):
    servers = Servers(tmp_path, 1, storage=kind)
    try:
        with Client(servers.endpoints) as client:
            table = client.create_table(SPEC)
            push(client, table)
            client.checkpoint(1, wait=True)
            vanish(tmp_path / "pool-0")
            push(client, table)
            with pytest.raises(
                StorageError, match=r"the (pool|storage) file .*\.(pool|log) is gone.*save the tables"
            ):
                client.checkpoint(2, wait=True)
            saved = tmp_path / "saved"
            saved.mkdir()
            client.save(saved)  # what the message says helps
            want = client.pull_rows(table, KEYS)
    finally:
        servers.end()
    with Client.in_process() as client:
        table = client.create_table(SPEC)
        client.restore(saved)
        assert np.array_equal(client.pull_rows(table, KEYS), want)


def test_a_server_whose_directory_is_gone_ends_as_it_was_asked_to(tmp_path, kind):
    servers = Servers(tmp_path, 1, storage=kind)
    try:
        with Client(servers.endpoints) as client:
            push(client, client.create_table(SPEC))
            shutil.rmtree(tmp_path / "pool-0")
            assert client.stats()["servers"][0]["tables"]["t"]["rows"] == len(KEYS)
        process = servers.servers[0].process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        servers.end()
