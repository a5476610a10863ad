"""What a block device holds (persistent memory's, a drive's), and file systems on it."""

import errno
import os
import uuid
from typing import Any, Dict, List, Optional

from . import content, devices, fstab, owned
from .command import CommandError, System
from .directory import human
from .state import Drive, FileSystem, KernelState, Namespace, State
from .step import Action, Applied, Step

MKFS_TIMEOUT = 1800.0  # seconds; a terabyte takes a while
_NOTHING_FOUND = 2  # exit status of blkid
_AMBIVALENT = 8
UNREADABLE = "unreadable"


def parse_block_size(text: str) -> int:
    """Block size of ``dumpe2fs -h``; 0 when it does not say."""
    for line in text.splitlines():
        if line.startswith("Block size:"):
            return int(line.split()[-1])
    return 0


def parse_blkid(device: str, text: str) -> FileSystem:
    """The signature in ``blkid -p -o export``; a partition table counts as one."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return FileSystem(
        device=device,
        type=values.get("TYPE") or values.get("PTTYPE", ""),
        uuid=values.get("UUID") or values.get("PTUUID", ""),
        label=values.get("LABEL", ""),
    )


def probe(system: System, device: str) -> FileSystem:
    """Read from the device itself what is on it now; CommandError when it cannot be read.

    udev's database may have nothing about a device that has just appeared.
    """
    path = "/dev/" + device
    result = system.run(["blkid", "-p", "-o", "export", path])
    holders = system.list(f"/sys/class/block/{device}/holders")
    bad = devices.bad_blocks(system.read(f"/sys/class/block/{device}/badblocks"))
    if result.code == _AMBIVALENT:
        return FileSystem(device, "ambivalent", holders=holders, bad_blocks=bad)
    # blkid says 2 for a device without a signature and for one that it cannot open.
    if not result.ok and (result.code != _NOTHING_FOUND or result.err.strip()):
        raise CommandError(result.explain())
    found = parse_blkid(device, result.out)._replace(holders=holders, bad_blocks=bad)
    if found.type.startswith("ext"):
        found = found._replace(block_size=parse_block_size(system.run(["dumpe2fs", "-h", path]).out))
    # It also reports nothing when it could not read, so an empty answer proves nothing.
    return found if found.type else found._replace(sample=content.sample(system, path))


def observe(system: System, names: List[str], trouble: List[str]) -> List[FileSystem]:
    """What is on the block devices; the type is empty if nothing was recognised, or "unreadable"."""
    found = []
    for device in names:
        try:
            found.append(probe(system, device))
        except CommandError as error:
            trouble.append(str(error))
            bad = devices.bad_blocks(system.read(f"/sys/class/block/{device}/badblocks"))
            found.append(FileSystem(device, UNREADABLE, error=str(error), bad_blocks=bad))
    return found


def observed(state: State, device: str) -> Optional[FileSystem]:
    """What was observed on a block device."""
    return next((item for item in state.filesystems if item.device == device), None)


def recognised(state: State, device: str) -> Optional[FileSystem]:
    """What was recognised on a block device, such as ``pmem0``."""
    return next((item for item in state.filesystems if item.device == device and item.type), None)


def consent_name(found: FileSystem) -> str:
    """The name of a device's content for consent; data without a signature is named by its digest."""
    if not found.type:
        return f"{found.device}/data/{found.sample}"
    return "{}/{}/{}".format(found.device, found.type, found.uuid or "no-uuid")


def data_on(state: State, device: str) -> List[str]:
    """Objects that are lost when the device is overwritten, as consent names them.

    A device without a signature is empty only if ``content.why_data`` finds no reason to think otherwise.
    """
    found = observed(state, device)
    if found is None or not (found.type or content.why_data(state, found)):
        return []
    return [consent_name(found)]


