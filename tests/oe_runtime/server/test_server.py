"""Real server processes on loopback: good and bad company, and death at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from server_processes import Server, Servers
from test_client import equal, train

from oe_runtime import (
    AuthError,
    CheckpointError,
    Client,
    GradientError,
    KeyRangeError,
    ServerLost,
    SpecError,
    SpecMismatch,
    StorageError,
    TableSpec,
)

pytestmark = pytest.mark.process


@pytest.fixture
def start(tmp_path):
    """Starts servers that end with the test."""
    started = []

    def start_servers(count=1, *flags, storage="dram"):
        servers = Servers(tmp_path / f"servers-{len(started)}", count, *flags, storage=storage)
        started.append(servers)
        return servers

    yield start_servers
    for servers in started:
        servers.end()


@pytest.fixture
def start_one(tmp_path):
    """Starts one server with flags of the test's own."""
    started = []

    def start_server(*flags):
        started.append(Server(tmp_path / f"server-{len(started)}", *flags))
        return started[-1]

    yield start_server
    for server in started:
        server.end()


def exported_rows(client: Client, table: int) -> dict[int, bytes]:
    keys, rows = client.export_rows(table)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def test_three_servers_and_persistent_memory_give_the_rows_of_one_process(start):
    one = Client.in_process()
    wanted = train(one)
    exported = [exported_rows(one, table) for table in range(4)]
    for servers in (start(1), start(3), start(2, storage="pmem_libpmem")):
        with Client(servers.endpoints) as client:
            assert client.servers == len(servers.endpoints)
            assert equal(train(client), wanted)
            assert [exported_rows(client, table) for table in range(4)] == exported


def test_save_with_three_restore_into_two_and_one(start, tmp_path):
    directory = tmp_path / "saved"
    directory.mkdir()
    with Client(start(3).endpoints) as source:
        train(source, 1)
        saved = source.save(directory)
        assert sorted(os.listdir(directory)) == sorted(entry["file"] for entry in saved)
        wanted = train(source, 2)
    for servers in (start(2, storage="pmem_libpmem"), start(1)):
        with Client(servers.endpoints) as target:
            train(target, 99, steps=1)
            target.restore(directory)
            # The same rows, slots and step numbers, or the next steps would differ.
            assert equal(train(target, 2), wanted)


def test_a_damaged_or_missing_file_restores_nothing(start, tmp_path):
    directory = tmp_path / "saved"
    directory.mkdir()
    with Client(start(2).endpoints) as client:
        train(client, 1)
        client.save(directory)
        train(client, 2)
        keys = np.arange(500)
        before = [client.pull_rows(table, keys) for table in range(4)]
        victim = directory / "server-1-of-2.words.oet"  # the last table that is read
        good = victim.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        victim.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"server-1-of-2\.words\.oet"):
            client.restore(directory)
        victim.write_bytes(good[:-3])
        with pytest.raises(CheckpointError, match=r"server-1-of-2\.words\.oet"):
            client.restore(directory)
        victim.unlink()
        with pytest.raises(CheckpointError, match=r"server-1-of-2\.words\.oet is missing"):
            client.restore(directory)
        with pytest.raises(CheckpointError, match="absent"):
            client.restore(directory / "absent")
        assert equal([client.pull_rows(table, keys) for table in range(4)], before)
        victim.write_bytes(good)
        client.restore(directory)
    other = Client.in_process()
    other.create_table(
        TableSpec("words", 10, "array", 500, initializer={"name": "normal", "stddev": 0.1, "seed": 3})
    )
    with pytest.raises(CheckpointError, match="'dim' was 9"):
        other.restore(directory)


def test_errors_are_those_of_one_process(start, tmp_path):
    with Client(start(2).endpoints) as client:
        table = client.create_table(TableSpec("t", 4, "array", 10))
        assert client.create_table(TableSpec("t", 4, "array", 10)) == table
        with pytest.raises(SpecMismatch, match=r"dim 4.*5.*127\.0\.0\.1"):
            client.create_table(TableSpec("t", 5, "array", 10))
        with pytest.raises(SpecError, match="lamb"):
            client.create_table(TableSpec("u", 4, optimizer={"name": "lamb"}))
        with pytest.raises(KeyRangeError, match="key 10"):
            client.pull([np.array([10])], [(table, 0)])
        nan = np.full((1, 4), np.nan, np.float32)
        with pytest.raises(GradientError, match=r"'t': the gradient of key 3 is not finite"):
            client.push(client.pull([np.array([3])], [(table, 0)]), [nan], 1.0)
        with pytest.raises(CheckpointError, match=f"in {tmp_path}/absent: No such file or directory; make"):
            client.save(tmp_path / "absent")
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match=f"in {tmp_path}/file: Not a directory; make"):
            client.save(tmp_path / "file")
        pulled = client.pull([np.array([1])], [(table, 0)])
        with pytest.raises(SpecError, match="learning rate"):
            client.push(pulled, [np.zeros((1, 4), np.float32)], -1.0)
        assert [s["tables"]["t"]["version"] for s in client.stats()["servers"]] == [0, 0]


