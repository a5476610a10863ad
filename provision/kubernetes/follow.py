"""News of a job on a cluster as lines for a terminal: its first worker's log, pods that come up or cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from provision.errors import TrainingError
from provision.kubernetes import state
from provision.kubernetes.api import Api, ApiFailure
from provision.kubernetes.record import Record

PAUSE_SECONDS = 2.0
_JOIN_SECONDS = 10.0
_Result = TypeVar("_Result")


class Follower:
    """Prints what the first worker says, in a thread, and with ``look`` what happens to the pods."""

    def __init__(self, cluster: Api, record: Record, console: Console, *, old_lines: bool = True) -> None:
        self._cluster, self._record, self._console = cluster, record, console
        self._query = {} if old_lines else {"tailLines": 0}
        self._said: set[str] = set()
        self._end = threading.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._stream, name="worker's log", daemon=True)

    def start(self) -> None:
        """Begin with the log."""
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until the log is being read, so that its end is not missed."""
        self._listens.wait(seconds)

    def join(self) -> None:
        """Print the log to its end, if that is near."""
        self._end.set()
        self._thread.join(_JOIN_SECONDS)

    def look(self) -> str:
        """Say what is new of the pods; why one of them will never run, or nothing."""
        pods = state.pods(self._cluster, self._record.namespace, self._record.id)
        ready = sum(pod.role == "server" and pod.ready for pod in pods)
        self._say(f"{ready} of {self._record.servers} servers are ready")
        for pod in pods:
            if pod.hopeless:
                return f"pod {pod.name}: {pod.trouble}"
            if pod.trouble:
                self._say(f"[yellow]![/] pod {pod.name}: {escape(pod.trouble)}")
        return ""

    def retried(self, ask: Callable[[], _Result]) -> _Result:
        """Ask until the API answers: training does not need this machine."""
        while True:
            try:
                return ask()
            except TrainingError as error:
                self._say(f"[yellow]![/] {escape(str(error))}; trying again")
                time.sleep(PAUSE_SECONDS)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._console.print(text, highlight=False, soft_wrap=True)

    def _stream(self) -> None:
        """The log of the first worker, of each pod that takes its place too."""
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
                pass  # it has not begun, or is gone
            if ending:
                return
            self._end.wait(PAUSE_SECONDS)

    def _worker(self, seen: set[str]) -> str:
        pods = state.pods(self._cluster, self._record.namespace, self._record.id)
        begun = [
            pod for pod in pods if pod.role == "worker" and pod.state != "starts" and pod.name not in seen
        ]
        return begun[0].name if begun else ""
