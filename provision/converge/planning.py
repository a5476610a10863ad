"""``oeprov plan``: the pending changes of observed hosts, or of freshly installed ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from provision.cluster.errors import OeprovError, did_you_mean
from provision.cluster.inventory import Inventory
from provision.cluster.systems import assigned
from provision.converge import assumed_state, outlook, rolling
from provision.converge.screen import Screen
from provision.hosts.journal import Journal
from provision.hosts.survey import ClusterSurvey, plan_host, survey
from provision.jobs import store
from provision.node import platforms
from provision.node.state import OsInfo, encode
from provision.node.step import Plan

_STOP = re.compile(r"oeprov stop ([\w.-]*\w)")
ALL_MODES = sorted({mode for kind in platforms.kinds() for mode in platforms.get(kind).modes} - {"none"})


def check_mode(mode: str) -> None:
    """Refuse a mode that no kind of host has."""
    if mode not in ALL_MODES:
        hint = did_you_mean(mode, ALL_MODES)
        raise OeprovError(f"mode {mode!r} is unknown; modes are {', '.join(ALL_MODES)}{hint}")


def assume(inventory: Inventory, systems: Mapping[str, OsInfo]) -> ClusterSurvey:
    """Plans for freshly installed hosts, some with the given systems; contacts none."""
    found = ClusterSurvey()
    for name, host in inventory.hosts.items():
        found.states[name] = assumed_state.state(host.desired(), systems.get(name))
        found.plans[name] = plan_host(host, found.states[name])
    return found


def plan(
    inventory: Inventory,
    screen: Screen,
    *,
    offline: bool = False,
    systems: Iterable[str] = (),
    commands: bool = False,
    host: str = "",
    state_dir: Path | None = None,
) -> int:
    """Show the plan of every host; 0: nothing to do, 2: changes, 1: a host is unreachable or has a problem.

    ``systems``: of freshly installed hosts (``offline``), see ``systems.assigned``. ``host``: plan only this
    one. ``state_dir``: its journal has the durations of earlier reboots.
    """
    named = assigned(inventory, systems)
    if named and not offline:
        raise OeprovError("--system is for --offline only: observed hosts report their systems")
    if host:
        inventory = _only(inventory, host)
    found = assume(inventory, named) if offline else survey(inventory)
    if state_dir:
        found.plans = name_unknown_jobs(found.plans, state_dir)
    plans = list(found.plans.values())
    broken = bool(found.lost) or any(item.problems for item in plans)
    code = 1 if broken else 2 if found.pending else 0
    turns = rolling.turns(inventory, found.pending, [error.host for error in found.lost])
    if screen.as_json:
        hosts: dict[str, object] = {item.host: encode(item) for item in plans}
        hosts.update({error.host: {"host": error.host, "unreachable": error.reason} for error in found.lost})
        changes = bool(found.pending)
        screen.report({"cluster": inventory.cluster, "changes": changes, "turns": turns, "hosts": hosts})
        return code
    journal = Journal(state_dir / "journal.jsonl", "plan") if state_dir else None
    view = outlook.look(found.pending, turns, journal)
    screen.show_plan(plans, rolling.describe(found.pending, turns), view)
    if commands:
        screen.show_commands(plans)
    screen.show_lost(found.lost)
    steps = sum(len(item.steps) for item in plans)
    reboots = sum(any(step.reboots for step in item.steps) for item in plans)
    if steps:
        screen.say(
            f"{steps:,} step(s) on {len(found.pending):,} of {len(inventory.hosts):,} host(s), "
            f"{reboots:,} of which reboot; to do them: oeprov bootstrap -i "
            f"{shlex.quote(str(inventory.path))}"
        )
    elif not broken:
        screen.say(f"[green]✓[/] {len(plans):,} host(s): nothing to do")
    return code


def name_unknown_jobs(plans: Mapping[str, Plan], state_dir: Path) -> dict[str, Plan]:
    """The plans; a problem with a running job says how the job can leave the host, or who started it."""
    known = {job.id for job in store.directories(state_dir)}

    def say_where(match: re.Match[str], host: str) -> str:
        if match[1] in known:
            return f"{match[0]} (or keep it running without this host: oeprov drain {host})"
        return (
            f"{match[0]} --state-dir DIR, with that of the user who started it; {state_dir} has no such job"
        )

    return {
        name: item._replace(
            problems=[_STOP.sub(partial(say_where, host=name), problem) for problem in item.problems]
        )
        for name, item in plans.items()
    }


def _only(inventory: Inventory, host: str) -> Inventory:
    """The inventory with one host."""
    if host not in inventory.hosts:
        hint = did_you_mean(host, inventory.hosts)
        raise OeprovError(f"--host {host}: {inventory.path} has no such host, or --limit leaves it out{hint}")
    return replace(inventory, hosts={host: inventory.hosts[host]})
