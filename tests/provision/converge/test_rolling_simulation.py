"""Simulated rolling changes of 1,000 hosts that fail at random in every phase: what holds whatever happens.

``OEPROV_ROLLING_SEEDS`` is the number of seeds (default 30), ``OEPROV_ROLLING_HOSTS`` that of hosts (1,000).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from provision.cluster.inventory import Inventory
from provision.converge.rolling import Failures, Rollout
from provision.inventory.loader import load
from provision.node.step import Plan, Step

SEEDS = int(os.environ.get("OEPROV_ROLLING_SEEDS", "30"))
HOSTS = int(os.environ.get("OEPROV_ROLLING_HOSTS", "1000"))
REBOOT = Step("reboot", "reboot", "a new kernel", reboots=True, action="reboot")
PACKAGES = Step("packages", "install ndctl", "it is missing", role="runtime", preparing=True)
SHARES = ([1, "5%", "20%"], ["50%"], [1], [7, 100], ["100%"])


@dataclass
class Run:
    """What happened to whom, in order."""

    inventory: Inventory
    plans: list[Plan]
    rollout: Rollout
    failures: Failures
    lost: set[str]  # cannot be reached from the start
    spoiled: set[str]  # failed before their turn
    turns: list[list[str]] = field(default_factory=list)
    failed: list[set[str]] = field(default_factory=list)  # by turn
    canary: set[str] = field(default_factory=set)

    @property
    def quiet(self) -> set[str]:
        return {plan.host for plan in self.plans if plan.steps == [PACKAGES]}

    @property
    def disturbing(self) -> list[list[str]]:
        return [turn for turn in self.turns if set(turn) - self.quiet]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    path = tmp_path_factory.mktemp("cluster") / "inventory.yml"
    servers = HOSTS * 2 // 5
    lines = {
        group: "".join(f"        {group[0]}{number}: {{oeprov_kind: cpu}}\n" for number in range(count))
        for group, count in (("parameter_servers", servers), ("workers", HOSTS - servers))
    }
    path.write_text(
        "all:\n  children:\n"
        + "".join(f"    {group}:\n      hosts:\n{text}" for group, text in lines.items())
    )
    return load(path)


def simulate(cluster: Inventory, seed: int) -> Run:
    """One rolling change; how likely hosts fail in each phase differs from seed to seed."""
    dice = random.Random(seed)  # noqa: S311 - a simulation
    often = {phase: dice.choice([0, 0.002, 0.02, 0.3]) for phase in ("lost", "prepare", "turn", "reboot")}
    rollout_settings = cluster.rollout.model_copy(
        update={
            "shares": dice.choice(SHARES),
            "quorum": dice.choice(["50%", "80%", 1, 390]),
            "failures": dice.choice(["10%", "1%", 1, 500]),
        }
    )
    names = list(cluster.hosts)
    if dice.random() < 0.3:
        names = dice.sample(names, dice.randint(1, 12))  # small clusters have bounds of their own
    chosen = set(names)
    inventory = Inventory(
        cluster.path,
        cluster.cluster,
        {name: cluster.hosts[name] for name in cluster.hosts if name in chosen},
        [name for name in cluster.parameter_servers if name in chosen],
        [name for name in cluster.workers if name in chosen],
        rollout_settings,
        cluster.training,
        cluster.containers,
        cluster.kubernetes,
    )
    lost = {name for name in inventory.hosts if dice.random() < often["lost"]}
    quiet = dice.choice([0, 0.1, 1])
    plans = [
        Plan(name, [PACKAGES] if dice.random() < quiet else [PACKAGES, REBOOT])
        for name in inventory.hosts
        if name not in lost
    ]
    failures = dice.choice(list(Failures))
    rollout = Rollout(inventory, plans, lost, failures=failures)
    spoiled = {plan.host for plan in plans if dice.random() < often["prepare"]}
    run = Run(inventory, plans, rollout, failures, lost, spoiled)
    dry = Rollout(inventory, plans, lost)
    while (turn := dry.next()) and not set(turn) - run.quiet:
        dry.end(turn, [])
    run.canary = set(turn)
    rollout.fail(sorted(spoiled))
    while turn := rollout.next():
        bad = {name for name in turn if dice.random() < often["turn"] or dice.random() < often["reboot"]}
        run.turns.append(turn)
        run.failed.append(bad)
        rollout.end(turn, sorted(bad))
    return run


def quorum_is_up(run: Run) -> None:
    """While a turn runs, its servers are down, and so are all that failed or cannot be reached."""
    servers = set(run.inventory.parameter_servers)
    reached = servers - run.lost
    share = run.inventory.rollout.quorum
    wanted = share if isinstance(share, int) else len(servers) * int(share[:-1]) // 100
    least = min(max(1, wanted), max(0, len(reached) - 1))
    down: set[str] = set()
    for turn, bad in zip(run.turns, run.failed, strict=True):
        disturbed = set(turn) - run.quiet
        assert len(reached - down - disturbed) >= least or not disturbed & servers
        down |= bad


def each_host_has_one_turn(run: Run) -> None:
    names = [name for turn in run.turns for name in turn]
    assert len(names) == len(set(names))
    assert set(names) <= {plan.host for plan in run.plans} - run.spoiled


def nobody_is_forgotten(run: Run) -> None:
    """Every host had a turn, or failed before it, or is said to be left; and only a reason leaves hosts."""
    had = {name for turn in run.turns for name in turn}
    assert had | run.spoiled | set(run.rollout.left) == {plan.host for plan in run.plans}
    assert not had & set(run.rollout.left)
    assert bool(run.rollout.stopped) or not run.rollout.left


def a_failed_canary_stops_the_others(run: Run) -> None:
    if run.failures is Failures.keep_going:
        return
    if run.spoiled & run.canary:
        assert run.turns == []
    for number, bad in enumerate(run.failed):
        if bad & run.canary:
            assert number == len(run.turns) - 1


def one_bad_host_does_not_stop_the_others(run: Run) -> None:
    """A single failure of a host that is no canary leaves nobody."""
    bad = run.spoiled.union(*run.failed)
    alone = len(bad) == 1 and not bad & run.canary and run.failures is not Failures.fail_fast
    servers = set(run.inventory.parameter_servers)
    if alone and not bad & servers:
        assert run.rollout.left == []


def too_many_failures_stop_the_others(run: Run) -> None:
    share = run.inventory.rollout.failures
    most = max(1, share if isinstance(share, int) else len(run.plans) * int(share[:-1]) // 100)
    most = {Failures.fail_fast: 0, Failures.limited: most, Failures.keep_going: len(run.plans)}[run.failures]
    count = len(run.spoiled)
    for bad in run.failed:
        assert count <= most  # when the turn began
        count += len(bad)


def quiet_hosts_come_first(run: Run) -> None:
    for number, turn in enumerate(run.turns):
        assert number == 0 or not set(turn) & run.quiet
    if run.turns and set(run.turns[0]) & run.quiet:
        assert set(run.turns[0]) <= run.quiet


def keep_going_stops_for_the_quorum_only(run: Run) -> None:
    if run.failures is Failures.keep_going and run.rollout.stopped:
        assert "rollout_quorum" in run.rollout.stopped
        assert set(run.rollout.left) <= set(run.inventory.parameter_servers)


CHECKS: list[Callable[[Run], None]] = [
    quorum_is_up,
    each_host_has_one_turn,
    nobody_is_forgotten,
    a_failed_canary_stops_the_others,
    one_bad_host_does_not_stop_the_others,
    too_many_failures_stop_the_others,
    quiet_hosts_come_first,
    keep_going_stops_for_the_quorum_only,
]


@pytest.fixture(scope="module")
def runs(cluster: Inventory) -> list[Run]:
    return [simulate(cluster, seed) for seed in range(SEEDS)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_whatever_fails(runs: list[Run], check: Callable[[Run], None]) -> None:
    for seed, run in enumerate(runs):
        try:
            check(run)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} of {HOSTS} hosts: {run.failures.value}: {error}") from error


def test_the_seeds_reach_every_outcome(runs: list[Run]) -> None:
    """Else the checks above would hold for want of cases."""
    stops = {word for run in runs for word in run.rollout.stopped.split() if word.startswith("(")}
    stops |= {"canary"} & {"canary" for run in runs if "changed first" in run.rollout.stopped}
    assert stops >= {"(rollout_quorum)", "(rollout_failures)", "(--fail-fast)", "canary"}
    assert any(run.rollout.failed and not run.rollout.stopped for run in runs)
    assert any(not run.rollout.failed for run in runs)


# Each breaks one thing, and one of the checks must find it.
def _without_quorum(rollout: Rollout) -> None:
    rollout.quorum = -10_000


def _forgetful(rollout: Rollout) -> None:
    rollout._stop_if_needed = lambda names: None  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [_without_quorum, _forgetful])
def test_the_checks_find_a_broken_rollout(
    cluster: Inventory, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Rollout], None]
) -> None:
    make = Rollout.__init__

    def broken(self: Rollout, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        spoil(self)

    monkeypatch.setattr(Rollout, "__init__", broken)
    found = 0
    for seed in range(30):
        run = simulate(cluster, seed)
        for check in CHECKS:
            try:
                check(run)
            except AssertionError:
                found += 1
    assert found
