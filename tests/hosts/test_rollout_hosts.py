"""Roll-outs over real SSH hosts that fail in any phase: a canary stops the others, another host does not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rebootable
from converged import entry, inventory, layer
from rebootable import FAILS, VANISHES, spoil, turns
from ssh_hosts import SshHosts, why_not

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]
COUNT = 5
APT, TURN = "/usr/bin/apt-get", "/etc/spoiled"
ARGUMENT = "transparent_hugepage=never"
LACKS = ", runtime_packages: [oeprov-no-such-package]"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = layer(tmp_path_factory.mktemp("layer"))
    rebootable.add(files)
    return files


@pytest.fixture
def hosts(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHosts]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with SshHosts(tmp_path / "hosts", COUNT, layer=base) as made:
        yield made


def rolled_out(directory: Path, hosts: SshHosts, first: str = "", shares: str = "[1, 2]") -> Path:
    """An inventory that wants another kernel argument on every host; ``first``: more of the first host."""
    lines = "".join(entry(host, first if host is hosts[0] else "") for host in hosts)
    path = inventory(directory / "inventory.yml", hosts, lines)
    text = path.read_text().replace(
        "    runtime_extra: none\n",
        f"    runtime_extra: none\n    rollout_shares: {shares}\n    kernel_arguments: [{ARGUMENT}]\n"
        "    kernel_trial_boot: false\n    kernel_reboot_timeout: 60\n",
    )
    path.write_text(text)
    return path


def run(directory: Path, *argv: str, expect: int) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / argv[0]), *argv[1:]],
        cwd=directory,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
            "OEPROV_STATE_DIR": str(directory / "state"),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def playbook(directory: Path, name: str, path: Path, expect: int) -> str:
    book = str(REPOSITORY / "playbooks" / f"{name}.yml")
    argv = ("ansible-playbook", "-i", str(path), book, "-e", "kernel_reboot_ok=true")
    return run(directory, *argv, expect=expect)


def bootstrap(directory: Path, path: Path, expect: int) -> str:
    return run(directory, "oeprov", "bootstrap", "-i", str(path), "--yes", expect=expect)


@pytest.mark.parametrize(
    "how", [FAILS, pytest.param(VANISHES, marks=pytest.mark.slow)], ids=["fails", "vanishes"]
)
def test_a_failure_during_preparation_changes_no_host(tmp_path: Path, hosts: SshHosts, how: str) -> None:
    path = rolled_out(tmp_path, hosts, LACKS)
    spoil(hosts[0], APT, how)
    said = bootstrap(tmp_path, path, 1)
    assert [turns(host) for host in hosts] == [{}] * COUNT, said
    assert "node001, which is changed first, failed; nothing was changed on 4 host(s) after that: " in said
    assert "or leave it out with --limit 'all:!node001'" in said
    assert said.count("the change stopped") == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [FAILS, VANISHES], ids=["fails", "vanishes"])
def test_a_failure_during_preparation_changes_no_host_without_oeprov(
    tmp_path: Path, hosts: SshHosts, how: str
) -> None:
    path = rolled_out(tmp_path, hosts, LACKS)
    spoil(hosts[0], APT, how)
    said = playbook(tmp_path, "bootstrap", path, 2 if how == FAILS else 4)
    assert [turns(host) for host in hosts] == [{}] * COUNT, said


@pytest.mark.slow
@pytest.mark.parametrize("how", [FAILS, VANISHES], ids=["fails", "vanishes"])
def test_a_failure_of_the_first_host_stops_the_rollout(tmp_path: Path, hosts: SshHosts, how: str) -> None:
    spoil(hosts[0], TURN, how)
    said = bootstrap(tmp_path, rolled_out(tmp_path, hosts), 1)
    assert "change" in turns(hosts[0])
    assert [turns(host) for host in list(hosts)[1:]] == [{}] * (COUNT - 1), said


@pytest.mark.timeout(900)  # five runs of Ansible; 230 s on a machine with a load of 20
@pytest.mark.parametrize(
    "how", [FAILS, pytest.param(VANISHES, marks=pytest.mark.slow)], ids=["fails", "vanishes"]
)
def test_a_failure_in_a_later_turn_leaves_the_others_alone(tmp_path: Path, hosts: SshHosts, how: str) -> None:
    """All others come to their end; the next run changes the failed host only."""
    path = rolled_out(tmp_path, hosts, shares="[1, 4]")
    spoil(hosts[1], TURN, how)
    said = bootstrap(tmp_path, path, 1)
    both = ["change", "reboot"]
    assert [sorted(turns(host)) for host in hosts] == [both, ["change"], both, both, both], said
    assert "the change stopped" not in said
    assert "node002: still to do: reboot" in said
    done = {host.name: turns(host) for host in hosts if host is not hosts[1]}

    spoil(hosts[1], TURN, "#!/bin/sh\n")
    said = bootstrap(tmp_path, path, 0)
    assert "5 hosts converged" in said
    assert done == {host.name: turns(host) for host in hosts if host is not hosts[1]}, "they were done"
    assert sorted(turns(hosts[1])) == both


@pytest.mark.slow
def test_fail_fast_stops_the_turns_after_a_failure(tmp_path: Path, hosts: SshHosts) -> None:
    path = rolled_out(tmp_path, hosts)
    spoil(hosts[1], TURN, FAILS)
    argv = ("oeprov", "bootstrap", "-i", str(path), "--yes", "--fail-fast")
    said = run(tmp_path, *argv, expect=1)
    both = ["change", "reboot"]
    assert [sorted(turns(host)) for host in hosts] == [both, ["change"], both, [], []], said
    assert (
        "node002 failed (--fail-fast); nothing was changed on 2 host(s) after that: node004, node005" in said
    )


@pytest.mark.slow
def test_pmem_mode_without_oeprov(tmp_path: Path, hosts: SshHosts) -> None:
    """Shares come from the inventory there too, and a host that is lost counts as one that failed."""
    path = rolled_out(tmp_path, hosts, shares='["40%", 2]')
    spoil(hosts[1], TURN, VANISHES)
    said = playbook(tmp_path, "pmem_mode", path, 4)
    assert [sorted(turns(host)) for host in hosts] == [["change", "reboot"], ["change"], [], [], []], said
    assert "nothing was changed on 3 host(s) after that: node003, node004, node005" in said.replace("\n", " ")


@pytest.mark.slow
def test_turns_wait_for_each_other(tmp_path: Path, hosts: SshHosts) -> None:
    path = rolled_out(tmp_path, hosts)
    planned = json.loads(run(tmp_path, "oeprov", "plan", "-i", str(path), "--json", expect=2))
    assert planned["turns"] == [["node001"], ["node002", "node003"], ["node004", "node005"]]
    shown = run(tmp_path, "oeprov", "plan", "-i", str(path), expect=2)
    assert "turns (3): node001, 2 hosts, 2 hosts; a failed first turn stops the later ones" in shown
    bootstrap(tmp_path, path, 0)
    found = {host.name: turns(host) for host in hosts}
    for before, after in itertools.pairwise(planned["turns"]):
        last = max(found[name]["reboot"] for name in before)
        assert all(found[name]["change"] > last for name in after)
    assert "5 hosts converged already" in bootstrap(tmp_path, path, 0)
