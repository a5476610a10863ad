"""Find the family of a host and its names for packages, releases and repositories."""

from functools import lru_cache
from typing import Dict, List, Optional, Tuple

from . import family_alinux2, family_alinux3, family_debian, family_el7, family_el8, family_el9, family_ubuntu
from .family import Family
from .state import OsInfo

# Derivatives with release numbers of their own: ID -> major release -> ID and release of their base;
# "": any other release.
_MADE_FROM: Dict[str, Dict[str, Tuple[str, str]]] = {
    "linuxmint": {
        "20": ("ubuntu", "20.04"),
        "21": ("ubuntu", "22.04"),
        "22": ("ubuntu", "24.04"),
        "23": ("ubuntu", "26.04"),
        "5": ("debian", "11"),  # Debian Edition
        "6": ("debian", "12"),
        "7": ("debian", "13"),
        "": ("ubuntu", ""),
    },
    "pop": {
        "20": ("ubuntu", "20.04"),
        "22": ("ubuntu", "22.04"),
        "24": ("ubuntu", "24.04"),
        "": ("ubuntu", ""),
    },
    "neon": {
        "20": ("ubuntu", "20.04"),
        "22": ("ubuntu", "22.04"),
        "24": ("ubuntu", "24.04"),
        "": ("ubuntu", ""),
    },
}
# All other derivatives count as the release with the same number of their lineage's ID.
_LIKE = {"debian": "debian", "rhel": "rhel"}


def known() -> List[Family]:
    """All families; their order means nothing."""
    return [
        family_el7.FAMILY,
        family_alinux2.FAMILY,
        family_alinux3.FAMILY,
        family_el8.FAMILY,
        family_el9.FAMILY,
        family_ubuntu.FAMILY,
        family_debian.FAMILY,
    ]


def known_names() -> str:
    """The families for messages, with the IDs of os-release that each is for."""
    return ", ".join(
        item.name + (f" ({', '.join(item.ids)})" if len(item.ids) > 1 else "") for item in sorted(known())
    )


def known_systems() -> List[str]:
    """ID and release of each known system, such as debian-12."""
    return sorted(f"{name}-{item}" for family in known() for name in family.ids for item in family.releases)


def lineage(name: str, like: List[str]) -> str:
    """``debian``, ``rhel`` or ``other`` by ID and ID_LIKE of os-release."""
    lineages = {word: item.lineage for item in known() for word in item.ids}
    lineages["fedora"] = "rhel"
    return next((lineages[word] for word in [name] + like if word in lineages), "other")


def find(os: OsInfo) -> Optional[Family]:
    """The family of a system or of its base; None if none fits."""
    return _like(os)[0]


def release_of(os: OsInfo) -> str:
    """The system's release in the family's tables; empty if it is newer than all of them."""
    return _like(os)[1]


def _like(os: OsInfo) -> Tuple[Optional[Family], str]:
    """The family and release that a system is treated as."""
    return _treated(os.id, os.version, os.family)


@lru_cache(maxsize=256)
def _treated(name: str, version: str, lineage: str) -> Tuple[Optional[Family], str]:
    """The family and release for ID, VERSION_ID and lineage.

    Each release of an rpm system has its own repositories, so an unknown one is refused. A release of Debian
    or a derivative that is newer than the tables is treated as the newest: its packages come from its own
    repositories, and few names change.
    """
    derived = not any(name in family.ids for family in known())
    if name in _MADE_FROM:
        made_from = _MADE_FROM[name]
        name, version = made_from.get(version.split(".")[0], made_from[""])
    elif derived:
        name = _LIKE.get(lineage, "")
    families = [family for family in known() if name in family.ids]
    for found in families:
        number = _release(found, version)
        if number in found.releases:
            return found, number
    releases = {number: item for item in families for number in item.releases if item.lineage == "debian"}
    # The release numbers of other derivatives differ from their base's.
    if not releases or not (derived or not version or _number(version) > min(map(_number, releases))):
        return None, ""
    return releases[max(releases, key=_number)], ""


def _number(version: str) -> List[int]:
    return [int(word) if word.isdigit() else 0 for word in version.split(".")]


def release(family: Family, os: OsInfo) -> str:
    """The system's own release, as its family names releases."""
    return _release(family, os.version)


def _release(family: Family, version: str) -> str:
    return version.split(".")[0] if family.by_major else version


def is_known(os: OsInfo) -> bool:
    """The release itself is in a family's tables, not only its base."""
    found = find(os)
    return found is not None and os.id in found.ids and release(found, os) in found.releases


def lacks(os: OsInfo, need: str) -> bool:
    """The release has no package of a need, although others of the family have."""
    found, number = _like(os)
    return found is not None and need in found.lacks.get(number, [])


def names(os: OsInfo, need: str) -> List[str]:
    """Packages of a need; empty if there are none."""
    found = find(os)
    return [] if found is None or lacks(os, need) else found.packages.get(need, "").split()


def treated_as(os: OsInfo) -> str:
    """The name of what a system is treated as; empty if it is refused."""
    found, number = _like(os)
    if found is None or found.by_major:
        return found.name if found else ""
    older = [item for item in found.releases if os.id in found.ids and _number(item) < _number(os.version)]
    nearest = max(older or found.releases, key=_number)
    which = "newest" if nearest == max(found.releases, key=_number) else "nearest older"
    return f"{found.name} {number}" if number else f"{found.name} {nearest}, the {which} that is known"


def title(os: OsInfo) -> str:
    """The system as it calls itself."""
    return os.name or " ".join(word for word in (os.id, os.version) if word) or "this system"


def glibc(os: OsInfo) -> int:
    """N of its C library 2.N; 0: not known."""
    found, number = _like(os)
    return 0 if found is None else found.glibc.get(number, 0)


def daxctl_version(os: OsInfo) -> int:
    """The version of the release's package if it is too old for some mode; else 0."""
    found, number = _like(os)
    return 0 if found is None else found.daxctl.get(number, 0)
