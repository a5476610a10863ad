"""Facts of each flavor below the inventory: environment, storage, and fields of the planner's ``Desired``.

The other parts of a flavor: ``provision/jobs/flavors`` places its processes, ``provision/node/flavors.py``
says what it needs on hosts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

from provision.cluster import own_sources, requirements
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.settings import Kind
from provision.node import platforms
from provision.node.openembedding import has_no_pmem

DEFAULT = "oe_runtime"


class FlavorFacts(Protocol):
    """What each class of this module has."""

    own_wheel: bool  # its environment is made from oeprov's own wheel

    def venv(self, local: bool, state_dir: Path) -> str:
        """Where its environment is, unless the inventory says."""

    def storage(self, mode: str, settings: RuntimeSettings, *, drives: bool) -> str:
        """What ``parameter_server_storage: auto`` means on a host of this ``pmem_mode``, with ``drives``."""

    def keeps_rows(self, *, parameter_server: bool, worker: bool) -> bool:
        """Whether processes on such a host keep rows, so that its memory must fit their storage."""

    def desired(self, kind: Kind, settings: RuntimeSettings) -> dict[str, Any]:
        """What the planner is told of the environment beyond the settings themselves."""


class _OeRuntime:
    own_wheel = True

    def venv(self, local: bool, _state_dir: Path) -> str:
        return sys.prefix if local else "/opt/oeprov/venv"  # the environment of oe_runtime

    def storage(self, mode: str, _settings: RuntimeSettings, *, drives: bool) -> str:
        if drives and mode == "none":
            return "dram_ssd"
        return "pmem_libpmem" if mode in ("fsdax", "directory") else "dram"

    def keeps_rows(self, *, parameter_server: bool, worker: bool) -> bool:
        return parameter_server

    def desired(self, kind: Kind, settings: RuntimeSettings) -> dict[str, Any]:
        extra = "" if settings.extra == "none" else settings.extra
        needs = list(requirements.extra_requirements(extra))
        found: dict[str, Any] = {"runtime_extra": extra, "runtime_requirements": needs}
        if platforms.get(kind.value).managed:
            if settings.python != "python3" and not needs:
                found["runtime_requirements"] = ["numpy"]  # the distribution's is for its own Python
            found.update(runtime_wheel_digest=own_sources.digest(), runtime_wheel_key=own_sources.own_key())
        return found


class _Foreign:
    own_wheel = False

    def desired(self, _kind: Kind, _settings: RuntimeSettings) -> dict[str, Any]:
        return {"runtime_extra": "", "runtime_requirements": []}


class _OpenEmbedding(_Foreign):
    def venv(self, local: bool, state_dir: Path) -> str:
        return str((state_dir / "openembedding").absolute()) if local else "/opt/oeprov/openembedding"

    def storage(self, mode: str, settings: RuntimeSettings, *, drives: bool) -> str:
        # PyPI's package has no persistent memory.
        return "pmem_libpmem" if mode == "fsdax" and not has_no_pmem(settings.package) else "dram"

    def keeps_rows(self, *, parameter_server: bool, worker: bool) -> bool:
        return parameter_server or worker


class _DeepRec(_Foreign):
    def venv(self, local: bool, state_dir: Path) -> str:
        return str((state_dir / "deeprec").absolute()) if local else "/opt/oeprov/deeprec"

    def storage(self, mode: str, _settings: RuntimeSettings, *, drives: bool) -> str:
        return {"fsdax": "pmem_libpmem", "system-ram": "pmem_memkind"}.get(mode, "dram")

    def keeps_rows(self, *, parameter_server: bool, worker: bool) -> bool:
        return worker


_FLAVORS: dict[str, FlavorFacts] = {
    DEFAULT: _OeRuntime(),
    "openembedding": _OpenEmbedding(),
    "deeprec": _DeepRec(),
}


def get(name: str) -> FlavorFacts:
    """The facts of the flavor of that name, as ``runtime_flavor`` has it."""
    return _FLAVORS[name]
