"""What ``oeprov doctor`` wants to know of a machine beyond what plans depend on. Changes nothing."""

import json
import re
import sys
import time
from typing import Any, Dict, List, NamedTuple

from . import port
from .__main__ import MARKER
from .command import System
from .observe import observe
from .state import decode, encode_fields
from .step import Desired

_BUS = "/sys/bus/nd/devices"


class Health(NamedTuple):
    """Sizes in bytes; ``time`` in seconds since 1970 by the host's clock."""

    time: float = 0.0
    memory: int = 0
    huge_pages: int = 0  # reserved for those who ask for huge pages, and for nobody else
    transparent: str = ""  # always, madvise or never
    ports: Dict[str, str] = {}  # of those asked for, which are taken: port -> by whom
    modules: List[str] = []  # persistent memory modules
    flags: Dict[str, str] = {}  # module -> what its firmware complains about
    bad_blocks: Dict[str, int] = {}  # region -> blocks of 512 bytes that cannot be read
    services: Dict[str, str] = {}  # service -> its state, of those asked for

    def to_dict(self) -> Dict[str, Any]:
        """Plain values, ready for JSON."""
        return encode_fields(self)

    @classmethod
    def from_dict(cls, data: Dict[str, Any]) -> "Health":
        """The inverse of ``to_dict``; unknown keys raise ValueError."""
        return decode(cls, data)


def look(system: System, ports: List[int], services: List[str]) -> Health:
    """The machine's health now."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", system.read("/proc/meminfo"), re.MULTILINE))
    chosen = re.search(r"\[(\w+)\]", system.read("/sys/kernel/mm/transparent_hugepage/enabled"))
    names = system.list(_BUS)
    modules = [name for name in names if re.match(r"nmem\d+$", name)]
    regions = [name for name in names if re.match(r"region\d+$", name)]
    flags = {name: system.read("{}/{}/nfit/flags".format(_BUS, name)).strip() for name in modules}
    bad = {name: _blocks(system.read("{}/{}/badblocks".format(_BUS, name))) for name in regions}
    taken = {str(number): port.holder(system, number) for number in ports}
    return Health(
        time=time.time(),
        memory=int(meminfo.get("MemTotal", 0)) << 10,
        huge_pages=int(meminfo.get("HugePages_Total", 0)) * int(meminfo.get("Hugepagesize", 0)) << 10,
        transparent=chosen.group(1) if chosen else "",
        ports={number: holder for number, holder in taken.items() if holder},
        modules=modules,
        flags={name: text for name, text in flags.items() if text},
        bad_blocks={name: count for name, count in bad.items() if count},
        services={name: system.run(["systemctl", "is-active", name]).out.strip() for name in services},
    )


def _blocks(text: str) -> int:
    """Sum of lengths in a list of bad blocks: a line has the first and how many."""
    rows = [line.split() for line in text.splitlines()]
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit())


def main(wanted: Dict[str, Any]) -> None:
    """Print state and health; an error of any kind becomes an answer too."""
    system = System()
    try:
        state = observe(system, Desired.from_dict(wanted["desired"]))
        health = look(system, wanted["ports"], wanted["services"])
        answer: Dict[str, Any] = {"state": state.to_dict(), "health": health.to_dict()}
    except Exception as error:
        answer = {"error": "{}: {}".format(type(error).__name__, error)}
    sys.stdout.write("\n" + MARKER + json.dumps(answer) + "\n")
