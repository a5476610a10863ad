"""The collection's roles in the build of an image: a Debian in a chroot, which has systemd and is not booted.

It stands for a container's build, as buildah and mkosi have it. Ansible comes in by SSH.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import bare_debian
import pytest
import yaml
from bare_debian import BareDebian, put_wheel
from installed_collection import Collection

from provision.cluster import own_sources
from provision.node.image import KARGS

VENV = "/usr/lib/oeprov/venv"
PLAYBOOK = [
    {
        "name": "Build an image",
        "hosts": "all",
        "gather_facts": False,
        "roles": [f"oeprov.oeprov.{role}" for role in ("pmem", "kernel", "runtime")],
    }
]

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(bare_debian.why_not()), reason=bare_debian.why_not() or "never"),
]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[BareDebian]:
    with BareDebian(tmp_path / "host", packages="python3,openssh-server,systemd") as made:
        assert made.run("systemctl is-system-running || true").strip() == "offline"
        made.run("mkdir -p /usr/lib/bootc/install")  # as a base image for bootc has it
        yield made


def changes(said: str) -> int:
    (line,) = (line for line in said.splitlines() if line.startswith("image") and "changed=" in line)
    return int(line.split("changed=")[1].split()[0])


def test_roles_prepare_an_image_and_leave_the_rest_for_the_boot(build: BareDebian, tmp_path: Path) -> None:
    collection = Collection(tmp_path / "a collection")
    put_wheel(tmp_path / "state", own_sources.own_key())
    collection.environment["OEPROV_STATE_DIR"] = str(tmp_path / "state")
    host = {
        **build.inventory(),
        "oeprov_kind": "re6p",
        "pmem_mode": "tiered",
        "kernel_arguments": ["transparent_hugepage=never"],
        "kernel_reboot_ok": True,
        "runtime_venv": VENV,
    }
    inventory, playbook = tmp_path / "inventory.yml", tmp_path / "build.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"image": host}}}))
    playbook.write_text(yaml.safe_dump(PLAYBOOK))

    said = collection.play(playbook, inventory)
    assert changes(said) == 2
    waits = "left for the booted host: persistent memory (pmem_mode tiered)"
    assert waits in " ".join(said.replace("[WARNING]:", "").split())
    wanted = json.dumps(["memhp_default_state=offline", "transparent_hugepage=never"])
    assert build.run(f"tail -n 1 {KARGS}").strip() == f"kargs = {wanted}"
    assert build.run(f"{VENV}/bin/python -m oe_runtime.server").strip() == "usage"
    for nothing in ("/etc/default/grub", "/etc/systemd/system/oeprov-*", "/var/lib/oeprov/owned"):
        assert build.run(f"ls -d {nothing} 2>/dev/null || true") == ""
    assert changes(collection.play(playbook, inventory)) == 0
    assert changes(collection.play(playbook, inventory, "--check")) == 0
