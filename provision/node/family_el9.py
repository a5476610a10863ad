"""EL 9: RHEL, Rocky, Alma, CentOS Stream. From their documentation, not looked up in their indexes."""

from . import family_el8
from .family import Fresh, KernelSource, Repository

_EL8 = family_el8.FAMILY
_ELREPO = "https://www.elrepo.org/elrepo-release-9.el9.elrepo.noarch.rpm"
_KERNELS = "https://elrepo.org/linux/kernel/el9/$basearch/ https://www.elrepo.org/RPM-GPG-KEY-elrepo.org"

FAMILY = _EL8._replace(
    name="EL 9",
    releases=["9"],
    packages=dict(
        _EL8.packages,
        build=_EL8.packages["build"].replace("gcc-toolset-13-gcc-c++", "gcc-c++"),
        **{"own-python": "python3 python3-devel"},
    ),
    kernels={
        "distribution": KernelSource("kernel", ["kernel-{release}"]),
        "elrepo-lt": KernelSource(
            "kernel-lt", ["kernel-lt-{release}"], {}, _ELREPO, "elrepo-kernel", _KERNELS
        ),
        "elrepo-ml": KernelSource(
            "kernel-ml", ["kernel-ml-{release}"], {}, _ELREPO, "elrepo-kernel", _KERNELS
        ),
    },
    pythons={"9": "3.11"},
    glibc={"9": 34},
    repositories={
        "crb": Repository({"rhel": "codeready-builder-for-rhel-9-x86_64-rpms", "": "crb"}),
        "epel": Repository(
            url=family_el8.EPEL + "9/Everything/$basearch/",
            key="https://dl.fedoraproject.org/pub/epel/RPM-GPG-KEY-EPEL-9",
        ),
        "nvidia": Repository(
            url=family_el8.NVIDIA + "rhel9/$basearch/", key=family_el8.NVIDIA + "rhel9/x86_64/D42D0685.pub"
        ),
    },
    compilers="",
    fresh={"9": Fresh("5.14.0-427.13.1.el9_4.x86_64", "3.9.18")},
    get_python="",
)
