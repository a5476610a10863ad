from pathlib import Path

import pytest

from provision.cluster.inventory import Inventory
from provision.converge import rolling
from provision.inventory.loader import load
from provision.node.step import Plan, Step

REBOOT = Step("reboot", "reboot", "a new kernel", reboots=True, action="reboot")
PACKAGES = Step("packages", "install ndctl", "it is missing", role="runtime", preparing=True)


def cluster(tmp_path: Path, servers: int, workers: int, shares: str = "") -> Inventory:
    def hosts(name: str, count: int) -> str:
        return "".join(
            f"        {name}{number}: {{oeprov_kind: cpu, ansible_host: {name}{number}}}\n"
            for number in range(count)
        )

    path = tmp_path / "inventory.yml"
    path.write_text(
        f"all:\n  vars: {{{shares and 'rollout_shares: ' + shares}}}\n"
        + "  children:\n    parameter_servers:\n      hosts:\n"
        + hosts("s", servers)
        + "    workers:\n      hosts:\n"
        + hosts("w", workers)
    )
    return load(path)


def turns(found: Inventory, plans: list[Plan], lost: tuple[str, ...] = ()) -> list[list[str]]:
    result = rolling.turns(found, plans, lost)
    names = [name for turn in result for name in turn]
    assert sorted(names) == sorted(plan.host for plan in plans)
    assert all(result)
    return result


def rebooted(found: Inventory) -> list[Plan]:
    return [Plan(name, [PACKAGES, REBOOT]) for name in found.hosts]


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
    assert [len(turn) for turn in seen] == [1, 1, 2, 2, 2, 2]


def test_a_hundred_hosts(tmp_path: Path) -> None:
    found = cluster(tmp_path, 20, 80)
    seen = turns(found, rebooted(found))
    assert [len(turn) for turn in seen] == [1, 5, 20, 20, 20, 20, 14]
    assert [sum(name.startswith("s") for name in turn) for turn in seen] == [1, 1, 4, 4, 4, 4, 2]


def test_one_host(tmp_path: Path) -> None:
    found = cluster(tmp_path, 1, 1)
    assert turns(found, [Plan("s0", [REBOOT])]) == [["s0"]]


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [
        ("[1]", [1] * 12),
        ("[3, 100%]", [3, 8, 1]),
        ("[50%]", [6, 6]),
        ("[1, 2, 4]", [1, 2, 4, 4, 1]),
    ],
)
def test_shares_of_the_inventory(tmp_path: Path, shares: str, sizes: list[int]) -> None:
    found = cluster(tmp_path, 4, 8, shares)
    assert [len(turn) for turn in turns(found, rebooted(found))] == sizes


@pytest.mark.parametrize("shares", ["[100%]", "[50]"])
def test_no_share_is_all_servers_at_once(tmp_path: Path, shares: str) -> None:
    found = cluster(tmp_path, 3, 2, shares)
    assert turns(found, rebooted(found)) == [["s0", "s1", "w0", "w1"], ["s2"]]
    # Of those that cannot be reached none serves.
    plans = [plan for plan in rebooted(found) if plan.host != "s2"]
    assert turns(found, plans, ("s2",)) == [["s0", "w0", "w1"], ["s1"]]


def test_turns_in_words(tmp_path: Path) -> None:
    found = cluster(tmp_path, 3, 40)
    plans = rebooted(found)
    assert rolling.describe(plans, turns(found, plans)) == (
        "turns (7): s0, 3 hosts, 9 hosts, 8 hosts, 8 hosts, …; a failed first turn stops the later ones "
        "(rollout_shares)"
    )
    assert rolling.describe(plans[:1], turns(found, plans[:1])) == ""
    plans = [Plan("s0", [PACKAGES]), Plan("w0", [PACKAGES]), Plan("w1", [REBOOT])]
    assert rolling.describe(plans, turns(found, plans)) == (
        "turns (2): 2 hosts (no disturbance), w1; a failed first turn stops the later ones (rollout_shares)"
    )
