"""Alibaba Cloud ecs.re7p: a guest with persistent memory as a node without CPUs, or a ``memmap=`` range."""

from typing import List

from . import memmap, numa
from .command import System
from .devices import is_memmap
from .platform_base import EL8, GIB, GUEST_REFUSAL, MIB, KernelOption, Platform, nodes_mode
from .state import MemoryRange, NumaNode, State
from .step import Desired, Part


class _Re7p(Platform):
    name = "re7p"
    modes = ("fsdax", "system-ram", "tiered", "none")
    refusals = {"memory": GUEST_REFUSAL}
    takes_memmap = True
    instance_types = ("re7p*",)

    def observe(self, system: System, state: State, desired: Desired) -> State:
        # The kernel's log is long; only here does anything depend on it.
        return state._replace(ranges=numa.observe_ranges(system, system.run(["dmesg"]).out))

    def plan(self, state: State, desired: Desired) -> Part:
        return memmap.plan(state, desired)

    def kernel_options(self, state: State, desired: Desired) -> List[KernelOption]:
        if desired.pmem_mode == "fsdax":
            return [KernelOption("CONFIG_FS_DAX"), KernelOption("CONFIG_X86_PMEM_LEGACY")]
        return []

    def find_mode(self, state: State) -> str:
        return "fsdax" if any(map(is_memmap, state.kernel.cmdline)) else nodes_mode(state)

    def fresh(self, desired: Desired) -> State:
        # ecs.re7p.16xlarge: node 1 shows 1,016,062 MB, which is 1008 GiB less its page structures (1/64).
        return State(
            os=EL8,
            numa=[
                NumaNode(0, 249568 * MIB, 240000 * MIB, list(range(64)), [10, 17]),
                NumaNode(1, 1016062 * MIB, 1016000 * MIB, [], [17, 10]),
            ],
            ranges=[
                MemoryRange(0, 640 << 10),
                MemoryRange(1 * MIB, 3 * GIB),
                MemoryRange(4 * GIB, 1265 * GIB),
                MemoryRange(0, 640 << 10, 0, "srat"),
                MemoryRange(1 * MIB, 3 * GIB, 0, "srat"),
                MemoryRange(4 * GIB, 257 * GIB, 0, "srat"),
                MemoryRange(257 * GIB, 1265 * GIB, 1, "srat"),
            ],
        )


PLATFORM = _Re7p()
