"""Alibaba Cloud ecs.re6p: a guest whose persistent memory is one namespace without a label."""

from .platform_base import EL8, GIB, GUEST_REFUSAL, Platform
from .state import FileSystem, Namespace, NumaNode, Region, State
from .step import Desired


class _Re6p(Platform):
    name = "re6p"
    modes = ("fsdax", "system-ram", "tiered", "none")
    regions = ("pmem", "volatile")
    instance_types = ("re6p*",)
    refusals = {"memory": GUEST_REFUSAL}

    def explain_absence(self, state: State, desired: Desired) -> str:
        if any(region.type == "ram" for region in state.regions):
            return super().explain_absence(state, desired)
        return "there is no namespace0.0: is this a re6p instance, and is the kernel's nfit driver loaded?"

    def fresh(self, desired: Desired) -> State:
        return State(
            os=EL8,
            numa=[NumaNode(0, 192 * GIB, 180 * GIB, list(range(52)), [10])],
            regions=[Region("region0", 1008 * GIB, 0, "pmem", 0, "memory_controller", "nvdimm")],
            namespaces=[
                Namespace(
                    "namespace0.0", "raw", "", 1008 * GIB, blockdev="pmem0", region="region0", labels=False
                )
            ],
            filesystems=[FileSystem("pmem0", sample="zero")],
        )


PLATFORM = _Re6p()
