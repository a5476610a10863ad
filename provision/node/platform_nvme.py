"""A host whose rows are on NVMe drives: a parameter server without persistent memory."""

from .platform_base import GIB, UBUNTU, Platform
from .state import NumaNode, State
from .step import Desired


class _Nvme(Platform):
    name = "nvme"
    needs_drives = True

    def fresh(self, desired: Desired) -> State:
        return State(os=UBUNTU, numa=[NumaNode(0, 128 * GIB, 125 * GIB, list(range(32)), [10])])


PLATFORM = _Nvme()
