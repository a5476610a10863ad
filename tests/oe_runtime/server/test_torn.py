"""A push that some servers have and others have not is never made durable."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from server_processes import Relay, Server, Servers

from oe_runtime import (
    CheckpointError,
    Client,
    OeError,
    ServerLost,
    StorageError,
    StorageFull,
    StorageSpec,
    TableSpec,
    TornError,
)

pytestmark = pytest.mark.process

SPEC = TableSpec("t", 64, optimizer={"name": "sgd"}, initializer={"name": "zeros"})
# Of which the first server has no room for a row.
HUGE = TableSpec("huge", 65536, optimizer={"name": "adam"}, dtype="float64")
SOME = np.arange(100)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two with pools, of which the first has room for 1.5 MiB of rows."""
    made = []
    for index in range(2):
        pool = tmp_path / f"pool-{index}"
        flags = ["--storage", "pmem_libpmem", "--storage-path", str(pool), "--storage-recover"]
        flags += ["--storage-size", str(1536 << 10)] if index == 0 else []
        flags += ["--checkpoint-dir", str(tmp_path / f"scratch-{index}")]
        made.append(Server(tmp_path / f"server-{index}", *flags, index=index, count=2))
    yield made
    for server in made:
        server.end()


def connect(servers: list[Server]) -> Client:
    client = Client([server.endpoint for server in servers])
    client.create_table(SPEC)
    client.create_table(HUGE)
    return client


def push(client: Client) -> None:
    pulled = client.pull([SOME], [(0, 0)])
    client.push(pulled, [np.ones((len(SOME), SPEC.dim), np.float32)], 1.0)


def push_huge(client: Client) -> None:
    pulled = client.pull([SOME[:8]], [(1, 0)])
    client.push(pulled, [np.ones((8, HUGE.dim))], 1.0)


