"""What a job and its processes do now, here and on its hosts: one round trip per host, all at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from provision.cluster.errors import HostError, TrainingError
from provision.jobs.backends.ssh import Answer, Fleet
from provision.jobs.ending import newest_checkpoint
from provision.jobs.metrics import Summary, summary
from provision.jobs.store import ACTIVE, Job, ProcessState
from provision.node import numa, process
from provision.node.command import System


def processes(job: Job, states: list[ProcessState]) -> list[dict[str, Any]]:
    """Every process with its state, counters and memory; ready for JSON."""
    answers: Mapping[str, Answer | HostError] = {}
    if any(item.unit and item.alive for item in states):
        answers = Fleet(job, job.spec()).observe()
    contained = bool(states) and bool(job.spec().settings.get("on"))
    cpus = {spec.name: spec.cpus for spec in job.spec().processes} if states else {}
    return [
        {**_process(job, item, answers.get(item.host), contained), "cpus": cpus.get(item.name, "")}
        for item in states
    ]


def _process(
    job: Job, item: ProcessState, answer: Answer | HostError | None, contained: bool
) -> dict[str, Any]:
    """One process; ``contained``: the pid here is that of the container engine."""
    found: dict[str, Any] = {
        "name": item.name,
        "role": item.role,
        "host": item.host,
        "pid": item.pid,
        "alive": item.alive,
        "state": "runs" if item.alive else "ended",
        "trouble": "",
        "exit_code": item.exit_code,
        "endpoint": item.endpoint,
        "unit": item.unit,
        "memory_bytes": None,
        "version": None,
    }
    if item.role == "replica" and item.alive and not item.unit:
        found["version"] = job.ready(item.name).get("version")
    counters = _read_counters(job.server_metrics(item.name)) if item.role == "parameter_server" else {}
    nodes: Mapping[str, int] = {}
    cpuless: list[int] = []
    if item.alive and not item.unit and not contained:
        found["memory_bytes"] = process.resident_bytes(item.pid)
        nodes = numa.process_bytes(System(), item.pid)
        cpuless = [node.id for node in numa.without_cpus(numa.observe_nodes(System()))]
    elif isinstance(answer, HostError):
        found.update(alive=None, state="does not answer", trouble=answer.reason)
    elif answer is not None and item.alive:
        seen = answer["processes"].get(item.name)
        if seen is None:
            found.update(alive=False, state="gone", trouble="its unit is no longer on the host")
        else:
            counters, nodes, cpuless = seen["metrics"] or counters, seen["nodes"], answer["cpuless"]
            if seen["up"] and counters.get("pid", seen["pid"]) != seen["pid"]:
                counters = {}  # those of an earlier process
            found.update(alive=seen["up"], pid=seen["pid"], memory_bytes=seen["resident"] or None)
            found.update(_unit_state(item, seen, answer["boot"]))
            found["version"] = seen.get("version")
            if seen["port"] and item.endpoint:
                found["endpoint"] = f"{item.endpoint.rpartition(':')[0]}:{seen['port']}"
    rates = counters.get("rates") or {}
    running = bool(found["alive"])
    return {
        **found,
        **_tiers(counters, nodes, cpuless, found["memory_bytes"] if running else None),
        **{name: rates.get(name) if running else None for name in ("pulled_keys_per_s", "pushed_keys_per_s")},
        "tables": _tables(counters.get("tables")),
    }


def _unit_state(item: ProcessState, seen: Mapping[str, Any], boot: str) -> dict[str, str]:
    """State and trouble of a unit, which may be another process than the one that was started."""
    if not seen["up"]:
        return {"state": "ended", "trouble": seen["how"]}
    if item.boot and boot != item.boot:
        return {"state": "came back", "trouble": "the host rebooted"}
    if item.started and seen["started"] not in (0, item.started):
        return {"state": "came back", "trouble": seen["how"] or "its process ended"}
    return {"state": "runs" if seen["active"] == "active" else "starts"}


def _tiers(
    counters: Mapping[str, Any], nodes: Mapping[str, int], cpuless: list[int], resident: int | None
) -> dict[str, int | None]:
    """Bytes in DRAM and in persistent memory (or CXL), from the server's counters and its pages' nodes."""
    memory = counters.get("memory") or {}
    on_devices = int(memory.get("pmem", 0))
    if cpuless and nodes:
        if counters.get("storage") == "pmem_memkind":
            on_devices = 0  # it lies on these nodes
        far = sum(nodes.get(str(node), 0) for node in cpuless)
        return {"dram_bytes": sum(nodes.values()) - far, "pmem_bytes": far + on_devices}
    if memory:
        near = int(memory.get("dram", 0)) + int(memory.get("index", 0))
        return {"dram_bytes": near, "pmem_bytes": on_devices}
    if counters.get("storage") == "pmem_libpmem":
        return {"dram_bytes": None, "pmem_bytes": counters.get("storage_bytes")}
    return {"dram_bytes": resident, "pmem_bytes": None}


def _read_counters(path: Path) -> dict[str, Any]:
    """A server's last counters: the whole file, or its last whole line."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    for candidate in (text, *reversed(text.splitlines())):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _tables(found: Any) -> dict[str, int]:
    """Rows by table, from a list of tables with name and rows; others are left out."""
    tables = [table for table in found if isinstance(table, dict)] if isinstance(found, list) else []
    return {str(table["name"]): int(table["rows"]) for table in tables if {"name", "rows"} <= table.keys()}


def rows(found: list[dict[str, Any]]) -> dict[str, int]:
    """Rows by table, summed over the servers."""
    total: Counter[str] = Counter()
    for item in found:
        total.update(item["tables"])
    return dict(total)


# The report of a job whose files cannot be read, without ``job``, ``directory`` and ``message``.
UNREADABLE: dict[str, Any] = {
    "state": "unreadable",
    "lost_workers": [],
    **asdict(Summary()),
    "processes": [],
    "rows": {},
}


def report(job: Job) -> dict[str, Any]:
    """Everything `status` knows of one job, ready for JSON."""
    state = job.state()
    listed = processes(job, state.processes)  # this also brings what a worker far away wrote
    facts = summary(job.metrics_file)
    return {
        "job": job.id,
        "state": state.phase,
        "message": state.message,
        "lost_workers": state.lost,
        **asdict(facts),
        "checkpoint_step": newest_checkpoint(job, facts)[0],
        "directory": str(job.directory),
        "processes": listed,
        "rows": rows(listed),
    }


def readable_report(job: Job) -> dict[str, Any]:
    """``report``, or why the job's files cannot be read: one such job must not hide the others."""
    why = job.broken
    try:
        if not why:
            return report(job)
    except (TrainingError, OSError) as error:
        why = str(error)
    return {**UNREADABLE, "job": job.id, "directory": str(job.directory), "message": why}


def detailed(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The jobs shown in detail: those that run, may be on hosts or are unreadable; if none, the last job."""
    shown = {*ACTIVE, "unreadable"}
    return [item for item in reports if item["state"] in shown or may_be_on_hosts(item)] or reports[-1:]


def may_be_on_hosts(item: dict[str, Any]) -> bool:
    """Whether units of the job are on hosts, or may be."""
    return any(map(may_be_on_host, item["processes"]))


def may_be_on_host(entry: dict[str, Any]) -> bool:
    """Whether a process, as ``report`` tells of it, is a unit that may still be on its host."""
    return bool(entry["unit"]) and entry["state"] not in ("ended", "gone")
