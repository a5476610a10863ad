"""A work queue in a directory that all workers of a job see: on one machine, or shared with file locks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from oe_runtime.data.work_queue import Range, Work, WorkQueue
from oe_runtime.errors import DataError


class QueueRestored(Exception):
    """The queue has gone back to a checkpoint, and this worker has not: see `SharedWorkQueue.follow`."""


class SharedWorkQueue:
    """One worker's end of a WorkQueue; each call reads and writes its state under a lock.

    A worker locks a file of its own while it lives. The kernel releases the lock when the process ends in any
    way, and the others then take its ranges. So worker processes must not leave forked children behind. The
    state survives processes, not machines; checkpoints (`save`) survive those.
    """

    def __init__(
        self, directory: Path, ranges: Sequence[Range], epochs: int = 1, seed: int | None = None
    ) -> None:
        self._queue = WorkQueue(ranges, epochs, seed)
        self._fresh = self._queue.save()
        self._directory = directory
        self._state = directory / "queue.json"
        self._followed: int | None = None
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._alive = _lock_of(self._alive_file(self.worker), wait=True)
        except OSError as error:
            raise DataError(f"cannot keep a work queue in {directory}: {error.strerror}") from error

    def __enter__(self) -> SharedWorkQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(
        self,
        poll_seconds: float = 0.2,
        give_up: Callable[[], bool] = lambda: False,
        idle: Callable[[], None] = lambda: None,
    ) -> Work | None:
        """Return the next range; None when all are finished except this worker's own.

        Where others have the last ones, waits until they finish or give back, or until `give_up`; calls
        `idle` before. Raises QueueRestored, as do `report`, `finish` and `save`.
        """
        waits = False
        while not give_up():
            with self._locked() as queue:
                work = queue.take(self.worker)
                if work is None and self._free_lost(queue):
                    work = queue.take(self.worker)
                if work is not None or queue.workers() <= {self.worker}:
                    return work
            if not waits:
                idle()
                waits = True
            time.sleep(poll_seconds)
        return None

    def report(self, work: Work, done: int) -> int:
        """Report `done` trained rows of the range, from its start; return the number of all reports."""
        with self._locked() as queue:
            queue.report(self.worker, work, done)
            return queue.reports

    def finish(self, work: Work) -> None:
        """Report that all rows of the range were trained on."""
        with self._locked() as queue:
            queue.finish(self.worker, work)

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON. One worker does so for all."""
        with self._locked() as queue:
            return queue.save()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state, or from the start (None).

        One worker calls it, before any takes a range; the others then `follow`. The state of an earlier run
        is forgotten.
        """
        with _lock_of(self._directory / "queue.lock", wait=True):
            _, restores = self._read()
            self._queue.restore(self._fresh if state is None else state)
            self._followed = restores + 1
            self._write()

    @property
    def followed(self) -> int | None:
        """The number of restores that this worker knows of; None: it has not looked yet."""
        return self._followed

    def restores(self) -> int:
        """Return the number of restores so far."""
        with _lock_of(self._directory / "queue.lock", wait=True):
            return self._read()[1]

    def follow(self) -> None:
        """Go to the state that the queue was restored to; this worker has no range then."""
        self._followed = None
        with self._locked() as queue:
            queue.lost(self.worker)

    def close(self) -> None:
        """Give back unfinished ranges."""
        if self._alive.closed:
            return
        with contextlib.suppress(QueueRestored), self._locked() as queue:
            queue.lost(self.worker)
        self._alive_file(self.worker).unlink(missing_ok=True)
        self._alive.close()

    def _free_lost(self, queue: WorkQueue) -> bool:
        """Take back the ranges of workers that are gone; return whether there were any."""
        freed = False
        for worker in queue.workers() - {self.worker}:
            file = self._alive_file(worker)
            with contextlib.suppress(BlockingIOError):
                if file.exists():
                    _lock_of(file, wait=False).close()
                queue.lost(worker)
                file.unlink(missing_ok=True)
                freed = True
        return freed

    def _alive_file(self, worker: str) -> Path:
        return self._directory / f"{worker}.alive"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[WorkQueue]:
        with _lock_of(self._directory / "queue.lock", wait=True):
            state, restores = self._read()
            if self._followed not in (None, restores):
                raise QueueRestored
            self._followed = restores
            if state is not None:
                self._queue.restore(state)
            yield self._queue
            self._write()

    def _read(self) -> tuple[dict[str, Any] | None, int]:
        """Return the stored state and the number of restores."""
        if not self._state.exists():
            return None, 0
        state = json.loads(self._state.read_text())
        return state, state.get("restored", 0)

    def _write(self) -> None:
        partial = self._state.with_suffix(".part")
        partial.write_text(json.dumps({**self._queue.save(workers=True), "restored": self._followed}))
        partial.replace(self._state)


def _lock_of(path: Path, *, wait: bool) -> IO[str]:
    """Open a file and lock it until it is closed. Raises BlockingIOError where another process has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file
