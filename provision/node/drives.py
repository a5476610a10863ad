"""NVMe drives of ``ssd_devices``: from a name in the inventory to a directory for rows.

A drive is never taken from somebody: one that is mounted elsewhere, or that another device is built on, is
refused, and data on it is erased with consent only.
"""

import os
from typing import Any, Dict, List

from . import content, devices, directory, filesystem, fstab, mount, platforms
from .command import CommandError, System
from .state import Directory, Drive, State
from .step import Action, Applied, Desired, Part, Step, note_left

DEVICE_TIMEOUT = 90  # seconds that a boot waits for a drive
OPTIONS = ["noatime", "discard"]  # freed segments are megabytes, so discarding them at once costs little
RULES = "/etc/udev/rules.d/61-oeprov-drives.rules"
_BY_ID = "/dev/disk/by-id/"
_DISABLED = "/proc/sys/kernel/io_uring_disabled"
# File systems in memory, for reading only, or elsewhere: no place for rows that must persist.
_UNFIT = (
    *("tmpfs", "ramfs", "overlay", "squashfs"),
    *("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "virtiofs", "ceph", "lustre", "gpfs", "beegfs"),
)


def is_drive(name: str) -> bool:
    """The name is a drive's, not a directory's."""
    return name.startswith("/dev/")


def use(desired: Desired) -> mount.MountUse:
    """How drives are mounted."""
    return mount.MountUse(desired.ssd_mount_prefix, desired.ssd_filesystem, OPTIONS, DEVICE_TIMEOUT)


def place(desired: Desired, name: str) -> str:
    """The directory of a name in ``ssd_devices``: a drive's mount point, or the directory itself."""
    if not is_drive(name):
        return name
    return desired.ssd_mount_prefix + str(desired.ssd_devices.index(name))


def observe(system: System, desired: Desired) -> List[Drive]:
    """What the names lead to now."""
    mounts = [line.split() for line in system.read("/proc/mounts").splitlines()]
    swaps = [line.split()[0] for line in system.read("/proc/swaps").splitlines()[1:] if line.split()]
    return [
        _observe_drive(system, name, swaps) if is_drive(name) else _observe_directory(system, name, mounts)
        for name in desired.ssd_devices
    ]


def observe_disabled(system: System, desired: Desired) -> str:
    """kernel.io_uring_disabled; empty without drives, and on kernels that have no such setting."""
    return system.read(_DISABLED).strip() if desired.ssd_devices else ""


def _observe_directory(system: System, name: str, mounts: List[List[str]]) -> Drive:
    above = [row for row in mounts if len(row) > 2 and is_below(name, fstab.unescape(row[1]))]
    kind = max(above, key=lambda row: len(row[1]))[2] if above else ""
    return Drive(name, directory=directory.observe(system, name), filesystem=kind)


def is_below(path: str, where: str) -> bool:
    """The path is ``where`` or lies below it."""
    return (path + "/").startswith(where.rstrip("/") + "/")


def _observe_drive(system: System, name: str, swaps: List[str]) -> Drive:
    target = system.link(name)
    device = os.path.basename(target)
    base = "/sys/class/block/" + device
    if not target or not system.exists(base):
        return Drive(name)
    parts = [f"{base}/{item}" for item in system.list(base) if system.exists(f"{base}/{item}/partition")]
    used_by = [item for part in [base] + parts for item in system.list(part + "/holders")]
    used_by += ["swap on " + path for path in swaps if devices.is_on(path, device)]
    queue = base + ("/.." if system.exists(base + "/partition") else "") + "/queue"
    return Drive(
        name=name,
        device=device,
        size=devices.number(system.read(base + "/size")) * 512,
        rotates=system.read(queue + "/rotational").strip() == "1",
        scheduler=_active(system.read(queue + "/scheduler")),
        identity=content.identity(system, device),
        used_by=sorted(set(used_by)),
    )


def _active(text: str) -> str:
    """``[none] mq-deadline`` → none."""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), text.strip())


def plan(state: State, desired: Desired) -> Part:
    """Steps for all drives; what is in the way of each is a problem, and then it has no steps."""
    part = Part(after=[], notes=[], problems=[])
    for name in desired.ssd_devices:
        seen = next((item for item in state.drives if item.name == name), Drive(name))
        found = (
            _drive_problems(state, desired, seen) if is_drive(name) else _directory_problems(desired, seen)
        )
        part.problems.extend(found)
        if found or not is_drive(name):
            continue
        part.after.extend(_scheduler(seen))
        where = place(desired, name)
        part.after.extend(mount.plan(state, use(desired), seen.device, where, False, seen.size))
        part.notes.extend(_notes(seen))
    if state.uring_disabled not in ("", "0"):
        part.notes.append(
            f"kernel.io_uring_disabled is {state.uring_disabled}, so servers read drives with threads, which "
            "takes three times the CPU; `kernel.io_uring_disabled = 0` in /etc/sysctl.d allows io_uring"
        )
    return part


