"""What the kernel and ipmctl say of modules."""

from pathlib import Path

from provision.node import ipmctl, modules
from provision.node.command import System
from provision.node.state import Dimms, FileSystem, Module, State

BUS = "sys/bus/nd/devices"
# As the documentation of ipmctl shows it.
LISTED = """
---DimmID=0x0001---
   LockState=Disabled, Frozen
   HealthState=Healthy
   SocketID=0x0000
---DimmID=0x0101---
   LockState=Locked
   HealthState=Healthy
   SocketID=0x0000
---DimmID=0x1001---
   LockState=Unlocked
   HealthState=Noncritical failure
   SocketID=0x0001
"""


def test_locks_and_complaints_come_from_sysfs(tmp_path: Path) -> None:
    for path, text in (
        ("nmem0/security", "locked\n"),
        ("nmem1/nfit/flags", "smart_notify\n"),
        ("nmem1/security", "disabled\n"),
        ("nmem2/flags", "label lock\n"),
        ("nmem2/nfit/flags", "not_armed map_fail\n"),
        ("region0/size", "1\n"),
    ):
        file = tmp_path / BUS / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = modules.observe(System(str(tmp_path)))
    assert found == [
        Module("nmem0", ["locked"]),
        Module("nmem1", ["smart_notify"]),
        Module("nmem2", ["not_armed", "map_fail", "locked"]),
    ]
    said = modules.complaints(State(modules=found, dimms=Dimms(unhealthy={"0x1001": "Fatal failure"})))
    assert len(said) == 3
    assert said[0].startswith(
        "persistent memory module nmem0 is locked: nothing on it can be read; unlock it"
    )
    assert "not armed: it would lose data at a power loss, could not be mapped, is locked" in said[1]
    assert said[2].startswith("ipmctl says of module 0x1001: Fatal failure; `ipmctl show -a -dimm 0x1001`")


def test_ipmctl_names_modules_that_are_not_well() -> None:
    assert ipmctl.parse_unhealthy(LISTED) == {"0x0101": "Locked", "0x1001": "Noncritical failure"}
    assert ipmctl.parse_sockets(LISTED) == [0, 1]


def test_a_plan_outlives_writes_to_a_device_that_it_does_not_touch() -> None:
    """What it does touch is read again when the step is done."""
    digests = {
        State(filesystems=[FileSystem("pmem0", sample=sample)]).digest()
        for sample in ("0123", "4567", "zero")
    }
    assert len(digests) == 2


def test_a_health_event_is_no_reason_to_stop() -> None:
    event = State(
        modules=[Module("nmem0", ["smart_event"])], dimms=Dimms(unhealthy={"1": "Noncritical failure"})
    )
    assert not modules.is_broken(event)
    assert modules.is_broken(State(modules=[Module("nmem0", ["smart_event", "locked"])]))
    assert modules.is_broken(State(dimms=Dimms(unhealthy={"1": "Noncritical failure, Locked"})))
