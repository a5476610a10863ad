"""A host without persistent memory: a worker, or a server with its rows in DRAM."""

from .platform_base import GIB, UBUNTU, Platform
from .state import NumaNode, State
from .step import Desired


class Cpu(Platform):
    """Also what a GPU host is beside its GPUs."""

    name = "cpu"

    def fresh(self, desired: Desired) -> State:
        """See ``Platform.fresh``."""
        return State(os=UBUNTU, numa=[NumaNode(0, 256 * GIB, 250 * GIB, list(range(64)), [10])])


PLATFORM = Cpu()
