"""The whole story on virtual nodes: bootstrap with a kernel upgrade, fsdax, training, system-ram, and back.

Run it with ``make test-lab``; ``-s`` shows what each command took.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from user import User, bring_wheel

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=[12, 13], ids=["debian-12", "debian-13"])
def user(
    request: pytest.FixtureRequest, new_lab: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[User]:
    lab = new_lab(nodes=2, variant="bare-metal", pmem=2 << 30, debian=request.param)
    found = User(
        lab,
        tmp_path_factory.mktemp("story"),
        kernel_version="newest",
        training_data="generate:40000",
        training_batch_size=256,
        training_learning_rate=0.05,
    )
    if request.param == 13:
        bring_wheel(found)
    yield found
    print("\n" + found.told())


def test_bootstrap_modes_and_training_on_virtual_nodes(user: User) -> None:
    old = user.everywhere("uname -r")
    assert "once on trial" in user.oeprov("plan", expect=2)
    assert user.everywhere("ls /var/lib/oeprov /etc/oeprov /opt/oeprov 2>/dev/null | wc -l") == ["0\n", "0\n"]

    user.oeprov("bootstrap", "--yes")
    new = user.everywhere("uname -r")
    assert len(set(new)) == 1
    assert new[0] not in old
    for mounts in user.everywhere("cat /proc/mounts"):
        assert re.search(r"^/dev/pmem0 /mnt/pmem0 ext4 .*\bdax=always\b", mounts, re.MULTILINE)
    assert "converged already: nothing to do" in user.oeprov("bootstrap")
    assert re.findall(r"(?:changed|failed)=(\d+)", user.ansible("bootstrap")) == ["0"] * 6

    first = user.train()
    assert first["state"] == "done"
    assert 0.5 < first["eval"]["auc"] < 1

    shown = user.ansible("pmem_mode", "-e", "pmem_mode=system-ram", "--limit", "lab-1", "--check", "--diff")
    assert re.search(r"make namespace0\.0 \(.* GiB\) a devdax namespace", shown)
    agreed = user.consents("pmem-mode", "system-ram")
    assert agreed, "a file system is given up by name only, our own too"
    user.oeprov("pmem-mode", "system-ram", "--yes", expect=1)
    user.oeprov("pmem-mode", "system-ram", "--yes", *agreed)
    user.set(pmem_mode="system-ram")
    check_system_ram(user)
    second = user.train()
    assert second["eval"]["loss"] == first["eval"]["loss"], "where rows lie does not change what is learned"

    for node in user.lab.nodes:
        node.shutdown()
        node.start()
    for node in user.lab.nodes:
        node.wait_ssh()
    assert "converged already" in user.oeprov("bootstrap"), "the mode came back by itself"
    check_system_ram(user)

    user.set(pmem_mode="fsdax")
    user.oeprov("pmem-mode", "fsdax", "--yes", *user.consents("pmem-mode", "fsdax"))
    assert "converged already" in user.oeprov("bootstrap")


def check_system_ram(user: User) -> None:
    for files in user.everywhere("cat /proc/mounts /etc/fstab"):
        assert "/mnt/pmem0" not in files
    for text in user.everywhere(
        "cat /sys/devices/system/node/node1/cpulist /sys/devices/system/node/node1/meminfo"
    ):
        assert text.startswith("\n"), "no CPUs"
        assert int(re.findall(r"MemTotal:\s+(\d+) kB", text)[0]) > 1 << 20
