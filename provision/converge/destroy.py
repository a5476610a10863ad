"""``oeprov destroy``: removes from hosts what oeprov made. Data goes only with consent by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from provision.cluster.inventory import Host, Inventory, Removal
from provision.converge import changes
from provision.converge.changes import How
from provision.hosts import history
from provision.hosts.journal import Journal
from provision.hosts.survey import ClusterSurvey
from provision.jobs.backends import units
from provision.jobs.store import jobs_dir


def run(inventory: Inventory, how: How) -> int:
    """Show the plan, ask, remove, observe again, and report what is left per host; exit codes of bootstrap.

    A named object that does not exist is only reported.
    """
    before = history.first(Journal(how.state_dir / "journal.jsonl", "destroy"), inventory.cluster)
    hosts = {}
    for name, host in inventory.hosts.items():
        named = tuple(
            item.removeprefix(f"{name}:") for item in how.consent.objects if item.startswith(f"{name}:")
        )
        local = host.is_here
        place = str(jobs_dir(how.state_dir).absolute() if local else units.JOBS)
        hosts[name] = replace(host, removal=Removal(named, place, *before.get(name, ())))
    code, found = changes.remove(
        replace(inventory, hosts=hosts), how, lambda seen: _missing_objects(seen, hosts)
    )
    left: dict[str, list[tuple[str, str]]] = {}  # by the mark before the line
    for plan in [] if how.check else found.plans.values():
        clean = "[green]✓[/] " if plan.converged else "[red]✗[/] "
        words = [f"{len(plan.steps)} step(s) not done"] * bool(plan.steps) + plan.problems
        words += [line.split("; to lose")[0] for line in plan.notes]
        text = "; ".join(words) or "nothing that oeprov made is left, except system packages and kernels"
        left.setdefault(clean, []).append((plan.host, text))
    for mark, lines in left.items():
        how.screen.show_lines(mark, lines)
    return code


def _missing_objects(found: ClusterSurvey, hosts: Mapping[str, Host]) -> list[str]:
    """One line per object that the user named and no plan removes."""
    lines = []
    for name, plan in found.plans.items():
        removal = hosts[name].removal
        kept = {word.removeprefix(f"{name}:") for note in plan.notes for word in note.split()}
        lines += [
            f"{name}:{item} was named, but oeprov made no such object there, or it is gone already"
            for item in (removal.objects if removal else ())
            if item not in plan.destroys and item not in kept
        ]
    return lines
