"""Units of systemd, by ``systemctl`` and ``journalctl``."""

import os
import re
from typing import Dict, List, NamedTuple

from .command import System, printable

DIRECTORY = "/etc/systemd/system"
_PROPERTIES = "Id,ActiveState,SubState,MainPID,Result,ExecMainCode,ExecMainStatus,NRestarts"
_KILLED = (2, 3)  # CLD_KILLED and CLD_DUMPED, in ExecMainCode
_OF_JOB = re.compile(r"oeprov-([A-Za-z0-9][A-Za-z0-9._-]*)-(?:server|worker|replica)-[0-9]+[.]service")
EXITED = re.compile(r"Main process exited, (code=.*)")


class Unit(NamedTuple):
    """State of one unit; ``exit_code`` is negative for a signal, as in subprocess."""

    name: str
    active: str  # active, activating, deactivating, inactive or failed
    pid: int = 0
    restarts: int = 0
    result: str = ""  # success, exit-code, signal, oom-kill, start-limit-hit, …
    exit_code: int = 0

    @property
    def up(self) -> bool:
        """It runs, or is starting."""
        return self.active in ("active", "activating", "reloading")

    @property
    def failing(self) -> bool:
        """Its process has failed, and systemd will restart it."""
        return self.active == "activating" and not self.pid and self.result not in ("", "success")

    @property
    def ending(self) -> bool:
        """It is stopping."""
        return self.active == "deactivating"


def parse_show(text: str) -> List[Unit]:
    """Units of ``systemctl show -p …``: blocks of KEY=VALUE lines."""
    units = []
    for block in re.split(r"\n\s*\n", text.strip()):
        values: Dict[str, str] = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in values:
            continue
        status = _number(values.get("ExecMainStatus", ""))
        code = _number(values.get("ExecMainCode", ""))
        units.append(
            Unit(
                name=values["Id"],
                active=values.get("ActiveState", "inactive"),
                pid=_number(values.get("MainPID", "")),
                restarts=_number(values.get("NRestarts", "")),
                result=values.get("Result", ""),
                exit_code=-status if code in _KILLED else status,
            )
        )
    return units


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def show(system: System, names: List[str]) -> Dict[str, Unit]:
    """The units by name; an unknown one is inactive. CommandError without systemd."""
    if not names:
        return {}
    out = system.check(["systemctl", "show", "--no-pager", "-p", _PROPERTIES] + names)
    found = {unit.name: unit for unit in parse_show(out)}
    return {name: found.get(name, Unit(name, "inactive")) for name in names}


def journal(system: System, name: str, lines: int, manager: bool = True) -> List[str]:
    """The last lines of a unit, oldest first; empty without a journal.

    ``manager``: include systemd's lines about the unit.
    """
    which = ["-u", name] if manager else ["_SYSTEMD_UNIT=" + name]
    result = system.run(["journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(lines)] + which)
    return result.out.splitlines() if result.ok else []


def how_it_ended(system: System, unit: Unit) -> str:
    """How the unit ended last: signal or exit status, and its last line."""
    own = journal(system, unit.name, 20, manager=False)
    lines = journal(system, unit.name, 60)
    starts = [number for number, line in enumerate(lines) if line.startswith("Started ")]
    if starts and not unit.restarts:
        lines = lines[starts[-1] :]  # earlier lines are of another start
    exits = [match.group(1) for match in map(EXITED.search, lines) if match]
    if unit.exit_code < 0:
        how = f"it was killed by signal {-unit.exit_code}"
    elif unit.exit_code and unit.result in ("", "success", "exit-code"):
        how = f"it ended with exit status {unit.exit_code}"
    elif exits:
        how = f"its process ended ({exits[-1]})"
    elif unit.result == "exit-code":
        how = "it could not be started"
    elif unit.result in ("", "success"):
        how = "it ended"
    else:
        how = f"systemd says {unit.result}"
    if unit.result == "oom-kill":
        how += " (the host ran out of memory)"
    said = last_words(own, errors_only="killed" in how)
    return how + (": " + said if said else "")


def last_words(lines: List[str], errors_only: bool = False) -> str:
    """The last line that begins with ``error:``, else the last line of any kind."""
    said = [printable(line.strip()) for line in lines if line.strip()]
    errors = [line[len("error:") :].strip() for line in said if line.lower().startswith("error:")]
    return (errors or ([] if errors_only else said) or [""])[-1]


def job_of(name: str) -> str:
    """The job that a unit belongs to; empty for a unit that is not of a job."""
    match = _OF_JOB.fullmatch(name)
    return match.group(1) if match else ""


def is_booted(system: System) -> bool:
    """Whether systemd runs this system; not so in a chroot, or in the build of a container image."""
    if system.exists("/run/systemd/system"):
        return True
    return system.run(["systemctl", "is-system-running"]).out.strip() != "offline"


def ours(system: System, job: str = "") -> List[str]:
    """Names of a job's units on this host; of all jobs if none is named."""
    owners = [(name, job_of(name)) for name in system.list(DIRECTORY)]
    return [name for name, owner in owners if owner and job in ("", owner)]


def path(name: str) -> str:
    """Path of a unit's file."""
    return os.path.join(DIRECTORY, name)
