"""The kernel's tiering beside ``dram_pmem``, in turns on one emulated node with fast and slow memory.

    python benchmarks/pmem/kernel_tiering.py [--turns 2] [--lab DIRECTORY] [--save]

As root; makes a lab node, or uses the first one of a lab in mode tiered, with its NVDIMM as a slower memory
node. Locked memory leaves ``FREE_MIB`` of DRAM. Each side then trains a table of ``ROWS`` rows in turn:
*kernel* has it in memory that Linux moves between the nodes (pmem_mode tiered), *no tiering* in the same
memory without that, and *dram_pmem* has its pool in a tmpfs bound to the slow node.

Emulation distorts times, so ``tier_accesses.c`` counts: accesses to each memory behind a cache of 1 MiB.
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from processes import PROGRAMS, ROOT, build
from reporting import RESULTS, header

from provision.lab import Lab, machine
from provision.lab.node import BOOT_SECONDS, Node
from provision.node import numa

ROWS, DIM, CACHE_MIB, FREE_MIB = 200_000, 64, 40, 64
WARM_SECONDS, BATCHES = 40, 4
SLOW = 3  # times as long as DRAM: what an access costs in "memory time", about that of Optane
PROCESSORS = 8

HOLD = """
import ctypes, mmap, sys, time
leave = int(sys.argv[1]) << 20
def free():
    text = open('/sys/devices/system/node/node0/meminfo').read()
    return int(text.split('MemFree:')[1].split()[0]) << 10
libc = ctypes.CDLL(None, use_errno=True)
blocks = []
while free() > leave + (16 << 20):
    block = mmap.mmap(-1, 16 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(16 << 20)):
        sys.exit('mlock: errno %d' % ctypes.get_errno())
    blocks.append(block)
print('held', len(blocks) * 16, flush=True)
time.sleep(100000)
"""


@dataclass(frozen=True)
class Counts:
    """Accesses behind the cache: programs and kernel, each to fast and to slow memory."""

    fast: int
    slow: int
    kernel_fast: int
    kernel_slow: int


class Counter:
    """The shared memory of the plugin: ``struct Counts``."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 0)

    def slow_memory(self, begin: int, end: int) -> None:
        """Say which memory is slow, by QEMU's offsets."""
        struct.pack_into("QQ", self._shared, 8, begin, end)

    def enable(self, on: bool) -> None:
        """Count, or do not."""
        struct.pack_into("Q", self._shared, 0, int(on))

    def read(self) -> Counts:
        """Accesses so far, of all processors."""
        numbers = struct.unpack_from(f"{PROCESSORS * 4}Q", self._shared, 24 + PROCESSORS * 4 * 8)
        sums = [sum(numbers[place::4]) for place in range(4)]
        return Counts(*sums)


@dataclass(frozen=True)
class Turn:
    """What one side did in its counted batches, per batch."""

    side: str
    order: str
    counts: Counts
    unique: float
    missed: float  # of unique keys, outside of dram_pmem's cache
    milliseconds: float
    warmed: int  # batches
    pages: dict[int, int]  # node → MiB of the program
    moved: str  # by the kernel, over the whole turn

    @property
    def memory_time(self) -> float:
        """In accesses to DRAM."""
        found = self.counts
        return found.fast + found.kernel_fast + SLOW * (found.slow + found.kernel_slow)


def make_lab(directory: Path) -> Lab:
    """A lab with a node in mode tiered."""
    images = ROOT / ".oeprov/lab/images"
    lab = Lab(directory, images=images, inventory=directory / "lab.yml", report=print)
    lab.up(nodes=1, pmem=768 << 20, memory=1024 << 20, install=True)
    change = [sys.executable, "-m", "provision.cli", "pmem-mode", "tiered", "-i", str(lab.inventory)]
    subprocess.run([*change, "--limit", "lab-1", "--yes"], cwd=directory, check=True)
    return lab


def prepare(lab: Lab, program: Path) -> tuple[Node, Counter]:
    """The node, started again with the plugin and the program on it."""
    old = lab.node("lab-1")
    old.shutdown(seconds=BOOT_SECONDS)
    plugin, shared = lab.directory / "tier_accesses.so", lab.directory / "counts"
    source = Path(__file__).with_name("tier_accesses.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", source, "-o", plugin], check=True)
    command = [machine.QEMU, "-plugin", f"{plugin},counts={shared}"]
    node = Node(old.spec, old.directory, lab.key, lab.known_hosts, lab.accelerator, lambda: command)
    node.start()
    node.wait_ssh()
    node.check("systemctl is-system-running --wait || :", timeout=BOOT_SECONDS)
    ram = machine.qmp(node.directory, "human-monitor-command", **{"command-line": "info ramblock"})
    found = re.search(r"\bpmem0\s+\d+ \w+\s+0x(\w+) 0x(\w+)", ram)
    assert found, ram
    begin, used = (int(number, 16) for number in found.groups())
    counter = Counter(shared)
    counter.slow_memory(begin, begin + used)
    with program.open("rb") as file:
        put = "cat >/root/kernel_tiering && chmod 755 /root/kernel_tiering"
        subprocess.run([*node.ssh_command(), put], stdin=file, check=True)
    return node, counter


def slow_node(node: Node) -> int:
    """The number of the first memory node without CPUs."""
    files = "/sys/devices/system/node/has_memory /sys/devices/system/node/has_cpu"
    memory, cpus = (numa.parse_list(line) for line in node.check(f"cat {files}").splitlines())
    return min(number for number in memory if number not in cpus)


