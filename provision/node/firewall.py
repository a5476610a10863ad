"""Whether a firewall of the distribution's lets a port in: firewalld (EL's, on by default) or ufw (Ubuntu's).

Only a plain no counts: rules that are made by hand may say anything, and are taken for a yes.
"""

import re
from typing import Dict, List, Tuple

from .command import System


def look(system: System, ports: List[int]) -> Tuple[str, Dict[str, bool]]:
    """(the firewall that is on, or empty; port → whether it comes in)."""
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
        if zone == "trusted" or system.run(ask + ["--query-port={}/tcp".format(number)]).ok:
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
