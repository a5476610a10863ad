"""Work on many hosts at once: bounded by count, and a host that hangs costs the others little."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import fanout, remote
from provision.hosts.fanout import Cut
from provision.inventory.loader import load


def cluster(tmp_path: Path, count: int) -> Inventory:
    path = tmp_path / "inventory.yml"
    hosts = "".join(f"        n{number}: {{oeprov_kind: cpu}}\n" for number in range(count))
    path.write_text(
        f"all:\n  children:\n    parameter_servers:\n      hosts:\n{hosts}    workers: {{hosts: {{n0: }}}}\n"
    )
    return load(path)


def test_at_most_so_many_hosts_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all are slow: then the bound is that of slow hosts beside the usual one, never time."""
    monkeypatch.setattr(fanout, "MOST_AT_ONCE", 4)
    monkeypatch.setattr(fanout, "MOST_SLOW", 3)
    monkeypatch.setattr(fanout, "PATIENCE", 0.05)
    lock = threading.Lock()
    running, most = 0, 0
    full = threading.Event()

    def work(host: Host, cut: Cut) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 7:
                full.set()
        assert full.wait(30), "slow hosts keep the others waiting"
        with lock:
            running -= 1
        return host.name

    found = fanout.on_hosts(cluster(tmp_path, 40).hosts, work)
    assert found == {f"n{number}": f"n{number}" for number in range(40)}
    assert most == 7


def test_a_busy_machine_gets_no_more_hosts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all take long for is no host's own slowness, which makes place for the next one."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    most = fanout.MOST_AT_ONCE
    one_hangs = [now - 3.0, *[now - 1.0] * (most - 1)]
    assert fanout._until_place([now] * (most - 1), []) == 0.0
    assert fanout._until_place(one_hangs, [0.5] * 9) == 0.0
    assert fanout._until_place([*one_hangs, now], [0.5] * 9) == 1.0  # a second one is slow after PATIENCE
    assert fanout._until_place(one_hangs, []) == 1.0  # nobody has answered: twice PATIENCE
    assert fanout._until_place(one_hangs, [5.0] * 9) == 7.0  # slow is twice what is usual
    assert fanout._until_place([0.0] * (most + fanout.MOST_SLOW), [0.5]) > 1e6  # the bound of all


