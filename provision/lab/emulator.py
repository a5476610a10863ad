"""QEMU for CXL memory: this machine's if it is new enough, else Debian 13's in a directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from provision.cluster.errors import LabError
from provision.lab import image, machine, programs


def command(images: Path, variant: str, report: machine.Report) -> list[str]:
    """The command that runs QEMU for nodes of a variant; the first call may download Debian 13's."""
    if variant != "cxl" or machine.version()[:2] >= machine.CXL_SINCE:
        return [machine.QEMU]
    root = images / f"qemu-{image.CXL_SUITE}"
    if not root.exists():
        _extract(root, report)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    # Its own loader and C library, so that neither root nor mounts are needed to run it.
    found = [str(root / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    found.append(str(root / "usr/bin" / machine.QEMU))
    for firmware in ("qemu", "seabios"):
        found += ["-L", str(root / "usr/share" / firmware)]
    return found


def check() -> None:
    """LabError if QEMU for CXL memory is neither here nor can be had."""
    if machine.version()[:2] < machine.CXL_SINCE and os.geteuid() != 0:
        found = ".".join(str(part) for part in machine.version())
        raise LabError(
            f"variant cxl needs QEMU 8.1 or newer (volatile CXL memory); this is {found}. As root, the lab "
            "takes Debian 13's; or try system-ram with --variant bare-metal"
        )


def _extract(root: Path, report: machine.Report) -> None:
    report("getting Debian 13's QEMU, which emulates CXL memory (once; some 60 MB)")
    work = Path(tempfile.mkdtemp(prefix="building-", dir=root.parent))
    argv: list[str | Path] = ["mmdebstrap", "--mode=root", "--variant=extract"]
    argv += ["--include=qemu-system-x86", "--dpkgopt=path-exclude=/usr/share/doc/*"]
    argv += [*image.apt_options(), image.CXL_SUITE, work / "root", *image.sources(image.CXL_SUITE)]
    programs.run(argv, log=root.parent / "build.log")
    (work / "root").rename(root)
    shutil.rmtree(work)
