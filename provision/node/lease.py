"""One run changes a host at a time, whatever the number of controllers.

The lock keeps two modules from running at once. The lease keeps other runs out between the tasks of a run,
reboots included. It expires some time after the run's last task, so a lost controller does not block the host
for long; the next run of the same controller takes it over at once.
"""

import fcntl
import json
import os
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator

from .command import CommandError, System

LEASE = "/var/lib/oeprov/lease.json"  # which run may change this host, and until when
LOCK = "/run/oeprov.lock"  # held while a module works
SECONDS = 900
_WAIT = 60.0


@contextmanager
def lock(system: System, seconds: float = _WAIT) -> Iterator[None]:
    """Hold the host's lock; CommandError if another process still holds it after ``seconds``."""
    with system.open_lock(LOCK) as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = _holder(system.read_json(LEASE))
                    raise CommandError(
                        f"another run of oeprov is at work on this host ({holder}) and did not "
                        f"end in {seconds:.0f} s"
                    )
                time.sleep(0.2)
        yield


def acquire(system: System, run: Dict[str, Any], seconds: int = SECONDS) -> None:
    """Take or renew the lease for ``run``: its ``id``, ``owner`` (one controller's cluster) and ``where``.

    CommandError names the holder. Only one run of an owner is alive, so a later one takes the lease over.
    """
    found = system.read_json(LEASE)
    now = time.time()
    if found and found.get("owner") != run["owner"] and float(found.get("until", 0)) > now:
        raise CommandError(
            f"this host is being changed by {_holder(found)}; wait for it to end (if it was lost, its "
            f"hold ends in {found['until'] - now:.0f} s; or remove {LEASE})"
        )
    same = found.get("id") == run["id"]
    since = found.get("since", now) if same else now
    system.write(LEASE, json.dumps(dict(run, since=since, until=now + seconds)) + "\n")


def release(system: System, run: Dict[str, Any]) -> bool:
    """Release the lease; False if another run holds it."""
    if system.read_json(LEASE).get("id") != run["id"] or not system.remove(LEASE):
        return False
    system.remove_empty(os.path.dirname(LEASE))  # after `oeprov destroy`
    return True


def _holder(found: Dict[str, Any]) -> str:
    if not found:
        return "unknown"
    return "{} on {}, since {}".format(
        found.get("id", "unknown"),
        found.get("where", "unknown"),
        time.strftime("%H:%M:%S", time.localtime(float(found.get("since", 0)))),
    )
