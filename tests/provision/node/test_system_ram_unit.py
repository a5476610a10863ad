"""The unit that makes memory nodes again at boot, run by a shell on a copy of sysfs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from provision.node import daxctl
from provision.node.state import DaxDevice

TOOL = """#!/bin/sh
echo "$@" >> {log}
for name; do :; done
[ "$name" = {broken} ] || ln -sfn ../drivers/kmem {devices}/$name/driver
echo "reconfigured 0 devices" >&2
exit 1
"""
# What the kernel does with what is written into a memory block's state; memory13 does not go offline.
KERNEL = """
echo() {
  file=$(readlink /proc/$$/fd/1); zones=${file%state}valid_zones
  case "$file $1" in
    */memory13/state" offline") printf online >"$file";;
    */state" offline") printf offline >"$file"; printf "Normal Movable" >"$zones";;
    */state" online_movable") printf online >"$file"; printf Movable >"$zones";;
    */state" online_kernel") printf online >"$file"; printf Normal >"$zones";;
    *) printf "%s\\n" "$*";;
  esac
}
"""
BLOCK = 128 << 20


def run(root: Path, text: str, broken: str = "none", zones: str = "") -> tuple[int, list[str]]:
    """Exit status of the unit and what daxctl was asked for; three devices, two of namespaces.

    ``zones`` are those of the blocks of dax0.0, which begin at number 10: N, M, or - for one that is offline.
    """
    devices = root / "sys/bus/dax/devices"
    devices.mkdir(parents=True)
    for name, uuid in (("dax0.0", "mine"), ("dax1.0", "theirs"), ("dax2.0", "")):
        held = root / "sys/devices/region" / ("nd" + name)
        (held / name).mkdir(parents=True)
        if uuid:
            (held / "uuid").write_text(uuid + "\n")
        (held / name / "driver").symlink_to("../drivers/device_dax")
        (devices / name).symlink_to(held / name)
    memory = root / "sys/devices/system/memory"
    for number, zone in enumerate("N" + zones + "N" if zones else "", 9):  # one more of others on each side
        block = memory / f"memory{number}"
        block.mkdir(parents=True)
        (block / "state").write_text("offline\n" if zone == "-" else "online\n")
        (block / "valid_zones").write_text(
            {"N": "Normal", "M": "Movable", "-": "Normal Movable"}[zone] + "\n"
        )
    memory.mkdir(parents=True, exist_ok=True)
    (memory / "block_size_bytes").write_text(f"{BLOCK:x}\n")
    if zones:
        # As of a namespace: its own data come first, so that the first block that is whole is the next.
        (devices / "dax0.0/resource").write_text(f"{10 * BLOCK - (2 << 20):#x}\n")
        (devices / "dax0.0/size").write_text(f"{len(zones) * BLOCK + (2 << 20)}\n")
    log = root / "log"
    (devices / "dax2.0/resource").write_text("0x1080000000\n")
    (devices / "dax2.0/size").write_text("0\n")
    for name, tool in (
        ("sleep", f"#!/bin/sh\necho >> {root}/slept\n"),
        ("daxctl", TOOL.format(log=log, devices=devices, broken=broken)),
        ("udevadm", f'#!/bin/sh\necho "$@" >> {root}/udev\n'),
    ):
        (root / name).write_text(tool)
        (root / name).chmod(0o755)
    line = next(line for line in text.splitlines() if line.startswith("ExecStart=/bin/sh -c '"))
    script = line.removeprefix("ExecStart=/bin/sh -c '").removesuffix("'")
    assert not set(script) & {"'", "\\"}
    script = script.replace("$$", "$").replace("%%", "%").replace("/sys/", f"{root}/sys/")
    path = f"{root}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", KERNEL + script], env={"PATH": path}, check=False, capture_output=True, text=True
    )
    (root / "said").write_text(done.stdout)
    assert (root / "udev").read_text().split() == [
        *("control", "--stop-exec-queue"),
        *("control", "--start-exec-queue"),
    ]
    return done.returncode, log.read_text().splitlines() if log.exists() else []


def zones_of(root: Path) -> list[str]:
    """State and zone of each memory block."""
    blocks = sorted((root / "sys/devices/system/memory").glob("memory*"), key=lambda path: int(path.name[6:]))
    return [
        " ".join([(path / "state").read_text().strip(), (path / "valid_zones").read_text().split()[0]])
        for path in blocks
    ]


@pytest.mark.parametrize("zones", ["NN", "MM", "--", "MN-"])
def test_memory_goes_into_the_wanted_zone(tmp_path: Path, zones: str) -> None:
    """EL's 40-redhat.rules may have brought it online before, as memory that is not movable."""
    code, _ = run(tmp_path, daxctl.unit_text(["mine"], [], movable=True), zones=zones)
    others = ["online Normal"]
    assert zones_of(tmp_path) == others + ["online Movable"] * len(zones) + others, "others' stays as it is"
    assert code == 0


