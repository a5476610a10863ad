"""Mount persistent memory and drives now and, through /etc/fstab, after every boot."""

import os
from typing import Any, Dict, List, NamedTuple

from . import content, devices, filesystem, fstab, inuse, owned
from .command import CommandError, System
from .state import FstabEntry, Mount, State
from .step import Action, Applied, Desired, Step

FSTAB = fstab.PATH
_TIMEOUT = "x-systemd.device-timeout="
_DAX = "dax"


class MountUse(NamedTuple):
    """How block devices of one sort are used; ``timeout``: seconds that a boot waits for one."""

    prefix: str  # of the mount points; a number follows
    filesystem: str
    options: List[str]  # of the mount; that these are in effect is checked
    timeout: int


def pmem_use(desired: Desired) -> MountUse:
    """How persistent memory is mounted."""
    return MountUse(desired.pmem_mount_prefix, desired.pmem_filesystem, [_DAX], desired.pmem_device_timeout)


def parse_mounts(text: str) -> List[Mount]:
    """Lines of /proc/mounts whose source is a device."""
    rows = [line.split() for line in text.splitlines()]
    return [
        Mount(fstab.unescape(row[0]), fstab.unescape(row[1]), row[2], row[3].split(","))
        for row in rows
        if len(row) >= 4 and row[0].startswith("/dev/")
    ]


def mounts_of(state: State, device: str) -> List[Mount]:
    """Where the device or a partition of it is mounted."""
    return [item for item in state.mounts if devices.is_on(item.device, device)]


def entry_ok(entry: FstabEntry, uuid: str, where: str, use: MountUse) -> bool:
    """The entry has the UUID, our options, and those that let a boot continue without the device."""
    wanted = fstab_options(use)
    return (
        entry.spec == "UUID=" + uuid
        and entry.where == where
        and entry.type == use.filesystem
        and all(word in entry.options for word in wanted)
    )


def fstab_options(use: MountUse) -> List[str]:
    """Mount options for /etc/fstab."""
    return use.options + ["nofail", f"{_TIMEOUT}{use.timeout}s"]


def is_place(where: str, use: MountUse) -> bool:
    """The path is one of our mount points."""
    return where.startswith(use.prefix) and where[len(use.prefix) :].isdigit()


def entered_by_us(entry: FstabEntry, use: MountUse) -> bool:
    """The entry is at one of our mount points and has our options, whatever its timeout."""
    waits = any(word.startswith(_TIMEOUT) for word in entry.options)
    return is_place(entry.where, use) and waits and {*use.options, "nofail"} <= set(entry.options)


def entry_line(uuid: str, where: str, kind: str, options: List[str]) -> str:
    """A line of /etc/fstab."""
    return " ".join(["UUID=" + uuid, fstab.escape(where), kind, ",".join(options), "0", "0"])


def edit_fstab(text: str, remove: List[str], line: str) -> str:
    """Remove the entries at the mount points ``remove`` from the file, and add ``line`` (may be empty).

    A new line replaces the first one that is removed, or is appended. All other lines stay as they are, byte
    for byte; the second time nothing changes.
    """
    kept = []
    pending = line + "\n" if line else ""
    for old in fstab.lines(text):
        entry = fstab.parse_line(old)
        if entry is None or entry.where not in remove:
            kept.append(old)
        elif pending:
            kept.append(pending)
            pending = ""
    if pending and pending not in kept:
        if kept and not kept[-1].endswith("\n"):
            kept[-1] += "\n"
        kept.append(pending)
    return "".join(kept)


def unmount_step(state: State, device: str) -> List[Step]:
    """The step that unmounts a device; none if it is not mounted."""
    where = [item.where for item in mounts_of(state, device)]
    if not where:
        return []
    # The last mount is undone first.
    where = list(reversed(where))
    return [
        Step(
            id="unmount-" + device,
            what=f"unmount {device} from {', '.join(where)}",
            why="a mounted device cannot be changed; the step fails if files are open there",
            commands=[["umount", item] for item in where],
            action="unmount",
            disturbs=True,
            args={"device": device, "where": where},
        )
    ]


def unmount_for_good(state: State, device: str) -> List[Step]:
    """The step that ends the mounts of a device when oeprov is removed; none if there are none."""
    why = "its data stays; the step fails if files are open"
    return [step._replace(why=why) for step in unmount_step(state, device)]


