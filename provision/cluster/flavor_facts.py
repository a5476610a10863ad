"""Facts of each flavor below the inventory: environment, storage, and fields of the planner's ``Desired``.

The other parts of a flavor: ``provision/jobs/flavors`` places its processes, ``provision/node/flavors.py``
says what it needs on hosts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.cluster import own_sources, requirements
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.settings import Kind
from provision.node import platforms
from provision.node.openembedding import has_no_pmem

DEFAULT = "oe_runtime"


@dataclass(frozen=True)
class FlavorFacts:
    """What the inventory knows of a flavor."""

    place: str  # of its environment on hosts; on this machine, its last part below the state directory
    storages: Mapping[str, str]  # what `parameter_server_storage: auto` means by pmem_mode; dram in others
    rows_in: tuple[str, ...]  # roles whose processes keep rows
    own_wheel: bool = False  # its environment is made from oeprov's own wheel
    drive_storage: str = "dram"  # the storage on hosts with drives and without persistent memory
    has_pmem: Callable[[str], bool] = lambda package: True  # whether this runtime_package uses it

    def venv(self, local: bool, state_dir: Path) -> str:
        """Where its environment is, unless the inventory says."""
        if not local:
            return self.place
        return sys.prefix if self.own_wheel else str((state_dir / Path(self.place).name).absolute())

    def storage(self, mode: str, settings: RuntimeSettings, *, drives: bool) -> str:
        """What ``parameter_server_storage: auto`` means on a host of this ``pmem_mode``, with ``drives``."""
        if drives and mode == "none":
            return self.drive_storage
        return self.storages.get(mode, "dram") if self.has_pmem(settings.package) else "dram"

    def keeps_rows(self, *, parameter_server: bool, worker: bool) -> bool:
        """Whether processes on such a host keep rows, so that its memory must fit their storage."""
        return (parameter_server and "parameter_server" in self.rows_in) or (
            worker and "worker" in self.rows_in
        )

    def desired(self, kind: Kind, settings: RuntimeSettings) -> dict[str, Any]:
        """What the planner is told of the environment beyond the settings themselves."""
        if not self.own_wheel:
            return {"runtime_extra": "", "runtime_requirements": []}
        extra = "" if settings.extra == "none" else settings.extra
        needs = list(requirements.extra_requirements(extra))
        found: dict[str, Any] = {"runtime_extra": extra, "runtime_requirements": needs}
        if platforms.get(kind.value).managed:
            if settings.python != "python3" and not needs:
                found["runtime_requirements"] = ["numpy"]  # the distribution's is for its own Python
            found.update(runtime_wheel_digest=own_sources.digest(), runtime_wheel_key=own_sources.own_key())
        return found


_FLAVORS = {
    DEFAULT: FlavorFacts(
        "/opt/oeprov/venv",  # the environment of oe_runtime
        {"fsdax": "pmem_libpmem", "directory": "pmem_libpmem"},
        ("parameter_server",),
        own_wheel=True,
        drive_storage="dram_ssd",
    ),
    "openembedding": FlavorFacts(
        "/opt/oeprov/openembedding",  # the environment of OpenEmbedding
        {"fsdax": "pmem_libpmem"},
        ("parameter_server", "worker"),
        has_pmem=lambda package: not has_no_pmem(package),  # PyPI's package has none
    ),
    "deeprec": FlavorFacts(
        "/opt/oeprov/deeprec",  # the environment of DeepRec
        {"fsdax": "pmem_libpmem", "system-ram": "pmem_memkind"},
        ("worker",),
    ),
}


def get(name: str) -> FlavorFacts:
    """The facts of the flavor of that name, as ``runtime_flavor`` has it."""
    return _FLAVORS[name]
