"""One worker and two on this machine's cores, and on paper what a cluster of them would do.

Measured: the trainer as one process on one core, and as two in step on a core each, every worker with a whole
batch of its own, the server on the same cores; and one worker on all cores, for what a step computes, sends,
and costs the server. From the latter a small model, printed with its table, says what 1 to 16 workers and 1
to 8 servers would train on faster networks. A run appends lines of JSON; the report is made of all of them.

With --network (root only), the model is checked instead: two workers and a server in network namespaces of
their own, whose cables have so many Mb/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import networks
import pipeline
from processes import Server, server
from reporting import RESULTS, append, header, lines_of, measured, table, when

from provision.jobs.worker_group import free_endpoints

WORKERS, SERVERS, GIGABITS = (1, 2, 4, 8, 16), (1, 2, 4, 8), (10, 25, 100)
PAYLOAD = 0.94  # of a network's bits: Ethernet's, IP's and TCP's headers take the rest
ROUND_TRIP = 1e-4  # seconds between hosts of one network
SERVER_CORES = 8


def main() -> int:
    """Measure one dim, or report."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training workers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--cap", type=int, default=40000, help="--max-cardinality; 0: full")
    parser.add_argument("--batch-size", type=int, default=4096, help="of each worker")
    parser.add_argument("--steps", type=int, default=60, help="of the trainer in each run")
    parser.add_argument("--seconds", type=float, default=8, help="of the single worker on all cores")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", type=Path, default=RESULTS / "training_workers.jsonl")
    parser.add_argument(
        "--network", type=int, nargs="+", metavar="MBITS", help="check the model at these rates"
    )
    parser.add_argument("--report", action="store_true", help="write the tables, and measure nothing")
    options = parser.parse_args()
    if not options.report:
        append(options.parts, check(options) if options.network else measure(options))
    return report(options.parts)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of one and two workers, in turns, and the costs of a step."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _, count in itertools.product(range(options.rounds), speeds):
        speeds[count].append(together(options, count))
    with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
        costs = step_costs(options, one)
    setup = {"model": options.model, "dim": options.dim, "cap": options.cap, "batch": options.batch_size}
    return {**setup, "speeds": {str(count): found for count, found in speeds.items()}, **costs, **measured()}


