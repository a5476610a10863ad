"""CXL memory: a volatile or persistent region, or a node without CPUs that the firmware hands out."""

from typing import List

from . import cxl, numa, system_ram
from .command import System
from .directory import human
from .platform_base import GIB, MIB, UBUNTU, KernelOption, Platform
from .state import DaxDevice, NumaNode, Region, State
from .step import Desired, Part

_RAM_REGIONS = KernelOption("CONFIG_DEV_DAX_CXL", (6, 3))


class _Cxl(Platform):
    name = "cxl"
    modes = ("system-ram", "tiered", "fsdax", "none")
    memory = "CXL"
    packages = ("cxl",)
    handed_out_by_firmware = True
    regions = ("pmem", "volatile", "ram")
    no_region = (
        "there is no region of CXL memory",
        "`cxl list -M` shows whether the expander is seen; `oeprov bootstrap` makes a region of a single one",
    )
    refusals = {"memory": "CXL memory has no memory mode; use system-ram"}

    def observe(self, system: System, state: State, desired: Desired) -> State:
        dynamic = [item for item in state.dax if cxl.is_dynamic(system, item)]
        return state._replace(
            numa=numa.tell_apart(system, state.numa),
            cxl=cxl.observe(system)._replace(dynamic=[item.chardev for item in dynamic]),
            dax=[item for item in state.dax if item not in dynamic],
        )

    def plan(self, state: State, desired: Desired) -> Part:
        if desired.pmem_mode == "system-ram" and not self.handed_out(state, desired):
            if not state.dax and not state.regions and not cxl.why_not(state):
                return system_ram.plan_region(state, desired, cxl.create(state))
            return system_ram.plan_devices(state, desired, self.explain_absence(state, desired))
        return super().plan(state, desired)

    def kernel_options(self, state: State, desired: Desired) -> List[KernelOption]:
        found = super().kernel_options(state, desired)
        ram = not state.regions or any(region.type == "ram" for region in state.regions)
        return found + [_RAM_REGIONS] if found and ram and desired.pmem_mode == "system-ram" else found

    def explain_absence(self, state: State, desired: Desired) -> str:
        if any(region.type == "ram" for region in state.regions):
            return super().explain_absence(state, desired)
        why = f"there is no CXL region, and oeprov makes none: {cxl.why_not(state)}"
        if desired.pmem_mode == "fsdax":
            why = "there is no persistent CXL region"
        why += "; create one with `cxl create-region`"
        return why + "".join(_not_taken(state, node, desired) for node in numa.cpuless(state))

    def fresh(self, desired: Desired) -> State:
        # From kernel 6.3 on, a volatile CXL region goes to kmem, and Ubuntu brings such memory online.
        return State(
            os=UBUNTU._replace(version="24.04", name="Ubuntu 24.04 LTS"),
            numa=[
                NumaNode(0, 256 * GIB, 250 * GIB, list(range(64)), [10, 20]),
                NumaNode(1, 252 * GIB, 252 * GIB, [], [20, 10]),
            ],
            regions=[Region("region0", 256 * GIB, 0, "ram", 1, "", "cxl")],
            dax=[DaxDevice("dax0.0", 256 * GIB, "system-ram", 1, 2 * MIB, False, 2048, 2048, "region0")],
        )


def _not_taken(state: State, node: NumaNode, desired: Desired) -> str:
    """Why a node without CPUs is not the memory that is looked for."""
    why = numa.other_memory(state, node)
    if not why and desired.pmem_mode == "fsdax":
        why = "the firmware hands it out like any other memory: use pmem_mode: system-ram"
    return f"; node {node.id} has {human(node.size)} and no CPUs, but {why}" if why else ""


PLATFORM = _Cxl()
