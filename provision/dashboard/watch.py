"""The dashboard's data: hosts and jobs, observed periodically while a browser has the page open."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from provision.cluster.errors import OeprovError
from provision.cluster.inventory import Inventory
from provision.dashboard import hostview
from provision.hosts.survey import survey
from provision.inventory import vault
from provision.jobs import observing, store
from provision.jobs.backends import registry
from provision.jobs.metrics import FRESHNESS, course
from provision.jobs.store import ACTIVE, Job

Document = dict[str, Any]
HOSTS_SECONDS, JOBS_SECONDS = 30.0, 2.0  # between observations
IDLE_SECONDS = 20.0  # after the last request, observing pauses
MOST_JOBS = 20


class Watch:
    """Observes in the background from ``__enter__`` to ``__exit__``."""

    def __init__(self, inventory: Inventory, state_dir: Path) -> None:
        self.inventory = inventory
        self.state_dir = state_dir
        # By job id, of ended jobs: their files' times, and what was read then.
        self._ended: dict[str, tuple[object, Document]] = {}
        self._parts: dict[str, Document] = {
            name: {"at": None, "list": [], "trouble": ""} for name in ("hosts", "jobs")
        }
        self._wanted = time.monotonic()
        self._wake = threading.Condition()
        self._over = False
        self._threads = [
            threading.Thread(target=self._keep, args=arguments, daemon=True)
            for arguments in (("hosts", self.hosts, HOSTS_SECONDS), ("jobs", self.jobs, JOBS_SECONDS))
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._wake:
            self._over = True
            self._wake.notify_all()
        # Not joined: a host that does not answer would delay the exit.

    def document(self, seen: float | None = None) -> bytes:
        """The newest data as JSON, without the list of hosts if the reader has the one of the time ``seen``.

        Each request keeps the observing going for ``IDLE_SECONDS``.
        """
        with self._wake:
            self._wanted = time.monotonic()
            self._wake.notify_all()
            parts = dict(self._parts)
        if seen is not None and parts["hosts"]["at"] == seen:
            parts["hosts"] = {name: value for name, value in parts["hosts"].items() if name != "list"}
        head = {
            "cluster": self.inventory.cluster,
            "inventory": str(self.inventory.path),
            "now": time.time(),
            "hosts_seconds": HOSTS_SECONDS,
        }
        return vault.hide(json.dumps({**head, **parts})).encode()

    def _keep(self, name: str, ask: Callable[[], list[Document]], seconds: float) -> None:
        while True:
            begun = time.monotonic()
            try:
                part = {"at": time.time(), "list": ask(), "trouble": ""}
            except OeprovError as error:
                part = {**self._parts[name], "trouble": str(error)}
            except Exception as error:  # shown on the page, which would else show old numbers for ever
                part = {**self._parts[name], "trouble": f"{type(error).__name__}: {error}"}
            with self._wake:
                self._parts[name] = part
                # With slow hosts, pause for as long as the observation took.
                self._wake.wait_for(lambda: self._over, max(seconds, time.monotonic() - begun))
                self._wake.wait_for(lambda: self._over or time.monotonic() - self._wanted < IDLE_SECONDS)
                if self._over:
                    return

    def hosts(self) -> list[Document]:
        """Observe every host."""
        return hostview.hosts(self.inventory, survey(self.inventory))

    def jobs(self) -> list[Document]:
        """The last jobs, newest first; ``detailed``: the page shows processes and curves."""
        known = [job for job in store.directories(self.state_dir) if not job.broken]
        here, there = registry.split(known, MOST_JOBS)
        found = [self._job(job) for job in here[-MOST_JOBS:]]
        names = [item["job"] for item in observing.detailed(found)]
        for item in found:
            item["detailed"] = item["job"] in names
        asked = [{**registry.backend_of(job).observe(job), "detailed": True} for job in there]
        return [*reversed(asked), *reversed(found)]

    def _job(self, job: Job) -> Document:
        times = tuple(
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (job.state_file, job.metrics_file, job.metrics_file.with_name(FRESHNESS))
        )
        known = self._ended.get(job.id)
        if known and known[0] == times:
            return dict(known[1])
        found = {**registry.backend_of(job).observe(job), "active": False}
        if found["state"] == "unreadable":
            return found
        found.update(active=found["state"] in ACTIVE, course=asdict(course(job.metrics_file)))
        if not found["active"] and not any(entry["unit"] for entry in found["processes"]):
            self._ended[job.id] = (times, dict(found))
        return found
