"""Random reads of 4 KiB from an NVMe: our reader and fio, in turns.

    python benchmarks/ssd/device.py [--directory DIRECTORY] [--rounds 9] [--seconds 2] [--save]

In each round fio reads at depth 128 with io_uring. Then ours reads batches of 4,160 rows of 512 bytes: with
two batches in flight, then one batch after the other; then the same with preads. A round compares neighbours
in time, since single runs stall on shared machines: the table has medians, and medians of each round's ratio
to its fio. Needs fio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from processes import PROGRAMS, build
from reporting import RESULTS, header, table

PROGRAM = PROGRAMS / "ssd_device"
READS = 4160  # distinct rows that the benchmark's skewed batches miss with 10 % cached

# Reader, batches in flight, and what issue 22 asks: the rate against fio's, and CPU microseconds per read.
CASES = {
    "io_uring, two batches in flight": ("io_uring", 2, 0.90, 3.5),
    "io_uring, isolated batches": ("io_uring", 1, 0.85, 3.5),
    "preads, two batches in flight": ("preads", 2, None, 10.0),
    "preads, isolated batches": ("preads", 1, None, 10.0),
}


@dataclass(frozen=True)
class Run:
    """Reads per second, and CPU microseconds per read."""

    rate: float
    cpu: float


def file_of(directory: Path, gib: float) -> Path:
    """The file that is read, which is made if it is not there; of whole 8 MiB."""
    mib = max(1, round(gib * 128)) * 8
    build(PROGRAM.name)
    file = directory / "ssd_device.blocks"
    if not file.exists() or file.stat().st_size != mib << 20:
        file.unlink(missing_ok=True)
        subprocess.run([str(PROGRAM), str(file), "fill", str(mib)], check=True)
    return file


def fio(file: Path, seconds: float, threads: int = 1) -> Run:
    """Reads of 4 KiB by io_uring, each thread at depth 128."""
    argv = [
        "fio",
        "--name=read",
        f"--filename={file}",
        "--readonly",
        "--direct=1",
        "--rw=randread",
        "--bs=4k",
    ]
    argv += ["--ioengine=io_uring", "--iodepth=128", "--registerfiles", "--fixedbufs", "--time_based"]
    argv += [f"--runtime={seconds}", "--norandommap", "--randrepeat=0", "--output-format=json"]
    argv += [f"--numjobs={threads}", "--group_reporting"]
    job = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] * 1e3 / job["read"]["total_ios"]
    return Run(job["read"]["iops"], cpu)


def _ours(file: Path, reader: str, seconds: float, in_flight: int) -> Run:
    argv = [str(PROGRAM), str(file), reader, str(seconds), str(in_flight), str(READS)]
    out = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    reads, wall, cpu = map(float, out.split())
    return Run(reads / wall, cpu / reads * 1e6)


def _page(directory: Path, beside: list[Run], runs: dict[str, list[Run]], about: str) -> str:
    device = subprocess.run(
        ["df", "--output=source,fstype", str(directory)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    columns = ["reader", "reads per second", "lowest to highest", "of fio's rate", "asked", "CPU µs per read"]
    middle = statistics.median

    def line(name: str, found: list[Run], share: str, asked: str, cpu: str) -> list[str]:
        rates = [run.rate / 1e3 for run in found]
        reach = f"{min(rates):.1f} to {max(rates):.1f} k"
        return [
            name,
            f"{middle(rates):.1f} k",
            reach,
            share,
            asked,
            f"{middle(r.cpu for r in found):.2f}",
            cpu,
        ]

    rows = [line("fio, io_uring, depth 128", beside, "", "", "")]
    for name, found in runs.items():
        _, _, asked, cpu = CASES[name]
        share = middle(run.rate / one.rate for run, one in zip(found, beside, strict=True))
        wanted = f"≥ {asked * 100:.0f} %" if asked else ""
        rows.append(line(name, found, f"{share * 100:.0f} %", wanted, f"≤ {cpu:g}"))
    head = header("Random reads of 4 KiB", f"{device[-2]} ({device[-1]})")
    return f"{head}{about}\n\n{table([*columns, 'asked'], rows)}"


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/ssd/device.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive")  # noqa: S108
    parser.add_argument(
        "--gib", type=float, default=8, help="size of the file, which is made if it is not there"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2, help="of each of a round's runs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ssd_device.md")
    options = parser.parse_args()
    file = file_of(options.directory, options.gib)
    beside: list[Run] = []
    runs: dict[str, list[Run]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        beside.append(fio(file, options.seconds))
        for name, (reader, in_flight, _, _) in CASES.items():
            runs[name].append(_ours(file, reader, options.seconds, in_flight))
    about = (
        f"{options.rounds} rounds of {options.seconds:g} s for each line, in turns, a file of "
        f"{options.gib:g} GiB. Each of our reads copies a row of 512 bytes out of its block; a batch has "
        f"{READS:,} reads. The share is the median of each round's ratio to fio's rate in the same "
        "round. CPU is that of all threads, without interrupts."
    )
    page = _page(options.directory, beside, runs, about)
    print(page)
    if options.save:
        (RESULTS / "ssd_device.md").write_text(page)


if __name__ == "__main__":
    main()