def test_a_push_that_only_some_servers_took_is_told(start):
    # 1 MiB holds 4,000 rows of this table, and no server takes 20,000; an empty part always fits.
    with Client(start(2, "--storage-size", str(1 << 20)).endpoints) as client:
        table = client.create_table(TableSpec("t", 64, "array", 10**6, optimizer={"name": "sgd"}))
        even = np.arange(0, 40_000, 2)
        pulled = client.pull([even], [(table, 0)])
        with pytest.raises(StorageError, match=r"applied by 127\.0\.0\.1.*last checkpoint"):
            client.push(pulled, [np.zeros((len(even), 64), np.float32)], 0.1)


def test_wrong_token_and_no_token(start, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    token.chmod(0o600)
    servers = start(2, "--token-file", str(token))
    for wrong in ("", "battery staple", "correct hors", "correct horse2"):
        with pytest.raises(AuthError, match="token"):
            Client(servers.endpoints, token=wrong)
    with Client(servers.endpoints, token="correct horse") as client:
        assert [s["connections"]["refused"]["token"] for s in client.stats()["servers"]] == [4, 4]
    for server in servers.servers:
        assert "correct" not in Path(f"/proc/{server.process.pid}/cmdline").read_text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda e: [], "no server"),
        (lambda e: e[::-1], "place 0 of 2"),
        (lambda e: e[:1], "place 0 of 1"),
        (lambda e: [e[0], e[0]], "given twice"),
        (lambda e: ["nonsense"], "host:port"),
        (lambda e: ["127.0.0.1:99999"], "not a port"),
    ],
)
def test_endpoints_that_are_wrong(start, make, message):
    servers = start(2)
    with pytest.raises(SpecError, match=message):
        Client(make(servers.endpoints))


def test_nobody_answers():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]  # and nobody else's while it is bound
        with pytest.raises(ServerLost, match=f"127.0.0.1:{port}.*refused") as caught:
            Client([f"127.0.0.1:{port}"])
    assert caught.value.endpoint == f"127.0.0.1:{port}"


def test_a_listener_that_never_says_a_word():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerLost, match=r"no answer within 0\.3 s"):
            Client([f"127.0.0.1:{silent.getsockname()[1]}"], timeout=0.3)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"OEP\n\x04\x00\x01\x00" + bytes(16),  # version 4
        b"OEP\n\x05\x00\x03\x00\x01" + bytes(15),  # the reply to a pull
        b"OEP\n\x05\x00\x01\x00\x05" + bytes(15),  # to request 5
        b"OEP\n\x05\x00\x01\x00\x01" + bytes(7) + b"\xff" * 8,  # endless
        b"OEP\n\x05\x00\x01\x00\x01" + bytes(7) + b"\x02" + bytes(7) + b"{]",  # not JSON
    ],
)
def test_a_peer_that_talks_nonsense(reply):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RuntimeError) as caught:
            Client([f"127.0.0.1:{listener.getsockname()[1]}"], timeout=20)
        assert type(caught.value).__name__ == "ProtocolError"
        thread.join()


def test_a_server_of_the_version_before():
    """It takes version 5 only, and says nothing of versions in its reply."""
    asked = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as stream:
                for reply in (b'{"index": 0, "count": 1}', b"3"):
                    header = stream.read(24)
                    magic, version, op, request, length = struct.unpack("<4sHHQQ", header)
                    asked.append((op, version, stream.read(length)[:2]))
                    connection.sendall(struct.pack("<4sHHQQ", magic, 5, op, request, len(reply)) + reply)

        thread = threading.Thread(target=answer)
        thread.start()
        client = Client([f"127.0.0.1:{listener.getsockname()[1]}"], timeout=60)
        assert client.evict() == 3
        client.close()
        thread.join()
    assert asked == [(1, 5, b"\x06\x00"), (17, 5, b"")]


def test_garbage_is_refused_and_counted_and_the_server_stays(start):
    servers = start(1)
    host, port = servers.endpoints[0].split(":")
    rng = np.random.default_rng(0)
    for garbage in (b"GET / HTTP/1.0\r\n\r\n" * 10, rng.bytes(100_000), b"OEP\n" + b"\xff" * 60):
        connection = socket.create_connection((host, int(port)))
        with (
            connection,
            contextlib.suppress(OSError),
        ):  # refused at its first bytes: it may reset the connection
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    with Client(servers.endpoints) as client:
        refused = client.stats()["servers"][0]["connections"]["refused"]
        assert (refused["foreign"], refused["version"]) == (2, 1)
        train(client, steps=1)


