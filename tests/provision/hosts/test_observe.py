"""Observation for real: this machine by a child process, and over SSH to a server on loopback."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import paramiko
import pytest
from other_pythons import find_python
from ssh_server import SshServer, serving

from provision.cluster import own_sources, share
from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import fanout, payload, remote
from provision.hosts import observe as observing
from provision.hosts.survey import interpreter, survey
from provision.inventory.loader import load
from provision.node import ansible_python, family_el7
from provision.node.command import System
from provision.node.observe import observe_node, observe_os
from provision.node.plan import make_plan
from provision.node.state import OsInfo, State, decode, difference, encode

PYTHON_2_7 = find_python("2.7")
PYTHON_3_6 = find_python("3.6")
TAG = payload.BYTECODE


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with serving(tmp_path) as found:
        (tmp_path / "known_hosts").write_text(found.known_hosts_line())
        yield found


def inventory(tmp_path: Path, hosts: str) -> Inventory:
    path = tmp_path / "inventory.yml"
    path.write_text(
        f"all:\n  hosts:\n{hosts}\n  children:\n    workers:\n      hosts: {{a: }}\n"
        "    parameter_servers:\n      hosts: {a: }\n"
    )
    return load(path)


def host(server: SshServer, extra: str = "") -> str:
    known = server.key_file.with_name("known_hosts")
    return (
        f"    a: {{ansible_host: 127.0.0.1, ansible_port: {server.port}, ansible_user: me, oeprov_kind: cpu, "
        f"ansible_ssh_private_key_file: {server.key_file}, ansible_ssh_common_args: -o IdentitiesOnly=yes "
        f"-o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null{extra}}}"
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
    direct = decode(State, observe_node(encode(desired)))
    carried = observing.observe_host(found.hosts["localhost"])
    assert difference(direct, carried) == []
    assert direct.digest() == carried.digest()


def test_making_the_directory_changes_the_digest(tmp_path: Path) -> None:
    found = load(share.inventory("local"), state_dir=tmp_path / "state")
    before = observing.observe_host(found.hosts["localhost"])
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    after = observing.observe_host(found.hosts["localhost"])
    assert before.digest() != after.digest()


@pytest.mark.skipif(not PYTHON_3_6, reason="no Python 3.6 here")
@pytest.mark.parametrize("kind", ["local", "re7p", "bare_metal_pmem", "cxl", "gpu"])
def test_the_payload_runs_on_python_3_6(kind: str) -> None:
    wanted = {"host": "h", "kind": kind, "pmem_mode": "system-ram", "worker": True}
    state = observing.parse("h", carried_to(str(PYTHON_3_6), wanted))
    assert state.os.python.startswith("3.6.")


def test_the_payload_leaves_nothing_behind(tmp_path: Path) -> None:
    carried_to(
        sys.executable, {"host": "h", "kind": "cpu"}, env={"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    )
    assert list(tmp_path.iterdir()) == []


def test_each_form_of_the_payload_gives_the_same_state() -> None:
    wanted: dict[str, object] = {"host": "h", "kind": "cpu"}
    forms = ("", payload.BYTECODE, "of another Python")
    both, *others = [
        observing.parse("h", carried_to(sys.executable, wanted, announced=form)) for form in forms
    ]
    for other in others:
        assert difference(both, other) == []


def test_what_all_hosts_get_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 threads that begin together would each digest the sources and compress the package."""
    made: list[object] = []
    digest_of, compiled = own_sources.digest_of, payload._compiled

    def digest(*arguments: Any) -> str:
        made.append("digest")
        return digest_of(*arguments)

    def compile_one(name: str, path: str) -> bytes:
        made.append(name)
        return compiled(name, path)

    monkeypatch.setattr(own_sources, "digest_of", digest)
    monkeypatch.setattr(payload, "_compiled", compile_one)
    monkeypatch.setattr(payload, "_package", cache(payload._package.__wrapped__))
    monkeypatch.setattr(own_sources, "digest", cache(own_sources.digest.__wrapped__))
    monkeypatch.setattr(remote, "run", lambda host, line, given, *_, **__: (0, str(len(given(TAG))), ""))
    hosts = "\n".join(f"    {name}: {{oeprov_kind: cpu}}" for name in ("a", *map("n{}".format, range(50))))
    assert len(observing.observe(inventory(tmp_path, hosts))) == 51
    assert made.count("digest") == 1
    assert len(made) == len(set(made))