def assert_torn(client: Client, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    refused: list[Callable[[], object]] = [
        lambda: push(client),
        lambda: client.save(directory),
        lambda: client.checkpoint(7, wait=True),
        client.evict,
    ]
    for request in refused:
        with pytest.raises(TornError, match="go back to a checkpoint by recover or restore"):
            request()
    assert not list(directory.iterdir())
    assert client.pull_rows(0, SOME).shape == (len(SOME), SPEC.dim), "pulls go on"


def test_a_push_that_one_full_server_refused_tears_the_job(servers: list[Server], tmp_path: Path) -> None:
    with connect(servers) as client, connect(servers) as other:
        push(client)
        client.checkpoint(1, wait=True)
        untouched = client.pull_rows(1, SOME[:8])
        with pytest.raises(StorageError, match="this push was applied by"):
            push_huge(client)
        assert_torn(client, tmp_path / "saved")
        assert_torn(other, tmp_path / "saved")
        assert client.recover() == 1
        for one in (client, other):
            rows, huge = one.pull_rows(0, SOME), one.pull_rows(1, SOME[:8])
            assert (rows == rows[0, 0]).all()
            np.testing.assert_array_equal(huge, untouched)
            push(one)
        client.checkpoint(2, wait=True)


@pytest.mark.parametrize("lost", [0, 1])
def test_reconnecting_does_not_mend_a_torn_job(servers: list[Server], tmp_path: Path, lost: int) -> None:
    with connect(servers) as client:
        push(client)
        client.checkpoint(1, wait=True)
        push(client)
        pulled = client.pull([SOME], [(0, 0)])
        port = servers[lost].endpoint.rpartition(":")[2]
        servers[lost].end()
        with pytest.raises(ServerLost):
            client.push(pulled, [np.ones((len(SOME), SPEC.dim), np.float32)], 1.0)
        with pytest.raises(ServerLost):
            client.checkpoint(2)
        flags = ["--storage", "pmem_libpmem", "--storage-path", str(tmp_path / f"pool-{lost}")]
        servers[lost].ready_file.unlink()
        servers[lost] = Server(
            tmp_path / f"server-{lost}", *flags, "--storage-recover", "--port", port, index=lost, count=2
        )
        servers[lost].ready()
        client.reconnect()
        assert_torn(client, tmp_path / "saved")
        with connect(servers) as other:
            assert_torn(other, tmp_path / "saved")
        assert client.recover() == 1
        np.testing.assert_array_equal(client.pull_rows(0, SOME), -1)
        push(client)
        client.checkpoint(2, wait=True)


changes_by_key = pytest.mark.parametrize(
    ("op", "change"),
    [
        (20, lambda client: client.assign(0, SOME, np.full((len(SOME), SPEC.dim), 2, np.float32))),
        (21, lambda client: client.erase(0, SOME)),
    ],
    ids=["assign", "erase"],
)


@changes_by_key
def test_a_change_by_key_that_one_server_never_got_tears_the_job(
    servers: list[Server], tmp_path: Path, op: int, change: Callable[[Client], object]
) -> None:
    broken = [op]

    def on_request(asked: int) -> None:
        if asked in broken:
            broken.clear()
            raise ConnectionResetError

    relay = Relay(servers[1].endpoint, on_request)
    with Client([servers[0].endpoint, relay.endpoint], share_memory=False) as client:
        client.create_table(SPEC)
        client.create_table(HUGE)
        push(client)
        client.checkpoint(1, wait=True)
        with pytest.raises(ServerLost):
            change(client)
        client.reconnect()
        assert_torn(client, tmp_path / "saved")
        with connect(servers) as other:
            assert_torn(other, tmp_path / "saved")
        assert client.recover() == 1
        np.testing.assert_array_equal(client.pull_rows(0, SOME), -1)
        change(client)
        client.checkpoint(2, wait=True)
    relay.close()


@pytest.mark.parametrize("where", ["servers", "one process"])
def test_an_assignment_that_one_full_server_refused_tears_the_job(
    request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    # Key k is server k % 2's.
    spec = TableSpec(
        "a", 64, index="array", input_dim=24_000, optimizer=SPEC.optimizer, initializer=SPEC.initializer
    )
    if where == "servers":
        made = request.getfixturevalue("servers")
        full, clients = 0, [connect(made), connect(made)]
    else:
        storage = StorageSpec("pmem_libpmem", path=str(tmp_path / "pool"), capacity_bytes=3 << 20)
        with pytest.warns(UserWarning, match="is not persistent memory"):
            full, clients = 1, [Client.in_process(storage, servers=2)]
        clients[0].create_table(SPEC)
    client = clients[0]
    for one in clients:
        table = one.create_table(spec)
    push(client)
    client.checkpoint(1, wait=True)
    many, few = np.arange(full, 24_000, 2), np.arange(1 - full, 20, 2)
    keys = np.concatenate([few, many])
    with pytest.raises(StorageFull):
        client.assign(table, keys, np.full((len(keys), spec.dim), 2, np.float32))
    np.testing.assert_array_equal(client.pull_rows(table, few), 2)
    np.testing.assert_array_equal(client.pull_rows(table, many), 0)
    for one in clients:
        assert_torn(one, tmp_path / "saved")
        with pytest.raises(TornError):
            one.assign(table, few, np.zeros((len(few), spec.dim), np.float32))
        with pytest.raises(TornError):
            one.erase(table, few)
    assert client.recover() == 1
    np.testing.assert_array_equal(client.pull_rows(0, SOME), -1)
    np.testing.assert_array_equal(client.pull_rows(table, keys), 0)
    for one in clients:
        push(one)
    client.checkpoint(2, wait=True)
    for one in clients:
        one.close()


def test_a_change_by_key_that_all_servers_refused_tears_nothing(
    servers: list[Server], tmp_path: Path
) -> None:
    with connect(servers) as client:
        push(client)
        refused = 0
        for key in SOME[:8]:
            try:
                client.assign(1, np.array([key]), np.ones((1, HUGE.dim)))
            except StorageFull:
                refused += 1
        assert 0 < refused < 8
        push(client)
        client.checkpoint(1, wait=True)
        client.save(tmp_path)


def breaks_once(op: int, armed: list[int]) -> Callable[[int], None]:
    """End the connection at a request for `op`, once `armed` has it."""

    def on_request(asked: int) -> None:
        if asked == op and asked in armed:
            armed.clear()
            raise ConnectionResetError

    return on_request


def await_half(client: Client) -> None:
    """Wait until one server has changed its rows and the other has not."""
    deadline = time.monotonic() + 60
    while len(np.unique(client.pull_rows(0, SOME))) == 1:
        assert time.monotonic() < deadline


def await_back(client: Client) -> None:
    """Wait until no server is going back any more, which refuses what was pulled meanwhile."""
    while True:
        client.pull([SOME], [(0, 0)])
        with contextlib.suppress(CheckpointError):
            client.evict()
            return


@changes_by_key
def test_another_client_after_half_a_change_by_key(
    servers: list[Server], tmp_path: Path, op: int, change: Callable[[Client], object]
) -> None:
    armed: list[int] = []
    relay = Relay(servers[1].endpoint, breaks_once(op, armed))
    with Client([servers[0].endpoint, relay.endpoint], share_memory=False) as client:
        client.create_table(SPEC)
        client.create_table(HUGE)
        push(client)
        client.checkpoint(1, wait=True)
        armed.append(op)
        with pytest.raises(ServerLost):
            change(client)
    with connect(servers) as client:
        await_half(client)
        with pytest.raises(TornError, match="has other assignments or erases in table 't' than server"):
            client.save(tmp_path)
        assert_torn(client, tmp_path / "saved")
        assert client.recover() == 1
        np.testing.assert_array_equal(client.pull_rows(0, SOME), -1)
        change(client)
        client.checkpoint(2, wait=True)
    relay.close()


def test_changes_by_key_and_a_server_that_came_back(servers: list[Server], tmp_path: Path) -> None:
    """What a server lost tears the job; what it had in its checkpoint, or had no keys of, does not."""

    def restart() -> None:
        port = servers[1].endpoint.rpartition(":")[2]
        servers[1].end()
        servers[1].ready_file.unlink()
        flags = ["--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool-1"), "--storage-recover"]
        servers[1] = Server(tmp_path / "server-1", *flags, "--port", port, index=1, count=2)
        servers[1].ready()

    def assign(client: Client, keys: NDArray[np.int64], value: float) -> None:
        client.assign(0, keys, np.full((len(keys), SPEC.dim), value, np.float32))

    with connect(servers) as client:
        for key in SOME[:8]:
            assign(client, np.array([key]), 1)
        client.erase(0, SOME[:1])
        client.save(tmp_path)
        client.checkpoint(1, wait=True)
    restart()
    with connect(servers) as client:
        client.save(tmp_path)
        assign(client, SOME[:8], 2)
        client.checkpoint(2, wait=True)
        assign(client, SOME[:8], 3)
    restart()
    with connect(servers) as client:
        assert set(client.pull_rows(0, SOME[:8])[:, 0]) == {2, 3}
        with pytest.raises(TornError, match="has other assignments or erases in table 't' than server"):
            client.checkpoint(3)
        assert_torn(client, tmp_path / "saved")
        assert client.recover() == 2
        np.testing.assert_array_equal(client.pull_rows(0, SOME[:8]), 2)
        client.checkpoint(3, wait=True)


@pytest.mark.parametrize(
    ("op", "transfer"),
    [(16, "shared"), (6, "shared"), (6, "wire")],
    ids=["recover", "restore", "restore-wire"],
)
def test_another_client_after_half_a_recovery(
    servers: list[Server], tmp_path: Path, op: int, transfer: str
) -> None:
    """Both servers went back before, and neither has been pushed to since: their pushes tell nothing."""
    armed: list[int] = []
    relay = Relay(servers[1].endpoint, breaks_once(op, armed))
    endpoints = [servers[0].endpoint, relay.endpoint]
    with Client(endpoints, share_memory=False, checkpoint_transfer=transfer) as client:
        client.create_table(SPEC)
        client.create_table(HUGE)

        def keep(number: int) -> None:
            push(client)
            if op == 16:
                client.checkpoint(number, wait=True)
            else:
                (tmp_path / f"save-{number}").mkdir()
                client.save(tmp_path / f"save-{number}")

        def go_back(number: int) -> None:
            if op == 16:
                client.recover(number)
            else:
                client.restore(tmp_path / f"save-{number}")

        keep(1)
        keep(2)
        go_back(2)
        armed.append(op)
        with pytest.raises(ServerLost):
            go_back(1)
    with connect(servers) as client:
        await_half(client)
        await_back(client)
        push(client)
        two = ("checkpoint 2", "checkpoint 1") if op == 16 else ("save-2", "save-1")
        sentence = f"table '(t|huge)' started from .*{two[0]} on server .*, from .*{two[1]} on server"
        with pytest.raises(TornError, match=sentence):
            client.save(tmp_path)
        assert_torn(client, tmp_path / "saved")
        if op == 16:
            client.recover(1)
        else:
            client.restore(tmp_path / "save-1")
        np.testing.assert_array_equal(client.pull_rows(0, SOME), -1)
        push(client)
        client.save(tmp_path / "saved")
    relay.close()


def test_a_server_that_came_back_where_the_others_are_tears_nothing(
    servers: list[Server], tmp_path: Path
) -> None:
    """One began with the checkpoint that the other made after it had begun with an earlier one."""
    with connect(servers) as client:
        push(client)
        client.checkpoint(1, wait=True)
        assert client.recover() == 1
        push(client)
        client.checkpoint(2, wait=True)
    port = servers[1].endpoint.rpartition(":")[2]
    servers[1].end()
    servers[1].ready_file.unlink()
    flags = ["--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool-1"), "--storage-recover"]
    servers[1] = Server(tmp_path / "server-1", *flags, "--port", port, index=1, count=2)
    servers[1].ready()
    with connect(servers) as client:
        client.save(tmp_path)
        push(client)
        client.checkpoint(3, wait=True)


