"""``oeprov doctor``: observes every host and reports what is wrong and what to do. Changes nothing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from functools import partial

from rich.markup import escape

from provision.cluster.errors import HostError
from provision.cluster.host_names import alike
from provision.cluster.inventory import Host, Inventory
from provision.converge.diagnosis import Finding, diagnose, wear_of
from provision.converge.planview import name_hosts
from provision.hosts import fanout, observe, payload
from provision.hosts.fanout import Cut
from provision.hosts.survey import plan_host
from provision.jobs.screen import make_console, say
from provision.node import families
from provision.node.health import Health
from provision.node.state import decode, encode


@dataclass(frozen=True)
class Examined:
    """What is wrong on a host, and one line on each of its drives."""

    findings: list[Finding]
    drives: list[str] = field(default_factory=list)


def examine(host: Host, cut: Cut, *, reached: bool) -> Examined:
    """What is wrong on one host; HostError when it cannot be observed.

    ``reached``: workers on other hosts connect to its servers.
    """
    desired = host.desired()
    services = sorted({family.time_service for family in families.known()})
    firsts = [host.server.port, host.server.metrics_port] if host.is_parameter_server else []
    ports = [first + number for first in firsts if first for number in range(host.servers())]
    wanted = {"desired": encode(desired), "ports": ports, "services": services}
    begun = time.time()
    text = observe.text_of(host, partial(payload.pack, "health", wanted), cut)
    ended = time.time()
    state, answer = observe.parse(host.name, text), observe.answer(host.name, text)
    health = decode(Health, answer["health"])
    # The host read its clock at some time between these two.
    off = max(begun - health.time, health.time - ended, 0.0)
    skew = 0.0 if host.connection == "local" else off if health.time > ended else -off
    family = families.find(state.os)
    name = family.time_service if family else ""
    health = health._replace(services={key: value for key, value in health.services.items() if key == name})
    health = health if reached else health._replace(firewall="")
    found = diagnose(state, desired, plan_host(host, state), health, skew)
    return Examined(found, wear_of(health))


def run(inventory: Inventory, *, as_json: bool = False) -> int:
    """Print what is wrong on each host; 0 when nothing is, 1 else."""
    found: dict[str, list[Finding]] = {}
    drives: dict[str, list[str]] = {}
    workers = set(inventory.workers)
    seen = fanout.on_hosts(
        inventory.hosts, lambda host, cut: examine(host, cut, reached=bool(workers - {host.name}))
    )
    for name, item in seen.items():
        if isinstance(item, HostError):
            found[name] = [Finding(item.reason, "nothing else could be observed")]
        else:
            found[name] = item.findings
            drives[name] = item.drives
    wrong = any(found.values())
    if as_json:
        listed = {name: [asdict(item) for item in items] for name, items in found.items()}
        worn = {name: lines for name, lines in drives.items() if lines}
        print(json.dumps({"cluster": inventory.cluster, "wrong": wrong, "hosts": listed, "drives": worn}))
        return int(wrong)
    console = make_console()
    said_of = ((name, (tuple(items), tuple(drives.get(name, ())))) for name, items in found.items())
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
