"""Observations for `oeprov doctor` beyond those that plans depend on; they change nothing."""

import os
import re
import time
from typing import Any, Dict, List, NamedTuple, Tuple

from . import answer, devices, drives, jobfiles, modules, platforms, port, systemd, wear
from .command import CommandError, System
from .observe import observe
from .state import State, decode, encode
from .step import Desired


class Health(NamedTuple):
    """Sizes in bytes; ``time`` in seconds since 1970 by the host's clock."""

    time: float = 0.0
    memory: int = 0
    huge_pages: int = 0  # reserved, so not available as ordinary memory
    transparent: str = ""  # always, madvise or never
    ports: Dict[str, str] = {}  # those of the requested ports that are taken: port -> by which process
    modules: List[str] = []  # persistent memory modules
    flags: Dict[str, str] = {}  # module -> the faults that its firmware reports
    bad_blocks: Dict[str, int] = {}  # region -> blocks of 512 bytes that cannot be read
    services: Dict[str, str] = {}  # requested service -> its state
    disks: Dict[
        str, List[int]
    ] = {}  # mount point of a file system that oeprov uses -> free bytes and all bytes
    servers: Dict[str, str] = {}  # unit of a parameter server that should run -> how it ended
    firewall: str = ""  # the active one: firewalld or ufw
    lets_in: Dict[str, bool] = {}  # requested port -> the firewall lets it in
    drives: List[wear.Wear] = []  # NVMe drives of ssd_devices


def observe_health(system: System, ports: List[int], services: List[str], places: List[str]) -> Health:
    """Observe the host's health; ``places``: directories that oeprov uses."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", system.read("/proc/meminfo"), re.MULTILINE))
    chosen = re.search(r"\[(\w+)\]", system.read("/sys/kernel/mm/transparent_hugepage/enabled"))
    names = system.list(devices.ND)
    found = modules.observe(system)
    regions = [name for name in names if re.match(r"region\d+$", name)]
    bad = {name: devices.bad_blocks(system.read(f"{devices.ND}/{name}/badblocks")) for name in regions}
    taken = {str(number): port.holder(system, number) for number in ports}
    on, lets_in = observe_firewall(system, ports)
    return Health(
        time=time.time(),
        memory=int(meminfo.get("MemTotal", 0)) << 10,
        huge_pages=int(meminfo.get("HugePages_Total", 0)) * int(meminfo.get("Hugepagesize", 0)) << 10,
        transparent=chosen.group(1) if chosen else "",
        ports={number: holder for number, holder in taken.items() if holder},
        modules=[item.dev for item in found],
        flags={item.dev: " ".join(item.flags) for item in found if item.flags},
        bad_blocks={name: count for name, count in bad.items() if count},
        services={name: system.run(["systemctl", "is-active", name]).out.strip() for name in services},
        disks=_disks(system, places),
        servers=_servers(system),
        firewall=on,
        lets_in=lets_in,
    )


def _places(desired: Desired, state: State) -> List[str]:
    """Directories that oeprov and its jobs write to."""
    mounts = [item.where for item in state.mounts if item.where.startswith(desired.pmem_mount_prefix)]
    mounts += [drives.place(desired, name) for name in desired.ssd_devices]
    system = ["/", "/boot", jobfiles.HOME] if platforms.get(desired.kind).managed else []
    return [path for path in [*system, desired.runtime_venv, desired.pmem_directory, *mounts] if path]


def _disks(system: System, places: List[str]) -> Dict[str, List[int]]:
    """Space of the file systems of ``places``, each file system once."""
    found: Dict[str, List[int]] = {}
    for place in places:
        while place != "/" and not os.path.ismount(system.path(place)):
            place = os.path.dirname(place)
        try:
            space = os.statvfs(system.path(place))
        except OSError:
            continue  # the plan reports faults of a mount
        found[place] = [space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize]
    return found


def _servers(system: System) -> Dict[str, str]:
    """Servers that do not run although their job was not stopped."""
    names = [name for name in systemd.ours(system) if "-server-" in name]
    try:
        units = systemd.show(system, names)
    except CommandError:
        return {}
    down = [unit for unit in units.values() if unit.failing or not (unit.up or unit.ending)]
    return {unit.name: systemd.how_it_ended(system, unit) for unit in down}


def observe_firewall(system: System, ports: List[int]) -> Tuple[str, Dict[str, bool]]:
    """(the firewall that is on, or empty; port → whether it lets the port in), of firewalld and ufw.

    Only a plain no counts: an administrator's own rules are taken for a yes.
    """
    if system.run(["firewall-cmd", "--state"]).ok:
        return "firewalld", {str(number): _firewalld(system, number) for number in ports}
    said = system.run(["ufw", "status"])
    if said.ok and re.search(r"^Status: active", said.out, re.MULTILINE):
        return "ufw", {str(number): _ufw(said.out, number) for number in ports}
    return "", {}


def _firewalld(system: System, number: int) -> bool:
    zones = [
        line.split()[0]
        for line in system.run(["firewall-cmd", "--get-active-zones"]).out.splitlines()
        if line and not line[0].isspace()
    ]
    for zone in zones:
        ask = ["firewall-cmd", "--zone=" + zone]
        if zone == "trusted" or system.run(ask + [f"--query-port={number}/tcp"]).ok:
            return True
        if system.run(ask + ["--list-rich-rules"]).out.strip():
            return True
    return not zones


def _ufw(status: str, number: int) -> bool:
    for line in status.splitlines():
        rule = re.match(r"(\S+)(?: \(v6\))?\s+(?:ALLOW|LIMIT)\b", line)
        if rule and _covers(rule.group(1), number):
            return True
    return False


def _covers(to: str, number: int) -> bool:
    """``to``: ``7700/tcp``, ``7700:7710/tcp``, ``80,443/tcp``, ``Anywhere``, or a program's name."""
    ports = re.match(r"([\d:,]+)(/tcp)?$", to)
    if not ports:
        return to == "Anywhere"
    spans = [item.split(":") for item in ports.group(1).split(",")]
    return any(int(span[0]) <= number <= int(span[-1]) for span in spans)


def main(wanted: Dict[str, Any]) -> None:
    """Print state and health as one line of JSON, or the error."""
    answer.give(lambda: _examine(System(), wanted))


def _examine(system: System, wanted: Dict[str, Any]) -> Dict[str, Any]:
    desired = decode(Desired, wanted["desired"])
    state = observe(system, desired)
    health = observe_health(system, wanted["ports"], wanted["services"], _places(desired, state))
    health = health._replace(drives=wear.observe(system, state))
    return {"state": encode(state), "health": encode(health)}
