"""Regions of volatile CXL memory on a copy of sysfs: what is seen, making one, and the unit at boot."""

import os
import subprocess
from pathlib import Path

import pytest

from provision.converge import assumed_state
from provision.node import cxl, daxctl, devices, platforms, pmem, system_ram
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.observe import observe
from provision.node.state import CxlBus, DaxDevice, State
from provision.node.step import Desired, Step

GIB = 1 << 30
BUS = "sys/bus/cxl/devices"
COMMAND = ["cxl", "create-region", "-t", "ram", "-d", "decoder0.0", "-m", "mem0"]
STEP = Step(
    id="cxl-region",
    what="",
    why="",
    action="create_cxl_region",
    args={"decoder": "decoder0.0", "expander": "mem0"},
)


class Node(System):
    """A node with an expander; its tool ``cxl`` makes a region, and the driver a device of it."""

    fails = False
    has_driver = True

    def put(self, path: str, text: str) -> None:
        file = Path(self.root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def run(
        self,
        argv: list[str],
        timeout: float = 60.0,
        environment: dict[str, str] | None = None,
        stdin: str | None = None,
    ) -> Result:
        assert argv == COMMAND
        if self.fails:
            return Result(argv, 1, "", "cxl region: create_region: failed to reserve size: No space left")
        self.put(BUS + "/region0/mode", "ram")
        self.put(BUS + "/region0/size", hex(2 * GIB))
        if self.has_driver:
            self.put("sys/bus/dax/devices/dax0.0/size", str(2 * GIB))
            self.put("sys/bus/dax/devices/dax0.0/target_node", "1")
        return Result(argv, 0, "", "")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(devices, "WAIT", 0.0)
    found = Node(str(tmp_path))
    (tmp_path / "run/systemd/system").mkdir(parents=True)  # it is booted
    found.put(BUS + "/mem0/ram/size", hex(2 * GIB))
    found.put(BUS + "/mem0/pmem/size", "0x0")
    found.put(BUS + "/mem1/ram/size", "0x0")  # persistent only
    found.put(BUS + "/decoder0.0/create_ram_region", "region0")
    found.put(BUS + "/decoder1.0/size", "0x0")  # of a host bridge
    return found


def test_expanders_and_root_decoders_are_seen(node: Node) -> None:
    assert cxl.observe(node) == CxlBus({"mem0": 2 * GIB}, {"decoder0.0": "region0"})
    assert cxl.observe(System("/nonexistent")) == CxlBus()
    assert observe(System(node.root), Desired(kind="cxl", pmem_mode="system-ram")).cxl.expanders


def test_a_region_is_made_once(node: Node) -> None:
    first, second = apply(STEP, node), apply(STEP, node)
    assert (first.changed, first.message) == (True, "region0 has 2 GiB")
    assert (second.changed, second.message) == (False, "region0 is there")


def test_devices_of_dynamic_capacity_are_seen_and_left_alone(node: Node) -> None:
    """Their extents come and go: they are neither used nor forgotten without a word."""
    for region, mode in (("region0", "ram"), ("region1", "dynamic_ram_1")):
        node.put(f"{BUS}/{region}/mode", mode)
        number = region[-1]
        name = f"dax{number}.0"
        node.put(f"sys/devices/root0/decoder0.0/{region}/dax_{region}/{name}/size", str(2 * GIB))
        node.put(f"sys/devices/root0/decoder0.0/{region}/dax_{region}/{name}/target_node", number)
        link = Path(node.root) / "sys/bus/dax/devices" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/root0/decoder0.0/{region}/dax_{region}/{name}")
    wanted = Desired(kind="cxl", pmem_mode="system-ram")
    seen = State(dax=devices.dax_devices(node), regions=devices.regions(node))
    state = platforms.get("cxl").observe(node, seen, wanted)
    assert [item.chardev for item in state.dax] == ["dax0.0"]
    assert state.cxl.dynamic == ["dax1.0"]
    part = pmem.plan(state, wanted)
    assert any(note.startswith("dax1.0 has dynamic CXL capacity") for note in part.notes)
    assert "dax1.0" not in str(part.after)


def test_a_region_that_cannot_be_made(node: Node) -> None:
    node.fails = True
    with pytest.raises(CommandError, match=r"no region of mem0: .*No space left"):
        apply(STEP, node)


def test_a_region_without_a_device_is_said_to_have_none(node: Node) -> None:
    node.has_driver = False
    with pytest.raises(CommandError, match=r"region0 is there and has no device dax0.0: .*dax_cxl"):
        apply(STEP, node)


def boot(root: Path, *, fails: int) -> tuple[int, int, str]:
    """Exit status of the unit's first command, how often it ran ``cxl``, and what it asked of udev.

    The tool fails so many times, as before the kernel has found the expander.
    """
    (root / "cxl").write_text(
        f'#!/bin/sh\necho "$*" >>{root}/asked\n[ "$*" = "{" ".join(COMMAND[1:])}" ] || exit 9\n'
        f"[ $(wc -l <{root}/asked) -gt {fails} ]\n"
    )
    (root / "udevadm").write_text(f'#!/bin/sh\necho "$*" >>{root}/udev\n')
    (root / "sleep").write_text("#!/bin/sh\n")
    for name in ("cxl", "udevadm", "sleep"):
        (root / name).chmod(0o755)
    text = daxctl.unit_text([], ["dax0.0"], True, COMMAND)
    line = next(line for line in text.splitlines() if line.startswith("ExecStart=/bin/sh -c '"))
    script = line.removeprefix("ExecStart=/bin/sh -c '").removesuffix("'").replace("$$", "$")
    script = script.replace("/sys/", f"{root}/sys/")
    path = f"{root}:{os.environ['PATH']}"
    done = subprocess.run(["/bin/sh", "-c", script], env={"PATH": path}, check=False)
    asked, udev = root / "asked", root / "udev"
    return (
        done.returncode,
        len(asked.read_text().splitlines()) if asked.exists() else 0,
        udev.read_text() if udev.exists() else "",
    )


@pytest.mark.parametrize("fails", [0, 3])
def test_the_region_comes_back_at_boot(tmp_path: Path, fails: int) -> None:
    code, asked, udev = boot(tmp_path, fails=fails)
    assert (code, asked) == (0, fails + 1)
    assert udev == f"settle --timeout=60 --exit-if-exists={tmp_path}/sys/bus/dax/devices/dax0.0\n"


def test_a_region_that_does_not_come_back_fails_the_unit(tmp_path: Path) -> None:
    assert boot(tmp_path, fails=99) == (1, 30, "")


def test_a_region_that_is_there_at_boot_stays(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/dax/devices/dax0.0").mkdir(parents=True)
    code, asked, _ = boot(tmp_path, fails=0)
    assert (code, asked) == (0, 0)


def test_the_unit_goes_on_making_the_region_that_it_made() -> None:
    """Also where the region is there; for one that the firmware makes it does nothing."""
    wanted = Desired(kind="cxl", pmem_mode="system-ram")
    there = assumed_state.state(wanted)._replace(
        dax=[DaxDevice("dax0.0", 2 * GIB, "system-ram", 1, 2 << 20, True, 16, 16, "region0")]
    )
    for region in (COMMAND, []):
        text = daxctl.unit_text([], ["dax0.0"], True, region)
        state = there._replace(files={daxctl.UNIT: text, daxctl.ENABLED: ""})
        steps = system_ram.plan_devices(state, wanted, "").after
        assert "system-ram-persist" not in [step.id for step in steps]
