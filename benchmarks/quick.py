"""Runs every benchmark in its shortest form, on tiny sizes: whether it works, not how fast anything is.

    python benchmarks/quick.py [--only NAME ...] [--fetch] [--jobs 2]

`make bench-quick` and CI run it. Each benchmark must end, and its tables must have figures in the rows that
are named here; whether a target is met does not count. What cannot run here is named with the reason. Peers
take part if they are in .cache/benchmarks already, or with --fetch: gigabytes, and minutes of compiling.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from processes import CACHE, OFFLINE, PROGRAMS, ROOT, build
from reporting import MISSED

SECONDS = 600  # at most, of one benchmark
SHOWN = 15  # lines of the output of one that failed


@dataclass(frozen=True)
class Quick:
    """The shortest form of a benchmark."""

    command: (
        str  # a program of the core, or after `python benchmarks/`; {out}: a directory for what it writes
    )
    rows: tuple[str, ...]  # each is within a cell of a row that has a figure in another cell
    needs: tuple[str, ...] = ()  # of NEEDS


def _module(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else f"{name} is not installed"


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"{name} is not installed"


def _path(path: str, what: str) -> Callable[[], str]:
    return lambda: "" if Path(path).exists() else f"there is no {path}: {what}"


# What a benchmark may need: a function that says why it is not here, or nothing.
NEEDS: dict[str, Callable[[], str]] = {
    "root": lambda: "" if os.geteuid() == 0 else "it needs root",
    "two cores": lambda: "" if len(os.sched_getaffinity(0)) > 1 else "it needs two cores",
    "fio": _program("fio"),
    "pandas": _module("pandas"),
    "moto": _module("moto"),
    "torch": _module("torch"),
    "namespaces": _program("ip"),
    "openssl": _program("openssl"),
    "sshd": _program("/usr/sbin/sshd"),
    "control groups": _path("/sys/fs/cgroup/memory", "no control groups of version 1 limit memory here"),
    "zram": _path("/sys/class/zram-control", "the kernel has no zram"),
    "message libraries": lambda: (
        "" if (CACHE / "transports/complete").exists() else "ZeroMQ and nng are not in .cache/benchmarks"
    ),
    "virtual nodes": lambda: "it emulates a host for many minutes; make test-lab tests what it is made of",
}
FETCHED = "message libraries"  # with --fetch
_RUNNING: set[int] = set()  # benchmarks, each in a session of its own
_INTERRUPTED = threading.Event()

TRAINING = "--dims 4 --rows 1000 --batch-size 128 --seconds 0 --rounds 1"
ENGINE = "--rows 20000 --dim 8 --optimizer adagrad --rounds 1"
QUICK = {
    "engine": Quick(f"engine {ENGINE}", ("socket", "ours, TCP", "ours, TLS", "ours (ours, dram_pmem)")),
    "engine_loopback": Quick(
        "engine_loopback.py --dims 4 --steps 1 --tls off on --by-key 1000 --precisions 1000",
        ("in process", "shared memory", "sockets", "TLS", "copied"),
    ),
    "transports": Quick(
        "transports.py --rounds 1 --seconds 0.1 --out {out}/page.md",
        ("socket", "asio", "zeromq", "nng"),
        ("message libraries",),
    ),
    "table_bench": Quick("table_bench 2000", ("dram",)),
    "memory": Quick(
        "memory.py --rows 1000 --dims 9 --optimizers adagrad --out {out}/page.md",
        ("adagrad, dim 9, float32", "adagrad, dim 9, bfloat16 rows and state"),
    ),
    "pmem/tiers": Quick(
        'pmem --only tiers --runs "20000 8 1 0 5" "20000 8 1 6 5"', ("dram_pmem", "Ori-Cache")
    ),
    "pmem/tiers-checkpoints": Quick(
        'pmem --only tiers-checkpoints --runs "20000 8 1 6 10 5"', ("dram_pmem", "pmem_libpmem")
    ),
    "pmem/checkpoints": Quick('pmem --only checkpoints --runs "dram_pmem 20000 8 1 0 20 1"', ("dram_pmem",)),
    "pmem/loopback": Quick('pmem --only loopback --runs "dram_pmem 20000 8 1 20 1"', ("dram_pmem",)),
    "pmem/recovery": Quick('pmem --only recovery --runs "50000 8 1"', ("recovery of the pool", "loading")),
    "pmem/kernel_tiering": Quick("pmem/kernel_tiering.py", (), ("virtual nodes",)),
    "ssd/device": Quick(
        "ssd/device.py --directory {out} --gib 0.06 --rounds 1 --seconds 0.2",
        ("fio", "two batches in flight", "isolated batches"),
        ("fio",),
    ),
    "ssd/step": Quick(
        "ssd/step.py --directory {out} --gib 0.06 --rows 20000 --dim 8 --rounds 1 "
        "--only dram_ssd dram_pmem dram",
        ("`dram_ssd`", "`dram_pmem`", "`dram`"),
        ("root", "fio", "control groups"),
    ),
    "ssd/memory_drive": Quick(
        "ssd/memory_drive.py 1 {python} {benchmarks}/ssd/step.py --directory {{}} --gib 0.06 --rows 20000 "
        "--dim 8 --rounds 1 --only dram_ssd",
        ("`dram_ssd`",),
        ("root", "fio", "control groups", "zram"),
    ),
    "training/vocabularies": Quick(
        f"training vocabularies --models wdl {TRAINING} --kinds stock served openembedding",
        ("stock", "served"),
    ),
    "training/auc": Quick(
        "training auc --data generate:3000:1 --dims 4 --optimizers adagrad --seeds 0 --epochs 1 "
        '--kinds served "stock by row" --max-cardinality 1000',
        ("served", "stock by row"),
    ),
    "training/pipeline": Quick(
        "training pipeline --dim 4 --cap 1000 --batch-size 128 --seconds 0 --rounds 1",
        ("one after the other", "pulled ahead", "staleness 1"),
    ),
    "training/checkpoints": Quick(
        "training checkpoints --dim 4 --cap 1000 --batch-size 128 --every 12 --seconds 0", ("every 12",)
    ),
    "training/drive": Quick(
        "training drive --dim 4 --cap 1000 --batch-size 128 --before 9 --steps 5 --pairs 1 "
        "--gib 0.06 --directory {out}",
        ("deepfm",),
        ("fio",),
    ),
    "training/workers": Quick(
        "training workers --dim 4 --cap 1000 --batch-size 128 --steps 5 --seconds 1 --rounds 1",
        ("deepfm", "100 Gb/s, 16 workers"),
        ("two cores",),
    ),
    "training/torch": Quick(
        f"training torch --layers EmbeddingBag {TRAINING}",
        ("torch.nn, sparse=True", "in process", "served", "collection", "collection, served"),
        ("torch",),
    ),
    "training/torch-turns": Quick(
        "training torch --turns --dims 4 --rows 1000 --batch-size 64 --rounds 1",
        ("nn.EmbeddingBag(sparse=True)", "plain layers", "EmbeddingBagCollection", "the dense part alone"),
        ("torch",),
    ),
    "training/schemas": Quick(
        "training schemas --schemas shop --dims 9 --max-cardinality 1000 --batch-size 128 --seconds 0 "
        "--rounds 1",
        ("shop",),
    ),
    "training/job": Quick(
        "training job --dim 4 --cap 1000 --batch-size 64 --rows 20000 --epochs 1 --pairs 1", ("deepfm",)
    ),
    "training/serving": Quick(
        "training serving --dims 4 --rows 1000 --sizes 1 --seconds 0.1 --rounds 1 --kinds "
        '"TensorFlow, save_as_original_model" "serving, rows inside" "serving, rows of a checkpoint" '
        '"serving, rows at a server"',
        ("save_as_original_model", "rows inside", "a checkpoint", "at a server"),
    ),
    "serving_freshness": Quick(
        "serving.py --dims 4 --rows 1000 --freshness 2 --followers 2 --out {out}/page.md",
        ("rows at a server", "rows that follow checkpoints", "2 followers"),
    ),
    "serving_soak": Quick(
        "serving_soak.py --dim 4 --rows 1000 --minutes 0.05 --requests 200 --connections 50 "
        "--out {out}/page.md",
        ("memory of follower 1", "steady load", "50 connections"),
    ),
    "serving": Quick(
        "serving.py --dims 4 --rows 1000 --sizes 1 --seconds 0.1 --rounds 1 --out {out}/page.md",
        ("rows at a server", "rows inside", "a connection each"),
        ("openssl",),
    ),
    "reader": Quick(
        "reader.py --data generate:500 --copies 2 --rounds 1 --short --out {out}/page.md",
        ("ours, to ids", "pandas, to ids", "tf.data, to ids", "rich: ours, to ids", "reading alone"),
        ("pandas",),
    ),
    "object_stores": Quick("object_stores.py --repeat 1 --only small --no-faults", ("pyarrow",), ("moto",)),
    "plan_hosts": Quick(
        "plan_hosts.py --hosts 2 --repetitions 1 --only ssh-true plan",
        ("ssh-true", "plan"),
        ("root", "namespaces", "sshd"),
    ),
}


def without_figures(output: str, rows: Sequence[str]) -> list[str]:
    """Those of the rows that have no figure in any table of the output."""
    found = set()
    for line in output.splitlines():
        cells = re.split("[|│]", line)[1:-1]
        for row in rows:
            others = [cell for cell in cells if row not in cell]
            if len(others) < len(cells) and re.search(r"\d", " ".join(others)):
                found.add(row)
    return [row for row in rows if row not in found]


def words(command: str, directory: Path) -> list[str]:
    """The command line of a quick form that writes into the directory."""
    program, *more = shlex.split(command)
    places = {"out": directory, "python": sys.executable, "benchmarks": ROOT / "benchmarks"}
    path = ROOT / "benchmarks" / program
    if not path.exists():
        build(program)
    begin = [sys.executable, str(path)] if path.exists() else [str(PROGRAMS / program)]
    found = [*begin, *(word.format(**places) for word in more)]
    return [*found, "--parts", str(directory / "parts.jsonl")] if program == "training" else found


def run(name: str, quick: Quick, fetch: bool) -> str:
    """Run one; what is said of it begins with ok, not run or FAILED."""
    for need in quick.needs:
        reason = "" if fetch and need == FETCHED else NEEDS[need]()
        if reason:
            return f"not run  {name}: {reason}"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **({} if fetch else {OFFLINE: "1"})}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-quick-") as directory, tempfile.TemporaryFile() as log:
        try:
            command = words(quick.command, Path(directory))
            status = _ended(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )
        except subprocess.CalledProcessError as error:  # a program that does not build
            status = error.returncode
        log.seek(0)
        output = log.read().decode(errors="replace")
    problem = ""
    if status not in (0, MISSED):
        problem = f"it did not end in {SECONDS} s" if status is None else f"it ended with status {status}"
    elif empty := without_figures(output, quick.rows):
        problem = f"no figures for {', '.join(empty)}"
    if problem:
        last = [f"    {line}" for line in output.rstrip().splitlines()[-SHOWN:]]
        return "\n".join([f"FAILED   {name}: {problem}: {quick.command}", *last])
    left_out = sorted(set(re.findall(r"([\w-]+) is not (?:in \.cache/benchmarks|installed)", output)))
    without = f", without {', '.join(left_out)}" if left_out else ""
    return f"ok       {name}: {time.monotonic() - began:.0f} s{without}"


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit status; None after SECONDS, when it is killed with the servers and workers that it started."""
    _RUNNING.add(process.pid)
    if _INTERRUPTED.is_set():  # what runs by then has been killed, maybe without this one
        _kill(process.pid)
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process.pid)
        process.wait()
        return None
    finally:
        _RUNNING.remove(process.pid)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(group, signal.SIGKILL)


def main() -> int:
    """Run them; 1 if one failed, and 130 after Ctrl-C or SIGTERM, with which all end."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quick.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=QUICK, metavar="NAME", help="some of them", default=QUICK
    )
    parser.add_argument("--fetch", action="store_true", help="fetch and build peers that are not there yet")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, said = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as threads:
        try:
            begun = [threads.submit(run, name, QUICK[name], options.fetch) for name in options.only]
            for done in as_completed(begun):
                said.append(done.result())
                print(said[-1], flush=True)
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            _INTERRUPTED.set()
            for group in list(_RUNNING):
                _kill(group)
            return 130
    counts = [sum(line.startswith(mark) for line in said) for mark in ("ok", "not run", "FAILED")]
    took = (time.monotonic() - began) / 60
    print(f"{counts[0]} benchmarks ran in {took:.1f} minutes, {counts[1]} did not, {counts[2]} failed")
    return 1 if counts[2] else 0


if __name__ == "__main__":
    sys.exit(main())
