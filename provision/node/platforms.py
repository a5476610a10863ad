"""The platforms that a host can be, by what ``oeprov_kind`` calls them."""

from typing import Any, Dict, List

from . import (
    platform_bare_metal,
    platform_cpu,
    platform_cxl,
    platform_gpu,
    platform_local,
    platform_nvme,
    platform_re6p,
    platform_re7p,
)
from .platform_base import Platform

# Modules, so that a host loads its own only.
_MODULES: Dict[str, Any] = {
    "re6p": platform_re6p,
    "re7p": platform_re7p,
    "bare_metal_pmem": platform_bare_metal,
    "cxl": platform_cxl,
    "nvme": platform_nvme,
    "gpu": platform_gpu,
    "cpu": platform_cpu,
    "local": platform_local,
}


def get(kind: str) -> Platform:
    """The platform of a kind."""
    found: Platform = _MODULES[kind].PLATFORM
    return found


def kinds() -> List[str]:
    """All kinds, as users choose among them."""
    return list(_MODULES)
