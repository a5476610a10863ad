"""``oeprov doctor``: observes every host and says what is wrong and what to do. Changes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.converge.diagnosis import Finding, diagnose, wear_of
from provision.hosts import fanout, observe, payload
from provision.hosts.fanout import Cut
from provision.hosts.survey import plan_host
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
    skew = 0.0 if host.is_here else off if health.time > ended else -off
    family = families.find(state.os)
    name = family.time_service if family else ""
    health = health._replace(services={key: value for key, value in health.services.items() if key == name})
    health = health if reached else health._replace(firewall="")
    found = diagnose(state, desired, plan_host(host, state), health, skew)
    return Examined(found, wear_of(health))


def examine_all(inventory: Inventory) -> dict[str, Examined]:
    """What is wrong on each host; an empty list where nothing is."""
    workers = set(inventory.workers)
    seen = fanout.on_hosts(
        inventory.hosts, lambda host, cut: examine(host, cut, reached=bool(workers - {host.name}))
    )
    unseen = "nothing else could be observed"
    return {
        name: Examined([Finding(item.reason, unseen)]) if isinstance(item, HostError) else item
        for name, item in seen.items()
    }
