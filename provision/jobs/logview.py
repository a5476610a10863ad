"""``logs``: the logs of a job's processes, here and in the journals of its hosts. Changes nothing."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from provision.cluster.errors import HostError, TrainingError
from provision.hosts import remote
from provision.jobs.backends.ssh import Fleet
from provision.jobs.metrics import LineTail
from provision.jobs.screen import LogPrinter
from provision.jobs.store import ACTIVE, Job, ProcessSpec

POLL_SECONDS = 0.3
JOURNAL = ("journalctl", "--no-pager", "--quiet", "--output=cat")
SECONDS = 60  # a host may take to show its last lines


def logs(
    job: Job,
    *,
    process: str | None = None,
    follow: bool = False,
    lines: int = 20,
) -> int:
    """Print the last lines of a job's logs, and with ``follow`` new ones until the job ends; returns 0."""
    view = _Logs(job, process, lines)
    view.last_lines()
    if follow:
        view.follow()
    return 0


class _Logs:
    """Log files here, and journals of units on their hosts."""

    def __init__(self, job: Job, process_name: str | None, lines: int) -> None:
        self.job = job
        self.process_name = process_name
        self.lines = lines
        self.tails: dict[Path, LineTail] = {}
        alive = {item.name for item in job.state().units_alive}
        self.fleet = Fleet(job, job.spec())
        known = self.fleet.processes.values()
        self.units = [item for item in known if item.name in alive and process_name in (None, item.name)]
        files = self._files()
        if not files and not self.units:
            raise TrainingError(self._nothing())
        names = [path.stem for path in files] + [item.name for item in self.units]
        self._print = LogPrinter(names).put

    def _files(self) -> list[Path]:
        """Logs here; a unit's log is here too once it was stopped."""
        far = {item.name for item in self.units}
        found = [path for path in sorted(self.job.logs.glob("*.log")) if path.stem not in far]
        return [path for path in found if self.process_name in (None, path.stem)]

    def _nothing(self) -> str:
        names = {path.stem for path in self.job.logs.glob("*.log")}
        names |= {item.name for item in self.job.state().units_alive}
        if self.process_name and names:
            there = ", ".join(sorted(names))
            return f"job {self.job.id} has no log of process {self.process_name!r}; there are: {there}"
        return f"job {self.job.id} has no logs yet in {self.job.logs}"

    def last_lines(self) -> None:
        """Print the last lines of each process."""
        for path in self._files():
            lines, offset = _last_lines(path, self.lines)
            self.tails[path] = LineTail(path, offset)
            for line in lines:
                self._print(path.stem, line.decode(errors="replace"))
        if not self.lines:
            return
        for item in self.units:
            try:
                for text in self._journal(item):
                    self._print(item.name, text)
            except HostError as error:
                self._print(item.name, f"({error})")

    def _journal(self, item: ProcessSpec) -> list[str]:
        host = self.fleet.hosts[item.host]
        words = [*JOURNAL, f"--lines={self.lines}", f"--unit={item.unit}"]
        command = remote.elevated(host, shlex.join(words))
        code, out, err = remote.run(host, command, "", remote.CONNECT_TIMEOUT, SECONDS)
        if code:
            raise HostError(item.host, (err.strip() or f"journalctl ended with exit status {code}"))
        return out.splitlines()

    def follow(self) -> None:
        """Print new lines of all processes until the job ends; leaves no process on the hosts."""
        lines: SimpleQueue[tuple[str, str]] = SimpleQueue()
        with ExitStack() as streams:
            for item in self.units:
                self._begin(streams, item, lines.put)
            while True:
                active = self.job.state().phase in ACTIVE
                for path in self._files():
                    for line in self.tails.setdefault(path, LineTail(path)).read_lines():
                        self._print(path.stem, line.decode(errors="replace"))
                while not lines.empty():  # this thread alone takes from it
                    self._print(*lines.get())
                sys.stdout.flush()
                if not active:
                    break
                time.sleep(POLL_SECONDS)
        for path, tail in self.tails.items():
            if tail.rest:
                self._print(path.stem, tail.rest.decode(errors="replace"))

    def _begin(self, streams: ExitStack, item: ProcessSpec, put: Callable[[tuple[str, str]], object]) -> None:
        command = shlex.join([*JOURNAL, "--lines=0", "--follow", f"--unit={item.unit}"])
        found = streams.enter_context(remote.stream(self.fleet.hosts[item.host], command))

        def read() -> None:
            try:
                for line in found:
                    put((item.name, line))
            except (HostError, ValueError) as error:  # ValueError: the pipe was closed from here
                if isinstance(error, HostError) and self.job.state().phase in ACTIVE:
                    put((item.name, f"({error})"))

        threading.Thread(target=read, name=f"logs of {item.name}", daemon=True).start()


def _last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last whole lines of a file, and the offset after them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - 1024 * max(1, count))
        file.seek(begin)
        data = file.read(size - begin)
    whole, newline, _ = data.rpartition(b"\n")
    found = whole.split(b"\n") if newline else []
    if begin and len(found) <= count:
        found = found[1:]  # an incomplete first line
    return found[len(found) - min(count, len(found)) :], begin + len(whole) + len(newline)
