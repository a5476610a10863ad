"""What a host is: one ``Platform`` per file ``platform_*.py``; ``platforms.py`` lists them.

A platform says which modes its memory has, what of the machine is observed, how a mode is reached, and how a
new host looks. No other module asks which platform a host is.
"""

from typing import Dict, List, NamedTuple, Tuple

from . import fsdax, system_ram, tiering
from .command import System
from .state import NumaNode, OsInfo, State
from .step import Desired, Part

GIB = 1 << 30
MIB = 1 << 20
EL8 = OsInfo("rocky", "8.10", "rhel", "Rocky Linux 8.10", "x86_64", "dnf")
UBUNTU = OsInfo("ubuntu", "22.04", "debian", "Ubuntu 22.04 LTS", "x86_64", "apt")
# Why guests with persistent memory have no memory mode.
GUEST_REFUSAL = (
    "{} is a guest: memory mode is set by ipmctl in the firmware of the physical machine, which a guest "
    "cannot reach; use system-ram (a memory node of its own) or fsdax"
)


class KernelOption(NamedTuple):
    """An option that a mode needs, and the first kernel series that has it; (): all supported kernels.

    ``feature``: what the mode needs of that series beyond the option, which older kernels have too.
    """

    name: str
    since: Tuple[int, ...] = ()
    feature: str = ""


KMEM = KernelOption("CONFIG_DEV_DAX_KMEM", (5, 1))
_BALANCING = KernelOption("CONFIG_NUMA_BALANCING", (5, 18), "NUMA balancing between tiers")
_WEIGHTS = KernelOption("CONFIG_NUMA", (6, 9), "pmem_dram_weight")
# Modes in which the memory is nodes without CPUs.
MEMORY_NODES = ("system-ram", tiering.MODE)


def nodes_mode(state: State) -> str:
    """The mode of a host whose memory is nodes."""
    return tiering.MODE if tiering.UNIT in state.files else "system-ram"


class Platform:
    """A managed host whose memory, if it has modes, shows as regions and namespaces; others override that."""

    name = ""  # what oeprov_kind says
    modes: Tuple[str, ...] = ("none",)  # the first is what pmem_mode auto means
    managed = True  # False: a user's own machine, of which oeprov changes a directory and an environment only
    has_gpus = False
    memory = "persistent"  # the kind of memory, for messages
    packages: Tuple[str, ...] = ()  # needs beyond those of the mode, in the words of family.py
    needs_drives = False  # rows are on ssd_devices
    handed_out_by_firmware = False  # the memory may be a node without CPUs from the start
    regions: Tuple[str, ...] = ()  # types of regions of which the memory consists; (): it has none
    no_region: Tuple[str, ...] = ()  # what `oeprov doctor` says without one, and its advice; (): the usual
    takes_memmap = False  # pmem_memmap may name its range
    instance_types: Tuple[str, ...] = ()  # patterns of Alibaba Cloud's instance families, without "ecs."
    refusals: Dict[str, str] = {}  # mode -> why the platform does not have it, where there is more to say

    @property
    def has_memory(self) -> bool:
        """There is memory with a mode."""
        return self.modes != ("none",)

    def refuse(self, mode: str) -> str:
        """Why the platform does not have ``mode``, and what to use instead; empty when it has."""
        if mode == "auto" or mode in self.modes:
            return ""
        if mode in self.refusals:
            return self.refusals[mode].format(self.name)
        if mode == "directory":
            return (
                f"directory stands in for persistent memory on kind local only; {self.name} can do "
                f"{', '.join(self.modes)}"
            )
        return f"kind {self.name} has no persistent memory; use none, or correct oeprov_kind"

    def observe(self, system: System, state: State, desired: Desired) -> State:
        """``state`` with what only this platform's plans depend on."""
        return state

    def plan(self, state: State, desired: Desired) -> Part:
        """The way to ``desired.pmem_mode``, which is one of ``modes`` and not none."""
        nodes = self.handed_out(state, desired)
        if nodes:
            return system_ram.plan_handed_out(state, desired, nodes, self.memory)
        absent = self.explain_absence(state, desired)
        if desired.pmem_mode == "system-ram":
            return system_ram.plan_namespaces(state, desired, absent)
        return fsdax.plan(state, desired, absent)

    def handed_out(self, state: State, desired: Desired) -> List[NumaNode]:
        """For modes with memory nodes: nodes without CPUs that the firmware made of the memory."""
        wanted = self.handed_out_by_firmware and desired.pmem_mode in MEMORY_NODES
        return system_ram.handed_out(state) if wanted else []

    def needed_options(self, state: State, desired: Desired) -> List[KernelOption]:
        """Kernel options that the mode depends on, and those of tiering."""
        if desired.pmem_mode != tiering.MODE:
            return self.kernel_options(state, desired)
        found = self.kernel_options(state, desired._replace(pmem_mode="system-ram"))
        return found + [_BALANCING] + ([_WEIGHTS] if desired.pmem_dram_weight else [])

    def kernel_options(self, state: State, desired: Desired) -> List[KernelOption]:
        """Kernel options that the mode depends on; tiered is not asked for."""
        if self.handed_out(state, desired):
            return []  # the firmware has made the memory a node already
        found = {"system-ram": [KMEM], "fsdax": [KernelOption("CONFIG_FS_DAX")]}
        return found.get(desired.pmem_mode, [])

    def find_mode(self, state: State) -> str:
        """The mode that the memory is in now; empty when it is in none."""
        if any(item.mode == "system-ram" for item in state.dax):
            return nodes_mode(state)
        if any(item.mode == "fsdax" for item in state.namespaces):
            return "fsdax"
        if self.handed_out(state, Desired(pmem_mode="system-ram")):
            return nodes_mode(state)
        return "memory" if state.dimms.volatile and not state.dimms.app_direct else ""

    def explain_absence(self, state: State, desired: Desired) -> str:
        """Why there is no memory to use, and what to check."""
        if any(region.type == "ram" for region in state.regions):
            return "the CXL region is volatile (ram) and cannot hold namespaces; use pmem_mode: system-ram"
        return "there is no persistent memory region: are the modules installed and enabled in the firmware?"

    def fresh(self, desired: Desired) -> State:
        """A new host's hardware and system, for plans without observation; figures are the vendors'."""
        return State(os=UBUNTU)
