"""Alibaba Cloud Linux 3: EL 8's packages with a newer kernel (5.10), C library and compiler.

From its documentation, not looked up in its indexes.
"""

from . import family_el8
from .family import Fresh, KernelSource

_EL8 = family_el8.FAMILY

FAMILY = _EL8._replace(
    name="Alibaba Cloud Linux 3",
    ids=["alinux"],
    releases=["3"],
    packages=dict(_EL8.packages, build=_EL8.packages["build"].replace("gcc-toolset-13-gcc-c++", "gcc-c++")),
    # ELRepo builds for EL's user space; Alibaba's drivers are in Alibaba's own kernel.
    kernels={"distribution": KernelSource("kernel", ["kernel-{release}"])},
    pythons={"3": "3.11"},
    glibc={"3": 32},
    repositories={name: _EL8.repositories[name] for name in ("epel", "nvidia")},
    comes_from={"build": ["epel"], "ipmctl": ["epel"], "openembedding-build": ["epel"]},
    compilers="",
    fresh={"3": Fresh("5.10.134-16.3.al8.x86_64", "3.6.8")},
    module_platform="al8",
    first_python="python36",
)
