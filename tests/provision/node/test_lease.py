import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from provision.node import lease
from provision.node.command import CommandError, System

MINE = {"id": "bootstrap-1", "owner": "a:/x:lab", "where": "a (pid 1)"}
AGAIN = {**MINE, "id": "bootstrap-2", "where": "a (pid 2)"}
OTHER = {"id": "pmem_mode-9", "owner": "b:/y:lab", "where": "b (pid 3)"}


@pytest.fixture
def system(tmp_path: Path) -> System:
    (tmp_path / "run").mkdir()
    return System(str(tmp_path))


def held(system: System) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(system.read(lease.LEASE))
    return found


def test_another_controller_is_kept_out_until_the_lease_ends(system: System) -> None:
    lease.acquire(system, MINE)
    with pytest.raises(
        CommandError, match=r"being changed by bootstrap-1 on a \(pid 1\), since .*lease.json"
    ):
        lease.acquire(system, OTHER)
    assert held(system)["id"] == "bootstrap-1"
    lease.acquire(system, MINE, seconds=-1)
    lease.acquire(system, OTHER)
    assert held(system)["id"] == "pmem_mode-9"


def test_the_next_run_of_a_lost_controller_takes_over(system: System) -> None:
    lease.acquire(system, MINE)
    since = held(system)["since"]
    lease.acquire(system, MINE)
    assert held(system)["since"] == since
    lease.acquire(system, AGAIN)
    assert held(system)["id"] == "bootstrap-2"


def test_only_the_holder_gives_it_back(system: System) -> None:
    lease.acquire(system, MINE)
    assert not lease.release(system, OTHER)
    assert lease.release(system, MINE)
    assert not lease.release(system, MINE)
    lease.acquire(system, OTHER)


def test_a_directory_that_it_leaves_empty_goes_with_it(system: System) -> None:
    lease.acquire(system, MINE)
    system.write("/var/lib/oeprov/owned", "u-1\n")
    assert lease.release(system, MINE)
    assert system.list("/var/lib/oeprov") == ["owned"]
    system.remove("/var/lib/oeprov/owned")
    lease.acquire(system, MINE)
    assert lease.release(system, MINE)
    assert not system.exists("/var/lib/oeprov")


def test_a_lease_damaged_by_a_power_cut_is_ignored(system: System) -> None:
    system.write(lease.LEASE, "{half")
    lease.acquire(system, OTHER)


def test_a_lock_held_by_another_process_is_refused_until_released(system: System) -> None:
    lease.acquire(system, MINE)
    with open(system.path(lease.LOCK), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match=r"at work on this host.*bootstrap-1"), lease.lock(system, 0.1):
            pytest.fail("two at once")
    with lease.lock(system, 0.1):
        pass