def test_only_answers_say_how_long_hosts_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are down end after a time of their own: many of them would make all others slow."""
    monkeypatch.setattr(fanout, "MOST_AT_ONCE", 2)
    asked: list[list[float]] = []
    until_place = fanout._until_place

    def spy(begun: list[float], took: list[float]) -> float:
        asked.append(list(took))
        return until_place(begun, took)

    monkeypatch.setattr(fanout, "_until_place", spy)

    def work(host: Host, cut: Cut) -> str:
        if int(host.name.removeprefix("n")) % 2:
            raise HostError(host.name, "is down")
        time.sleep(0.02)
        return "up"

    hosts = cluster(tmp_path, 12).hosts
    fanout.on_hosts(hosts, work)
    assert 1 <= len(asked[-1]) <= 2
    assert all(0.02 <= took < 2 for took in asked[-1])
    asked.clear()
    fanout.on_hosts(hosts, work, cut_off=False)
    assert not any(asked)


def test_an_error_of_one_host_is_its_result(tmp_path: Path) -> None:
    def work(host: Host, cut: Cut) -> int:
        if host.name == "n1":
            raise HostError(host.name, "is broken")
        return 1

    found = fanout.on_hosts(cluster(tmp_path, 3).hosts, work)
    assert [str(item) for item in found.values()] == ["1", "n1: is broken", "1"]


# Where a host may hang: before the login, before Python, in a command, with part of its output.
HANGS = {
    "n3": ("", ""),
    "n17": ("echo Welcome", "; it printed something, but Python did not start"),
    "n30": ("echo OEPROV-BEGUN >&2", "; the login worked, and then a command hung on the host"),
    "n49": ("printf part", "; it printed something, but Python did not start"),
}


def test_hosts_that_hang_are_cut_off_and_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "LEAST", 1.0)  # which a busy machine may need for a shell that does not hang
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    cases = "".join(f"*' {name} '*) {code or ':'}; exec sleep 600 ;;\n" for name, (code, _) in HANGS.items())
    ssh.write_text(f'#!/bin/sh\ncase " $* " in\n{cases}esac\necho here\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = fanout.on_hosts(
        cluster(tmp_path, 60).hosts, lambda host, cut: remote.run(host, "x", "", 10, 600, cut=cut)[1]
    )
    lost = {name: item.reason for name, item in found.items() if isinstance(item, HostError)}
    assert list(lost) == list(HANGS)
    for name, (_, words) in HANGS.items():
        assert re.fullmatch(
            rf"did not answer within \d+ s; \d+ other hosts took \S+ s or little more{words}", lost[name]
        )
    assert all(found[name] == "here\n" for name in found.keys() - lost.keys())


@pytest.mark.parametrize(
    ("usual", "all_took", "expected"),
    [
        (0.1, 0.3, 10.0),  # 20 quick hosts: ssh itself waits so long
        (6.0, 90.0, 12.0),  # 1,000 hosts, 64 at a time: twice the usual, not five times
        (6.0, 900.0, 30.0),  # 10,000: a tenth of the time would be 90 s
        (3.0, 140.0, 14.0),  # a tenth of the time
        (8.0, 8.5, 16.0),
    ],
)
def test_how_long_a_host_may_take(usual: float, all_took: float, expected: float) -> None:
    assert fanout.limit(usual, all_took) == expected


def test_few_hosts_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers do not say what is usual."""
    monkeypatch.setattr(fanout, "LEAST", 0.0)
    monkeypatch.setattr(fanout, "MULTIPLE", 0.0)
    monkeypatch.setattr(fanout, "PATIENCE", 0.01)
    others = threading.Barrier(3)
    done = threading.Event()

    def work(host: Host, cut: Cut) -> str:
        if host.name != "n3":
            others.wait(30)
            done.set()
            return "quick"
        done.wait(30)
        for _ in range(20):
            time.sleep(0.01)
            if cut.why:
                raise HostError(host.name, cut.why)
        return "slow"

    found = fanout.on_hosts(cluster(tmp_path, 4).hosts, work)
    assert list(found.values()) == ["quick"] * 3 + ["slow"]


def test_work_that_may_take_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "LEAST", 0.0)
    monkeypatch.setattr(fanout, "MULTIPLE", 0.0)
    others = threading.Barrier(29)

    def work(host: Host, cut: Cut) -> str:
        if host.name != "n29":
            others.wait(30)
            return "quick"
        for _ in range(20):
            time.sleep(0.01)
            if cut.why:
                raise HostError(host.name, cut.why)
        return "slow"

    hosts = cluster(tmp_path, 30).hosts
    assert list(fanout.on_hosts(hosts, work, cut_off=False).values()) == ["quick"] * 29 + ["slow"]


def test_endless_output_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that prints for ever takes neither the controller's memory nor its time."""
    monkeypatch.setattr(remote, "MOST_OUTPUT", 1 << 20)
    monkeypatch.setattr(remote, "argv", lambda host, timeout: [sys.executable, "-c"])
    host = cluster(tmp_path, 1).hosts["n0"]
    with pytest.raises(HostError, match="n0: sent more than 1 MiB; what prints there at a login"):
        remote.run(host, "import os\nwhile True: os.write(1, b'y' * 65536)", "", 10, 600)


def test_slow_hosts_that_answer_one_after_another_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the last ones take longer than the limit; none of them hangs."""
    monkeypatch.setattr(fanout, "limit", lambda usual, all_took: 0.0)
    quick = threading.Barrier(27)
    turns = [threading.Event() for _ in range(4)]
    turns[0].set()

    def work(host: Host, cut: Cut) -> str:
        number = int(host.name.removeprefix("n"))
        if number < 27:
            quick.wait(30)
            time.sleep(0.5)  # what is usual
            return "quick"
        assert turns[number - 27].wait(30)
        for _ in range(5):
            time.sleep(0.05)
            if cut.why:
                raise HostError(host.name, cut.why)
        turns[number - 26].set()
        return "slow"

    found = fanout.on_hosts(cluster(tmp_path, 30).hosts, work)
    assert list(found.values()) == ["quick"] * 27 + ["slow"] * 3