def is_usable(state: State, kind: str, device: str, at_home: bool) -> bool:
    """The device holds a file system that can be used as it is: ours, or one mounted in our place."""
    found = recognised(state, device)
    return (
        found is not None
        and found.type == kind
        and found.block_size in (0, state.memory.page_size)
        and (found.uuid in state.owned or at_home)
    )


def mkfs_command(args: Dict[str, Any], identity: str) -> List[str]:
    """The command for a file system whose block size is the page size, as DAX needs it."""
    path = "/dev/" + args["device"]
    if args["type"] == "ext4":
        return ["mkfs.ext4", "-q", "-b", str(args["block_size"]), "-U", identity, path]
    features = "uuid=" + identity
    if not args["reflink"]:
        features += ",reflink=0"  # before 6.0, XFS has either reflink or DAX
    return ["mkfs.xfs", "-q", "-b", f"size={args['block_size']}", "-m", features, path]


def _kernel_before_6(state: State) -> bool:
    major = state.kernel.running.split(".")[0]
    return not major.isdigit() or int(major) < 6


def make_step(state: State, kind: str, device: str, size: int, why: str, lost: List[str]) -> Step:
    """The step that makes a file system; ``size`` in bytes, 0: unknown; ``lost``: what it overwrites."""
    args = {
        "device": device,
        "type": kind,
        "block_size": state.memory.page_size,
        "reflink": not _kernel_before_6(state),
        "lose": lost,
    }
    commands = [["wipefs", "-a", "/dev/" + device]] if lost else []
    return Step(
        id="mkfs-" + device,
        what=f"make {kind} on {sized(device, size)}",
        why=why,
        destroys=lost,
        commands=commands + [mkfs_command(args, "<new>")],
        action="make_filesystem",
        disturbs=bool(lost),
        args=args,
    )


def wipe(system: System, device: str, lose: List[str]) -> bool:
    """Erase the signatures on a device; False if there was no data.

    CommandError when the device is in use, or holds something that consent does not cover.
    """
    found = probe(system, device)
    check_unused(system, found)
    state = _read_state(system, found)
    item = content.namespace_on(state, device)
    for problem in _unsound(found, item.dev if item else device):
        raise CommandError(problem)
    data = data_on(state, device)
    if [name for name in data if name not in lose]:
        words = [found.type, found.label, found.uuid] if found.type else ["data", found.sample]
        raise CommandError(
            f"{device} holds {' '.join(word for word in words if word)}, which appeared after the plan was "
            "made; nothing was changed: plan again"
        )
    if not data:
        return False
    # If this run is interrupted, the next one does not ask for consent again.
    owned.change(system, [content.vacant_word(system, device)], [])
    if found.type:
        system.check(["wipefs", "-q", "-a", "/dev/" + device])
        # The partitions of an erased table must disappear too.
        system.run(["blockdev", "--rereadpt", "/dev/" + device])
    owned.change(system, [], [found.uuid])
    return True


def _read_state(system: System, found: FileSystem) -> State:
    """Read the part of the state that decides what is lost with a device."""
    namespaces = devices.namespaces(system)
    others = [item.blockdev for item in namespaces if item.blockdev not in ("", found.device)]
    return State(
        regions=devices.regions(system),
        namespaces=namespaces,
        filesystems=[found] + observe(system, others, []),
        fstab=fstab.parse(system.read(fstab.PATH)),
        owned=owned.observe(system),
        drives=[Drive("", found.device, identity=content.identity(system, found.device))],
        kernel=KernelState(cmdline=system.read("/proc/cmdline").split()),
    )


def _unsound(found: FileSystem, where: str) -> List[str]:
    """Why a device must not be written; ``where`` is its namespace, or the device itself."""
    if found.type == UNREADABLE:
        what = f"{found.error}; its content is unknown"
    elif found.bad_blocks:
        what = f"/dev/{found.device} has {found.bad_blocks} blocks of 512 bytes that cannot be read"
    else:
        return []
    if where == found.device:
        return [f"{what}, so nothing is made there: replace the drive, or take it out of ssd_devices"]
    cure = "mend that"
    if found.bad_blocks or os.strerror(errno.EIO) in found.error:
        cure = (
            f"`ndctl list -NM` shows media errors. Save what you need first: `ndctl clear-errors {where}` "
            "removes them and loses the data in those blocks"
        )
    return [f"{what}, so nothing is made there: {cure}; or set pmem_namespaces without {where}"]


