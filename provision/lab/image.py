"""The disk images of lab nodes: Debian 12 or 13 with an older kernel and a package repository of its own.

CXL memory needs Debian 13. Each is built once and kept under the digest of its recipe; nodes are
overlays on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from provision.cluster.errors import LabError
from provision.lab import machine, programs
from provision.lab.node import BOOT_SECONDS

SUITE = machine.SUITES[12]
# Its kernel (6.3 or newer) and its tool `cxl` know volatile CXL memory, and its QEMU emulates it.
CXL_SUITE = machine.SUITES[13]
# Devices of a machine reach only its DRAM, not emulated CXL memory: this copies what they transfer.
_KERNEL_ARGUMENTS = {CXL_SUITE: ("swiotlb=force",)}
_HERE = Path(__file__).resolve().parent
_MIB = 1 << 20
_BOOT_MIB, _DISK_MIB = 255, 6 * 1024
_PACKAGES = (
    "systemd-sysv,udev,dbus,kmod,procps,iproute2,mount,e2fsprogs,openssh-server,python3,grub-pc,"
    "initramfs-tools,lz4,zstd,"
    # Large packages that take minutes to install under emulation; ndctl and its like are left to oeprov.
    "python3-venv,python3-numpy,ca-certificates"
)
# What oeprov may install on a node, with what people like to have there.
_REPOSITORY = (
    "ndctl daxctl cxl nvme-cli numactl e2fsprogs xfsprogs libpmem1 libmemkind0 python3-venv python3-numpy "
    "python3-pip libgomp1 pciutils less curl"
)
# No file system checks at boot: they cost seconds, and the journal heals what a power cut leaves.
_FSTAB = "UUID={root} / ext4 errors=remount-ro 0 0\nUUID={boot} /boot ext4 defaults 0 0\n"
# Unpacking documentation and translations costs time under emulation.
_EXCLUDED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")


@dataclass(frozen=True)
class GuestImage:
    """A finished image: ``disk`` (raw, never written again), and the kernel and initrd that are on it."""

    directory: Path
    older: str
    newest: str

    @property
    def disk(self) -> Path:
        """The raw disk that overlays are made on."""
        return self.directory / "disk.img"

    @property
    def kernel(self) -> Path:
        """The older kernel, for booting without a boot loader."""
        return self.directory / "vmlinuz"


def digest(suite: str = SUITE) -> str:
    """Digest of what decides what is in an image, except the state of the distribution."""
    recipe = hashlib.sha256()
    parts = (suite, _PACKAGES, _REPOSITORY, *_EXCLUDED, _FSTAB, str(_BOOT_MIB), str(_DISK_MIB))
    for part in (*parts, *_KERNEL_ARGUMENTS.get(suite, ())):
        recipe.update(part.encode() + b"\0")
    for name in ("guest.sh", "ipmctl.py"):
        recipe.update((_HERE / name).read_bytes())
    return recipe.hexdigest()[:16]


def find(images: Path, suite: str = SUITE) -> GuestImage | None:
    """The image of the present recipe, if it was built."""
    directory = images / digest(suite)
    try:
        facts = json.loads((directory / "image.json").read_text())
    except FileNotFoundError:
        return None
    return GuestImage(directory, facts["older"], facts["newest"])


def build(images: Path, report: machine.Report, suite: str = SUITE) -> GuestImage:
    """Build the image of the present recipe; as root, takes some minutes. The caller holds the lab's lock."""
    if os.geteuid() != 0:
        raise LabError(
            "building the lab's image needs root (mmdebstrap and mke2fs -d): run `oeprov lab up` as root"
        )
    images.mkdir(parents=True, exist_ok=True)
    for leftover in images.glob("building-*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=images))
    log = images / "build.log"
    log.write_text("")
    begun = time.monotonic()
    report(f"building the image (once; some minutes; log: {log})")
    root = work / "root"
    # apt's sandbox user must be able to reach the root.
    work.chmod(0o755)
    _debootstrap(suite, root, work, log)
    older, newest = (root / "srv/kernels").read_text().split()
    report(f"kernels: {older} installed, {newest} in the node's repository; writing the disk")
    _write_disk(root, work, older, log)
    report("first boot: the boot loader")
    _install_grub(work)
    shutil.rmtree(root)
    facts = {"older": older, "newest": newest, "seconds": round(time.monotonic() - begun)}
    (work / "image.json").write_text(json.dumps(facts))
    target = images / digest(suite)
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)
    report(f"image ready after {facts['seconds']} s")
    return GuestImage(target, older, newest)


def sources(suite: str = SUITE) -> list[str]:
    """This machine's own apt sources for a suite, one per line; empty: mmdebstrap's default is used."""
    wanted = "$(ORIGIN)|$(CODENAME)|deb [signed-by=$(SIGNED_BY)] $(REPO_URI) $(RELEASE) $(COMPONENT)"
    try:
        text = programs.run(["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"])
    except LabError:
        return []
    found = []
    for line in text.splitlines():
        origin, codename, source = line.split("|", 2)
        if origin == "Debian" and codename in (suite, suite + "-updates", suite + "-security"):
            found.append(source.replace("[signed-by=$(SIGNED_BY)] ", ""))
    return list(dict.fromkeys(found))


