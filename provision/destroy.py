"""``oeprov destroy``: takes what oeprov made off the hosts; a plan like any other, with data by name only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from provision import converge, past
from provision.converge import Consent
from provision.inventory import Inventory, Removal
from provision.journal import Journal
from provision.training import units
from provision.training.jobs import jobs_dir


def run(
    inventory: Inventory, *, state_dir: Path, consent: Consent, as_json: bool = False, check: bool = False
) -> int:
    """Show the plan, ask, remove, look again, and say of each host what is left; exit codes of bootstrap."""
    before = past.first(Journal(state_dir / "journal.jsonl", "destroy"), inventory.cluster)
    hosts = {}
    for name, host in inventory.hosts.items():
        named = tuple(
            item.removeprefix(f"{name}:") for item in consent.objects if item.startswith(f"{name}:")
        )
        local = host.connection == "local"
        place = str(jobs_dir(state_dir).absolute() if local else units.JOBS)
        hosts[name] = replace(host, removal=Removal(named, place, *before.get(name, ())))
    code, found = converge.remove(
        replace(inventory, hosts=hosts), state_dir=state_dir, consent=consent, as_json=as_json, check=check
    )
    console = Console(stderr=as_json)
    for plan in [] if check else found.plans.values():
        clean = "[green]✓[/]" if plan.converged else "[red]✗[/]"
        words = [f"{len(plan.steps)} step(s) not done"] * bool(plan.steps) + plan.problems
        words += [line.split("; to lose")[0] for line in plan.notes]
        text = "; ".join(words) or "nothing that oeprov made is left, but system packages and kernels"
        console.print(f"{clean} {plan.host}: {escape(text)}", highlight=False, soft_wrap=True)
    return code
