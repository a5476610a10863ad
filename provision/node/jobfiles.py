"""Files of a training job on one host: directories, token, and the record of its units.

``units.json`` in the job's directory lists the started units, so the directory suffices to stop them.
"""

import json
import os
import pwd
import shutil
from typing import Any, Dict, List

from . import systemd
from .command import CommandError, System

RECORD = "units.json"
HOME = "/var/lib/oeprov"  # home of the user oeprov; a job's files lie in jobs/JOB
_USER_COMMAND = ["useradd", "--system", "--home-dir", HOME, "--no-create-home", "--shell"]


def prepare(system: System, directory: str, user: str, token: str, more: List[str]) -> None:
    """Make the job's directories and token, readable for the job's user only (created if missing)."""
    uid, gid = ensure_user(system, user)
    for path in (os.path.dirname(os.path.dirname(directory)), os.path.dirname(directory)):
        _make(system, path, 0o755, 0, 0)
    below = [os.path.join(directory, name) for name in ("", "ready", "metrics", "logs", "run", "checkpoints")]
    for path in [directory] + below[1:]:
        _make(system, path, 0o700, uid, gid)
    for path in more:
        # The parents below the mount point are ours too: /mnt/pmem0/oeprov/JOB/server-0.
        parent = os.path.dirname(path)
        if not path.startswith(directory + "/"):
            _make(system, os.path.dirname(parent), 0o755, 0, 0)
        _make(system, parent, 0o700, uid, gid)
        _make(system, path, 0o700, uid, gid)
    if token:
        path = os.path.join(directory, "token")
        system.write(path, token.strip() + "\n", 0o600)
        _own(system, path, 0o600, uid, gid)
    if not system.exists(os.path.join(directory, RECORD)):
        record(system, directory, [])


def ensure_user(system: System, name: str) -> Any:
    """(uid, gid) of the system user that runs jobs; created if missing."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        nologin = system.which("nologin") or "/bin/false"
        system.check(_USER_COMMAND + [nologin, name])
        found = pwd.getpwnam(name)
    return found.pw_uid, found.pw_gid


def _make(system: System, path: str, mode: int, uid: int, gid: int) -> None:
    try:
        os.makedirs(system.path(path), 0o755, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}")
    _own(system, path, mode, uid, gid)


def _own(system: System, path: str, mode: int, uid: int, gid: int) -> None:
    try:
        os.chown(system.path(path), uid, gid)
        os.chmod(system.path(path), mode)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}")


def record(system: System, directory: str, units: List[Dict[str, Any]]) -> None:
    """Add units to the record."""
    kept = ("name", "role", "unit", "directories", "mount")
    old = [item for item in recorded(system, directory) if item["unit"] not in [u["unit"] for u in units]]
    new = old + [{key: item[key] for key in kept} for item in units]
    system.write(os.path.join(directory, RECORD), json.dumps(new) + "\n", 0o600)


def recorded(system: System, directory: str) -> List[Dict[str, Any]]:
    """Units of the job on this host; those without a record are recognised by their names."""
    try:
        found: List[Dict[str, Any]] = json.loads(system.read(os.path.join(directory, RECORD)) or "[]")
    except ValueError:
        found = []
    names = [item["unit"] for item in found]
    job = os.path.basename(directory)
    for unit in systemd.ours(system, job):
        if unit not in names:
            name = unit[len("oeprov-" + job + "-") : -len(".service")]
            role = "worker" if name.startswith("worker-") else "parameter_server"
            found.append({"name": name, "role": role, "unit": unit, "directories": [], "mount": ""})
    return found


def forget(system: System, directory: str, items: List[Dict[str, Any]], keep: bool) -> None:
    """Remove the files of ``items``, and the job's directory if no unit is left, unless ``keep``.

    The directory of a job with its run (checkpoints) here is never removed.
    """
    for item in items:
        remove_scratch(system, directory, item)
    left = [item for item in recorded(system, directory) if item["unit"] not in [i["unit"] for i in items]]
    path = os.path.join(directory, RECORD)
    if left or keep:
        if system.exists(directory):
            system.write(path, json.dumps(left) + "\n", 0o600)
    elif system.exists(path) and not system.list(os.path.join(directory, "run")):
        shutil.rmtree(system.path(directory), ignore_errors=True)


def remove(system: System, directory: str) -> None:
    """Remove the directory of a job with its run; CommandError for any other directory."""
    if os.path.dirname(directory) != os.path.join(HOME, "jobs") or not os.path.basename(directory):
        raise CommandError(f"{directory} is no job's directory")
    try:
        shutil.rmtree(system.path(directory))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}")


def remove_scratch(system: System, directory: str, item: Dict[str, Any]) -> None:
    """Remove directories of a process of this job only: …/JOB/NAME or …/JOB/checkpoints/NAME."""
    job = os.path.basename(directory)
    for path in item["directories"]:
        if os.path.basename(path) == item["name"] and "/" + job + "/" in path:
            shutil.rmtree(system.path(path), ignore_errors=True)
            system.remove_empty(os.path.dirname(path))
