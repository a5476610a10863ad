"""Alibaba Cloud Linux 2: CentOS 7's packages with a newer kernel (4.19), from Alibaba's own mirrors.

From its documentation, not looked up in its indexes.
"""

from . import family_el7
from .family import Fresh, KernelSource

_EL7 = family_el7.FAMILY

FAMILY = _EL7._replace(
    name="Alibaba Cloud Linux 2",
    ids=["alinux"],
    releases=["2"],
    # ELRepo builds for EL's user space; Alibaba's drivers are in Alibaba's own kernel.
    kernels={"distribution": KernelSource("kernel", ["kernel-{release}"])},
    gpu=_EL7.gpu._replace(branches={"2": "550"}),
    pythons={"2": "3.6"},
    glibc={"2": 17},
    lacks={"2": _EL7.lacks["7"]},
    daxctl={"2": 65},
    gone={},
    gone_mirrors=[],
    fresh={"2": Fresh("4.19.91-27.6.al7.x86_64", "3.6.8")},
    module_platform="al7",
)