def together(options: argparse.Namespace, count: int) -> float:
    """Samples a second of `count` workers in step, the server and they on `count` cores."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    if len(cores) < count:
        raise SystemExit(f"error: {count} workers need {count} cores, and there are {len(cores)}")
    with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
        os.sched_setaffinity(one.pid, cores)
        command = [sys.executable, "-m", "oe_runtime.train", "--data", "generate:1000000000", "--no-eval"]
        command += ["--model", options.model, "--dim", str(options.dim), "--steps", str(options.steps)]
        command += ["--max-cardinality", str(options.cap), "--batch-size", str(options.batch_size * count)]
        command += ["--servers", one.endpoint, "--checkpoint-steps", "0", "--run-dir", f"{directory}/run"]
        if count > 1:
            command += ["--workers", free_endpoints(count)]
        processes = [
            subprocess.Popen(
                ["taskset", "-c", str(core), *command, *(["--rank", str(rank)] if count > 1 else [])],
                stdout=subprocess.DEVNULL,
            )
            for rank, core in enumerate(cores)
        ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit("error: a worker failed")
        lines = (Path(directory) / "run/metrics.jsonl").read_text().splitlines()
    return float(next(e for e in map(json.loads, lines) if e["event"] == "end")["samples_per_s"])


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of two workers over cables of each rate, in turns; 0: without a limit."""
    steps: dict[int, list[float]] = {rate: [] for rate in (0, *options.network)}
    for _, rate in itertools.product(range(options.rounds), steps):
        steps[rate].append(2 * options.batch_size / over_cables(options, rate))
        print(f"{rate or 'unlimited'} Mb/s: {steps[rate][-1] * 1000:.1f} ms a step", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
        costs = step_costs(options, one)
    setup = {"model": options.model, "dim": options.dim, "cap": options.cap, "batch": options.batch_size}
    return {**setup, "steps": {str(rate): found for rate, found in steps.items()}, **costs, **measured()}


def over_cables(options: argparse.Namespace, megabits: int) -> float:
    """Samples a second of two workers in step on hosts of their own, and the server on a third."""
    flags = ("--host", "10.77.0.1", "--port", "7001", "--tls", "off")
    with (
        tempfile.TemporaryDirectory() as directory,
        networks.hosts(3, megabits) as (of_server, *of_workers),
        server(
            "dram",
            Path(directory),
            *flags,
            token=secrets.token_hex(),
            prefix=networks.within(of_server, []),
        ) as one,
    ):
        processes = []
        command = [sys.executable, "-m", "oe_runtime.train", "--data", "generate:1000000000", "--no-eval"]
        command += ["--model", options.model, "--dim", str(options.dim), "--steps", str(options.steps)]
        command += ["--max-cardinality", str(options.cap), "--batch-size", str(2 * options.batch_size)]
        command += ["--token-file", str(one.token_file), "--tls", "off"]
        command += ["--servers", "10.77.0.1:7001", "--checkpoint-steps", "0", "--run-dir", f"{directory}/run"]
        command += ["--workers", "10.77.0.2:7002,10.77.0.3:7003"]
        try:
            for rank, name in enumerate(of_workers):
                words = networks.within(name, [*command, "--rank", str(rank)])
                processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            statuses = [process.wait() for process in processes]
            if any(statuses):
                raise SystemExit("error: a worker failed")
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        lines = (Path(directory) / "run/metrics.jsonl").read_text().splitlines()
    return float(next(e for e in map(json.loads, lines) if e["event"] == "end")["samples_per_s"])


def step_costs(options: argparse.Namespace, one: Server) -> dict[str, float]:
    """Of a step of one worker, one thing after the other: what the model below is made of."""
    # By sockets, as between hosts: rows in shared memory are not among the server's bytes.
    with pipeline.Trained(options, one.endpoint, share_memory=False) as trained:
        trained.turn("one after the other", 0.0)  # compiles
        client = trained.trainee.model.client
        before, cpu = client.stats()["servers"][0], one.cpu_seconds()
        found = trained.turn("one after the other", options.seconds)
        after, cpu = client.stats()["servers"][0], one.cpu_seconds() - cpu
        steps = (after["pulls"]["requests"] - before["pulls"]["requests"]) or 1
        keys = after["pulls"]["keys"] - before["pulls"]["keys"]
        moved = {way: after["traffic"][way] - before["traffic"][way] for way in ("bytes_in", "bytes_out")}
        trained_here = [v for v in trained.trainee.model.weights if v.trainable]
        dense = sum(v.shape.num_elements() for v in trained_here)
    return {
        "compute_s": (found["input"] + found["compute"] + found["other"]) / 1000,
        "pull_push_s": (found["pull"] + found["push"]) / 1000,
        "keys": keys / steps,
        "bytes": sum(moved.values()) / steps,
        "server_cpu_s": cpu / steps,
        "dense_bytes": 4 * dense,
    }


def step_seconds(cell: dict[str, Any], workers: int, servers: int, gigabits: float) -> float:
    """The model: a step of workers in step, nothing hidden behind anything."""
    bytes_a_second = gigabits * 1e9 / 8 * PAYLOAD
    alone = cell["compute_s"] + cell["pull_push_s"]
    wire = max(1, workers / servers) * cell["bytes"] / bytes_a_second + 2 * ROUND_TRIP
    queue = max(0, workers / servers - 1) * cell["server_cpu_s"] / SERVER_CORES
    ring = 2 * (workers - 1) * (cell["dense_bytes"] / workers / bytes_a_second + ROUND_TRIP)
    return float(alone + wire + queue + ring)


def report(parts: Path) -> int:
    """The tables of the newest line of each dim."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    checks: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in lines_of(parts):
        (checks if "steps" in one else cells)[one["model"], one["dim"], one["cap"]] = one
    rows, costs = [], []
    for (model, dim, cap), cell in sorted(cells.items()):
        name = f"{model}, dim {dim}, {cap or 'full'}"
        one, two = (statistics.median(cell["speeds"][count]) for count in ("1", "2"))
        measured_at = when(cell)
        rows.append([name, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}", measured_at])
        values = [cell[what] for what in ("compute_s", "pull_push_s", "server_cpu_s")]
        sizes = [f"{cell['keys']:,.0f}", f"{cell['bytes'] / 1e6:.2f}", f"{cell['dense_bytes'] / 1e6:.2f}"]
        a_second = cell["keys"] / cell["server_cpu_s"] / 1e6
        costs.append([name, *(f"{1000 * value:.1f}" for value in values), *sizes, f"{a_second:.1f}"])
    text = header("Several workers: measured on this machine, and a cluster on paper")
    text += """\
## One core and one worker, two cores and two workers

The trainer, adagrad, generated rows, 4096 of them for each worker in a step; workers in step, whose dense
gradients TensorFlow sums; one server on the workers' cores. Medians of rounds in turns.

"""
    text += table(["", "1 worker, samples/s", "2 workers, samples/s", "×", "measured"], rows)
    text += """
## What a step costs

One worker on all cores, one thing after the other: milliseconds it computes (input and Keras included), and
waits for pull and push over loopback; milliseconds of processor time of the server; keys pulled (and pushed:
ids of a batch, each once in each table), megabytes of both on the wire, megabytes of dense weights; million
keys that a core of the server pulls and pushes in a second.

"""
    columns = [
        "compute, ms",
        "pull + push, ms",
        "server, ms",
        "keys",
        "wire, MB",
        "dense, MB",
        "Mkeys/s a core",
    ]
    text += table(["", *columns], costs)
    text += f"""
## The same on a network: a model

n workers like the one above, m servers of {SERVER_CORES} cores, g Gb/s in each direction at every host, of
which {PAYLOAD:.0%} are payload, round trips of {ROUND_TRIP * 1e6:.0f} µs. A step of workers in step takes

    alone + wire + queue + ring
    alone = computation, pull and push over loopback, as above (with the client's work and a server's)
    wire  = max(1, n / m) · bytes / g + 2 round trips       (pull and push, at the busiest host)
    queue = max(0, n / m - 1) · server's processor time / its cores    (other workers' keys; equal ones too)
    ring  = 2 (n - 1) · (dense bytes / n / g + a round trip)