def test_a_python_gets_the_form_that_it_can_use() -> None:
    whole, bytecode, text = (len(payload.pack("__main__", {}, of)) for of in ("", payload.BYTECODE, "3"))
    assert bytecode < 0.7 * whole
    assert text < 0.4 * whole


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9", "3.12", "3.13"])
def test_other_pythons_are_observed_and_get_text_over_ssh(
    tmp_path: Path, server: SshServer, version: str
) -> None:
    if not (python := find_python(version)):
        pytest.skip(f"no Python {version} here")
    there = host(server, f", ansible_python_interpreter: {python}")
    state = observing.observe(inventory(tmp_path, there))["a"]
    assert isinstance(state, State)
    assert state.os.python.startswith(f"{version}.")


def carried_to(
    python: str, wanted: dict[str, object], env: dict[str, str] | None = None, announced: str = ""
) -> str:
    """What the payload prints under that interpreter."""
    given = payload.pack("__main__", wanted, announced)
    done = subprocess.run(payload.command(python), input=given, capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_over_ssh_in_one_round_trip(tmp_path: Path, server: SshServer) -> None:
    server.banner = b"Welcome to this machine\n"
    state = observing.observe(inventory(tmp_path, host(server)))["a"]
    assert isinstance(state, State)
    assert state.hostname == socket.gethostname()
    assert state.kernel.running or not state.image.booted
    assert [command.split()[:4] for command in server.commands] == [["sh", "-c", "'for", "python"]]


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
    assert f"127.0.0.1 port {server.port} refuses to let me in (publickey)" in text


def test_a_key_file_that_is_not_there(tmp_path: Path, server: SshServer) -> None:
    server.key_file = tmp_path / "none"
    text = reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert f"refuses to let me in (no such identity: {tmp_path}/none: No such file or directory)" in text


def test_a_host_key_that_changed(tmp_path: Path, server: SshServer) -> None:
    line = server.known_hosts_line(paramiko.ECDSAKey.generate())
    (tmp_path / "known_hosts").write_text(line)
    assert "has another host key" in reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert server.commands == []


def test_a_host_key_that_is_not_known(tmp_path: Path, server: SshServer) -> None:
    (tmp_path / "known_hosts").write_text("")
    text = reason(observing.observe(inventory(tmp_path, host(server)))["a"])
    assert "has a host key that is not in known_hosts" in text
    assert server.commands == []


def test_a_python_that_the_inventory_names_and_is_not_there(tmp_path: Path, server: SshServer) -> None:
    (tmp_path / "python3").symlink_to(tmp_path / "removed")  # a broken link
    found = inventory(tmp_path, host(server, f", ansible_python_interpreter: {tmp_path / 'python3'}"))
    assert f"has no {tmp_path / 'python3'}, or it is a broken link: correct ansible_python" in reason(
        observing.observe(found)["a"]
    )


def test_a_named_python_that_is_too_old(tmp_path: Path, server: SshServer) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'Python 3.6 or newer is needed, this is 3.5.2' >&2\nexit 1\n")
    old.chmod(0o755)
    found = inventory(tmp_path, host(server, f", ansible_python_interpreter: {old}"))
    assert reason(observing.observe(found)["a"]).startswith(
        f"{old} is Python 3.5.2, and oeprov needs 3.6 or newer on hosts: set ansible_python_interpreter"
    )


@pytest.mark.skipif(not PYTHON_2_7, reason="no Python 2.7 here")
def test_a_named_python_that_is_python_2(tmp_path: Path, server: SshServer) -> None:
    found = inventory(tmp_path, host(server, f", ansible_python_interpreter: {PYTHON_2_7}"))
    assert f"{PYTHON_2_7} is Python 2, and oeprov needs 3.6" in reason(observing.observe(found)["a"])


def only(directory: Path, **programs: str) -> str:
    """A PATH with what a host always has, and these programs: name → path."""
    directory.mkdir()
    names = ("sh", "ssh", "cat", "grep", "id", "tr", "uname")
    for name, path in {**{name: shutil.which(name) or "" for name in names}, **programs}.items():
        (directory / name.replace("_", "-")).symlink_to(path)
    return str(directory)


@pytest.mark.parametrize("python", ["", "broken", "2.7"])
def test_a_host_without_a_python_3_gets_one_first(
    tmp_path: Path, server: SshServer, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    if python == "2.7" and not PYTHON_2_7:
        pytest.skip("no Python 2.7 here")
    there = {"": {}, "broken": {"python3": "/no/python3"}, "2.7": {"python3": str(PYTHON_2_7)}}[python]
    monkeypatch.setattr(payload, "_FIRST", payload.first(("python3",)))
    monkeypatch.setenv("PATH", only(tmp_path / "bin", apt_get="/bin/true", **there))
    found = inventory(tmp_path, host(server, ", ansible_become: false"))
    planned = survey(found)
    assert not planned.lost
    state, plan = planned.states["a"], planned.plans["a"]
    assert state.bare == ("python3 there is Python 2" if python == "2.7" else "there is no Python 3")
    assert state.os._replace(package_manager="", python="", cpu_level=0) == observe_os(System())._replace(
        package_manager="", python="", cpu_level=0
    )
    (step,) = plan.steps
    assert step.id == "first-python"
    assert state.bare in step.why
    assert "the other steps are planned once Python is there" in plan.notes
    if os.geteuid():
        assert "this user cannot install one: set ansible_become: true" in plan.problems[0]


def test_the_system_of_a_host_without_python_is_read_by_the_shell() -> None:
    text = (
        'ID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="7"\nPRETTY_NAME="CentOS Linux 7 (Core)"\n\n'
        "OEPROV_MANAGER_yum=yes\nOEPROV_MACHINE=x86_64\nOEPROV_USER=0\n"
    )
    found = observing.bare_system(text)
    name = "CentOS Linux 7 (Core)"
    assert found == OsInfo("centos", "7", "rhel", name, "x86_64", "yum", is_root=True)
    (gone, *_) = family_el7.FAMILY.gone_mirrors
    assert observing.bare_system(f"{text}mirrorlist=http://{gone}/?release=7\n").mirrors_gone
    assert not observing.bare_system(f"{text}baseurl=http://mirror/centos/7\n").mirrors_gone
    assert observing.bare_system("").id == ""


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    found = inventory(tmp_path, "    a: {ansible_host: no-such-host.invalid, oeprov_kind: cpu}")
    assert "cannot be resolved; set ansible_host" in reason(observing.observe(found)["a"])


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "sent no state back"),
        ("bash: warning\nbye\n", "sent no state back: bash: warning / bye"),
        ("OEPROV-ANSWER {]\n", "sent a state that cannot be read"),
        ('OEPROV-ANSWER {"state": {"new_field": 1}}\n', "State has no field new_field"),
        ('OEPROV-ANSWER {"error": "OSError: gone"}\n', "cannot be observed: OSError: gone"),
    ],
)
def test_answers_that_are_none(text: str, piece: str) -> None:
    with pytest.raises(HostError) as caught:
        observing.parse("a", text)
    assert piece in caught.value.reason