def test_kill_in_the_middle_is_told_at_once(start):
    servers = start(2)
    client = Client(servers.endpoints, timeout=120)
    victim = servers.servers[1]
    killer = threading.Timer(0.5, victim.process.kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(ServerLost, match=servers.endpoints[1]) as caught:
        train(client, steps=10**6)
    assert time.monotonic() - started < 60  # not the time-out
    assert caught.value.endpoint == servers.endpoints[1]
    assert "last checkpoint" in str(caught.value)
    with pytest.raises(ServerLost):
        client.stats()
    assert servers.servers[0].process.poll() is None
    killer.join()


def large_pull(client):
    """A batch that is large enough to lie in shared memory."""
    table = client.create_table(TableSpec("large", 16))
    return client.pull([np.arange(20_000)], [(table, 0)])


def shared_bytes(client):
    """Of all clients of the server."""
    return client.stats()["servers"][0]["connections"]["shared_bytes"]


def test_shared_memory_outlives_the_server_that_wrote_it(start):
    servers = start(1)
    client = Client(servers.endpoints, timeout=120)
    pulled = large_pull(client)
    rows = pulled.groups[0].rows.copy()
    assert shared_bytes(client) > rows.nbytes
    servers.servers[0].process.kill()
    with pytest.raises(ServerLost, match=servers.endpoints[0]):
        client.push(pulled, [rows], 0.1)
    assert np.array_equal(pulled.groups[0].rows, rows)
    client.close()
    kept = pulled.groups[0].rows
    del pulled, client
    assert np.array_equal(kept, rows)


def test_the_memory_of_a_killed_client_is_let_go(start):
    servers = start(1)
    with Client(servers.endpoints) as client:
        table = client.create_table(TableSpec("large", 16))
        code = (
            "import os, signal, sys, numpy as np, oe_runtime as oe\n"
            f"client = oe.Client({servers.endpoints})\n"
            "lookups = [(client.create_table(oe.TableSpec('large', 16)), 0)]\n"
            "pulled = client.pull([np.arange(20_000)], lookups)\n"
            "client.push(pulled, [np.ones((20_000, 16), np.float32)], 0.1)\n"
            "connections = client.stats()['servers'][0]['connections']\n"
            "assert connections['sharing_memory'] == 1, connections\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        deadline = time.monotonic() + 60
        while shared_bytes(client) > 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.pull_rows(table, np.array([5])).shape == (1, 16)


def test_a_stopped_server_is_lost_after_the_timeout(start):
    servers = start(1)
    client = Client(servers.endpoints, timeout=0.5)
    os.kill(servers.servers[0].process.pid, signal.SIGSTOP)
    os.waitpid(servers.servers[0].process.pid, os.WUNTRACED)  # all its threads have stopped
    with pytest.raises(ServerLost, match=r"no answer within 0\.5 s"):
        client.stats()
    os.kill(servers.servers[0].process.pid, signal.SIGCONT)


def test_ctrl_c_ends_a_wait(start):
    servers = start(1)
    client = Client(servers.endpoints, timeout=600)
    process = servers.servers[0].process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        client.stats()
    with pytest.raises(RuntimeError, match="closed"):
        client.stats()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(start, number, tmp_path):
    servers = start(1, storage="pmem_libpmem")
    server = servers.servers[0]
    with Client(servers.endpoints) as client:
        train(client, steps=2)
        server.process.send_signal(number)
        assert server.wait()[0] == 0
    assert number.name in server.errors.read_text()
    assert not server.ready_file.exists()
    assert list((tmp_path / "servers-0" / "pool-0").glob("*.pool*")) == []
    assert json.loads(server.metrics_file.read_text())["pushes"]["requests"] == 2


def test_the_end_of_standard_input_ends_it(start):
    server = start(1).servers[0]
    server.ready()
    server.process.stdin.write(b"words do nothing\n")
    server.process.stdin.flush()
    assert server.process.poll() is None
    server.process.stdin.close()
    status, errors = server.wait()
    assert status == 0
    assert "parent" in errors


def test_two_jobs_use_the_same_servers(start, tmp_path):
    servers = start(2)
    with Client(servers.endpoints, job="ctr") as one, Client(servers.endpoints, job="cvr") as other:
        first, second = one.create_table(TableSpec("t", 4)), other.create_table(TableSpec("t", 2))
        one.push(one.pull([np.arange(9)], [(first, 0)]), [np.ones((9, 4), np.float32)], 0.1)
        for server in other.stats()["servers"]:
            assert {job: list(tables) for job, tables in server["jobs"].items()} == {
                "ctr": ["t"],
                "cvr": ["t"],
            }
            assert server["tables"]["t"]["dim"] == 2
            assert server["tables"]["t"]["version"] == 0
        assert sum(s["tables"]["t"]["rows"] for s in one.stats()["servers"]) == 9
        assert [entry["table"] for entry in one.save(tmp_path)] == ["t", "t"]
        assert len(other.export_rows(second)[0]) == 0
    with pytest.raises(SpecError, match="a job's name has up to 64 letters"):
        Client(servers.endpoints, job="a/b")


def test_a_client_may_end_the_servers(start):
    servers = start(2)
    Client(servers.endpoints).shutdown()
    assert [server.wait()[0] for server in servers.servers] == [0, 0]


def test_ready_file_and_the_note_about_memory_that_is_not_persistent(start_one, tmp_path):
    server = start_one("--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool"))
    ready = server.ready()
    assert ready == {
        "pid": server.process.pid,
        "host": "127.0.0.1",
        "port": ready["port"],
        "index": 0,
        "count": 1,
        "storage": "pmem_libpmem",
        "is_pmem": False,
        "encrypted": False,
    }
    assert server.errors.read_text().count("not persistent memory") == 1


def test_a_port_that_is_taken(start_one):
    first = start_one()
    port = first.ready()["port"]
    second = start_one("--port", str(port))
    status, errors = second.wait()
    assert status == 1
    assert errors.startswith(f"error: cannot listen on 127.0.0.1:{port}: another program has this port")
    assert errors.count("\n") == 1
    assert not second.ready_file.exists()


def test_a_directory_that_another_server_holds(start_one, tmp_path):
    flags = ("--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool"))
    first = start_one(*flags)
    first.ready()
    status, errors = start_one(*flags).wait()
    assert status == 1
    assert str(first.process.pid) in errors
    assert errors.count("\n") == 1
    # A server that was killed holds nothing.
    first.process.kill()
    first.process.wait()
    assert start_one(*flags).ready()["storage"] == "pmem_libpmem"