CLIENT = """
import sys
import numpy as np
from oe_runtime import Client, StorageError, TableSpec
client = Client(sys.argv[1:])
client.create_table(TableSpec.from_json(sys.stdin.read()))
pulled = client.pull([np.arange(8)], [(0, 0)])
try:
    client.push(pulled, [np.ones(pulled.groups[0].rows.shape)], 1.0)
except StorageError:
    print("refused", flush=True)
"""


def test_a_client_that_ended_after_its_push_was_refused(servers: list[Server], tmp_path: Path) -> None:
    with connect(servers) as client:
        push(client)
        client.checkpoint(1, wait=True)
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *(server.endpoint for server in servers)],
        input=HUGE.to_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "refused\n"
    with connect(servers) as client:
        assert_torn(client, tmp_path / "saved")
        assert client.recover() == 1


def test_servers_that_came_back_at_different_checkpoints(servers: list[Server], tmp_path: Path) -> None:
    """Nobody said that something failed: the servers' pushes are compared."""
    with connect(servers) as client:
        push(client)
        client.checkpoint(1, wait=True)
        push(client)
    port = servers[1].endpoint.rpartition(":")[2]
    servers[1].end()
    servers[1].ready_file.unlink()
    flags = ["--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool-1"), "--storage-recover"]
    servers[1] = Server(tmp_path / "server-1", *flags, "--port", port, index=1, count=2)
    servers[1].ready()
    with connect(servers) as client:
        with pytest.raises(TornError, match="pushes to table 't', server"):
            client.checkpoint(2)
        assert_torn(client, tmp_path / "saved")
        assert client.recover() == 1
        push(client)
        client.checkpoint(2, wait=True)
        client.save(tmp_path / "saved")


