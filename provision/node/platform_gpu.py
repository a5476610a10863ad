"""A host with NVIDIA GPUs."""

from .platform_cpu import Cpu
from .state import Gpu, State
from .step import Desired


class _Gpu(Cpu):
    name = "gpu"
    has_gpus = True
    instance_types = ("gn*", "vgn*", "sgn*", "ebmgn*", "sccgn*")

    def fresh(self, desired: Desired) -> State:
        # An A10, as on Alibaba Cloud's gn7i.
        return super().fresh(desired)._replace(gpu=Gpu(["0000:00:07.0"], ids=["2236"]))


PLATFORM = _Gpu()
