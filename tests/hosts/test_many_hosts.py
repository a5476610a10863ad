"""Looking at many real hosts over SSH: all well, some lost, odd ways in, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from converged import entry, inventory, layer
from ssh_hosts import SshHost, SshHosts, why_not

from provision.cli.views.terminal import Terminal
from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.converge import planning
from provision.hosts import fanout, remote
from provision.hosts.observe import observe
from provision.inventory.loader import load
from provision.node.state import State

WHY_NOT = why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
COUNT = 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layer(tmp_path_factory.mktemp("layer"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("hosts"), COUNT, layer=base) as made:
        yield made


@pytest.fixture
def pair(tmp_path: Path, base: Path) -> Iterator[SshHosts]:
    """Two hosts that a test may spoil."""
    with SshHosts(tmp_path / "pair", 2, layer=base) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def oeprov(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "provision.cli", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)


def first(path: Path) -> Host:
    return next(iter(load(path).hosts.values()))


def see(path: Path) -> State | HostError:
    """What is seen of the first host of an inventory."""
    return next(iter(observe(load(path)).values()))


def options(hosts: SshHosts) -> str:
    return f"-o UserKnownHostsFile={hosts.known_hosts} -o IdentitiesOnly=yes"


def test_all_hosts_are_planned_and_nothing_is_written_there(tmp_path: Path, hosts: SshHosts) -> None:
    path = inventory(tmp_path / "inventory.yml", hosts)
    before = [host.written() for host in hosts]
    done = oeprov(tmp_path, "plan", "-i", str(path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["hosts"]
    assert list(found) == [host.name for host in hosts]
    assert all(item["steps"] == [] for item in found.values())
    assert [host.written() for host in hosts] == before


def test_each_state_is_of_its_own_host(tmp_path: Path, hosts: SshHosts) -> None:
    states = observe(load(inventory(tmp_path / "inventory.yml", hosts)))
    assert [state.hostname for state in states.values() if isinstance(state, State)] == [
        h.name for h in hosts
    ]


def test_bootstrap_of_converged_hosts_changes_nothing_and_does_not_start_ansible(
    tmp_path: Path, hosts: SshHosts
) -> None:
    path = inventory(tmp_path / "inventory.yml", hosts)
    before = [host.written() for host in hosts]
    done = oeprov(tmp_path, "bootstrap", "-i", str(path), "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 hosts converged already" in done.stdout
    assert not (tmp_path / ".oeprov" / "logs").exists()
    assert [host.written() for host in hosts] == before


def forget_key(host: SshHost) -> None:
    host.enter("rm", "/etc/oeprov-test/authorized_keys")


def remove_python(host: SshHost) -> None:
    host.enter("rm", "/usr/bin/python3")


def test_lost_hosts_are_named_with_their_reasons_and_the_others_planned(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "CONNECT_TIMEOUT", 3)
    with SshHosts(tmp_path / "hosts", COUNT, layer=base) as hosts:
        path = inventory(tmp_path / "inventory.yml", hosts)
        spoil: dict[str, tuple[Callable[[SshHost], None], str]] = {
            "refuses connections": (SshHost.stop, ""),
            "does not answer within 3 s": (hosts.cut, ""),
            "does not answer within 3 s; is it up": (SshHost.freeze, ""),
            "refuses to let root in (publickey)": (forget_key, ""),
            "install python3": (remove_python, ""),  # not lost: its plan begins with a Python
        }
        for host, (do, _) in zip(hosts, spoil.values(), strict=False):
            do(host)
        changed, unknown = hosts[5], hosts[6]
        lines = hosts.known_hosts.read_text().splitlines()
        lines[5] = f"{changed.address} {lines[4].split(' ', 1)[1]}"
        hosts.known_hosts.write_text("\n".join(lines[:6] + lines[7:]) + "\n")
        code = planning.plan(load(path), Terminal(as_json=True))
        said = json.loads(capsys.readouterr().out)["hosts"]
        expected = [*spoil, "has another host key", "has a host key that is not in known_hosts"]
        for host, words in zip(hosts, expected, strict=False):
            if words == "install python3":
                assert said[host.name]["steps"][0]["what"] == words
                continue
            assert words in said[host.name]["unreachable"]
            assert host.address in said[host.name]["unreachable"]
        assert unknown.name in said
        assert [said[host.name]["steps"] for host in list(hosts)[len(expected) :]] == [[]] * (
            COUNT - len(expected)
        )
        assert code == 1
        hosts[0].start()
        assert isinstance(see(inventory(path, hosts)), State)


def test_hosts_that_hang_at_different_points_are_named_and_the_others_planned(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "CONNECT_TIMEOUT", 5)
    monkeypatch.setattr(fanout, "LEAST", 6.0)
    monkeypatch.setattr(fanout, "FLEET", 10)
    monkeypatch.setattr(fanout, "_NEARLY_ALL", 0.7)  # of 20 hosts; a fleet has more
    with SshHosts(tmp_path / "hosts", COUNT, layer=base) as hosts:
        hangs: list[tuple[Callable[[SshHost], None], str]] = [
            (hosts.cut, "does not answer within 5 s"),  # connecting
            (SshHost.freeze, "does not answer within 5 s"),  # before sshd's banner
            (SshHost.hang_logins, "other hosts took"),
            (lambda host: host.hang_reading("/var/lib/dpkg/status"), "a command hung on the host"),
        ]
        hung = [hosts[place] for place in (0, 7, 13, 19)]
        for host, (hang, _) in zip(hung, hangs, strict=True):
            hang(host)
        code = planning.plan(load(inventory(tmp_path / "inventory.yml", hosts)), Terminal(as_json=True))
        said = json.loads(capsys.readouterr().out)["hosts"]
    assert code == 1
    assert [name for name, item in said.items() if "unreachable" in item] == [host.name for host in hung]
    for host, (_, words) in zip(hung, hangs, strict=True):
        assert words in said[host.name]["unreachable"]
    assert "the login worked" in said[hung[3].name]["unreachable"]
    assert "the login worked" not in said[hung[2].name]["unreachable"]


def test_a_proxy_command_is_the_way_to_a_host(tmp_path: Path, pair: SshHosts) -> None:
    gate, target = pair
    proxy = f"ssh {options(pair)} -i {pair.key} -W %h:%p root@{gate.address}"
    common = f'{options(pair)} -o ProxyCommand=\\"{proxy}\\"'
    way = f', ansible_ssh_common_args: "{common}"'
    lines = entry(target, way)
    pair.cut(target)  # this machine cannot reach it by itself
    state = see(inventory(tmp_path / "inventory.yml", pair, lines))
    assert isinstance(state, State)
    assert state.hostname == target.name


def test_a_configuration_file_with_a_jump_host(tmp_path: Path, pair: SshHosts) -> None:
    gate, target = pair
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  UserKnownHostsFile {pair.known_hosts}\n  IdentityFile {pair.key}\n  User root\n"
        f"Host target\n  HostName {target.address}\n  ProxyJump {gate.address}\n"
    )
    lines = f"    {target.name}: {{ansible_host: target, ansible_ssh_common_args: -F {config}}}\n"
    path = inventory(tmp_path / "inventory.yml", pair, lines)
    pair.cut(target)
    state = see(path)
    assert isinstance(state, State)
    assert state.hostname == target.name
    gate.stop()
    lost = see(path)
    assert isinstance(lost, HostError)
    assert f"{gate.address} port 22 refuses connections (on the way to target port 22)" in lost.reason


def test_a_login_shell_that_talks(tmp_path: Path, pair: SshHosts) -> None:
    pair[0].enter("sh", "-c", "printf 'echo Welcome; echo {\\n' >/root/.bashrc")
    assert isinstance(see(inventory(tmp_path / "inventory.yml", pair)), State)


@pytest.fixture(scope="module")
def sudo(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A layer with sudo and a user who may use it."""
    directory = tmp_path_factory.mktemp("sudo")
    done = subprocess.run(["apt-get", "download", "sudo"], cwd=directory, capture_output=True, check=False)
    archives = list(directory.glob("sudo_*.deb"))
    if done.returncode or not archives:
        pytest.skip("the package sudo cannot be had")
    made = directory / "layer"
    subprocess.run(["cp", "-a", str(base), str(made)], check=True)
    subprocess.run(["dpkg", "--extract", str(archives[0]), str(made)], check=True)
    for name in ("lib", "bin", "sbin"):  # / has links there
        if (made / name).is_dir() and not (made / name).is_symlink():
            subprocess.run(["cp", "-a", f"{made}/{name}/.", f"{made}/usr/{name}/"], check=True)
            subprocess.run(["rm", "-r", f"{made}/{name}"], check=True)
    return made