def problems(state: State, steps: List[Step]) -> List[str]:
    """Devices that the steps overwrite, and that are unreadable or in use."""
    found = []
    for item in _written(state, steps):
        seen = observed(state, item.blockdev)
        if seen is None:
            continue
        found += _unsound(seen, item.dev)
        if seen.holders:
            found.append(
                "{} is in use by {} ({}): take that apart first".format(
                    item.blockdev, ", ".join(seen.holders), seen.type or "no signature"
                )
            )
    return found


def notes(state: State, steps: List[Step], names: List[str]) -> List[str]:
    """Media errors of the namespaces in ``names`` that stay as they are."""
    written = _written(state, steps)
    return [
        f"/dev/{seen.device} has {seen.bad_blocks} blocks of 512 bytes that cannot be read, and files there "
        f"may be damaged: `ndctl list -NM -n {item.dev}` shows where"
        for item in state.namespaces
        for seen in [observed(state, item.blockdev)]
        if item.dev in names and item not in written and seen and seen.bad_blocks
    ]


def _written(state: State, steps: List[Step]) -> List[Namespace]:
    """Namespaces with a block device that the steps overwrite."""
    names: List[str] = []
    for step in steps:
        if step.action in ("make_filesystem", "create_namespace", "destroy_namespace", "give_up_data"):
            args = step.args
            names += [args.get("device", ""), args.get("namespace", "")] + args.get("namespaces", [])
    return [item for item in state.namespaces if item.blockdev and {item.blockdev, item.dev} & set(names)]


def sized(name: str, size: int) -> str:
    """A device with its size, as plans show it: ``pmem0 (1008 GiB)``."""
    return f"{name} ({human(size)})" if size else name


def check_unused(system: System, found: FileSystem) -> None:
    """CommandError when a device is mounted or another device is built on it."""
    mounts = [line.split() for line in system.read("/proc/mounts").splitlines()]
    where = [row[1] for row in mounts if len(row) > 1 and devices.is_on(row[0], found.device)]
    if where:
        raise CommandError(f"{found.device} is mounted at {', '.join(where)}: unmount it first")
    if found.holders:
        raise CommandError(f"{found.device} is in use by {', '.join(found.holders)}: take that apart first")


def _make_filesystem(system: System, args: Dict[str, Any]) -> Applied:
    device = args["device"]
    if not devices.wait_for(lambda: system.exists("/dev/" + device)):
        raise CommandError(f"there is no /dev/{device}: an earlier step should have made it")
    devices.settle(system)
    owned.adopt(system)
    found = probe(system, device)
    ours = found.uuid in owned.observe(system) and found.type == args["type"]
    if ours and found.block_size in (0, args["block_size"]) and consent_name(found) not in args["lose"]:
        return Applied(False, f"{device} holds our {found.type} {found.uuid}")
    wipe(system, device, args["lose"])
    # Registered before it exists: after a power cut it is not taken for foreign data.
    identity = str(uuid.uuid4())
    owned.change(system, [identity, content.vacant_word(system, device)], [])
    system.check(mkfs_command(args, identity), timeout=MKFS_TIMEOUT)
    devices.settle(system)
    made = probe(system, device)
    if (made.type, made.uuid) != (args["type"], identity):
        raise CommandError(
            "{}: mkfs said that it made {} {}, but {} is there".format(
                device, args["type"], identity, " ".join([made.type, made.uuid]).strip() or "nothing"
            )
        )
    return Applied(True, f"made {made.type} {identity} on {device}")


ACTIONS: Dict[str, Action] = {"make_filesystem": _make_filesystem}
