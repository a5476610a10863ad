"""``oeprov plan``: the pending changes of observed hosts, or of freshly installed ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape

from provision.cluster.errors import OeprovError, did_you_mean
from provision.cluster.inventory import Inventory
from provision.cluster.systems import assigned
from provision.converge import fresh, planview, rolling
from provision.hosts.survey import ClusterSurvey, plan_host, survey
from provision.jobs.screen import say
from provision.node import platforms
from provision.node.state import OsInfo

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
        found.states[name] = fresh.state(host.desired(), systems.get(name))
        found.plans[name] = plan_host(host, found.states[name])
    return found


def plan(
    inventory: Inventory,
    *,
    offline: bool = False,
    systems: Iterable[str] = (),
    commands: bool = False,
    as_json: bool = False,
) -> int:
    """Show the plan of every host; 0: nothing to do, 2: changes, 1: a host is unreachable or has a problem.

    ``systems``: of freshly installed hosts (``offline``), see ``systems.assigned``.
    """
    named = assigned(inventory, systems)
    if named and not offline:
        raise OeprovError("--system is for --offline only: observed hosts report their systems")
    found = assume(inventory, named) if offline else survey(inventory)
    plans = list(found.plans.values())
    broken = bool(found.lost) or any(item.problems for item in plans)
    code = 1 if broken else 2 if found.pending else 0
    turns = rolling.turns(inventory, found.pending, [error.host for error in found.lost])
    if as_json:
        hosts: dict[str, object] = {item.host: item.to_dict() for item in plans}
        hosts.update({error.host: {"host": error.host, "unreachable": error.reason} for error in found.lost})
        changes = bool(found.pending)
        print(json.dumps({"cluster": inventory.cluster, "changes": changes, "turns": turns, "hosts": hosts}))
        return code
    console = Console()
    planview.show(console, plans, rolling.describe(found.pending, turns))
    if commands:
        _show_commands(console, found)
    for error in found.lost:
        say(console, f"[red]✗[/] {escape(str(error))}")
    steps = sum(len(item.steps) for item in plans)
    reboots = sum(any(step.reboots for step in item.steps) for item in plans)
    if steps:
        say(
            console,
            f"{steps} step(s) on {len(found.pending)} of {len(inventory.hosts)} host(s), {reboots} of which "
            f"reboot; to do them: oeprov bootstrap -i {shlex.quote(str(inventory.path))}",
        )
    elif not broken:
        say(console, f"[green]✓[/] {len(plans)} host(s): nothing to do")
    return code


def _show_commands(console: Console, found: ClusterSurvey) -> None:
    for item in found.plans.values():
        for step in item.steps:
            say(console, f"[bold]{item.host}[/]: {escape(step.what)}")
            for argv in step.commands:
                text = " ".join(word if word.startswith("<") else shlex.quote(word) for word in argv)
                say(console, f"    {escape(text)}")