def forget_for_good(state: State, use: MountUse, name: str) -> List[Step]:
    """The step that removes our entries from /etc/fstab, and their mount points; none if there are none."""
    where = [item.where for item in state.fstab if entered_by_us(item, use)]
    if not where:
        return []
    return [
        Step(
            id=name,
            what=f"remove {', '.join(where)} from {FSTAB}",
            why="oeprov entered it there",
            commands=[["edit", FSTAB] + ["-" + item for item in where], ["rmdir"] + where],
            action="edit_fstab",
            args={"remove": where, "empty": where},
        )
    ]


def forget_step(state: State, desired: Desired) -> List[Step]:
    """The step that removes persistent memory's mount points from /etc/fstab; none if there are none."""
    entries = [item for item in state.fstab if is_place(item.where, pmem_use(desired))]
    if not entries:
        return []
    where = list(dict.fromkeys(item.where for item in entries))
    return [
        Step(
            id="fstab-forget",
            what=f"remove {', '.join(where)} from {FSTAB}",
            why="there will be no such device any more",
            commands=[["edit", FSTAB] + ["-" + item.spec for item in entries]],
            action="edit_fstab",
            args={"remove": where},
        )
    ]


def plan(state: State, use: MountUse, device: str, where: str, fresh: bool, size: int = 0) -> List[Step]:
    """The steps from a block device of ``size`` bytes to a mount that survives a reboot.

    ``fresh``: the device does not exist yet or will be created again, so nothing on it can be kept.
    """
    steps: List[Step] = []
    mounts = [] if fresh else mounts_of(state, device)
    at_home = any(item.where.startswith(use.prefix) for item in mounts)
    keep = not fresh and filesystem.is_usable(state, use.filesystem, device, at_home)
    found = filesystem.recognised(state, device)
    if not keep:
        lost = [] if fresh else filesystem.data_on(state, device)
        steps += unmount_step(state, device) if mounts else []
        why = _why_made(state, use, device, mounts) if not fresh else "the device is empty"
        steps.append(filesystem.make_step(state, use.filesystem, device, size, why, lost))
        mounts = []
    ready = len(mounts) == 1 and mounts[0].where == where and not lacking(mounts[0].options, use.options)
    if mounts and not ready:
        steps += unmount_step(state, device)
    steps += _fstab_steps(state, use, device, where, found.uuid if keep and found else "")
    if not ready:
        why = "it is not mounted"
        if mounts:
            without = lacking(mounts[0].options, use.options)
            why = f"it is mounted without {_shown(without)}" if without else "it is mounted elsewhere"
        dax = _DAX in use.options
        steps.append(
            Step(
                id="mount-" + device,
                what=f"mount {device} at {where}" + (" with DAX" if dax else ""),
                why=why + ("; that DAX is on is checked afterwards" if dax else ""),
                commands=[
                    ["mkdir", "-p", where],
                    ["mount", "-o", ",".join(use.options), "/dev/" + device, where],
                ],
                action="mount",
                args={"device": device, "where": where, "options": use.options},
            )
        )
    return steps


def _why_made(state: State, use: MountUse, device: str, mounts: List[Mount]) -> str:
    """Why a file system is made on an existing device."""
    found = filesystem.observed(state, device)
    if found is None:
        return "the device is empty"
    if found.type == filesystem.UNREADABLE:
        return "it cannot be read"
    if found.type:
        return "it holds {} that oeprov did not make or cannot use{} ({}{})".format(
            "a file system" if _DAX in use.options else "something",
            " with DAX" if _DAX in use.options else "",
            found.type,
            ", mounted at " + mounts[0].where if mounts else "",
        )
    gone = content.lost_with_power(state, found)
    if gone:
        return f"file system {gone} on it was lost in a stop of the instance"
    return content.why_data(state, found) or "the device is empty"


def _fstab_steps(state: State, use: MountUse, device: str, where: str, uuid: str) -> List[Step]:
    """The step for the entry of a mount point; the UUID of a new file system is empty."""
    entries = [item for item in state.fstab if item.where == where]
    if uuid and len(entries) == 1 and entry_ok(entries[0], uuid, where, use):
        return []
    options = fstab_options(use)
    line = entry_line(uuid or f"<of {device}>", where, use.filesystem, options)
    return [
        Step(
            id="fstab-" + device,
            what=f"enter {where} in {FSTAB}",
            why="the mount must survive a reboot, and a boot must survive a missing device",
            commands=[["edit", FSTAB] + ["-" + where for _ in entries[:1]] + ["+" + line]],
            action="edit_fstab",
            args={
                "remove": [where],
                "device": device,
                "where": where,
                "type": use.filesystem,
                "options": options,
            },
        )
    ]


