"""oeprov's own runtime."""

from __future__ import annotations

import sys

from provision.cluster.inventory import Host, Inventory
from provision.jobs import placement, request, script
from provision.jobs.request import Request

place = placement.place


def settle(inventory: Inventory, wanted: Request) -> Request:
    """See ``Flavor``."""
    if wanted.training.script:
        script.check(inventory, wanted)
    return wanted


def check_data(inventory: Inventory, wanted: Request) -> None:
    """See ``Flavor``."""
    if wanted.training.script:
        script.check_data(wanted.training.data, placement.worker_hosts(inventory))
        return
    request.check_data(wanted.training.data, placement.worker_hosts(inventory))


def data_check(host: Host, wanted: Request) -> list[str]:
    """See ``Flavor``."""
    training = wanted.training
    if training.script:
        return script.data_check(host, training.data)
    flags = placement.arguments({"max_bad_rows": training.max_bad_rows})
    python = placement.python_of(host)
    if wanted.on:  # containers have a Python of their own, and TensorFlow, which this one may lack
        python, flags = sys.executable, [*flags, "--without-tensorflow"]
    return [python, "-m", "oe_runtime.data.check", *flags, "--", training.data]
