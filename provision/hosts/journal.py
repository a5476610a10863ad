"""The journal of changes: one JSON object per line, written before a step begins and after it ends.

A killed run leaves a step without an end. The next run names that step and plans from the observed state.
``oeprov history`` shows it. ``event`` is run (who, command, hosts, hosts with something to do), before (a
host's kernel and mode), begin and end of a step, rebooted (seconds), or finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from provision.cluster.errors import ConvergeError
from provision.inventory import vault
from provision.node.command import flush_directory


class Journal:
    """The journal of one state directory; ``run`` and ``cluster`` name this run in every line.

    Runs of two clusters that begin in one second have the same id.
    """

    def __init__(self, path: Path, run: str, cluster: str = "") -> None:
        self.path = path
        self.run = run
        self._common = {"run": run, "cluster": cluster} if cluster else {"run": run}
        self._lock = threading.Lock()
        self._unflushed = self._flushing = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one line and flush it to disk."""
        self.write_all([{"event": event, **fields}])

    def write_all(self, entries: Iterable[Mapping[str, Any]], *, wait: bool = True) -> None:
        """Append lines, and flush them to disk together. Without ``wait`` that is done in the background."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        lines = (json.dumps({"time": now, **self._common, **entry}) for entry in entries)
        text = "".join(vault.hide(line) + "\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # A killed run may have left a partial line: do not append to it.
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                text = "\n" + text
            os.write(descriptor, text.encode())
            if wait:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            flush_directory(str(self.path.parent))
        if not wait:
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Flush in the background: lines that are written meanwhile are flushed together."""
        with self._lock:
            self._unflushed = True
            if not self._flushing:
                self._flushing = True
                threading.Thread(target=self._flush, daemon=True).start()

    def _flush(self) -> None:
        while True:
            with self._lock:
                if not self._unflushed:
                    self._flushing = False
                    return
                self._unflushed = False
            with suppress(OSError):  # the next line that is waited for reports it
                descriptor = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def begin(self, host: str, step: str, what: str) -> None:
        """Record that a step begins."""
        self.write_all([{"event": "begin", "host": host, "step": step, "what": what}], wait=False)

    def end(self, host: str, step: str, *, ok: bool, message: str = "", seconds: float | None = None) -> None:
        """Record that a step is done, or failed with ``message``, after so many seconds."""
        took = {} if seconds is None else {"seconds": round(seconds, 3)}
        entry = {"event": "end", "host": host, "step": step, "ok": ok, "message": message, **took}
        self.write_all([entry], wait=False)

    def rebooted(self, host: str, seconds: float) -> None:
        """Record how long a reboot took."""
        self.write_all([{"event": "rebooted", "host": host, "seconds": round(seconds, 3)}], wait=False)

    def read(self) -> Iterator[dict[str, Any]]:
        """Every entry, oldest first; skips lines that a crash cut off."""
        try:
            text = self.path.read_text(errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry


def _unwritable(state_dir: Path, error: OSError) -> ConvergeError:
    return ConvergeError(
        f"state directory {state_dir}: cannot be written: {error.strerror}; choose another with "
        "--state-dir or OEPROV_STATE_DIR"
    )


@contextmanager
def cluster_lock(state_dir: Path, cluster: str) -> Iterator[None]:
    """Lock the cluster for this process; ConvergeError names the process that holds the lock.

    The kernel drops the lock when the process ends, however it ends. The lock file is removed on release.
    The private files of a process that was killed are removed.
    """
    path = state_dir / f"lock-{cluster}"
    with _locked(state_dir, path, cluster) as file:
        shutil.rmtree(private_files(state_dir, cluster), ignore_errors=True)
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
        holder = f"pid {os.getpid()} ({command}, since {datetime.now():%H:%M:%S})\n"
        try:
            file.truncate(0)
            try:  # unbuffered, so that a full disk is not found again when the file is closed
                os.write(file.fileno(), holder.encode())
            except OSError as error:
                raise _unwritable(state_dir, error) from None
            yield
        finally:
            shutil.rmtree(private_files(state_dir, cluster), ignore_errors=True)
            with suppress(OSError):
                path.unlink()


def private_files(state_dir: Path, cluster: str) -> Path:
    """Where a run on the cluster keeps its own files, Ansible's above all, which have secrets.

    They belong to the holder of the cluster's lock.
    """
    return state_dir.absolute() / "ansible" / f"of-{cluster}"  # a cluster may be named ".."


def remove_private_files(state_dir: Path, cluster: str) -> None:
    """Remove the private files of a process that was killed, unless another changes the cluster now."""
    with suppress(ConvergeError), cluster_lock(state_dir, cluster):
        pass  # the lock's holder removes them


def is_locked(state_dir: Path, cluster: str) -> bool:
    """Whether a process changes the cluster now."""
    try:
        with (state_dir / f"lock-{cluster}").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _locked(state_dir: Path, path: Path, cluster: str) -> TextIO:
    """The lock file, opened and locked."""
    while True:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            raise _unwritable(state_dir, error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # the last holder removed this file meanwhile: open a new one
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConvergeError(
                f"cluster {cluster} is being changed by {holder}; wait for it or stop it (lock: {path})"
            ) from None
