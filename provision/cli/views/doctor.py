"""What ``oeprov doctor`` prints: the findings of each host, once for all hosts that have the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rich.markup import escape

from provision.cli.views.plan import name_hosts
from provision.cluster.host_names import alike
from provision.converge.doctor import Examined
from provision.jobs.screen import make_console, say


def show(cluster: str, found: Mapping[str, Examined], *, as_json: bool = False) -> int:
    """Print what is wrong on each host; 0 when nothing is, 1 else."""
    wrong = any(item.findings for item in found.values())
    if as_json:
        listed = {name: [asdict(finding) for finding in item.findings] for name, item in found.items()}
        worn = {name: item.drives for name, item in found.items() if item.drives}
        print(json.dumps({"cluster": cluster, "wrong": wrong, "hosts": listed, "drives": worn}))
        return int(wrong)
    console = make_console()
    said_of = ((name, (tuple(item.findings), tuple(item.drives))) for name, item in found.items())
    for (items, lines), hosts in alike(said_of).items():
        mark = "[red]✗[/]" if items else "[green]✓[/]"
        said = f"{len(items)} problem(s)" if items else "nothing wrong"
        say(console, f"{mark} [bold]{escape(name_hosts(hosts))}[/]: {said}")
        for finding in items:
            say(console, f"  - {escape(finding.what)}")
            say(console, f"    [dim]→[/] {escape(finding.do)}")
        for line in lines:
            say(console, f"  [dim]{escape(line)}[/]")
    return int(wrong)