@pytest.fixture
def with_old(tmp_path: Path) -> Iterator[tuple[list[Server], Path]]:
    """Two servers, of which the second came back without table 'old', and a save of before."""
    made = [Server(tmp_path / f"server-{index}", index=index, count=2) for index in range(2)]
    with Client([server.endpoint for server in made]) as client:
        client.create_table(TableSpec("old", 2))
        client.create_table(SPEC)
        pulled = client.pull([SOME], [(1, 0)])
        client.push(pulled, [np.ones((len(SOME), SPEC.dim), np.float32)], 1.0)
        (tmp_path / "save").mkdir()
        client.save(tmp_path / "save")
    port = str(made[1].ready()["port"])
    made[1].end()
    made[1].ready_file.unlink()
    made[1] = Server(tmp_path / "server-1", "--port", port, index=1, count=2)
    yield made, tmp_path / "save"
    for server in made:
        server.end()


def test_a_table_that_one_server_has_alone_hides_no_other(
    with_old: tuple[list[Server], Path], tmp_path: Path
) -> None:
    servers, _ = with_old
    with Client([server.endpoint for server in servers]) as client:
        client.create_table(SPEC)
        with pytest.raises(TornError, match=r"0 pushes to table 't', server .* 1"):
            client.save(tmp_path)