def bad_start(tmp_path, name):
    """Flags that cannot work, and what the message must say."""
    file = tmp_path / "file"
    file.write_text("in the way")
    open_token = tmp_path / "open-token"
    open_token.write_text("secret")
    open_token.chmod(0o644)
    empty_token = tmp_path / "empty-token"
    empty_token.touch(0o600)
    pmem = ("--storage", "pmem_libpmem", "--storage-path")
    return {
        "no directory": ((*pmem, str(file / "pool")), "pool"),
        "a file": ((*pmem, str(file)), str(file)),
        "proc": ((*pmem, "/proc/pool"), "/proc"),
        "no path": (("--storage", "pmem_libpmem"), "path"),
        "open token": (("--token-file", str(open_token)), "chmod 600"),
        "empty token": (("--token-file", str(empty_token)), "empty"),
        "no token file": (("--token-file", str(tmp_path / "absent")), "absent"),
        "all the world": (("--host", "0.0.0.0"), "token"),  # noqa: S104
        "foreign address": (("--host", "192.0.2.1"), "192.0.2.1"),
        "ready file": (("--ready-file", "/proc/ready"), "error: /proc/ready: No such file"),
        "index": (("--index", "1"), "index 1 of 1"),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("no directory", "a file", "proc", "no path", "open token", "empty token", "no token file"),
        *("all the world", "foreign address", "ready file", "index"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(start_one, tmp_path, name):
    flags, message = bad_start(tmp_path, name)
    status, errors = start_one(*flags).wait()
    assert status == 1, errors
    assert errors.startswith("error: "), errors
    assert message in errors
    assert "Traceback" not in errors
    assert errors.count("\n") <= 2


def test_a_server_says_once_that_it_listens(tmp_path):
    token = tmp_path / "token"
    token.write_text("correct horse battery")
    token.chmod(0o600)
    command = [sys.executable, "-m", "oe_runtime.server", "--exit-with-parent", "--token-file", str(token)]
    command += ["--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool"), "--tls", "on"]
    (tmp_path / "pool").mkdir()
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    line = server.stdout.readline()  # it is there while the server runs
    assert re.fullmatch(
        rf"server 0 of 1 listens on 127\.0\.0\.1:[1-9]\d*, rows in pmem_libpmem in {tmp_path}/pool, "
        rf"encrypted, clients need the token of {token}\n",
        line,
    )
    assert server.communicate("", timeout=60)[0] == ""
    assert server.returncode == 0
