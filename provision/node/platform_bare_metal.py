"""A physical machine with Optane modules, whose mode is a goal that ipmctl gives to the firmware."""

from . import ipmctl, numa
from .command import System
from .platform_base import EL8, GIB, Platform
from .state import Dimms, NumaNode, State
from .step import Desired, Part, join


class _BareMetal(Platform):
    name = "bare_metal_pmem"
    modes = ("fsdax", "system-ram", "tiered", "memory", "none")
    packages = ("ipmctl",)
    handed_out_by_firmware = True
    regions = ("pmem", "volatile")

    def observe(self, system: System, state: State, desired: Desired) -> State:
        return state._replace(numa=numa.tell_apart(system, state.numa), dimms=ipmctl.observe(system))

    def plan(self, state: State, desired: Desired) -> Part:
        if desired.pmem_mode == "memory":
            return ipmctl.plan_memory(state, desired)
        if self.handed_out(state, desired):
            return super().plan(state, desired)
        if ipmctl.needs_app_direct(state):
            return ipmctl.plan_app_direct(state, super().plan(ipmctl.predicted(state), desired))
        return join(ipmctl.forget_goal(state), super().plan(state, desired))

    def fresh(self, desired: Desired) -> State:
        # Two sockets, each with four 128 GiB modules; no goal was ever set.
        return State(
            os=EL8,
            numa=[
                NumaNode(0, 192 * GIB, 185 * GIB, list(range(26)), [10, 21]),
                NumaNode(1, 192 * GIB, 185 * GIB, list(range(26, 52)), [21, 10]),
            ],
            dimms=Dimms("02.00.00.3885", int(1013.937 * GIB), 0, 0, int(1013.937 * GIB), [], [0, 1]),
        )


PLATFORM = _BareMetal()
