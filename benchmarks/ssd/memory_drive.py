"""Runs a benchmark on a drive in memory, whose only limit is the cores.

    python benchmarks/ssd/memory_drive.py GIB COMMAND …

As root. The drive is the kernel's (zram, with a file system of ext4), so a read takes the way of every read
past the page cache, and takes the time of a core to get the block out of memory, lz4 included. It stands for
drives that are faster than the cores. ``{}`` in the command is the directory; the drive is removed when the
command ends.

    python benchmarks/ssd/memory_drive.py 8 python benchmarks/ssd/step.py --directory {} --only dram
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = Path("/sys/class/zram-control")
SECONDS = 30  # in which a drive is no longer used


@contextmanager
def memory_drive(gib: int) -> Iterator[Path]:
    """The directory of a drive of ``gib`` GiB, which is gone afterwards with all that is there."""
    if os.geteuid() != 0:
        raise SystemExit("a drive in memory is made by root only")
    if not CONTROL.exists():
        raise SystemExit("this kernel has no zram: modprobe zram")
    number = (CONTROL / "hot_add").read_text().strip()
    block = Path(f"/sys/block/zram{number}")
    try:
        (block / "comp_algorithm").write_text("lz4")  # the quickest
        (block / "disksize").write_text(str(gib << 30))
        subprocess.run(["mkfs.ext4", "-q", f"/dev/zram{number}"], check=True)
        directory = tempfile.mkdtemp()
        subprocess.run(["mount", "-o", "noatime", f"/dev/zram{number}", directory], check=True)
        try:
            yield Path(directory)
        finally:
            for _ in range(SECONDS):  # of a command that failed, processes may still end
                if subprocess.run(["umount", directory], check=False).returncode == 0:
                    break
                time.sleep(1)
            os.rmdir(directory)
    finally:
        (CONTROL / "hot_remove").write_text(number)


def main() -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/ssd/memory_drive.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("gib", type=int, metavar="GIB")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args()
    if not options.command or shutil.which(options.command[0]) is None:
        parser.error(f"COMMAND: found {' '.join(options.command[:1])!r}; give a program to run")
    if options.gib < 1:
        parser.error(f"GIB: found {options.gib}; it is at least 1")
    with memory_drive(options.gib) as directory:
        command = [word.replace("{}", str(directory)) for word in options.command]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
