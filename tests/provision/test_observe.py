"""Observation for real: this machine by a child process, and over SSH to a server on loopback."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from ssh_server import SshServer, serving

from provision import observe as observing
from provision import share
from provision.errors import HostError
from provision.inventory import Inventory, load
from provision.node.observe import observe_node
from provision.node.plan import make_plan
from provision.node.state import State, difference

OLD_PYTHONS = sorted(Path("/root/.pyenv/versions").glob("3.6*/bin/python3.6"))


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with serving(tmp_path) as found:
        (tmp_path / ".ssh" / "known_hosts").write_text(found.known_hosts_line())
        yield found


def inventory(tmp_path: Path, hosts: str) -> Inventory:
    path = tmp_path / "inventory.yml"
    path.write_text(
        f"all:\n  hosts:\n{hosts}\n  children:\n    workers:\n      hosts: {{a: }}\n"
        "    parameter_servers:\n      hosts: {a: }\n"
    )
    return load(path)


def host(server: SshServer, extra: str = "") -> str:
    return (
        f"    a: {{ansible_host: 127.0.0.1, ansible_port: {server.port}, ansible_user: me, oeprov_kind: cpu, "
        f"ansible_ssh_private_key_file: {server.key_file}{extra}}}"
    )


def reason(found: State | HostError) -> str:
    assert isinstance(found, HostError)
    assert str(found).startswith("a: ")
    assert "\n" not in str(found)
    return found.reason


def test_this_machine(tmp_path: Path) -> None:
    found = load(share.inventory("local"), state_dir=tmp_path / "state")
    state = observing.observe(found)["localhost"]
    assert isinstance(state, State)
    assert state.hostname == socket.gethostname()
    assert state.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert state.runtime.venv == sys.prefix
    assert state.directories[0].path == str(tmp_path / "state" / "pmem0")
    assert state.directories[0].exists is False
    plan = make_plan(state, found.hosts["localhost"].desired())
    assert "directory" in [step.id for step in plan.steps]


def test_the_state_is_the_same_whichever_way_it_is_seen(tmp_path: Path) -> None:
    found = load(share.inventory("local"), state_dir=tmp_path / "state")
    desired = found.hosts["localhost"].desired()
    direct = State.from_dict(observe_node(desired.to_dict()))
    carried = observing.observe_host(found.hosts["localhost"])
    assert difference(direct, carried) == []
    assert direct.digest() == carried.digest()


def test_making_the_directory_changes_the_digest(tmp_path: Path) -> None:
    found = load(share.inventory("local"), state_dir=tmp_path / "state")
    before = observing.observe_host(found.hosts["localhost"])
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    after = observing.observe_host(found.hosts["localhost"])
    assert before.digest() != after.digest()


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python 3.6 here")
def test_the_payload_runs_on_python_3_6() -> None:
    for kind in ("local", "re7p", "bare_metal_pmem", "cxl", "gpu"):
        script = observing.payload({"host": "h", "kind": kind, "pmem_mode": "system-ram", "worker": True})
        done = subprocess.run(
            [str(OLD_PYTHONS[0]), "-"], input=script, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        state = observing.parse("h", done.stdout)
        assert state.os.python.startswith("3.6.")


def test_the_payload_leaves_nothing_behind(tmp_path: Path) -> None:
    script = observing.payload({"host": "h", "kind": "cpu"})
    subprocess.run(
        [sys.executable, "-"],
        input=script,
        text=True,
        check=True,
        env={"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    assert [path.name for path in tmp_path.iterdir()] == [".ssh"]


def test_over_ssh_in_one_round_trip(tmp_path: Path, server: SshServer) -> None:
    server.banner = b"Welcome to this machine\n"
    state = observing.observe(inventory(tmp_path, host(server)))["a"]
    assert isinstance(state, State)
    assert state.hostname == socket.gethostname()
    assert state.kernel.running
    assert server.commands == ["python3 -"]


def test_one_lost_host_does_not_hide_the_others(tmp_path: Path, server: SshServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    hosts = host(server) + f"\n    b: {{ansible_host: 127.0.0.1, ansible_port: {port}, oeprov_kind: cpu}}"
    found = observing.observe(inventory(tmp_path, hosts))
    assert list(found) == ["a", "b"]
    assert isinstance(found["a"], State)
    assert isinstance(found["b"], HostError)
    assert found["b"].reason == (
        f"127.0.0.1 port {port} refuses connections; is sshd running there, and is ansible_port right?"
    )


def test_a_key_that_is_not_accepted(tmp_path: Path, server: SshServer) -> None:
    other = tmp_path / "other"
    paramiko.ECDSAKey.generate().write_private_key_file(str(other))
    server.key_file = other
    text = reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert f"127.0.0.1 port {server.port} refuses to let me in" in text


def test_a_host_key_that_changed(tmp_path: Path, server: SshServer) -> None:
    line = server.known_hosts_line(paramiko.ECDSAKey.generate())
    (tmp_path / ".ssh" / "known_hosts").write_text(line)
    assert "shows another host key" in reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert server.commands == []


def test_a_host_key_that_is_not_known(tmp_path: Path, server: SshServer) -> None:
    (tmp_path / ".ssh" / "known_hosts").write_text("")
    text = reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert "has a host key that is not in known_hosts" in text
    assert server.commands == []


def test_a_host_without_python(tmp_path: Path, server: SshServer) -> None:
    found = inventory(tmp_path, host(server, ", ansible_python_interpreter: /no/python3"))
    assert "has no /no/python3; install Python 3" in reason(observing.observe(found)["a"])


def test_a_host_whose_python_is_too_old(tmp_path: Path, server: SshServer) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'Python 3.6 or newer is needed, this is 3.5.2' >&2\nexit 1\n")
    old.chmod(0o755)
    found = inventory(tmp_path, host(server, f", ansible_python_interpreter: {old}"))
    assert "Python 3.6 or newer is needed, this is 3.5.2" in reason(observing.observe(found)["a"])


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    found = inventory(tmp_path, "    a: {ansible_host: no-such-host.invalid, oeprov_kind: cpu}")
    assert "cannot be resolved; set ansible_host" in reason(observing.observe(found)["a"])


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "sent no state back"),
        ("bash: warning\nbye\n", "sent no state back: bash: warning / bye"),
        ("OEPROV-STATE {]\n", "sent a state that cannot be read"),
        ('OEPROV-STATE {"state": {"new_field": 1}}\n', "State has no field new_field"),
        ('OEPROV-STATE {"error": "OSError: gone"}\n', "cannot be observed: OSError: gone"),
    ],
)
def test_answers_that_are_none(text: str, piece: str) -> None:
    with pytest.raises(HostError) as caught:
        observing.parse("a", text)
    assert piece in caught.value.reason