def test_root_by_sudo(tmp_path: Path, sudo: Path) -> None:
    with SshHosts(tmp_path / "hosts", 2, layer=sudo) as hosts:
        for host in hosts:
            host.enter("useradd", "--create-home", "--shell", "/bin/sh", "--password", "*", "admin")
        may, may_not = hosts
        may.enter("sh", "-c", "echo 'admin ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin")
        lines = "".join(entry(host, ", ansible_user: admin, ansible_become: true") for host in hosts)
        found = observe(load(inventory(tmp_path / "inventory.yml", hosts, lines)))
        state, lost = found[may.name], found[may_not.name]
        assert isinstance(state, State)
        assert state.os.is_root
        assert isinstance(lost, HostError)
        assert lost.reason.startswith("sudo refused (sudo: ")
        assert lost.reason.endswith(
            "it must work without a password, and `oeprov adopt -i INVENTORY --limit node002` sets that up"
        )


def test_lines_are_followed_and_the_command_ends_with_the_reader(tmp_path: Path, pair: SshHosts) -> None:
    host = first(inventory(tmp_path / "inventory.yml", pair))
    pair[0].enter("sh", "-c", "echo one >/var/log/it")
    with remote.stream(host, "tail -n 5 -F /var/log/it | cat") as lines:
        assert next(lines) == "one"
        pair[0].enter("sh", "-c", "echo two >>/var/log/it")
        assert next(lines) == "two"
        assert "tail -n 5 -F" in processes(host)
    end = time.monotonic() + 10
    while "tail -n 5 -F" in processes(host) and time.monotonic() < end:
        time.sleep(0.1)
    assert "tail -n 5 -F" not in processes(host)