def take_turn(node: Node, counter: Counter, side: str, order: str) -> Turn:
    """Run one side on the node."""
    tiers = "start" if side == "kernel" else "stop"
    node.check(f"systemctl {tiers} oeprov-tiering.service")
    before, slow = moved(node), slow_node(node)
    pool = "/run/slow"
    node.check(f"mkdir -p {pool} && mount -t tmpfs -o mpol=bind:{slow} tmpfs {pool}")
    hold = subprocess.Popen(
        [
            *node.ssh_command(),
            f"numactl --membind=0 python3 -c '{HOLD.replace(chr(39), chr(34))}' {FREE_MIB}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert hold.stdout is not None
        assert hold.stdout.readline().startswith("held"), "the memory could not be locked"
        kind = "dram_pmem" if side == "dram_pmem" else "dram"
        words = f"{kind} {pool}/rows {ROWS} {DIM} {CACHE_MIB << 20} {WARM_SECONDS} {BATCHES} {order}"
        line = f"PMEM_IS_PMEM_FORCE=1 taskset -c 0 /root/kernel_tiering {words}"
        run = subprocess.Popen(
            [*node.ssh_command(), line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert run.stdin is not None
        assert run.stdout is not None
        warmed = int(said(run, "begin")[0])
        start = counter.read()
        counter.enable(True)
        run.stdin.write("\n")
        run.stdin.flush()
        unique, missed, milliseconds = (float(word) for word in said(run, "end"))
        counter.enable(False)
        end = counter.read()
        pages = node.check("cat /proc/$(pgrep -x kernel_tiering)/numa_maps")
        run.stdin.write("\n")
        run.stdin.close()
        run.wait(60)
    finally:
        counter.enable(False)
        node.run("pkill -x kernel_tiering; pkill -f MemFree; umount /run/slow")
        hold.kill()
        hold.wait()
    counts = Counts(
        *(round((getattr(end, name) - getattr(start, name)) / BATCHES) for name in Counts.__annotations__)
    )
    sizes = dict.fromkeys((0, slow), 0)
    for number, size in re.findall(r" N(\d)=(\d+)", "\n".join(anonymous(pages))):
        sizes[int(number)] = sizes.get(int(number), 0) + int(size)
    after = moved(node)
    changes = ", ".join(f"{name} {after[name] - before[name]}" for name in after)
    megabytes = {number: size * 4 >> 10 for number, size in sizes.items()}
    return Turn(
        side, order, counts, unique / BATCHES, missed / BATCHES, milliseconds, warmed, megabytes, changes
    )


def anonymous(numa_maps: str) -> list[str]:
    """Lines of memory that is the program's own, or the pool's."""
    return [line for line in numa_maps.splitlines() if "file=/usr" not in line and "file=/root" not in line]


def said(run: subprocess.Popen[str], word: str) -> list[str]:
    """What follows a word that the program must say."""
    assert run.stdout is not None
    words = run.stdout.readline().split()
    if not words or words[0] != word:
        raise SystemExit(f"kernel_tiering said {words} instead of {word}")
    return words[1:]


def moved(node: Node) -> dict[str, int]:
    """Pages that the kernel moved between tiers since the boot."""
    text = node.check("cat /proc/vmstat")
    names = ("pgpromote_success", "pgdemote_kswapd", "pgdemote_direct", "numa_hint_faults")
    return {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", text, re.M) if name in names}


def table(turns: list[Turn]) -> str:
    """The result as Markdown."""
    lines = [
        "| side | slow accesses of the program | fast | slow by the kernel | fast | memory time | "
        "unique keys | outside of the cache | MiB in DRAM / slow | ms (emulated) | batches before |",
        "|---|" + "---:|" * 10,
    ]
    for turn in turns:
        found = turn.counts
        slow = sum(turn.pages.values()) - turn.pages[0]
        missed = f"{turn.missed:,.0f}" if turn.side == "dram_pmem" else ""
        lines.append(
            f"| {turn.side} | {found.slow:,} | {found.fast:,} | {found.kernel_slow:,} | "
            f"{found.kernel_fast:,} | {turn.memory_time:,.0f} | {turn.unique:,.0f} | {missed} | "
            f"{turn.pages[0]} / {slow} | {turn.milliseconds:.0f} | {turn.warmed} |"
        )
    lines += ["", "Pages moved, from the start of a turn to its end:", ""]
    lines += [f"- {turn.side}: {turn.moved}" for turn in turns]
    return "\n".join(lines)


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/pmem/kernel_tiering.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=2, help="of each side")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kernel_tiering.md")
    parser.add_argument("--order", choices=("seen", "shuffled"), default="shuffled", help="of the rows")
    parser.add_argument("--lab", type=Path, help="of `oeprov lab up`, its first node in mode tiered")
    options = parser.parse_args()
    build("kernel_tiering")
    directory = options.lab or Path(tempfile.mkdtemp(prefix="kernel-tiering-"))
    lab = Lab(directory, images=ROOT / ".oeprov/lab/images") if options.lab else make_lab(directory)
    turns = []
    try:
        node, counter = prepare(lab, PROGRAMS / "kernel_tiering")
        for number in range(options.turns):
            sides = ["kernel", "dram_pmem", "no tiering"]
            for side in sides[number % 3 :] + sides[: number % 3]:
                turns.append(take_turn(node, counter, side, options.order))
                print(turns[-1], flush=True)
        kernel = node.check("uname -r").strip()
    finally:
        if not options.lab:
            lab.down()
            shutil.rmtree(directory)
    text = table(turns)
    print(text)
    if options.save:
        page = header("The kernel's tiering beside dram_pmem", f"on a node with Linux {kernel}")
        (RESULTS / "kernel_tiering.md").write_text(f"{page}{text}\n")


if __name__ == "__main__":
    main()
