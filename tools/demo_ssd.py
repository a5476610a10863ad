"""``make demo-ssd``: trains 20 GiB of rows on a drive in 4 GiB of memory, as a job, and shows what it took.

``GIB=40`` trains more, ``DIRECTORY=/mnt/ssd0`` there (default: .oeprov/ssd). The drive needs 1.6 times the
room of the rows, and .oeprov as much as the rows again for the checkpoint in files at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OEPROV = Path(sys.executable).with_name("oeprov")
LIMIT = 4 << 30
CACHE = "1G"
ROOM = 1.6  # times the rows: the cleaner's room, and what changes between checkpoints
FILES = 1.05  # times the rows: the checkpoint in files, with keys
GROUPS = Path("/sys/fs/cgroup")
NAME = "oeprov-demo-ssd"


def limit_memory() -> str:
    """Put this process into a control group with ``LIMIT`` bytes of memory; returns why not, or nothing."""
    try:
        if (GROUPS / "memory").is_dir():
            group, limits = GROUPS / "memory" / NAME, ("memory.limit_in_bytes",)
            group.mkdir(exist_ok=True)
        else:
            group, limits = GROUPS / NAME, ("memory.max", "memory.swap.max")
            (GROUPS / "cgroup.subtree_control").write_text("+memory")
            group.mkdir(exist_ok=True)
        for name, size in zip(limits, (LIMIT, 0), strict=False):
            (group / name).write_text(str(size))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def main() -> int:
    """Train, and print what the job's report shows; the exit status."""
    text = os.environ.get("GIB", "20")
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        print(f"GIB: found {text!r}; give a number of GiB, such as 20", file=sys.stderr)
        return 1
    place = Path(os.environ.get("DIRECTORY", ROOT / ".oeprov" / "ssd")).absolute()
    place.mkdir(parents=True, exist_ok=True)
    state = ROOT / ".oeprov"
    state.mkdir(exist_ok=True)
    needs = {place: ROOM, state: FILES}
    if place.stat().st_dev == state.stat().st_dev:
        needs = {place: ROOM + FILES}
    for where, times in needs.items():
        free = shutil.disk_usage(where).free
        if free < gib * times * 2**30:
            print(
                f"{where} has {free / 2**30:.0f} GiB free, and {gib:g} GiB of rows need {gib * times:.0f} "
                "there: free some, name another DIRECTORY=, or fewer GIB=",
                file=sys.stderr,
            )
            return 1
    if why := limit_memory():
        print(f"memory is not limited to {LIMIT >> 30} GiB ({why}): run it as root for that")
    inventory = place / "demo-ssd.yml"
    inventory.write_text(
        "all:\n"
        "  vars:\n"
        "    ansible_connection: local\n"
        "    oeprov_kind: local\n"
        "    pmem_mode: none\n"
        "    parameter_server_storage: dram_ssd\n"
        f"    parameter_server_storage_cache: {CACHE}\n"
        f"    ssd_devices: [{json.dumps(str(place))}]\n"
        "    training_checkpoint_steps: 100\n"
        "  hosts:\n    localhost:\n"
        "  children:\n    parameter_servers: {hosts: {localhost: }}\n    workers: {hosts: {localhost: }}\n"
    )
    script = ["--script", str(ROOT / "examples" / "rows_on_nvme.py"), "--name", "demo-ssd"]
    command = [str(OEPROV), "launch-training", "-i", str(inventory), *script, "--", "--gib", f"{gib:g}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