def apt_options() -> list[str]:
    """How this machine's apt reaches its sources (proxies, checks), as mmdebstrap options."""
    options = []
    for line in programs.run(["apt-config", "dump"]).splitlines():
        if line.startswith(("Acquire::Check-", "Acquire::http", "Acquire::https")) and '""' not in line:
            options.append("--aptopt=" + line.rstrip(";"))
    return options


def _debootstrap(suite: str, root: Path, work: Path, log: Path) -> None:
    ours = work / "debs"
    ours.mkdir()
    stand_in_package(ours)
    hook = f'sh "{_HERE / "guest.sh"}" "$1" "{ours}" "{_REPOSITORY}"'
    # In a mount namespace of its own, so that nothing stays mounted when it fails.
    argv: list[str | Path] = ["unshare", "--mount", "--propagation", "private"]
    argv += ["mmdebstrap", "--mode=root", "--variant=apt", "--include=" + _PACKAGES]
    argv += [f"--dpkgopt=path-exclude={path}" for path in _EXCLUDED] + apt_options()
    argv += ["--skip=cleanup/apt", "--customize-hook=" + hook]
    for argument in _KERNEL_ARGUMENTS.get(suite, ()):
        edit = f's/^GRUB_CMDLINE_LINUX="/&{argument} /'
        argv.append(f"--customize-hook=sed -i '{edit}' \"$1/etc/default/grub\"")
    argv += [suite, root]
    programs.run([*argv, *sources(suite)], log=log)


def stand_in_package(directory: Path) -> Path:
    """Write the .deb of the ipmctl stand-in into ``directory``; its path."""
    from provision.lab import ipmctl

    tree = directory / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: ipmctl\nVersion: {ipmctl.PACKAGE_VERSION}\nArchitecture: all\nDepends: python3\n"
        "Maintainer: oeprov <oeprov@localhost>\n"
        "Description: stand-in for ipmctl on oeprov's virtual lab nodes\n"
        " It keeps goals in a file and prints what the real tool prints. It reaches no hardware.\n"
    )
    program = tree / "usr/bin/ipmctl"
    program.write_text((_HERE / "ipmctl.py").read_text())
    program.chmod(0o755)
    package = directory / f"ipmctl_{ipmctl.PACKAGE_VERSION}_all.deb"
    programs.run(["dpkg-deb", "--root-owner-group", "-b", tree, package])
    shutil.rmtree(tree)
    return package


def _write_disk(root: Path, work: Path, older: str, log: Path) -> None:
    """Two ext4 file systems, /boot and /, written at their offsets: no loop devices."""
    boot_uuid, root_uuid = str(uuid.uuid4()), str(uuid.uuid4())
    (root / "etc/fstab").write_text(_FSTAB.format(root=root_uuid, boot=boot_uuid))
    shutil.copy(root / f"boot/vmlinuz-{older}", work / "vmlinuz")
    shutil.copy(root / f"boot/initrd.img-{older}", work / "initrd")
    boot = work / "boot"
    (root / "boot").rename(boot)
    (root / "boot").mkdir()
    disk = work / "disk.img"
    with disk.open("wb") as file:
        file.truncate(_DISK_MIB * _MIB)
    layout = (
        f"label: dos\nstart=1MiB, size={_BOOT_MIB}MiB, type=83, bootable\nstart={_BOOT_MIB + 1}MiB, type=83\n"
    )
    (work / "layout").write_text(layout)
    programs.run(["sh", "-c", 'sfdisk -q "$1" <"$2"', "sh", disk, work / "layout"], log=log)
    _mke2fs(boot, disk, boot_uuid, 1, _BOOT_MIB, log)
    _mke2fs(root, disk, root_uuid, _BOOT_MIB + 1, _DISK_MIB - _BOOT_MIB - 1, log)
    shutil.rmtree(boot)


def _mke2fs(tree: Path, disk: Path, name: str, offset: int, size: int, log: Path) -> None:
    extended = f"offset={offset * _MIB},assume_storage_prezeroed=1"
    argv: list[str | Path] = ["mke2fs", "-q", "-t", "ext4", "-b", "4096", "-U", name, "-d", tree]
    programs.run([*argv, "-E", extended, disk, f"{size}M"], log=log)


def _install_grub(work: Path) -> None:
    """Boot the disk once with its own kernel; what runs there as init installs the boot loader."""
    disk = work / "disk.img"
    console = work / "first-boot.log"
    arguments = "root=/dev/vda2 rw console=ttyS0 quiet init=/usr/local/sbin/lab-first-boot panic=-1"
    argv = machine.direct_boot(work / "vmlinuz", work / "initrd", disk, arguments, console)
    ended = machine.run_to_end(argv, seconds=BOOT_SECONDS)
    if "lab: disk is bootable" not in console.read_text(errors="replace"):
        why = "" if ended else f": no end within {BOOT_SECONDS} s"
        raise LabError(f"the boot loader could not be installed on the image{why}; see {console}")