Nothing is hidden behind anything, which workers in step come near to today (they only read input ahead),
keys are spread evenly, and hosts do nothing else. Samples/s, and in brackets the share of the step that is
"alone": what is missing to 100% is what the cluster costs.

"""
    lines = []
    for ((model, dim, cap), cell), gigabits, n in itertools.product(sorted(cells.items()), GIGABITS, WORKERS):
        found = []
        for m in SERVERS:
            seconds = step_seconds(cell, n, m, gigabits)
            share = (cell["compute_s"] + cell["pull_push_s"]) / seconds
            found.append(f"{n * cell['batch'] / seconds:,.0f} ({share:.0%})")
        of = f"{n} worker{'s' if n > 1 else ''}"
        lines.append([f"{model}, dim {dim}, {cap or 'full'}, {gigabits} Gb/s, {of}", *found])
    text += table(["", *(f"{m} server{'s' if m > 1 else ''}" for m in SERVERS)], lines)
    text += checked(checks)
    parts.with_suffix(".md").write_text(text)
    print(text)
    return 0


def checked(checks: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """The model's steps of two workers beside measured ones, over cables of limited bandwidth."""
    rows = []
    for (model, dim, cap), cell in sorted(checks.items()):
        steps = {int(rate): statistics.median(found) for rate, found in cell["steps"].items()}
        name, base = f"{model}, dim {dim}, {cap or 'full'}", steps.pop(0)
        measured_at = when(cell)
        rows.append([f"{name}, unlimited", f"{1000 * base:.0f}", "", "", measured_at])
        for rate, found in sorted(steps.items(), reverse=True):
            # The cores are shared, so what a step takes without the network is measured, not modelled.
            network = step_seconds(cell, 2, 1, rate / 1000) - step_seconds(cell, 2, 1, math.inf)
            modelled = base + network
            cells = [f"{1000 * found:.0f}", f"{1000 * modelled:.0f}", f"{found / modelled:.2f}", measured_at]
            rows.append([f"{name}, {rate} Mb/s", *cells])
    text = """
## The model checked: two workers and a server on hosts of their own

Network namespaces of this machine, each with a cable of limited bandwidth in each direction; the server and
both workers share its two cores, so a step without a limit is the machine's and not a cluster's. Modelled:
that step, and the model's wire and ring at the rate. Milliseconds of a step, medians of rounds in turns.

"""
    return text + table(["", "measured, ms", "modelled, ms", "measured / modelled", "measured"], rows)