def test_the_end_of_a_stream(tmp_path: Path, pair: SshHosts) -> None:
    host = first(inventory(tmp_path / "inventory.yml", pair))
    with remote.stream(host, "printf 'a\\nb'") as lines:
        assert list(lines) == ["a", "b"]
    with remote.stream(host, "echo a; echo 'no such unit' >&2; exit 4") as lines:
        assert next(lines) == "a"
        with pytest.raises(HostError, match="no such unit"):
            next(lines)
    pair[0].stop()
    with remote.stream(host, "echo a") as lines, pytest.raises(HostError, match="refuses connections"):
        next(lines)


def processes(host: Host) -> str:
    return remote.run(host, "ps ax -o args= | grep -v grep", "", 10, 20)[1]


def test_a_connection_that_breaks_in_the_middle(tmp_path: Path, pair: SshHosts) -> None:
    host = first(inventory(tmp_path / "inventory.yml", pair))
    timer = threading.Timer(1, pair[0].stop)
    timer.start()
    with pytest.raises(HostError) as caught:
        remote.run(host, "echo begun; sleep 60", "", 10, 50)
    timer.join()
    assert (
        caught.value.reason == f"the connection to {pair[0].address} port 22 broke before the command ended"
    )


def test_hosts_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, ssh_hosts, time\n"
        "with ssh_hosts.SshHosts(pathlib.Path(sys.argv[1]), 2) as hosts:\n"
        "    print(hosts[0].address, *(host.process.pid for host in hosts), flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as maker:
        assert maker.stdout is not None
        address, *pids = maker.stdout.readline().split()
        network = address.rsplit(".", 2)[0]
        assert network in addresses()
        maker.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while (network in addresses() or left(pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert network not in addresses()
    assert left(pids) == []


def left(pids: list[str]) -> list[str]:
    return [pid for pid in pids if Path("/proc", pid).exists()]


def addresses() -> str:
    return subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
