from pathlib import Path

import pytest

from provision.inventory import Inventory
from provision.inventory_check import load
from provision.node.step import Plan, Step
from provision.rolling import batches

REBOOT = Step("reboot", "reboot", "a new kernel", reboots=True, action="reboot")
PACKAGES = Step("packages", "install ndctl", "it is missing", action="install_packages")


def cluster(tmp_path: Path, servers: int, workers: int) -> Inventory:
    def hosts(name: str, count: int) -> str:
        return "".join(
            f"        {name}{number}: {{oeprov_kind: cpu, ansible_host: {name}{number}}}\n"
            for number in range(count)
        )

    path = tmp_path / "inventory.yml"
    path.write_text(
        "all:\n  children:\n    parameter_servers:\n      hosts:\n"
        + hosts("s", servers)
        + "    workers:\n      hosts:\n"
        + hosts("w", workers)
    )
    return load(path)


def turns(found: Inventory, plans: list[Plan]) -> list[list[str]]:
    order, sizes = batches(found, plans)
    assert sum(sizes) == len(order) == len(set(order))
    result = []
    for size in sizes:
        result.append(order[:size])
        order = order[size:]
    return result


@pytest.mark.parametrize("servers", [2, 3, 5, 10, 23])
def test_never_all_servers_at_once_and_one_goes_first(tmp_path: Path, servers: int) -> None:
    found = cluster(tmp_path, servers, 4)
    seen = turns(found, [Plan(name, [PACKAGES, REBOOT]) for name in found.hosts])
    assert seen[0] == ["s0"]
    assert sorted(name for turn in seen for name in turn) == sorted(found.hosts)
    for turn in seen:
        down = [name for name in turn if name.startswith("s")]
        assert len(down) <= max(1, servers // 4)


def test_hosts_where_nothing_is_disturbed_go_first_and_together(tmp_path: Path) -> None:
    found = cluster(tmp_path, 3, 2)
    plans = [Plan(name, [PACKAGES, REBOOT] if name == "s1" else [PACKAGES]) for name in found.hosts]
    assert turns(found, plans) == [["s0", "s2", "w0", "w1"], ["s1"]]


def test_workers_alone_have_a_first_one_too(tmp_path: Path) -> None:
    found = cluster(tmp_path, 1, 10)
    seen = turns(found, [Plan(name, [REBOOT]) for name in found.workers])
    assert [len(turn) for turn in seen] == [1, 2, 2, 2, 2, 1]


def test_one_host(tmp_path: Path) -> None:
    found = cluster(tmp_path, 1, 1)
    assert turns(found, [Plan("s0", [REBOOT])]) == [["s0"]]
