"""oeprov's own runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision import requirements, wheel
from provision.settings import Kind
from provision.training import placement

if TYPE_CHECKING:
    from provision.inventory import Host, Inventory
    from provision.runtime_settings import RuntimeSettings
    from provision.training.jobspec import Request

_VENV = "/opt/oeprov/venv"
place = placement.place
provide = wheel.provide


def venv(local: bool, _state_dir: Path) -> str:
    """See ``Flavor``."""
    return sys.prefix if local else _VENV


def storage(mode: str, _settings: RuntimeSettings) -> str:
    """See ``Flavor``."""
    return "pmem_libpmem" if mode in ("fsdax", "directory") else "dram"


def keeps_rows(host: Host) -> bool:
    """See ``Flavor``."""
    return host.is_parameter_server


def desired(host: Host) -> dict[str, Any]:
    """See ``Flavor``."""
    extra = "" if host.runtime.extra == "none" else host.runtime.extra
    needs = list(requirements.of_extra(extra))
    found: dict[str, Any] = {"runtime_extra": extra, "runtime_requirements": needs}
    if host.kind is not Kind.local:
        if host.runtime.python != "python3" and not needs:
            found["runtime_requirements"] = ["numpy"]  # the distribution's is for its own Python
        found.update(runtime_wheel_digest=wheel.digest(), runtime_wheel_key=wheel.own_key())
    return found


def settle(_inventory: Inventory, wanted: Request) -> Request:
    """See ``Flavor``."""
    return wanted


def check_data(inventory: Inventory, wanted: Request) -> None:
    """See ``Flavor``."""
    from provision.training import jobspec

    jobspec.check_data(wanted.training.data, placement.worker_hosts(inventory))


def data_check(host: Host, wanted: Request) -> list[str]:
    """See ``Flavor``."""
    training = wanted.training
    flags = ["--max-bad-rows", str(training.max_bad_rows)]
    python = placement.python_of(host)
    if wanted.on:  # containers have a Python of their own, and TensorFlow, which this one may lack
        python, flags = sys.executable, [*flags, "--without-tensorflow"]
    return [python, "-m", "oe_runtime.data.check", *flags, "--", training.data]
