"""Files of a training job on one host: its directory, its token, and what its units say of it.

A job's processes own its directory, so root trusts nothing in it: see ``openat``. What root must know to stop
a job and to clean up is in its units' files, which only root writes.
"""

import contextlib
import json
import os
import pwd
import shlex
from typing import Any, Dict, List

from . import openat, systemd
from .command import CommandError, System, printable

HOME = "/var/lib/oeprov"  # home of the user oeprov; a job's files lie in jobs/JOB
TAKEN = "belongs to another job of the same name and second, of another controller or state directory"
LOCK = "oe.lock"  # that a server of a storage directory holds
_MARKS = ("token", "job.json")  # a directory with one of them is a job's
_MOST_TABLES, _LONGEST_NAME = 8, 80  # in a message
_FOLDERS = ("ready", "metrics", "logs", "run", "checkpoints")
_USER_COMMAND = ["useradd", "--system", "--home-dir", HOME, "--no-create-home", "--shell"]


def prepare(system: System, directory: str, user: str, token: str, more: List[str]) -> None:
    """Make the job's directories and token, readable for the job's user only (created if missing)."""
    uid, gid = ensure_user(system, user)
    for path in (os.path.dirname(os.path.dirname(directory)), os.path.dirname(directory)):
        openat.make_directory(system, path, 0o755, 0, 0, (uid,))
    for path in [directory] + [os.path.join(directory, name) for name in _FOLDERS]:
        openat.make_directory(system, path, 0o700, uid, gid)
    for path in more:
        # The parents below the mount point are ours too: /mnt/pmem0/oeprov/JOB/server-0. They are root's, for
        # systemd makes what a link in the place of a unit's directory leads to writable.
        parent = os.path.dirname(path)
        if not path.startswith(directory + "/"):
            for above in (os.path.dirname(parent), parent):
                openat.make_directory(system, above, 0o755, 0, 0, (uid,))
        openat.make_directory(system, path, 0o700, uid, gid)
    if token:
        openat.write(system, os.path.join(directory, "token"), token.strip() + "\n", 0o600, uid, gid)


def check_ours(system: System, directory: str, token: str, items: List[Dict[str, Any]]) -> None:
    """Refuse what another job with this id has here; CommandError names it. Changes nothing.

    Ids have the second of the launch, so those of two controllers can be the same; their tokens are not.
    Without a token here, rows are another job's where ``items`` are ``fresh``, those of a new job.
    """
    there = check_token(system, directory, token, "launch this one again: it gets another id")
    for item in items if not there else []:
        for path in item["directories"] if item.get("fresh") else []:
            if not path.startswith(directory + "/") and has_rows(system, path):
                raise CommandError(foreign_rows(system, os.path.basename(directory), path))


def check_token(system: System, directory: str, token: str, advice: str) -> str:
    """The token of the job here, or nothing; CommandError, with ``advice``, if another job has it."""
    there = openat.read(system, os.path.join(directory, "token")).strip()
    if token and there and there != token.strip():
        raise CommandError(
            f"{directory} {TAKEN}; {advice}. (If it is this job, whose token was lost here: remove "
            f"{directory}/token there.)"
        )
    return there


def foreign_rows(system: System, job: str, path: str) -> str:
    """The refusal of a new job, whose directory for rows holds those of another job with its id."""
    tables = _describe_tables(system, path)
    return (
        f"{path} {TAKEN}, and holds rows{tables}; launch this one again: it gets another id. The owner of "
        f"those rows removes them by: oeprov jobs rm {job}"
    )


def _describe_tables(system: System, path: str) -> str:
    """The tables of pools and logs in a directory, for a sentence; empty if no file tells.

    The job's user writes those files: only some names, and only their beginnings.
    """
    names = set()
    for file in openat.list_names(system, path):
        if not file.endswith(("-super.pool", ".log")):
            continue
        head = openat.read(system, os.path.join(path, file))
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            identity = json.JSONDecoder().raw_decode(head, head.index('{"'))[0]  # behind a binary header
            names.add(printable(str(identity["table"]["name"]))[:_LONGEST_NAME])
    more = f" and {len(names) - _MOST_TABLES} more" if len(names) > _MOST_TABLES else ""
    return " of tables " + ", ".join(sorted(names)[:_MOST_TABLES]) + more if names else ""


