"""How much memory of which NUMA node a process holds."""

import os
import re
from typing import Dict, List

from . import numa
from .command import System

_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_SIZE = re.compile(r"\bkernelpagesize_kB=(\d+)")


def parse_numa_maps(text: str) -> Dict[int, int]:
    """Bytes by node, from /proc/PID/numa_maps."""
    found: Dict[int, int] = {}
    for line in text.splitlines():
        size = _PAGE_SIZE.search(line)
        page = int(size.group(1)) * 1024 if size else os.sysconf("SC_PAGE_SIZE")
        for node, pages in _PAGES.findall(line):
            found[int(node)] = found.get(int(node), 0) + int(pages) * page
    return found


def by_node(system: System, pid: int) -> Dict[str, int]:
    """Bytes that a process holds on each node; the keys are node numbers as text, ready for JSON."""
    found = parse_numa_maps(system.read("/proc/{}/numa_maps".format(pid)))
    return {str(node): size for node, size in sorted(found.items())}


def resident(system: System, pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    fields = system.read("/proc/{}/statm".format(pid)).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def cpuless(system: System) -> List[int]:
    """Nodes with memory and without CPUs: persistent or CXL memory as system RAM."""
    return [node.id for node in numa.observe_nodes(system) if node.size and not node.cpus]