def problems(state: State, device: str, where: str, setting: str = "pmem_mount_prefix") -> List[str]:
    """Why a device cannot be mounted at a mount point; ``setting`` chooses others."""
    others = [
        item.device for item in state.mounts if item.where == where and not devices.is_on(item.device, device)
    ]
    return [
        f"{device} is to be mounted at {where}, where {other} is mounted; unmount that or set {setting}"
        for other in others
    ]


def has_dax(options: List[str]) -> bool:
    """The options of the mount, as the kernel shows them, have DAX."""
    return _DAX in options or "dax=always" in options


def lacking(options: List[str], wanted: List[str]) -> List[str]:
    """What of ``wanted`` is not in effect."""
    found = options + ([_DAX] if has_dax(options) else [])
    return [word for word in wanted if word not in found]


def _shown(words: List[str]) -> str:
    return "DAX" if words == [_DAX] else ",".join(words)


def _now(system: System, device: str) -> List[Mount]:
    return mounts_of(State(mounts=parse_mounts(system.read("/proc/mounts"))), device)


def _unmount(system: System, args: Dict[str, Any]) -> Applied:
    device = args["device"]
    mounts = _now(system, device)
    for item in reversed(mounts):
        result = system.run(["umount", item.where])
        if not result.ok:
            users = inuse.observe_users(system, item.where)
            raise CommandError(
                "{} cannot be unmounted from {}: {}".format(
                    device,
                    item.where,
                    f"process {inuse.describe(users)} uses it; stop it first" if users else result.explain(),
                )
            )
    left = [item.where for item in _now(system, device)]
    if left:
        raise CommandError(f"{device} is still mounted at {', '.join(left)}")
    return Applied(bool(mounts), "unmounted" if mounts else "not mounted")


def _mount(system: System, args: Dict[str, Any]) -> Applied:
    device, where, options = args["device"], args["where"], args["options"]
    mounts = _now(system, device)
    if [item.where for item in mounts if not lacking(item.options, options)] == [where]:
        return Applied(False, f"{where} is mounted with {_shown(options)}")
    if mounts:
        raise CommandError(f"{device} is mounted at {mounts[0].where} already")
    try:
        os.makedirs(system.path(where), exist_ok=True)
    except OSError as error:
        raise CommandError(f"{where}: {error.strerror}")
    system.check(["mount", "-o", ",".join(options), "/dev/" + device, where])
    mounts = _now(system, device)
    if not mounts:
        raise CommandError(f"{device} was mounted at {where} and disappeared: see the journal")
    if _DAX in options and not has_dax(mounts[-1].options):
        # "DAX unsupported by block device. Turning off DAX." is no error for mount.
        system.run(["umount", where])
        raise CommandError(
            f"{device} was mounted at {where} without DAX (options {','.join(mounts[-1].options)}), so "
            "it was unmounted again: the kernel says why in `dmesg | grep -i dax`"
        )
    return Applied(True, f"{where} is mounted with {','.join(mounts[-1].options)}")


def _edit_fstab(system: System, args: Dict[str, Any]) -> Applied:
    line = ""
    if args.get("device"):
        found = filesystem.probe(system, args["device"])
        if not found.uuid or found.type != args["type"]:
            raise CommandError(
                "{} holds {}, not the {} that {} should name".format(
                    args["device"], found.type or "nothing", args["type"], FSTAB
                )
            )
        line = entry_line(found.uuid, args["where"], args["type"], args["options"])
        # From now on each boot mounts it, and it may hold files.
        owned.change(system, [], [content.vacant_word(system, args["device"])])
    text = system.read(FSTAB)
    changed = system.edit(FSTAB, edit_fstab(text, args["remove"], line)) if text or line else False
    for where in args.get("empty", []):
        system.remove_empty(where)
    if changed:
        # Otherwise systemd's mount unit waits for the old device and unmounts the new one.
        system.run(["systemctl", "daemon-reload"])
        devices.settle(system)
    return Applied(changed, line or f"removed {', '.join(args['remove'])}")


ACTIONS: Dict[str, Action] = {
    "unmount": _unmount,
    "mount": _mount,
    "edit_fstab": _edit_fstab,
}