def test_memory_that_is_not_to_be_movable(tmp_path: Path) -> None:
    code, _ = run(tmp_path, daxctl.unit_text(["mine"], [], movable=False), zones="MN-")
    assert (code, zones_of(tmp_path)) == (0, ["online Normal"] * 5)


def test_a_block_that_stays_in_the_wrong_zone_fails_the_unit(tmp_path: Path) -> None:
    code, _ = run(tmp_path, daxctl.unit_text(["mine"], [], movable=True), zones="NNNN")
    assert code == 1
    assert (tmp_path / "said").read_text() == "dax0.0: memory13 is online, zone Normal\n"
    assert zones_of(tmp_path)[1:-1] == ["online Movable"] * 3 + ["online Normal"]


def test_a_namespace_is_known_by_its_uuid(tmp_path: Path) -> None:
    code, asked = run(tmp_path, daxctl.unit_text(["mine"], [], movable=True))
    assert (code, asked) == (0, ["reconfigure-device --mode=system-ram dax0.0"])
    assert not (tmp_path / "slept").exists()


def test_a_device_that_does_not_come_is_waited_for_and_fails_the_unit(tmp_path: Path) -> None:
    """An extent of CXL memory can be gone; the devices that are there become memory nodes."""
    code, asked = run(tmp_path, daxctl.unit_text(["mine", "gone"], ["0x2080000000"], movable=True))
    assert (code, asked) == (1, ["reconfigure-device --mode=system-ram dax0.0"])
    assert (tmp_path / "said").read_text() == "only 1 of 3 dax devices are there\n"
    assert len((tmp_path / "slept").read_text().splitlines()) == 30


def test_a_device_that_has_got_another_name_is_known_by_its_address(tmp_path: Path) -> None:
    """Since Linux 7.1 names depend on which driver binds first."""
    before = DaxDevice("dax0.0", 1 << 30, "system-ram", 2, start=0x1080000000)
    code, asked = run(tmp_path, daxctl.unit_text([], [daxctl.unit_key(before)], movable=True))
    assert (code, asked) == (0, ["reconfigure-device --mode=system-ram dax2.0"])


def test_a_cxl_device_is_known_by_its_name(tmp_path: Path) -> None:
    code, asked = run(tmp_path, daxctl.unit_text([], ["dax2.0"], movable=False))
    assert (code, asked) == (0, ["reconfigure-device --mode=system-ram --no-movable dax2.0"])


def test_a_device_that_stays_a_device_fails_the_unit(tmp_path: Path) -> None:
    """Pitfall 18: the exit status of daxctl says nothing."""
    code, asked = run(tmp_path, daxctl.unit_text(["mine"], ["dax2.0"], movable=True), broken="dax0.0")
    assert (code, len(asked)) == (1, 2)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    path = tmp_path / daxctl.UNIT_NAME
    path.write_text(daxctl.unit_text(["mine"], ["dax2.0"], movable=True))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if daxctl.UNIT_NAME in line] == []
