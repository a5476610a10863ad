"""Users of persistent memory that a change would interrupt: training jobs, and processes with open files."""

from typing import Dict, List

from . import systemd
from .command import CommandError, System
from .state import State
from .step import Step


def observe_jobs(system: System) -> List[str]:
    """Ids of training jobs with a unit that runs on this host."""
    names = systemd.ours(system)
    try:
        units = systemd.show(system, names)
    except CommandError:
        return []
    return sorted({systemd.job_of(unit.name) for unit in units.values() if unit.up or unit.ending})


def observe_users(system: System, where: str, by_command: bool = False) -> List[str]:
    """``PID NAME`` of every process with a file, a mapping or its directory below ``where``.

    ``by_command``: also of those whose command line names a path there, such as an interpreter's.
    """
    found = []
    below = where.rstrip("/") + "/"
    for pid in sorted((name for name in system.list("/proc") if name.isdigit()), key=int):
        base = "/proc/" + pid
        links = [system.link(f"{base}/{name}") for name in ("cwd", "root", "exe")]
        links += [
            system.link(f"{base}/fd/{name}")
            for name in system.list(base + "/fd")  # empty if the process has just ended
        ]
        open_there = any(link == where or link.startswith(below) for link in links)
        open_there = open_there or (by_command and below in system.read(base + "/cmdline"))
        if open_there or " " + below in system.read(base + "/maps"):
            found.append("{} {}".format(pid, system.read(base + "/comm").strip() or "?"))
    return found


def unmounted_by(steps: List[Step]) -> List[str]:
    """Mount points that the steps unmount."""
    return [where for step in steps if step.action == "unmount" for where in step.args["where"]]


def describe(users: List[str]) -> str:
    """At most five processes, in words: 812 (python3), 900 (sh)."""
    shown = ["{} ({})".format(*item.split(" ", 1)) for item in users[:5]]
    more = [f"and {len(users) - 5} more"] if len(users) > 5 else []
    return ", ".join(shown + more)


def problems(state: State, steps: List[Step]) -> List[str]:
    """Why the steps must wait: training jobs or other processes use what they change."""
    found = []
    if any(step.disturbs for step in steps):
        found = [
            f"training job {job} runs on this host and would lose its memory or files; stop it first: "
            f"oeprov stop {job}"
            for job in state.jobs
        ]
    users: Dict[str, List[str]] = {
        where: state.users[where] for where in unmounted_by(steps) if state.users.get(where)
    }
    # A job's own processes are named by the job already.
    if not found:
        found += [
            f"{where} is in use and cannot be unmounted: process {describe(items)}; stop it first"
            for where, items in users.items()
        ]
    return found
