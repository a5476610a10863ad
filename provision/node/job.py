"""Processes of a training job on one host, as systemd units: start, observe and stop them.

They come over SSH as errands; the Ansible module ``oeprov_job`` runs ``start`` and ``stop`` too.
"""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from typing import Any, Dict, Iterator, List

from . import answer, environments, jobfiles, jobscript, numa, openat, port, process, replicas, systemd
from .command import CommandError, System

STOPPING = "/run/oeprov-job.stop"  # names the job that is being stopped
MOST_EVENTS = 16 << 20  # bytes of events in one answer
_UNIT = re.compile(r"oeprov-(\S+)-(server|worker|replica)-\d+[.]service")  # of a job
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - where TensorFlow's workers listen
LOG_LINES = 200  # of each unit, brought back when it is stopped
_READY = {"pid": int, "host": str, "port": int, "storage": str, "is_pmem": bool}
_WORD = re.compile(r"[A-Za-z0-9.:%_-]+")  # a host or a storage


def start(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Start units, after ending those of an earlier run, and wait until each server listens.

    Without units, only prepare the job's directory and token. ``args``: ``directory`` of the job; ``user``
    that its processes run as; ``token``, or empty to leave it; ``seconds`` that a server may take;
    ``units``, each with name, unit, text, directories, mount, needs
    (files that must be there), files (to write: name in the job's directory -> text), script
    (digest of its directory; empty: none), address and port (of a server; port 0: any, which it keeps when
    systemd starts it again), fresh (of a new job: rows in its directories are another's, and refused),
    forget_events (the trainer's metrics.jsonl goes first). Gives ``servers``, the ready files' content with
    each server's name, and ``workers``, their pids by name. CommandError says why not; then nothing of them
    is left behind.
    """
    with alone(system):
        return _start(system, args)


def _start(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    directory = args["directory"]
    if not args["units"]:
        jobfiles.check_ours(system, directory, args["token"], [])
        jobfiles.prepare(system, directory, args["user"], args["token"], [])
        return {"servers": [], "workers": {}, "boot": boot_id(system)}
    units = environments.pin(system, os.path.basename(directory), args["units"])
    args = dict(args, units=units)
    _check_place(system, args)
    jobfiles.check_ours(system, directory, args["token"], units)
    _end(system, [item["unit"] for item in units])
    for item in units:
        _check_port(system, item)
    again = bool(systemd.ours(system, os.path.basename(directory)))
    try:
        for item in units:
            if item.get("forget_events"):
                openat.remove(system, _events(directory))
            # First of all, for it is the record of what else is made.
            system.write(systemd.path(item["unit"]), item["text"])
        more = [path for item in units for path in item["directories"]]
        jobfiles.prepare(system, directory, args["user"], args["token"], more)
        for item in units:
            if item.get("script"):
                jobscript.unpack(system, directory, args["user"], item["script"])
        servers = _start_units(system, args)
        workers = {item["unit"]: item["name"] for item in units if item["role"] == "worker"}
        pids = {workers[unit.name]: unit.pid for unit in systemd.show(system, list(workers)).values()}
        return {"servers": servers, "workers": pids, "boot": boot_id(system)}
    except CommandError as error:
        names = [item["unit"] for item in units]
        # A resumed job has its rows only there.
        pools = again or not all(item.get("fresh") for item in units)
        try:
            _stop(system, {"directory": directory, "units": names, "keep": again, "keep_pools": pools})
        except CommandError as more:
            raise CommandError(f"{error}; {more}")
        raise


@contextlib.contextmanager
def alone(system: System) -> Iterator[None]:
    """Run one start or stop at a time: an interrupted launch may still be starting here."""
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(system.open_lock("/run/oeprov-job.lock"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # without /run or root nothing can be started anyway
        yield


def boot_id(system: System) -> str:
    """The id of the host's boot."""
    return system.read("/proc/sys/kernel/random/boot_id").strip()


def _check_place(system: System, args: Dict[str, Any]) -> None:
    """Check systemd, files and mounts, and that no other job uses the storage."""
    if system.which("systemctl") and not systemd.is_booted(system):
        raise CommandError(
            "is not booted, as in the build of an image: a job's units start on a booted host, and its token "
            "must not lie in an image"
        )
    if not system.which("systemctl"):
        raise CommandError(
            "has no systemctl: processes of a job run as systemd units on hosts reached over ssh"
        )
    for item in args["units"]:
        for path in item["needs"]:
            if not system.exists(path):
                raise CommandError(f"{path} is missing; run: oeprov bootstrap")
        if item["mount"] and not os.path.ismount(system.path(item["mount"])):
            raise CommandError(f"{item['mount']} is not mounted; run: oeprov bootstrap")
    mounts = {item["mount"] for item in args["units"] if item["mount"]}
    jobs, mine = os.path.split(args["directory"])
    for job in sorted(set(map(systemd.job_of, systemd.ours(system)))) if mounts else []:
        if job == mine:
            continue
        others = [
            (item, mount)
            for item in jobfiles.recorded(system, os.path.join(jobs, job))
            for mount in sorted(mounts.intersection(_mount_of(system, path) for path in item["directories"]))
        ]
        found = systemd.show(system, [item["unit"] for item, _ in others])
        for item, mount in others:
            if found[item["unit"]].up:
                raise CommandError(
                    f"job {job} runs on {mount} already ({item['name']}); stop it first: oeprov stop {job}"
                )


def _mount_of(system: System, path: str) -> str:
    """The mount point that a path is on, as far as it is mounted."""
    while path != "/" and not os.path.ismount(system.path(path)):
        path = os.path.dirname(path)
    return path


def _check_port(system: System, item: Dict[str, Any]) -> None:
    if not item.get("port"):
        return
    why = port.blocked(item["address"], item["port"])
    if why:
        who = port.holder(system, item["port"])
        setting = "--port" if item["role"] == "replica" else "parameter_server_port"
        raise CommandError(_refusal(item, item["address"], item["port"], why, who, setting))


def _refusal(item: Dict[str, Any], address: str, number: int, why: str, who: str, setting: str) -> str:
    ours = _UNIT.search(who)
    return "{}: port {} on {} cannot be used: {}; {}, or choose another {} (0: any free one)".format(
        item["name"],
        number,
        address,
        f"{who} listens there" if who else why,
        "oeprov stop " + ours.group(1) if ours else "free it",
        setting,
    )


def worker_ports(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Ports at which workers can listen for each other; changes nothing.

    ``args``: ``directory`` of the job; ``workers``, each with name and port (0: any that is free now). Gives
    ``ports`` in that order. CommandError names who has a port; a worker of this job does not count, since
    ``start`` ends it first.
    """
    job, found = os.path.basename(args["directory"]), []
    with contextlib.ExitStack() as held:  # so that no two get the same one
        for item in args["workers"]:
            if not item["port"]:
                probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                probe.bind((_EVERYWHERE, 0))
                found.append(probe.getsockname()[1])
                continue
            why = port.blocked(_EVERYWHERE, item["port"])
            who = port.holder(system, item["port"]) if why else ""
            ours = _UNIT.search(who)
            if why and not (ours and ours.groups() == (job, "worker")):
                raise CommandError(_refusal(item, _EVERYWHERE, item["port"], why, who, "worker_port"))
            found.append(item["port"])
    return {"ports": found}


def _start_units(system: System, args: Dict[str, Any]) -> List[Dict[str, Any]]:
    directory, units = args["directory"], args["units"]
    names = [item["unit"] for item in units]
    ready = {item["unit"]: os.path.join(directory, "ready", item["name"] + ".json") for item in units}
    uid, gid = jobfiles.ensure_user(system, args["user"])
    for item in units:
        openat.remove(system, ready[item["unit"]])
        for name, text in item.get("files", {}).items():
            openat.write(system, os.path.join(directory, name), text, 0o600, uid, gid)
    lasting = [item["unit"] for item in units if item["role"] != "worker"]
    if lasting:
        system.check(["systemctl", "enable", "--no-reload", "--quiet"] + lasting)
    system.check(["systemctl", "daemon-reload"])
    # A unit that does not start is reported below, with its last lines.
    begun = system.run(["systemctl", "start"] + names, timeout=args["seconds"])
    servers, again = [], False
    deadline = time.time() + args["seconds"]
    for item in units:
        if item["role"] != "worker":
            found = _wait_ready(system, item, ready[item["unit"]], deadline, args["seconds"])
            servers.append(dict(found, name=item["name"], unit=item["unit"]))
            # Workers know its port, so it must have the same one after a restart by systemd.
            pinned = re.sub(r"( --port) 0(?=\s)", r"\1 {:d}".format(found["port"]), item["text"], count=1)
            if pinned != item["text"]:
                system.write(systemd.path(item["unit"]), pinned)
                again = True
        elif not begun.ok:
            unit = systemd.show(system, [item["unit"]])[item["unit"]]
            raise CommandError(f"{item['name']} did not start: {systemd.how_it_ended(system, unit)}")
    if again:
        system.check(["systemctl", "daemon-reload"])
    return servers


def _ready(system: System, path: str) -> Dict[str, Any]:
    """What a server's ready file says; empty unless it is one.

    The job's user writes it, and its host and port become part of units.
    """
    try:
        found = json.loads(openat.read(system, path))
        known = {key: found[key] for key in _READY}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if any(type(known[key]) is not kind for key, kind in _READY.items()):
        return {}
    if type(found.get("version")) is int:
        known["version"] = found["version"]  # that a replica serves
    words = all(_WORD.fullmatch(known[key]) for key in ("host", "storage"))
    return known if words and known["pid"] > 0 and 0 < known["port"] < 1 << 16 else {}


def _wait_ready(
    system: System, item: Dict[str, Any], path: str, deadline: float, seconds: float
) -> Dict[str, Any]:
    while True:
        found = _ready(system, path)
        if found:
            return dict(found, started=process.start_time(found["pid"]))
        unit = systemd.show(system, [item["unit"]])[item["unit"]]
        if not unit.up or unit.restarts or unit.failing:
            raise CommandError(f"{item['name']} did not start: {systemd.how_it_ended(system, unit)}")
        if system.read(STOPPING) == os.path.basename(os.path.dirname(os.path.dirname(path))):
            raise CommandError(f"{item['name']} was stopped before it was ready")
        if time.time() > deadline:
            said = systemd.last_words(systemd.journal(system, unit.name, 20, manager=False))
            raise CommandError(
                "{} was not ready after {:.0f} s{}; if it needs longer, raise {}".format(
                    item["name"],
                    seconds,
                    "; its last line: " + said if said else "",
                    "--start-timeout" if item["role"] == "replica" else "parameter_server_start_timeout",
                )
            )
        time.sleep(0.3)


def stop(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Stop units of the job, and remove them and their files; idempotent.

    ``args``: ``directory``; ``token`` (a job here with another one is left alone: CommandError), or none;
    ``role``, or ``units`` by name, or neither for all; ``keep``: leave the job's directory; ``keep_pools``:
    leave storage directories that may hold rows; ``pools``: directories for rows of servers by name.

    Gives ``stopped``: for each name, whether it ran, exit code, its last lines, its last counters and
    ``rows``, a directory left that may hold rows; and ``rows``: those of ``pools`` that may hold rows, of
    servers whose units are gone already. The directory of a job whose run lies here (checkpoints!) is never
    removed.
    """
    _check_token(system, args)
    # A start of this job that still waits for its servers ends when it finds this file.
    system.write(STOPPING, os.path.basename(args["directory"]))
    try:
        with alone(system):
            _check_token(system, args)  # another job's start may have ended meanwhile
            return _stop(system, args)
    finally:
        system.remove(STOPPING)


def _check_token(system: System, args: Dict[str, Any]) -> None:
    jobfiles.check_token(system, args["directory"], args.get("token", ""), "that one was left alone")


def _stop(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    directory = args["directory"]
    wanted = args.get("units")
    items = [
        item
        for item in jobfiles.recorded(system, directory)
        if (wanted is None or item["unit"] in wanted) and args.get("role") in (None, "", item["role"])
    ]
    names = [item["unit"] for item in items]
    before = systemd.show(system, names)
    _end(system, names)
    after = systemd.show(system, names)
    stopped = {}
    for item in items:
        unit = after[item["unit"]]
        stopped[item["name"]] = {
            "ran": before[item["unit"]].up or before[item["unit"]].ending,
            "exit_code": unit.exit_code,
            "log": systemd.journal(system, item["unit"], LOG_LINES),
            "metrics": _metrics(system, directory, item["name"]),
        }
    for item in items if args.get("keep_pools") else []:
        kept = [
            path
            for path in item["directories"]
            if not path.startswith(directory + "/") and jobfiles.may_have_rows(system, path)
        ]
        item["directories"] = [path for path in item["directories"] if path not in kept]
        stopped[item["name"]]["rows"] = kept[0] if kept else ""
    links = environments.linked_by_units(system, names)
    _forget(system, directory, items, bool(args.get("keep")))
    for path in links:
        environments.clean(system, path)
    pools = {name: path for name, path in args.get("pools", {}).items() if name not in stopped}
    rows = {name: path for name, path in pools.items() if jobfiles.may_have_rows(system, path)}
    return {"stopped": stopped, "rows": rows, "removed": not system.exists(directory)}


def _end(system: System, names: List[str]) -> None:
    """Stop units and wait, as long as their units allow; CommandError if one does not end."""
    running = [unit.name for unit in systemd.show(system, names).values() if unit.up or unit.ending]
    if running:
        system.check(["systemctl", "stop"] + running, timeout=1200)
        left = [unit.name for unit in systemd.show(system, running).values() if unit.up or unit.ending]
        if left:
            raise CommandError("did not end: " + ", ".join(left))


def _forget(system: System, directory: str, items: List[Dict[str, Any]], keep: bool) -> None:
    known = [item["unit"] for item in items if system.exists(systemd.path(item["unit"]))]
    if known:
        system.run(["systemctl", "disable", "--no-reload", "--quiet"] + known)
    stays = []
    for item in items:  # before its unit, which is the record of its directories
        try:
            jobfiles.remove_scratch(system, directory, item)
        except CommandError as error:
            stays.append(str(error))
    if known:
        for name in known:
            system.remove(systemd.path(name))
        system.check(["systemctl", "daemon-reload"])
        system.run(["systemctl", "reset-failed"] + known)
    if stays:
        raise CommandError("not all could be removed: " + "; ".join(stays))
    jobfiles.forget(system, directory, items, keep)


def remove_pools(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Remove rows of servers that the job no longer has from persistent memory; idempotent.

    ``args``: ``directory`` of the job; ``servers`` with name, unit and pools. CommandError if one runs.
    """
    with alone(system):
        found = systemd.show(system, [item["unit"] for item in args["servers"]])
        for item in args["servers"]:
            if found[item["unit"]].up:
                raise CommandError(f"{item['name']} still runs")
        for item in args["servers"]:
            jobfiles.remove_scratch(system, args["directory"], dict(item, directories=[item["pools"]]))
    return {}


def remove(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Remove all files of a job here, with its run and checkpoints; idempotent.

    ``args`` as for ``remove_pools``, of all its processes. CommandError if one of them runs.
    """
    directory = args["directory"]
    remove_pools(system, args)
    with alone(system):
        items = jobfiles.recorded(system, directory)
        found = systemd.show(system, [item["unit"] for item in items])
        for item in items:
            if found[item["unit"]].up or found[item["unit"]].ending:
                raise CommandError(f"{item['name']} still runs")
        _forget(system, directory, items, True)
        jobfiles.remove(system, directory)
    return {}


def observe(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Observe the job's units; changes nothing.

    ``args``: ``directory``; ``offset`` in the trainer's ``metrics.jsonl``, or -1 for none of it. Gives
    ``processes`` by name: active, up, pid, started, restarts, exit_code, how (it ended, in words), port,
    version (that a replica serves), metrics (its own counters), nodes (bytes by memory node) and resident
    bytes; ``cpuless`` nodes of the host; ``events``: new text of metrics.jsonl, at most 16 MiB; ``boot``: the
    boot's id.
    """
    directory = args["directory"]
    items = jobfiles.recorded(system, directory)
    units = systemd.show(system, [item["unit"] for item in items])
    found = {}
    for item in items:
        unit = units[item["unit"]]
        ready = _ready(system, os.path.join(directory, "ready", item["name"] + ".json")) if unit.up else {}
        found[item["name"]] = {
            "active": unit.active,
            "up": unit.up,
            "pid": unit.pid,
            "started": process.start_time(unit.pid) if unit.pid else 0,
            "restarts": unit.restarts,
            "exit_code": None if unit.up or unit.ending else unit.exit_code,
            "how": systemd.how_it_ended(system, unit) if unit.restarts or unit.failing or not unit.up else "",
            "port": ready.get("port", 0),
            "version": ready.get("version"),
            "metrics": _metrics(system, directory, item["name"]),
            "nodes": numa.process_bytes(system, unit.pid) if unit.pid else {},
            "resident": process.resident_bytes(unit.pid) or 0,
        }
    return {
        "boot": boot_id(system),
        "processes": found,
        "cpuless": [node.id for node in numa.without_cpus(numa.observe_nodes(system))],
        "events": _tail(system, _events(directory), args.get("offset", -1)),
    }


def send(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Signal the main process of one unit: ``directory`` of the job, ``name`` and ``signal`` (SIGTERM)."""
    job = os.path.basename(args["directory"])
    unit = f"oeprov-{job}-{args['name']}.service"
    system.check(["systemctl", "kill", "--kill-who=main", "--signal=" + args["signal"], unit])
    return {}


def _metrics(system: System, directory: str, name: str) -> Dict[str, Any]:
    """A process's own counters; empty without such a file."""
    try:
        found = json.loads(openat.read(system, os.path.join(directory, "metrics", name + ".json")))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _events(directory: str) -> str:
    return os.path.join(directory, "run", "metrics.jsonl")


def check_data(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Run a program that checks data, as the user that will read it (created if missing).

    ``args``: ``user``, ``argv`` and ``seconds``. Gives ``problem``, its last line, empty after success.
    """
    jobfiles.ensure_user(system, args["user"])  # a host without an earlier job does not have it
    done = system.run(["runuser", "-u", args["user"], "--"] + args["argv"], timeout=args["seconds"])
    if done.ok:
        return {"problem": ""}
    said = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
    return {"problem": said[-1] if said and said[-1].startswith("error: ") else done.explain()}


def _tail(system: System, path: str, offset: int) -> str:
    if offset < 0:
        return ""
    try:
        with openat.opened(system, path) as file:
            file.seek(offset)
            return file.read(MOST_EVENTS).decode("utf-8", "replace")
    except OSError:
        return ""


_ERRANDS = {
    "start": start,
    "stop": stop,
    "observe": observe,
    "send": send,
    "remove_pools": remove_pools,
    "remove": remove,
    "check_data": check_data,
    "worker_ports": worker_ports,
    "deliver_script": jobscript.deliver,
    "pin": replicas.pin,
}


def main(wanted: Dict[str, Any]) -> None:
    """Print the result of one errand, or its error, as one line of JSON."""
    answer.give(lambda: {"ok": _ERRANDS[wanted["errand"]](System(), wanted["args"])})
