"""The unit that makes memory nodes again at boot, run by a shell on a copy of sysfs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from provision.node import daxctl

TOOL = """#!/bin/sh
echo "$@" >> {log}
for name; do :; done
[ "$name" = {broken} ] || ln -sfn ../drivers/kmem {devices}/$name/driver
echo "reconfigured 0 devices" >&2
exit 1
"""


def run(root: Path, text: str, broken: str = "none") -> tuple[int, list[str]]:
    """Exit status of the unit and what daxctl was asked for; three devices, two of namespaces."""
    devices = root / "sys/bus/dax/devices"
    devices.mkdir(parents=True)
    for name, uuid in (("dax0.0", "mine"), ("dax1.0", "theirs"), ("dax2.0", "")):
        held = root / "sys/devices/region" / ("nd" + name)
        (held / name).mkdir(parents=True)
        if uuid:
            (held / "uuid").write_text(uuid + "\n")
        (held / name / "driver").symlink_to("../drivers/device_dax")
        (devices / name).symlink_to(held / name)
    log = root / "log"
    tool = root / "daxctl"
    tool.write_text(TOOL.format(log=log, devices=devices, broken=broken))
    tool.chmod(0o755)
    line = next(line for line in text.splitlines() if line.startswith("ExecStart=/bin/sh -c '"))
    script = line.removeprefix("ExecStart=/bin/sh -c '").removesuffix("'")
    assert not set(script) & {"'", "\\"}
    script = script.replace("$$", "$").replace("%%", "%").replace("/sys/", f"{root}/sys/")
    path = f"{root}:{os.environ['PATH']}"
    done = subprocess.run(["/bin/sh", "-c", script], env={"PATH": path}, check=False)
    return done.returncode, log.read_text().splitlines() if log.exists() else []


def test_a_namespace_is_known_by_its_uuid(tmp_path: Path) -> None:
    code, asked = run(tmp_path, daxctl.unit_text(["mine", "gone"], [], movable=True))
    assert (code, asked) == (0, ["reconfigure-device --mode=system-ram dax0.0"])


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