def _drive_problems(state: State, desired: Desired, seen: Drive) -> List[str]:
    name, where = seen.name, place(desired, seen.name)
    if not seen.device:
        return [f"{name}: there is no such drive; `ls {_BY_ID}` on the host shows what it has"]
    same = [item.name for item in state.drives if item.device == seen.device and item.name != name]
    if same:
        return [f"{name} and {same[0]} are the same drive, {seen.device}; name it once"]
    device = f"{name} ({seen.device})"
    elsewhere = [item.where for item in mount.mounts_of(state, seen.device) if item.where != where]
    found = [f"{device} is mounted at {item}; unmount it, or name another drive" for item in elsewhere]
    if seen.used_by:
        found.append(
            f"{device} is in use by {', '.join(seen.used_by)}; take that apart first, or name another"
        )
    held = filesystem.observed(state, seen.device)
    if held is not None and held.type == filesystem.UNREADABLE:
        found.append(f"{device} cannot be read: {held.error}; replace it, or take it out of ssd_devices")
    return found + mount.problems(state, seen.device, where, "ssd_mount_prefix")


def _directory_problems(desired: Desired, seen: Drive) -> List[str]:
    there = seen.directory
    if not there.exists:
        # oeprov makes no file systems on kind local.
        managed = platforms.get(desired.kind).managed
        cure = f"name the drive by {_BY_ID}…" if managed else "name another directory"
        return [f"ssd_devices {seen.name}: is not there; mount a drive there, or {cure}"]
    if not there.is_directory:
        return [f"ssd_devices {seen.name}: is a file, not a directory"]
    if not there.writable:
        return [f"ssd_devices {seen.name}: is not writable by this user"]
    if seen.filesystem.split(".")[0] in _UNFIT:
        return [
            f"ssd_devices {seen.name}: is on {seen.filesystem}, which is no drive; name a directory on ext4 "
            "or xfs"
        ]
    return []


def _notes(seen: Drive) -> List[str]:
    if not seen.rotates:
        return []
    return [
        f"{seen.device} says that it rotates: a disk reads about a hundred rows per second, an NVMe 100,000"
    ]


def _scheduler(seen: Drive) -> List[Step]:
    """The step that takes the scheduler off a drive's queue, now and at each boot; none if it has none."""
    if seen.scheduler in ("", "none") or seen.rotates:
        return []
    return [
        Step(
            id="scheduler-" + seen.device,
            what=f"take the I/O scheduler {seen.scheduler} off {seen.device}",
            why="it costs CPU for each read; drives need none",
            commands=[["edit", RULES, "+" + _rule(seen.name)], ["write", _queue(seen.device), "none"]],
            action="set_scheduler",
            preparing=True,
            args={"device": seen.device, "rule": _rule(seen.name)},
        )
    ]


def _rule(name: str) -> str:
    link = name[len("/dev/") :]
    return f'ACTION=="add|change", SUBSYSTEM=="block", SYMLINK=="{link}", ATTR{{queue/scheduler}}="none"'


def _queue(device: str) -> str:
    return f"/sys/class/block/{device}/queue/scheduler"


def _set_scheduler(system: System, args: Dict[str, Any]) -> Applied:
    rules = system.read(RULES)
    changed = args["rule"] not in rules.splitlines() and system.write(RULES, rules + args["rule"] + "\n")
    queue = _queue(args["device"])
    if _active(system.read(queue)) != "none":
        changed = system.write(queue, "none")
        if _active(system.read(queue)) != "none":
            raise CommandError(f"{queue} is still {system.read(queue).strip()} after none was written")
    return Applied(bool(changed), f"{args['device']} has no I/O scheduler")


def fresh(desired: Desired) -> List[Drive]:
    """Empty drives and directories of a new host, for plans without observation."""
    return [
        Drive(name, device=f"nvme{number}n1", scheduler="none", identity=name)
        if is_drive(name)
        else Drive(name, directory=Directory(name, True, True, True), filesystem="ext4")
        for number, name in enumerate(desired.ssd_devices)
    ]


def is_ours(state: State, desired: Desired, seen: Drive) -> bool:
    """oeprov made the file system on the drive, or it is mounted in our place."""
    found = filesystem.observed(state, seen.device) if seen.device else None
    at_home = [item.where for item in mount.mounts_of(state, seen.device)] if seen.device else []
    return found is not None and (found.uuid in state.owned or place(desired, seen.name) in at_home)


def plan_removal(state: State, desired: Desired) -> Part:
    """Unmount our drives and forget them; the file system of a drive that was named is erased."""
    part = Part(before=[], after=[], notes=[])
    for seen in state.drives:
        if not is_drive(seen.name) or not is_ours(state, desired, seen):
            continue
        part.before.extend(mount.unmount_for_good(state, seen.device))
        lost = filesystem.data_on(state, seen.device)
        if lost and all(name in desired.remove_objects for name in lost):
            part.after.append(
                Step(
                    id="wipe-" + seen.device,
                    what=f"erase the file system on {filesystem.sized(seen.device, seen.size)}",
                    why="oeprov made it, and it was named",
                    destroys=lost,
                    commands=[["wipefs", "-a", "/dev/" + seen.device]],
                    action="wipe_drive",
                    disturbs=True,
                    args={"device": seen.device, "lose": lost},
                )
            )
        elif lost:
            part.notes.append(note_left(desired, f"{seen.device} ({seen.name}) and what is on it", lost))
    part.before.extend(mount.forget_for_good(state, use(desired), "fstab-forget-drives"))
    return part


def _wipe(system: System, args: Dict[str, Any]) -> Applied:
    changed = filesystem.wipe(system, args["device"], args["lose"])
    return Applied(changed, f"erased {args['device']}" if changed else f"{args['device']} was empty")


ACTIONS: Dict[str, Action] = {"set_scheduler": _set_scheduler, "wipe_drive": _wipe}
