"""The least that a virtual node shows, for CI: a real kernel's NVDIMM under our roles, over a power cut."""

from __future__ import annotations

import re
from typing import Any

import pytest
from user import User

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def test_a_file_on_pmem_outlives_a_power_cut(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    lab = new_lab(nodes=1, variant="bare-metal", pmem=1 << 30)
    user = User(lab, tmp_path_factory.mktemp("smoke"), runtime_extra="none")
    assert "create a fsdax namespace on region0" in user.oeprov("plan", expect=2)
    user.oeprov("bootstrap", "--yes")
    assert re.search(r" ext4 .*\bdax=always\b", user.on("lab-1", "grep /mnt/pmem0 /proc/mounts"))
    user.on("lab-1", "seq 100000 >/mnt/pmem0/rows && sync /mnt/pmem0/rows")

    node = lab.node("lab-1")
    node.power_cut()
    node.start()
    node.wait_ssh()
    assert "converged already" in user.oeprov("bootstrap")
    assert user.on("lab-1", "seq 100000 | cmp - /mnt/pmem0/rows && echo the same") == "the same\n"
    print("\n" + user.told())
