"""Drives of ssd_devices: what is observed, and all steps on a real block device (as root)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.node import content, devices, drives, filesystem, fstab, mount, owned, removal
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.state import Directory, Drive, FileSystem, FstabEntry, Mount, State
from provision.node.step import Desired, Part, Step

NAME = "/dev/disk/by-id/nvme-VENDOR_1"
OTHER = "/dev/disk/by-id/nvme-VENDOR_2-part1"


def write(root: Path, files: dict[str, str]) -> System:
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return System(str(root))


def link(root: Path, path: str, target: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def test_drives_are_found_by_their_id(tmp_path: Path) -> None:
    disks = "/sys/devices"
    system = write(
        tmp_path,
        {
            f"{disks}/nvme0n1/size": "2048\n",
            f"{disks}/nvme0n1/wwid": "eui.0025 38\n",
            f"{disks}/nvme0n1/queue/rotational": "0\n",
            f"{disks}/nvme0n1/queue/scheduler": "[none] mq-deadline\n",
            f"{disks}/nvme0n1/nvme0n1p2/partition": "2\n",
            f"{disks}/nvme0n1/nvme0n1p2/holders/dm-0/size": "1\n",
            f"{disks}/sda/queue/rotational": "1\n",
            f"{disks}/sda/queue/scheduler": "none [mq-deadline]\n",
            f"{disks}/sda/device/wwid": "naa.5\n",
            f"{disks}/sda/sda1/size": "8\n",
            f"{disks}/sda/sda1/partition": "1\n",
            "/proc/swaps": "Filename Type Size\n/dev/nvme0n1p3 partition 8\n",
        },
    )
    for name in ("nvme0n1", "sda", "sda/sda1"):
        link(tmp_path, f"/sys/class/block/{Path(name).name}", f"../../devices/{name}")
    link(tmp_path, NAME, "../../nvme0n1")
    link(tmp_path, OTHER, "../../sda1")
    wanted = Desired(ssd_devices=[NAME, OTHER, "/dev/disk/by-id/gone"])
    assert drives.observe(system, wanted) == [
        Drive(NAME, "nvme0n1", 1 << 20, False, "none", "eui.0025_38", ["dm-0", "swap on /dev/nvme0n1p3"]),
        Drive(OTHER, "sda1", 4096, True, "mq-deadline", "naa.5"),
        Drive("/dev/disk/by-id/gone"),
    ]


def test_directories_are_seen_with_their_file_system(tmp_path: Path) -> None:
    rows = tmp_path / "data" / "rows"
    rows.mkdir(parents=True)
    system = write(tmp_path, {"/proc/mounts": "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\n"})
    (found,) = drives.observe(system, Desired(ssd_devices=["/data/rows"]))
    assert found.filesystem == "xfs"
    assert found.directory._replace(free=0) == Directory("/data/rows", True, True, True)
    assert drives.observe_disabled(system, Desired()) == ""
    write(tmp_path, {"/proc/sys/kernel/io_uring_disabled": "2\n"})
    assert drives.observe_disabled(system, Desired(ssd_devices=["/data"])) == "2"


@pytest.mark.parametrize(
    ("source", "device", "on"),
    [
        ("/dev/sda", "sda", True),
        ("/dev/sda12", "sda", True),
        ("/dev/sdaa", "sda", False),
        ("/dev/sdap1", "sda", False),
        ("/dev/nvme0n1p2", "nvme0n1", True),
        ("/dev/nvme0n12", "nvme0n1", False),
        ("/dev/nvme0n1px", "nvme0n1", False),
        ("/dev/pmem0p1", "pmem0", True),
        ("/dev/pmem01", "pmem0", False),
        ("/dev/pmem", "pmem0", False),
    ],
)
def test_partitions_are_on_their_device(source: str, device: str, on: bool) -> None:
    assert devices.is_on(source, device) == on


def test_a_missing_directory_on_this_machine_has_a_cure_that_works() -> None:
    desired = Desired(host="h", kind="local", ssd_devices=["/nowhere"])
    part = drives.plan(State(drives=[Drive("/nowhere", directory=Directory("/nowhere"))]), desired)
    cure = "mount a drive there, or name another directory"  # by-id paths are refused on kind local
    assert part.problems == [f"ssd_devices /nowhere: is not there; {cure}"]


def test_the_scheduler_goes_now_and_at_each_boot(tmp_path: Path) -> None:
    queue = "/sys/class/block/vdb/queue/scheduler"
    system = write(tmp_path, {queue: "none [mq-deadline]", drives.RULES: "# mine\n"})
    (step,) = drives._scheduler(Drive(NAME, "vdb", scheduler="mq-deadline"))
    assert apply(step, system).changed
    rule = 'SYMLINK=="disk/by-id/nvme-VENDOR_1", ATTR{queue/scheduler}="none"'
    assert system.read(queue) == "none"
    assert system.read(drives.RULES).startswith("# mine\n")
    assert rule in system.read(drives.RULES)
    assert not apply(step, system).changed
    # A kernel that takes the word and does not do it.
    write(tmp_path, {queue: "none [bfq]"})
    system.write = lambda path, text, mode=0o644: True  # type: ignore[method-assign]
    with pytest.raises(CommandError, match=r"scheduler is still none \[bfq\] after none was written"):
        apply(step, system)


OURS = State(
    drives=[Drive(NAME, "nvme0n1", 1 << 40)],
    filesystems=[FileSystem("nvme0n1", "ext4", "aa")],
    owned=["aa"],
    mounts=[Mount("/dev/nvme0n1", "/mnt/ssd0", "ext4", ["rw", "noatime", "discard"])],
    fstab=[
        FstabEntry(
            "UUID=aa",
            "/mnt/ssd0",
            "ext4",
            ["noatime", "discard", "nofail", "x-systemd.device-timeout=90s"],
        )
    ],
)


def destroyed(state: State, *objects: str) -> Part:
    wanted = Desired(host="h", kind="nvme", ssd_devices=[NAME], remove=True, remove_objects=list(objects))
    return removal.plan(state, wanted)


def test_destroy_unmounts_a_drive_and_keeps_its_data() -> None:
    part = destroyed(OURS)
    assert [step.id for step in part.before] == ["unmount-nvme0n1", "fstab-forget-drives"]
    assert not any(step.destroys for step in part.before + part.after)
    assert part.notes == [
        f"left: nvme0n1 ({NAME}) and what is on it; to lose that too, add: --consent h:nvme0n1/ext4/aa"
    ]
    # The registry says whose it is, so it stays as long as the data does.
    assert not any(owned.PATH in step.args.get("paths", []) for step in part.after)


def test_destroy_erases_a_drive_that_is_named() -> None:
    part = destroyed(OURS, "nvme0n1/ext4/aa")
    (wipe,) = [step for step in part.after if step.id == "wipe-nvme0n1"]
    assert wipe.destroys == ["nvme0n1/ext4/aa"]
    assert part.notes == []


def test_destroy_leaves_a_drive_that_is_not_ours() -> None:
    foreign = OURS._replace(owned=[], mounts=[], fstab=[])
    part = destroyed(foreign, "nvme0n1/ext4/aa")
    assert part.before == []
    assert [step.id for step in part.after if "nvme" in step.id] == []


class Machine(System):
    """This machine, with a loop device under a by-id name, and an /etc and a registry of its own."""

    def __init__(self, root: Path) -> None:
        super().__init__("/")
        self.own = root

    def path(self, path: str) -> str:
        own = path.startswith(("/etc/", "/dev/disk/", "/var/lib/oeprov"))
        return str(self.own / path.lstrip("/")) if own else path

    def run(self, argv: list[str], *more: object, **options: object) -> Result:
        if argv[0] in ("systemctl", "udevadm"):
            return Result(argv, 0, "", "")
        return super().run(argv, *more, **options)  # type: ignore[arg-type]


def loop_device(file: Path) -> str:
    done = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    return Path(done.stdout.strip()).name


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[tuple[Machine, Desired, str]]:
    if os.geteuid() != 0:
        pytest.skip("only root makes loop devices and mounts")
    if not all(map(shutil.which, ("losetup", "mkfs.ext4", "wipefs", "blkid", "dumpe2fs"))):
        pytest.skip("losetup, mkfs.ext4, wipefs, blkid or dumpe2fs is missing")
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    device = loop_device(image)
    try:
        link(tmp_path, NAME, f"../../{device}")
        wanted = Desired(
            host="h", kind="nvme", ssd_devices=[NAME], ssd_mount_prefix=f"{tmp_path}/mnt/ssd", remove=False
        )
        yield Machine(tmp_path), wanted, device
    finally:
        subprocess.run(["umount", f"{tmp_path}/mnt/ssd0"], check=False, capture_output=True)
        subprocess.run(["losetup", "-d", f"/dev/{device}"], check=True)


def seen(system: System, wanted: Desired) -> State:
    found = drives.observe(system, wanted)
    return State(
        drives=found,
        filesystems=filesystem.observe(system, [item.device for item in found], []),
        mounts=mount.parse_mounts(system.read("/proc/mounts")),
        fstab=fstab.parse(system.read(fstab.PATH)),
        owned=owned.observe(system),
    )


def planned(system: System, wanted: Desired) -> list[Step]:
    part = drives.plan(seen(system, wanted), wanted)
    assert part.problems == []
    # A loop device has a scheduler on some kernels; the machine's stays.
    return [step for step in part.after if step.action != "set_scheduler"]


def test_an_empty_drive_becomes_a_mount_and_goes_again(machine: tuple[Machine, Desired, str]) -> None:
    system, wanted, device = machine
    steps = planned(system, wanted)
    assert [step.action for step in steps] == ["make_filesystem", "edit_fstab", "mount"]
    assert not any(step.destroys for step in steps)
    for step in steps:
        assert apply(step, system).changed
        assert not apply(step, system).changed
    where = Path(f"{wanted.ssd_mount_prefix}0")
    assert where.is_mount()
    (where / "rows").write_bytes(b"x")
    (entry,) = fstab.parse(system.read(fstab.PATH))
    assert mount.entered_by_us(entry, drives.use(wanted))
    assert planned(system, wanted) == []
    # A file system that is no drive's place any more: refused, not unmounted.
    elsewhere = wanted._replace(ssd_mount_prefix=f"{wanted.ssd_mount_prefix}-")
    assert "is mounted at" in drives.plan(seen(system, elsewhere), elsewhere).problems[0]

    found = filesystem.data_on(seen(system, wanted), device)
    part = drives.plan_removal(seen(system, wanted), wanted._replace(remove_objects=found))
    for step in part.before + part.after:
        assert apply(step, system).changed
    assert not where.exists()
    assert fstab.parse(system.read(fstab.PATH)) == []
    assert filesystem.probe(system, device).type == ""


def test_foreign_data_is_erased_only_when_it_was_named(machine: tuple[Machine, Desired, str]) -> None:
    system, wanted, device = machine
    empty = planned(system, wanted)
    subprocess.run(["mkfs.ext4", "-q", f"/dev/{device}"], check=True)
    # It appeared after the plan was made.
    with pytest.raises(CommandError, match="appeared after the plan was made"):
        apply(empty[0], system)
    assert filesystem.probe(system, device).type == "ext4"
    foreign = filesystem.probe(system, device).uuid
    (step, *_rest) = planned(system, wanted)
    assert step.destroys == [f"{device}/ext4/{foreign}"]
    # Power is cut after the erasure: the same drive needs no consent again, another one of that name does.
    filesystem.wipe(system, device, step.destroys)
    (word,) = [word for word in owned.observe(system) if word.startswith("vacant:")]
    assert word == owned.vacant(device, content.identity(system, device)) != owned.vacant(device)
    subprocess.run(["dd", "if=/dev/urandom", f"of=/dev/{device}", "bs=1M", "count=2"], check=True)
    state = seen(system, wanted)
    assert filesystem.data_on(state, device) == []
    swapped = [item._replace(identity="another") for item in state.drives]
    assert filesystem.data_on(state._replace(drives=swapped), device) != []


def test_a_drive_in_use_is_refused_at_the_last_moment(machine: tuple[Machine, Desired, str]) -> None:
    system, wanted, device = machine
    steps = planned(system, wanted)
    subprocess.run(["mkfs.ext4", "-q", f"/dev/{device}"], check=True)
    elsewhere = system.own / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["mount", f"/dev/{device}", elsewhere], check=True)
    try:
        with pytest.raises(CommandError, match=f"{device} is mounted at {elsewhere}: unmount it first"):
            apply(steps[0], system)
        state = seen(system, wanted)
        assert drives.plan(state, wanted).problems == [
            f"{NAME} ({device}) is mounted at {elsewhere}; unmount it, or name another drive"
        ]
    finally:
        subprocess.run(["umount", elsewhere], check=True)
