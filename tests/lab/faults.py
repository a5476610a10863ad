"""What can go wrong on a node, made to go wrong."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from provision.lab import Node

BAD_RELEASE = "6.1.0-99-amd64"
_ABOUT = "Maintainer: tests\nDescription: a kernel that does not boot\n"
_BAD_VERSION = "6.1.999-1"
KERNELS = ("panics", "finds no root")


def offer_bad_kernel(node: Node, directory: Path, how: str) -> str:
    """Put a newest kernel into the node's repository that does not boot; its release.

    ``panics``: its initramfs is empty, so the kernel panics. ``finds no root``: its initramfs looks for a
    disk that is not there, and gives up. Otherwise the package is complete: kernel, settings, menu entry.
    """
    assert how in KERNELS
    tree = directory / "kernel"
    (tree / "boot").mkdir(parents=True)
    (tree / "lib/modules" / BAD_RELEASE).mkdir(parents=True)
    for name in ("vmlinuz", "config"):
        data = _fetch(node, f"/boot/{name}-$(uname -r)")
        (tree / f"boot/{name}-{BAD_RELEASE}").write_bytes(data)
    if how == "panics":
        initrd = _cpio({})
        (tree / "boot/first.cpio").write_bytes(initrd)
        make = "mv /boot/first.cpio /boot/initrd.img-$release"
    else:
        # Read by init after the command line; an archive in front of the ordinary initramfs.
        (tree / "boot/first.cpio").write_bytes(_cpio({"conf/param.conf": b"ROOT=/dev/gone\nrootdelay=3\n"}))
        ordinary = "/boot/initrd.img-$(uname -r)"
        make = f"cat /boot/first.cpio {ordinary} >/boot/initrd.img-$release; rm /boot/first.cpio"
    (tree / "DEBIAN").mkdir()
    control = f"Package: linux-image-{BAD_RELEASE}\nVersion: {_BAD_VERSION}\nArchitecture: amd64\n"
    (tree / "DEBIAN/control").write_text(control + _ABOUT)
    scripts = {
        "postinst": f"release={BAD_RELEASE}\n{make}\nupdate-grub\n",
        "postrm": f"rm -f /boot/initrd.img-{BAD_RELEASE}\nupdate-grub\n",
    }
    for name, text in scripts.items():
        (tree / "DEBIAN" / name).write_text("#!/bin/sh\nset -e\n" + text)
        (tree / "DEBIAN" / name).chmod(0o755)
    meta = directory / "meta"
    (meta / "DEBIAN").mkdir(parents=True)
    (meta / "DEBIAN/control").write_text(
        f"Package: linux-image-amd64\nVersion: {_BAD_VERSION}\nArchitecture: amd64\n"
        f"Depends: linux-image-{BAD_RELEASE} (= {_BAD_VERSION})\n{_ABOUT}"
    )
    packages = []
    for source in (tree, meta):
        package = directory / f"{source.name}.deb"
        command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(source), str(package)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        packages.append(package)
    _offer(node, packages)
    return BAD_RELEASE


def _offer(node: Node, packages: list[Path]) -> None:
    """Add packages to the node's repository."""
    names = [f"./{package.name}" for package in packages]
    there = node.check("cat /srv/apt/Packages").strip().split("\n\n")
    kept = [stanza for stanza in there if not any(f"Filename: {name}" in stanza for name in names)]
    index = "\n\n".join(kept) + "\n"
    for package in packages:
        data = package.read_bytes()
        _send(node, data, f"/srv/apt/{package.name}")
        control = subprocess.run(["dpkg-deb", "-f", str(package)], check=True, capture_output=True, text=True)
        digest = hashlib.sha256(data).hexdigest()
        index += f"\n{control.stdout}Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {digest}\n"
    _send(node, index.encode(), "/srv/apt/Packages")
    digest = hashlib.sha256(index.encode()).hexdigest()
    release = f"Date: {node.check('date -Ru').strip()}\nSHA256:\n {digest} {len(index.encode())} Packages\n"
    _send(node, release.encode(), "/srv/apt/Release")


def _fetch(node: Node, path: str) -> bytes:
    return subprocess.run([*node.ssh_command(), f"cat {path}"], check=True, capture_output=True).stdout


def _send(node: Node, data: bytes, path: str) -> None:
    subprocess.run([*node.ssh_command(), f"cat >{path}"], input=data, check=True)


def _cpio(files: dict[str, bytes]) -> bytes:
    """An uncompressed archive of the format that kernels unpack (newc)."""
    out = b""
    folders = {str(parent): b"" for name in files for parent in Path(name).parents if str(parent) != "."}
    for number, (name, data) in enumerate([*folders.items(), *files.items(), ("TRAILER!!!", b"")]):
        mode = 0o040755 if name in folders else 0o100644
        fields = (number + 1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        out += head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
    return out + b"\0" * (-len(out) % 512)


def fill_boot(node: Node, leave: int = 1 << 20) -> None:
    """Fill the file system of /boot until ``leave`` bytes are free, those reserved for root included."""
    node.run("dd if=/dev/zero of=/boot/filler bs=1M")  # until there is no space left
    node.check(f"truncate -s -{leave} /boot/filler && sync")


def empty_boot(node: Node) -> None:
    """Undo ``fill_boot``."""
    node.check("rm -f /boot/filler")


def plant(node: Node, path: str = "/mnt/foreign") -> str:
    """Make a namespace and a file system by hand, as somebody else would, with a file in it; its digest.

    On a module with labels it is a new namespace, else the one that is there. The node keeps it mounted.
    """
    node.check("command -v ndctl || apt-get install -y -q ndctl", timeout=300)
    there = node.check("ls -d /sys/bus/nd/devices/namespace0.0/block/pmem0 2>/dev/null || true").strip()
    which = "-e namespace0.0" if there else "-r region0"
    node.check(f"ndctl create-namespace -f {which} -m fsdax && mkfs.ext4 -q -b 4096 /dev/pmem0", timeout=300)
    node.check(f"mkdir -p {path} && mount -o dax /dev/pmem0 {path}")
    node.check(f"seq 200000 | sha256sum >{path}/digest; seq 200000 >{path}/precious; sync")
    return planted(node, path)


def planted(node: Node, path: str = "/mnt/foreign") -> str:
    """Digest of the planted file, read through the device: it is mounted for that when it is not."""
    node.check(f"mkdir -p {path}; mountpoint -q {path} || mount -o ro,dax /dev/pmem0 {path}")
    return node.check(f"sha256sum <{path}/precious").split()[0]
