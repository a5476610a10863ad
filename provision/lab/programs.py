"""The programs that the lab needs, where they come from, and running them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from provision.cluster.errors import LabError

# Program → Debian package that brings it.
NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "sfdisk": "fdisk",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "apt-ftparchive": "apt-utils",
    "dpkg-deb": "dpkg",
}
_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def missing() -> list[str]:
    """Debian packages of the programs that are not installed, without repeats."""
    return sorted({package for program, package in NEEDED.items() if not shutil.which(program, path=_PATH)})


def install_command(packages: Sequence[str]) -> list[str]:
    """The one command that installs them."""
    return ["apt-get", "install", "-y", "--no-install-recommends", *packages]


def require(install: bool = False) -> None:
    """LabError when programs are missing, with the line that installs them; as root ``install`` does it."""
    packages = missing()
    if not packages:
        return
    line = " ".join(install_command(packages))
    if not shutil.which("apt-get", path=_PATH):
        raise LabError(
            f"the lab needs packages that are not installed ({', '.join(packages)}), and no apt-get"
        )
    if os.geteuid() != 0:
        raise LabError(f"the lab needs programs that are not installed; run: sudo {line}")
    if not install:
        raise LabError(f"the lab needs programs that are not installed; run: {line} (or give --yes)")
    run(["apt-get", "update", "-q"])
    run(install_command(packages), environment={"DEBIAN_FRONTEND": "noninteractive"})
    if missing():
        raise LabError(f"these packages did not bring what the lab needs: {', '.join(missing())}")


def make_key(path: Path, comment: str) -> None:
    """Make a key pair for ssh without a password."""
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def run(
    argv: Sequence[str | Path], *, log: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    """Standard output of a command; its output goes to ``log`` instead when one is given.

    Raises LabError with the command and the last line that it wrote.
    """
    words = [str(word) for word in argv]
    variables = {**os.environ, "PATH": _PATH, "LC_ALL": "C", **(environment or {})}
    try:
        if log is None:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=variables)
            out, wrote = done.stdout, done.stderr or done.stdout
        else:
            with log.open("ab") as sink:
                done = subprocess.run(words, stdout=sink, stderr=sink, text=True, env=variables)
            out, wrote = "", log.read_text(errors="replace")
    except FileNotFoundError:
        raise LabError(f"{words[0]} is not installed") from None
    if done.returncode:
        lines = [line for line in wrote.strip().splitlines() if line.strip()] or ["it said nothing"]
        where = f" (all of it in {log})" if log else ""
        raise LabError(f"{words[0]} failed: {lines[-1].strip()}{where}")
    return out
