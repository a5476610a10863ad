"""Follows a job on a cluster: prints its first worker's log, and pods that start or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.jobs.backends.kubernetes import state
from provision.jobs.backends.kubernetes.api import Api, ApiFailure, Document
from provision.jobs.backends.kubernetes.record import Record
from provision.jobs.screen import say

PAUSE_SECONDS = 2.0
PASSING_SECONDS = 30.0  # a passing trouble may last before it is printed
HOPELESS_SECONDS = 90.0  # a hopeless one, before the job fails: the kubelet pulls an image thrice
_JOIN_SECONDS = 10.0


class Follower:
    """Prints the first worker's log, in a thread, and with ``observe`` changes of the pods."""

    def __init__(
        self,
        cluster: Api,
        record: Record,
        documents: list[Document],
        console: Console,
        *,
        old_lines: bool = True,
    ) -> None:
        self._cluster, self._record, self._console = cluster, record, console
        self._documents = documents
        self._query = {} if old_lines else {"tailLines": 0}
        self._said: set[str] = set()
        self._since: dict[tuple[str, bool], float] = {}  # pod, hopeless → when its trouble was first seen
        self._begun = False  # a worker was seen to run
        self._end = threading.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="worker's log", daemon=True)

    def start(self) -> None:
        """Start to print the log."""
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until the log is being read, so that its end is not missed."""
        self._listens.wait(seconds)

    def join(self) -> None:
        """Print the rest of the log, for a limited time."""
        self._end.set()
        self._thread.join(_JOIN_SECONDS)

    def observe(self) -> str:
        """Print changes of the pods; returns why training can never begin, or an empty text."""
        record, now = self._record, time.monotonic()
        pods = state.pods(self._cluster, record.namespace, record.id)
        servers = [pod for pod in pods if pod.role == "server"]
        self._say(f"{sum(pod.ready for pod in servers)} of {record.servers} servers are ready")
        if len(servers) < record.servers or len(servers) == len(pods):
            for words in state.refusals(self._cluster, record.namespace, self._documents):
                self._say(f"[yellow]![/] {escape(words)}")
        self._begun |= any(pod.role == "worker" and pod.state != "starts" for pod in pods)
        lasting = {pod.name for pod in pods if pod.trouble or pod.state == "starts"}
        self._since = {key: since for key, since in self._since.items() if key[0] in lasting}
        for pod in pods:
            if not pod.trouble:
                continue
            lasted = now - self._since.setdefault((pod.name, pod.hopeless), now)
            if pod.passing and lasted < PASSING_SECONDS:
                continue
            # Once training has begun, workers wait for a lost server's pod without limit.
            if pod.hopeless and lasted >= HOPELESS_SECONDS and not self._begun:
                return f"pod {pod.name}: {pod.trouble}"
            self._say(f"[yellow]![/] pod {pod.name}: {escape(pod.trouble)}")
        return ""

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Print that the API does not answer, instead of failing: training does not need this machine."""
        try:
            yield
        except (ApiFailure, TrainingError) as error:
            if isinstance(error, ApiFailure) and not error.passing:
                raise
            self._say(f"[yellow]![/] {escape(str(error))}; trying again")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(self._console, text)

    def _stream(self) -> None:
        """Print the log of the first worker, and of pods that replace it."""
        seen: set[str] = set()
        while True:
            ending = self._end.is_set()
            try:
                pod = self._worker(seen)
                if pod:
                    path = state.log_path(self._record.namespace, pod)
                    lines = self._cluster.lines(path, follow="true", **self._query)
                    self._listens.set()
                    for line in lines:
                        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                    seen.add(pod)
            except (ApiFailure, TrainingError):
                pass  # the pod has not started, or was deleted
            if ending:
                return
            self._end.wait(PAUSE_SECONDS)

    def _worker(self, seen: set[str]) -> str:
        pods = state.pods(self._cluster, self._record.namespace, self._record.id)
        begun = [
            pod for pod in pods if pod.role == "worker" and pod.state != "starts" and pod.name not in seen
        ]
        return begun[0].name if begun else ""