def test_a_command_that_fails_says_so_with_its_own_words(tmp_path: Path, server: SshServer) -> None:
    found = inventory(tmp_path, host(server)).hosts["a"]
    assert remote.run(found, "cat; echo oh >&2; exit 7", "text", 5, 20) == (7, "text", "oh\n")


def test_a_command_that_takes_too_long(tmp_path: Path, server: SshServer) -> None:
    found = inventory(tmp_path, host(server)).hosts["a"]
    with pytest.raises(HostError, match="did not answer within 1 s"):
        remote.run(found, "sleep 30", "", 1, 1)


def test_a_host_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        hosts = f"    a: {{ansible_host: 127.0.0.1, ansible_port: {port}, oeprov_kind: cpu}}"
        found = inventory(tmp_path, hosts).hosts["a"]
        with pytest.raises(HostError, match=f"127.0.0.1 port {port} does not answer within 1 s"):
            remote.run(found, "true", "", 1, 20)


def test_hosts_that_hang_do_not_keep_the_others_waiting(
    tmp_path: Path, server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(fanout, "PATIENCE", 0.1)
    answer = threading.Event()

    def survey(host: Host, cut: fanout.Cut) -> str:
        if host.name == "a":
            answer.set()
        else:
            assert answer.wait(20), "a waits for hosts that hang"
        raise HostError(host.name, "seen")

    monkeypatch.setattr(observing, "observe_host", survey)
    hanging = "".join(f"    h{index}: {{oeprov_kind: cpu}}\n" for index in range(6))
    found = observing.observe(inventory(tmp_path, hanging + host(server)))
    assert list(found) == [*(f"h{index}" for index in range(6)), "a"]


def test_an_option_that_ssh_does_not_know(tmp_path: Path) -> None:
    hosts = "    a: {ansible_host: 127.0.0.1, oeprov_kind: cpu, ansible_ssh_extra_args: -o NoSuchOption=1}"
    text = reason(observing.observe(inventory(tmp_path, hosts))["a"])
    assert text.startswith("ssh does not take its options: ")
    assert "nosuchoption" in text.lower()


@pytest.mark.parametrize(
    ("said", "piece"),
    [
        ("", "the connection to 10.0.0.1 port 22 broke before the command ended"),
        ("Connection to 10.0.0.1 closed by remote host.\n", "broke before the command ended"),
        ("client_loop: send disconnect: Broken pipe\n", "broke before the command ended"),
        ("Timeout, server 10.0.0.1 not responding.\n", "broke before the command ended"),
        ("ssh: connect to host 10.0.0.1 port 22: Connection timed out\n", "does not answer within 10 s"),
        ("Connection timed out during banner exchange\n", "does not answer within 10 s"),
        (
            "ssh: connect to host 10.0.0.1 port 22: No route to host\n",
            "the connection to 10.0.0.1 port 22 failed: No route to host; is it up",
        ),
        (
            "ssh: connect to host gate port 2222: Connection refused\n"
            "kex_exchange_identification: Connection closed by remote host\n"
            "Connection closed by UNKNOWN port 65535\n",
            "gate port 2222 refuses connections (on the way to 10.0.0.1 port 22)",
        ),
        (
            "me@gate: Permission denied (publickey).\nConnection closed by UNKNOWN port 65535\n",
            "gate (on the way to 10.0.0.1 port 22) refuses to let me in (publickey)",
        ),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\n", "too many keys"),
        (
            "kex_exchange_identification: Connection closed by remote host\n",
            "SSH to 10.0.0.1 port 22 failed: kex",
        ),
        ("Warning: x\nUnable to negotiate with 10.0.0.1 port 22: no match\n", "failed: Unable to negotiate"),
    ],
)
def test_what_ssh_says_in_our_words(tmp_path: Path, said: str, piece: str) -> None:
    found = inventory(
        tmp_path, "    a: {ansible_host: 10.0.0.1, ansible_user: root, oeprov_kind: cpu}"
    ).hosts["a"]
    text = remote.failure(found, said, 10).reason
    assert piece in text
    assert "\n" not in text


def test_a_python_that_ansible_cannot_use_is_a_step_of_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    old = State(os=OsInfo("rocky", "8.10", "rhel", package_manager="dnf", python="3.6.8", is_root=True))
    found = load(share.inventory("sample"), state_dir=Path("state"))
    monkeypatch.setattr(observing, "observe", lambda inventory: dict.fromkeys(inventory.hosts, old))
    monkeypatch.setattr("ansible.release.__version__", "2.19.14")
    looked = survey(found)
    assert all(plan.steps[0].what.startswith("install python3.11 ") for plan in looked.plans.values())
    monkeypatch.setattr("ansible.release.__version__", "2.16.19")
    assert not any(step.id == "python" for plan in survey(found).plans.values() for step in plan.steps)


def test_ansible_uses_the_python_that_was_installed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ansible.release.__version__", "2.19.14")
    found = next(iter(load(share.inventory("sample"), state_dir=Path("state")).hosts.values()))
    os = OsInfo("rocky", "8.10", "rhel", python="3.6.8", own_python="3.11.9")
    program = {"ansible_python_interpreter": ansible_python.PROGRAM}
    assert interpreter(found, State(os=os)) == program
    assert interpreter(found, State(os=os._replace(own_python=""))) == {}
    assert interpreter(found, State(os=os._replace(python="3.9.18"))) == {}
    assert interpreter(replace(found, python="/usr/bin/python3.9"), State(os=os)) == {}
    assert interpreter(found, None) == {}
