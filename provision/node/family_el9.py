"""EL 9: RHEL, Rocky, Alma, CentOS Stream. From their documentation, not looked up in their indexes."""

from . import family_el8
from .family import AnsiblePython, Fresh

_EL8 = family_el8.FAMILY

FAMILY = _EL8._replace(
    name="EL 9",
    releases=["9"],
    packages=dict(
        _EL8.packages,
        build=_EL8.packages["build"].replace("gcc-toolset-13-gcc-c++", "gcc-c++"),
        **{"own-python": "python3 python3-devel"},
    ),
    kernels=family_el8.kernels("9"),
    pythons={"9": "3.11"},
    glibc={"9": 34},
    repositories=family_el8.repositories("9", "crb"),
    compilers="",
    fresh={"9": Fresh("5.14.0-427.13.1.el9_4.x86_64", "3.9.18")},
    first_python="python3",
    ansible_python=AnsiblePython(),
)
