"""A host that vanishes says no farewell: no reset, no end of the stream. Both sides must notice."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from training_runs import wait_for

from oe_runtime import Client, ServerLost, SpecError, TableSpec, Worker

pytestmark = pytest.mark.process

TOKEN = "correct horse battery"
WORKER = """
import sys, time
import numpy as np
from oe_runtime import Client, TableSpec, Worker
client = Client([sys.argv[1] + ":7001"], token=sys.argv[2], worker=Worker(1, 2))
table = client.create_table(TableSpec("t", 4))
client.push(client.pull([np.arange(9)], [(table, 0)]), [np.ones((9, 4), np.float32)], 0.1)
print("pushed", flush=True)
time.sleep(1000)
"""
_numbers = itertools.count()


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace, reached over a cable, with one server that listens on every address."""

    def __init__(self, directory: Path) -> None:
        number = next(_numbers)
        self.name = f"oe{os.getpid()}-{number}"
        self._cable = f"oe{os.getpid() % 100000}x{number}"
        network = f"198.18.{os.getpid() % 250}."
        self.gateway, address = f"{network}{number * 4 + 1}", f"{network}{number * 4 + 2}"
        self.process: subprocess.Popen[bytes] | None = None
        sh("ip", "netns", "add", self.name)
        sh("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        sh("ip", "address", "add", f"{self.gateway}/30", "dev", self._cable)
        sh("ip", "link", "set", self._cable, "up")
        self.sh("ip", "address", "add", f"{address}/30", "dev", "eth0")
        self.sh("ip", "link", "set", "eth0", "up")
        self.sh("ip", "link", "set", "lo", "up")
        token, ready = directory / "token", directory / "ready.json"
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "oe_runtime.server", "--host", "0.0.0.0", "--port", "7000"]  # noqa: S104
        command += ["--token-file", str(token), "--ready-file", str(ready), "--exit-with-parent"]
        command += ["--checkpoint-dir", str(directory / "own")]
        self.process = subprocess.Popen(["ip", "netns", "exec", self.name, *command], stdin=subprocess.PIPE)
        wait_for(ready.exists, self.process)
        self.endpoint = f"{address}:7000"

    def sh(self, *command: str) -> str:
        """Run a command there."""
        return sh("ip", "netns", "exec", self.name, *command)

    def vanish(self) -> None:
        """The cable is cut at the host's end: nothing goes out and nothing comes in."""
        self.sh("ip", "link", "set", "eth0", "down")

    def end(self) -> None:
        """Take everything away again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            self.process.stdin.close()
        subprocess.run(["ip", "netns", "delete", self.name], check=False)
        subprocess.run(["ip", "link", "delete", self._cable], check=False, capture_output=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (iproute2) here")
    probe = f"oe{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make network namespaces")
    enters = subprocess.run(
        ["ip", "netns", "exec", probe, "true"], check=False, capture_output=True, text=True
    )
    sh("ip", "netns", "delete", probe)
    if enters.returncode:
        pytest.skip(f"network namespaces cannot be entered here: {enters.stderr.strip()}")  # as in a chroot
    made = Host(tmp_path)
    yield made
    made.end()


def push(client: Client) -> None:
    client.push(client.pull([np.arange(9)], [(0, 0)]), [np.ones((9, 4), np.float32)], 0.1)


def outcome(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """`work` in a thread, and the list in which its exception will be."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_host_that_vanishes_during_a_save_is_noticed(host: Host, tmp_path: Path) -> None:
    client = Client([host.endpoint], token=TOKEN, timeout=3, checkpoint_transfer="wire")
    table = client.create_table(TableSpec("t", 4))
    client.push(client.pull([np.arange(9)], [(table, 0)]), [np.ones((9, 4), np.float32)], 0.1)
    (tmp_path / "saved").mkdir()
    # A server that is only slow is waited for: a save may take an hour.
    host.process.send_signal(signal.SIGSTOP)
    thread, raised = outcome(lambda: client.save(tmp_path / "saved"))
    thread.join(7)
    assert thread.is_alive()
    host.vanish()
    thread.join(60)
    assert not thread.is_alive()
    assert type(raised[0]) is ServerLost
    assert raised[0].endpoint == host.endpoint
    assert "the connection broke" in str(raised[0])
    assert os.listdir(tmp_path / "saved") == []