def test_a_restore_where_one_server_has_a_table_more_tears_nothing(
    with_old: tuple[list[Server], Path], tmp_path: Path
) -> None:
    servers, saved = with_old
    with Client([server.endpoint for server in servers]) as client:
        table = client.create_table(SPEC)
        client.restore(saved)
        np.testing.assert_array_equal(client.pull_rows(table, SOME), -1)
        client.save(tmp_path)


@pytest.mark.parametrize("storage", ["dram", "pmem_libpmem", "dram_pmem", "dram_ssd"])
def test_other_clients_pushes_are_saved_on_all_servers_or_on_none(tmp_path: Path, storage: str) -> None:
    # At rate 1 and with gradients of -1, each row counts the pushes.
    specs = [TableSpec(name, 4, optimizer={"name": "sgd"}, initializer={"name": "zeros"}) for name in "ab"]
    ids = np.arange(1000)
    servers = Servers(tmp_path / "servers", 2, storage=storage)
    stop = threading.Event()
    errors: list[OeError] = []

    def connect_both() -> Client:
        client = Client(servers.endpoints)
        for spec in specs:
            client.create_table(spec)
        return client

    def push_both(client: Client) -> None:
        pulled = client.pull([ids], [(0, 0), (1, 0)])
        client.push(pulled, [np.full((2000, 4), -1, np.float32)], 1.0)

    def push_until_stopped() -> None:
        try:
            with connect_both() as client:
                while not stop.is_set():
                    push_both(client)
        except OeError as error:
            errors.append(error)

    try:
        client = connect_both()
        push_both(client)
        threads = [threading.Thread(target=push_until_stopped) for _ in range(2)]
        for thread in threads:
            thread.start()
        directories = [tmp_path / f"save-{i}" for i in range(8)]
        for i, directory in enumerate(directories):
            directory.mkdir()
            client.save(directory)
            if storage != "dram":
                client.checkpoint(i, wait=True)
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
        kept = [] if storage == "dram" else client.checkpoints()[::-1]
        for go_back, places in ((client.recover, kept), (client.restore, directories)):
            for place in places:
                go_back(place)
                rows = np.concatenate([client.pull_rows(table, ids) for table in range(2)])
                assert (rows == rows[0, 0]).all(), "a push is in some rows only"
                assert rows[0, 0] > 0
    finally:
        stop.set()
        servers.end()