def has_rows(system: System, path: str) -> bool:
    """Whether a storage directory holds more than a server's lock.

    A server that ends in an orderly way leaves only tables with a checkpoint there.
    """
    try:
        found, others = openat.sizes(system, path)
    except CommandError:  # too deep: none of ours
        return True
    return bool(others or [name for name in found if os.path.basename(name) != LOCK])


def may_have_rows(system: System, path: str) -> bool:
    """Whether a storage directory …/oeprov/JOB/NAME holds rows, or is on a file system that is not mounted.

    Only the directories of jobs are removed: where …/oeprov is missing too, nobody knows what is there.
    """
    return has_rows(system, path) or not system.exists(os.path.dirname(os.path.dirname(path)))


def ensure_user(system: System, name: str) -> Any:
    """(uid, gid) of the system user that runs jobs; created if missing."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        nologin = system.which("nologin") or "/bin/false"
        system.check(_USER_COMMAND + [nologin, name])
        found = pwd.getpwnam(name)
    return found.pw_uid, found.pw_gid


def recorded(system: System, directory: str) -> List[Dict[str, Any]]:
    """The job's units on this host: name, role, unit, and the directories that go with it.

    All from the units' files. An earlier version's record, ``units.json``, is not read: the job's user can
    write it.
    """
    job = os.path.basename(directory)
    found = []
    for unit in systemd.ours(system, job):
        name = unit[len("oeprov-" + job + "-") : -len(".service")]
        role = {"worker": "worker", "replica": "replica"}.get(name.split("-")[0], "parameter_server")
        places = [path for path in _writable(system, unit) if path != directory]
        scratch = os.path.join(directory, "checkpoints", name)
        found.append({"name": name, "role": role, "unit": unit, "directories": [scratch] + places})
    return found


def _writable(system: System, unit: str) -> List[str]:
    """The directories that a unit's processes may write: the job's, and that of its rows."""
    for line in system.read(systemd.path(unit)).splitlines():
        key, _, value = line.partition("=")
        if key == "ReadWritePaths":
            with contextlib.suppress(ValueError):  # somebody else's quotes
                return [word.lstrip("-").replace("%%", "%") for word in shlex.split(value)]
    return []


def forget(system: System, directory: str, items: List[Dict[str, Any]], keep: bool) -> None:
    """Remove the job's directory if no other unit than ``items`` is left, unless ``keep``.

    The directory of a job with its run (checkpoints) here is never removed.
    """
    names = [item["unit"] for item in items]
    left = [unit for unit in systemd.ours(system, os.path.basename(directory)) if unit not in names]
    if is_marked(system, directory) and not left and not keep and not has_run(system, directory):
        openat.remove(system, directory)


def is_marked(system: System, directory: str) -> bool:
    """Whether a directory is a job's."""
    return any(name in _MARKS for name in openat.list_names(system, directory))


def has_run(system: System, directory: str) -> bool:
    """Whether the trainer's files of the job, with its checkpoints, lie here."""
    try:
        with openat.directory(system, os.path.join(directory, "run")) as run:
            return bool(os.listdir(run))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a link of somebody's: what it leads to is not ours to judge


def remove(system: System, directory: str) -> None:
    """Remove the directory of a job with its run; CommandError for any other directory."""
    if os.path.dirname(directory) != os.path.join(HOME, "jobs") or not os.path.basename(directory):
        raise CommandError(f"{directory} is no job's directory")
    openat.remove(system, directory)


def remove_scratch(system: System, directory: str, item: Dict[str, Any]) -> None:
    """Remove directories of a process of this job only: …/JOB/NAME or …/JOB/checkpoints/NAME."""
    job = os.path.basename(directory)
    for path in item["directories"]:
        parent, name = os.path.split(path)
        ours = os.path.basename(parent) == job or parent == os.path.join(directory, "checkpoints")
        if name == item["name"] and ours:
            openat.remove(system, path)
            openat.remove_empty(system, os.path.dirname(path))