def test_a_host_that_vanished_while_nobody_asked_is_noticed_at_the_next_request(host: Host) -> None:
    client = Client([host.endpoint], token=TOKEN, timeout=3)
    host.vanish()
    with pytest.raises(ServerLost, match=re.escape(host.endpoint)):
        client.stats()


def test_a_host_that_vanished_is_noticed_while_something_is_under_way(host: Host, tmp_path: Path) -> None:
    """Nothing probes a connection then, and a save may take an hour."""
    client = Client([host.endpoint], token=TOKEN, timeout=3, checkpoint_transfer="wire")
    client.create_table(TableSpec("t", 4))
    (tmp_path / "saved").mkdir()
    host.vanish()
    thread, raised = outcome(lambda: client.save(tmp_path / "saved"))
    thread.join(60)
    assert not thread.is_alive()
    assert type(raised[0]) is ServerLost
    assert "its host has not answered for 3 s" in str(raised[0])


def test_a_server_probes_clients_that_say_nothing(host: Host) -> None:
    client = Client([host.endpoint], token=TOKEN)
    found: list[str] = []
    while not found:  # while the last reply is not acknowledged, the connection has another timer
        found = re.findall(r"timer:\(keepalive,([^,]*),", host.sh("ss", "-tnoH", "sport", "=", ":7000"))
    (timer,) = found
    seconds = re.fullmatch(r"(?:(\d+)min)?(?:([\d.]+)sec)?(?:\d+ms)?", timer)
    assert seconds, timer
    assert int(seconds[1] or 0) * 60 + float(seconds[2] or 0) <= 40
    client.close()


def test_the_rest_takes_the_places_of_a_worker_whose_host_vanished(host: Host, tmp_path: Path) -> None:
    """Its connection stays open for 90 s; those that start again as fewer need not wait for that."""
    one = [sys.executable, "-c", WORKER, host.gateway, TOKEN]
    serve = [sys.executable, "-m", "oe_runtime.server", "--host", host.gateway, "--port", "7001"]
    ready, token = tmp_path / "here.json", tmp_path / "token"
    server = subprocess.Popen(
        [*serve, "--token-file", str(token), "--ready-file", str(ready)], stdout=subprocess.DEVNULL
    )
    there = None
    try:
        wait_for(ready.exists, server)
        there = subprocess.Popen(["ip", "netns", "exec", host.name, *one], stdout=subprocess.PIPE, text=True)
        assert there.stdout is not None
        endpoint = f"{host.gateway}:7001"
        first = Client([endpoint], token=TOKEN, worker=Worker(0, 2))
        first.create_table(TableSpec("t", 4))
        assert there.stdout.readline() == "pushed\n"
        push(first)
        (tmp_path / "saved").mkdir()
        first.save(tmp_path / "saved")
        host.vanish()
        first.close()
        started = time.monotonic()
        with pytest.raises(SpecError, match="'of' is 3, but the job's other workers have said 2"):
            Client([endpoint], token=TOKEN, worker=Worker(0, 3))
        rest = Client([endpoint], token=TOKEN, worker=Worker(0, 1, generation=2, wait=5))
        rest.create_table(TableSpec("t", 4))
        rest.restore(tmp_path / "saved")
        push(rest)
        assert time.monotonic() - started < 20
        assert rest.stats()["servers"][0]["workers"][0]["of"] == 1
        rest.close()
    finally:
        for process in (there, server):
            if process is not None:
                process.kill()
                process.communicate()
