"""The family of a host, and what it calls things."""

from typing import List, Optional

from . import family_alinux3, family_debian, family_el7, family_el8, family_el9, family_ubuntu
from .family import Family
from .state import OsInfo

_LINEAGES = {"debian": "debian", "ubuntu": "debian", "rhel": "rhel", "centos": "rhel", "fedora": "rhel"}
KNOWN = "CentOS 7, EL 8 and 9 (RHEL, Rocky, Alma, CentOS Stream), Alibaba Cloud Linux 3, Ubuntu and Debian"


def known() -> List[Family]:
    """All families; a release of none of them is treated as the last that it is like."""
    return [
        family_el7.FAMILY,
        family_alinux3.FAMILY,
        family_el8.FAMILY,
        family_el9.FAMILY,
        family_ubuntu.FAMILY,
        family_debian.FAMILY,
    ]


def lineage(name: str, like: List[str]) -> str:
    """``debian``, ``rhel`` or ``other`` by ID and ID_LIKE of os-release."""
    for item in known():
        if name in item.ids:
            return item.lineage
    return next((_LINEAGES[word] for word in [name] + like if word in _LINEAGES), "other")


def of(os: OsInfo) -> Optional[Family]:
    """The family of a system; a derivative gets the one that it is like, None when there is none."""
    alike = [item for item in known() if os.id in item.ids] or [
        item for item in known() if item.lineage == os.family
    ]
    exact = [item for item in alike if release(item, os) in item.releases]
    return next(iter(exact or alike[-1:]), None)


def release(family: Family, os: OsInfo) -> str:
    """The release as the family's tables name it."""
    return os.version.split(".")[0] if family.by_major else os.version


def is_known(os: OsInfo) -> bool:
    """This very release is in a family's tables, not only one like it."""
    found = of(os)
    return found is not None and os.id in found.ids and release(found, os) in found.releases


def lacks(os: OsInfo, need: str) -> bool:
    """The release has no package of it, while others of the family do."""
    found = of(os)
    return found is not None and need in found.lacks.get(release(found, os), [])


def names(os: OsInfo, need: str) -> List[str]:
    """Packages of a need; empty where there are none."""
    found = of(os)
    return [] if found is None or lacks(os, need) else found.packages.get(need, "").split()


def title(os: OsInfo) -> str:
    """The system as it calls itself."""
    return os.name or " ".join(word for word in (os.id, os.version) if word) or "this system"


def daxctl_version(os: OsInfo) -> int:
    """The version that the release's package has, where it is too old for something; 0 elsewhere."""
    found = of(os)
    return 0 if found is None else found.daxctl.get(release(found, os), 0)
