"""Encrypted connections of real processes, and beside TensorFlow, which brings a TLS library of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap

import pytest
from server_processes import Relay, Servers
from test_client import equal, train
from training_runs import wait_for

from oe_runtime import AuthError, Client, ProtocolError, SpecError

pytestmark = pytest.mark.process

TOKEN = "correct horse battery staple"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def start(tmp_path, token_file):
    """Starts servers that know the token and end with the test."""
    started = []

    def start_servers(count=1, *flags):
        flags = ("--token-file", str(token_file), *flags)
        started.append(Servers(tmp_path / f"servers-{len(started)}", count, *flags))
        return started[-1]

    yield start_servers
    for servers in started:
        servers.end()


def test_encrypted_servers_give_the_rows_of_one_process(start):
    wanted = train(Client.in_process())
    servers = start(2, "--tls", "on")
    assert all(server.ready()["encrypted"] for server in servers.servers)
    with Client(servers.endpoints, token=TOKEN, tls="on") as client:
        assert equal(train(client), wanted)


def test_loopback_is_in_clear_unless_it_is_asked_for(start):
    servers = start(1)
    assert not servers.servers[0].ready()["encrypted"]
    with Client(servers.endpoints, token=TOKEN) as client:
        assert not client.stats()["servers"][0]["connections"]["encrypted"]


def test_what_leaves_the_machine_is_encrypted_by_itself(start):
    servers = start(1, "--host", "0.0.0.0")  # noqa: S104
    port = servers.servers[0].ready()["port"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    with Client([f"{address}:{port}"], token=TOKEN) as client:
        assert client.stats()["servers"][0]["connections"]["encrypted"]
    with pytest.raises(ProtocolError, match="--tls on"):
        Client([f"127.0.0.1:{port}"], token=TOKEN)  # auto: loopback, so in clear


def test_one_side_without_says_what_to_set(start):
    with pytest.raises(ProtocolError, match=r"takes encrypted connections only.*--tls on"):
        Client(start(1, "--tls", "on").endpoints, token=TOKEN, tls="off")
    with pytest.raises(ProtocolError, match=r"does not encrypt; start it with --tls on"):
        Client(start(1, "--tls", "off").endpoints, token=TOKEN, tls="on")


def test_wrong_tokens(start):
    servers = start(1, "--tls", "on")
    with pytest.raises(AuthError, match="token"):
        Client(servers.endpoints, token=TOKEN + "r", tls="on")
    with pytest.raises(SpecError, match="at least 16 bytes"):
        Client(servers.endpoints, token="horse", tls="on")
    with pytest.raises(SpecError, match="tls is 'yes'"):
        Client(servers.endpoints, token=TOKEN, tls="yes")
    with Client(servers.endpoints, token=TOKEN, tls="on") as client:
        # The answer to the client is on its way before it is counted.
        refused = lambda: client.stats()["servers"][0]["connections"]["refused"]["token"]  # noqa: E731
        wait_for(lambda: refused() == 1, servers.servers[0].process)


def test_nothing_readable_crosses_the_wire(start):
    seen = []

    class Tap(Relay):
        def _requests(self, client, server):
            while data := client.recv(1 << 16):
                seen.append(data)
                server.sendall(data)
            server.close()

    tap = Tap(start(1, "--tls", "on").endpoints[0], lambda op: None)
    with Client([tap.endpoint], token=TOKEN, tls="on") as client:
        train(client, steps=1)
    tap.close()
    wire = b"".join(seen)
    assert len(wire) > 1000
    for secret in (TOKEN.encode(), b"OEP\n", b"adagrad", b"words"):
        assert secret not in wire


SCRIPT = """\
import importlib, json, sys
{imports}
import numpy as np
with oe_runtime.Client(sys.argv[1].split(","), token={token!r}, tls="on") as client:
    table = client.create_table(oe_runtime.TableSpec("t", 4, optimizer={{"name": "sgd"}}))
    for step in range(20):
        pulled = client.pull([np.arange(2000) + step], [(table, 0)])
        rows = tf.constant(pulled.groups[0].rows)
        client.push(pulled, [tf.sign(rows).numpy()], 0.01)
    print(json.dumps(client.stats()["servers"][0]["pushes"]["requests"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import tensorflow as tf; import oe_runtime",
        "import oe_runtime; import tensorflow as tf",
        "import ssl; import oe_runtime; import tensorflow as tf; import pyarrow",
    ],
)
def test_it_lives_beside_tensorflow_in_either_order(start, imports):
    servers = start(2, "--tls", "on")
    script = textwrap.dedent(SCRIPT).format(imports=imports, token=TOKEN)
    done = subprocess.run(
        [sys.executable, "-c", script, ",".join(servers.endpoints)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == 20


@pytest.mark.slow
def test_a_job_trains_over_encrypted_connections(start, tmp_path, token_file):
    servers = start(2, "--tls", "on")
    command = [sys.executable, "-m", "oe_runtime.train", "--data", "generate:4000", "--servers"]
    command += [
        ",".join(servers.endpoints),
        "--token-file",
        str(token_file),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command += ["--batch-size", "512", "--max-cardinality", "100", "--steps", "6", "--checkpoint-steps", "3"]
    refused = subprocess.run([*command, "--tls", "off"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "--tls on" in refused.stderr
    done = subprocess.run([*command, "--tls", "on"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
