"""File systems on persistent memory: what is on a device, where it is mounted, and making one with DAX."""

import json
from typing import Any, Dict, List, Optional

from .command import System
from .state import FileSystem, FstabEntry, Mount, State
from .step import Action, Desired, Step

FSTAB = "/etc/fstab"
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def _unescape(text: str) -> str:
    for code, character in _ESCAPES:
        text = text.replace(code, character)
    return text


def parse_mounts(text: str) -> List[Mount]:
    """Lines of /proc/mounts whose source is a device."""
    rows = [line.split() for line in text.splitlines()]
    return [
        Mount(_unescape(row[0]), _unescape(row[1]), row[2], row[3].split(","))
        for row in rows
        if len(row) >= 4 and row[0].startswith("/dev/")
    ]


def parse_fstab(text: str) -> List[FstabEntry]:
    """Entries of /etc/fstab."""
    rows = [line.split() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [FstabEntry(row[0], _unescape(row[1]), row[2], row[3].split(",")) for row in rows if len(row) >= 4]


def parse_lsblk(text: str) -> List[FileSystem]:
    """Signatures of ``lsblk -J -o NAME,FSTYPE,UUID,LABEL,PHY-SEC``."""
    found = json.loads(text) if text.strip() else {}
    return [
        FileSystem(
            device=item["name"],
            type=item.get("fstype") or "",
            uuid=item.get("uuid") or "",
            label=item.get("label") or "",
        )
        for item in found.get("blockdevices", [])
    ]


def parse_block_size(text: str) -> int:
    """Block size of ``dumpe2fs -h`` or ``xfs_info``; 0 when neither says."""
    for line in text.splitlines():
        if line.startswith("Block size:"):
            return int(line.split()[-1])
        if line.startswith("data") and "bsize=" in line:
            return int(line.split("bsize=")[1].split()[0])
    return 0


def observe_filesystems(system: System, devices: List[str]) -> List[FileSystem]:
    """What is on the block devices; an empty type where nothing was recognised."""
    found = []
    for device in devices:
        path = "/dev/" + device
        result = system.run(["lsblk", "-d", "-J", "-o", "NAME,FSTYPE,UUID,LABEL", path])
        for item in parse_lsblk(result.out if result.ok else ""):
            if item.type.startswith("ext"):
                item = item._replace(block_size=parse_block_size(system.run(["dumpe2fs", "-h", path]).out))
            found.append(item)
    return found


def filesystem_on(state: State, device: str) -> Optional[FileSystem]:
    """The recognised file system on a block device, such as ``pmem0``."""
    return next((item for item in state.filesystems if item.device == device and item.type), None)


def mount_of(state: State, device: str) -> Optional[Mount]:
    """Where the device is mounted (the first place)."""
    return next((item for item in state.mounts if item.device == "/dev/" + device), None)


def data_on(state: State, device: str) -> List[str]:
    """Objects that are lost when the device is written over, as consent names them."""
    found = filesystem_on(state, device)
    return ["{}/{}/{}".format(device, found.type, found.uuid or "no-uuid")] if found else []


def entry_ok(entry: FstabEntry, uuid: str, where: str, desired: Desired) -> bool:
    """By UUID, DAX, and a boot that goes on without the device."""
    wanted = fstab_options(desired)
    return (
        entry.spec == "UUID=" + uuid
        and entry.where == where
        and all(word in entry.options for word in wanted)
    )


def fstab_options(desired: Desired) -> List[str]:
    """Mount options for /etc/fstab."""
    return ["dax", "nofail", "x-systemd.device-timeout={}s".format(desired.pmem_device_timeout)]


def mkfs_command(state: State, desired: Desired, device: str) -> List[str]:
    """Makes the file system with a block size equal to the page size, which DAX needs."""
    path = "/dev/" + device
    if desired.pmem_filesystem == "ext4":
        argv = ["mkfs.ext4", "-b", str(state.memory.page_size)]
        return argv + (["-F"] if data_on(state, device) else []) + [path]
    argv = ["mkfs.xfs", "-b", "size={}".format(state.memory.page_size)]
    if _kernel_before_6(state):
        argv += ["-m", "reflink=0"]  # before 6.0, XFS has either reflink or DAX
    return argv + (["-f"] if data_on(state, device) else []) + [path]


def _kernel_before_6(state: State) -> bool:
    major = state.kernel.running.split(".")[0]
    return not major.isdigit() or int(major) < 6


def suits(state: State, desired: Desired, device: str) -> bool:
    """The device holds a file system that can be used as it is: ours, or mounted where ours would be."""
    found = filesystem_on(state, device)
    if found is None or found.type != desired.pmem_filesystem:
        return False
    if found.block_size not in (0, state.memory.page_size):
        return False
    mounted = mount_of(state, device)
    at_home = mounted is not None and mounted.where.startswith(desired.pmem_mount_prefix)
    return found.uuid in state.owned or at_home


def unmount_step(state: State, device: str) -> List[Step]:
    """Takes the device out of use; none when it is not mounted."""
    mounted = mount_of(state, device)
    if mounted is None:
        return []
    return [
        Step(
            id="unmount-" + device,
            what="unmount {} from {}".format(device, mounted.where),
            why="a mounted device cannot be changed; the step fails when files are open there",
            commands=[["umount", mounted.where]],
            action="unmount",
            args={"device": device, "where": mounted.where},
        )
    ]


def forget_step(state: State, desired: Desired) -> List[Step]:
    """Takes our mount points out of /etc/fstab; none when there are none."""
    entries = [item for item in state.fstab if _is_ours(item, desired)]
    if not entries:
        return []
    return [
        Step(
            id="fstab-forget",
            what="remove {} from {}".format(", ".join(item.where for item in entries), FSTAB),
            why="there will be no such device any more",
            commands=[["edit", FSTAB] + ["-" + item.spec for item in entries]],
            action="edit_fstab",
            args={"remove": [item.where for item in entries], "add": []},
        )
    ]


def _is_ours(entry: FstabEntry, desired: Desired) -> bool:
    rest = entry.where[len(desired.pmem_mount_prefix) :]
    return entry.where.startswith(desired.pmem_mount_prefix) and rest.isdigit()


def plan(state: State, desired: Desired, device: str, where: str, fresh: bool) -> List[Step]:
    """From a block device to a DAX mount that survives a reboot.

    ``fresh``: the device does not exist yet or was just made again, so nothing on it can be kept.
    """
    steps: List[Step] = []
    keep = not fresh and suits(state, desired, device)
    found = filesystem_on(state, device)
    mounted = None if fresh else mount_of(state, device)
    if not keep:
        lost = [] if fresh else data_on(state, device)
        steps += [] if fresh else unmount_step(state, device)
        why = "the device is empty"
        if lost and found:
            why = "it holds a file system that oeprov did not make or cannot use with DAX ({}{})".format(
                found.type, ", mounted at " + mounted.where if mounted else ""
            )
        steps.append(
            _step(
                "mkfs-" + device,
                "make {} on {}".format(desired.pmem_filesystem, device),
                why,
                lost,
                [mkfs_command(state, desired, device)],
                "make_filesystem",
                {"device": device, "type": desired.pmem_filesystem, "where": where},
            )
        )
        mounted = None
    dax = mounted is not None and mounted.where == where and _has_dax(mounted)
    if mounted is not None and not dax:
        steps += unmount_step(state, device)
    uuid = found.uuid if keep and found else ""
    entry = next((item for item in state.fstab if item.where == where), None)
    if entry is None or not uuid or not entry_ok(entry, uuid, where, desired):
        spec = "UUID=" + (uuid or "<of {}>".format(device))
        line = " ".join([spec, where, desired.pmem_filesystem, ",".join(fstab_options(desired)), "0", "0"])
        remove = [entry.where] if entry else []
        steps.append(
            _step(
                "fstab-" + device,
                "enter {} in {}".format(where, FSTAB),
                "the mount must survive a reboot, and a boot must survive a missing device",
                [],
                [["edit", FSTAB] + ["-" + item for item in remove] + ["+" + line]],
                "edit_fstab",
                {"remove": remove, "add": [line], "device": device},
            )
        )
    if not dax:
        why = "it is mounted without DAX" if mounted is not None else "it is not mounted"
        steps.append(
            _step(
                "mount-" + device,
                "mount {} at {} with DAX".format(device, where),
                why + "; that DAX is on is checked afterwards",
                [],
                [["mkdir", "-p", where], ["mount", "-o", "dax", "/dev/" + device, where]],
                "mount",
                {"device": device, "where": where, "assert_option": "dax"},
            )
        )
    return steps


def _has_dax(mounted: Mount) -> bool:
    return any(option in ("dax", "dax=always") for option in mounted.options)


def _step(
    name: str, what: str, why: str, destroys: List[str], commands: List[List[str]], action: str, args: Any
) -> Step:
    return Step(name, what, why, destroys, False, commands, action, args)


ACTIONS: Dict[str, Action] = {}
