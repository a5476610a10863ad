"""Uploads of a run to an object store: checkpoints while training goes on, the report at the end.

The store has what the run directory has: checkpoints/, export/, report.html, config.json and metrics.jsonl. A
thread uploads links to a checkpoint's files, so that training may remove the checkpoint itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from oe_runtime import checkpoint
from oe_runtime.checkpoint import store
from oe_runtime.checkpoint.remote import RemoteCheckpoints
from oe_runtime.errors import CheckpointError
from oe_runtime.run import report
from oe_runtime.run.options import RunOptions
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.support import remote_files
from oe_runtime.support.remote_files import Bandwidth, Cancelled, RemotePath

_PROBE = ".oeprov-write-test"
_REPORTS = (report.FILE, "metrics.jsonl", "config.json")


def prepare(options: RunOptions) -> str:
    """Check before a run that it can upload; with --resume, fetch a checkpoint newer than the local ones.

    Returns what to say about that. Raises RunError.
    """
    root = RemotePath(options.upload_to.rstrip("/"))
    there = RemoteCheckpoints(root / "checkpoints")
    try:
        names, _ = there.list()
        (root / _PROBE).write_bytes(b"")
        (root / _PROBE).unlink()
    except OSError as error:
        raise RunError(f"--upload-to: cannot write {remote_files.describe(error)}") from error
    if not names:
        return ""
    if not options.resume:
        raise RunError(
            f"--upload-to: {root} already holds the checkpoints of a run; go on with --resume, or name "
            "another folder"
        )
    directory = options.run_dir / "checkpoints"
    here = checkpoint.published(directory)
    if here and (store.order(here[-1].name) or ()) >= (store.order(names[-1]) or ()):
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    there.fetch(names[-1], directory)
    return f"fetched checkpoint {there.root / names[-1]}"


class Uploads:
    """Uploads checkpoints from a thread; one that waits makes way for a newer one."""

    def __init__(self, options: RunOptions, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._root = RemotePath(options.upload_to.rstrip("/"))
        self._there = RemoteCheckpoints(self._root / "checkpoints")
        self._keep = options.keep_checkpoints
        self._limit = Bandwidth(options.upload_bandwidth * 1e6)
        self._directory = directory
        self.say = say
        self._links = directory.path / ".uploads"
        shutil.rmtree(self._links, ignore_errors=True)  # of a process that was killed
        self._changed = threading.Condition()
        self._waiting: list[Path] = []  # links to checkpoints, oldest first
        self._busy = False
        self._ended = False
        self._problem = ""  # why the last one offered is not there
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def offer(self, path: Path) -> None:
        """Upload this checkpoint, and bases that are not there, instead of older ones that wait."""
        try:
            self._offer(path, [part.name for part in checkpoint.chain(path)])
        except CheckpointError as error:
            self._failed(path.name, str(error))

    def _offer(self, path: Path, chain: list[str]) -> None:
        with self._changed:
            for late in [links for links in self._waiting if links.name not in chain]:
                self._waiting.remove(late)
                shutil.rmtree(late, ignore_errors=True)
                self._directory.event("upload_skipped", path=str(self._there.root / late.name))
                self.say(f"warning: checkpoint {late.name} is not uploaded: {path.name} came before its turn")
            waiting = {links.name for links in self._waiting}
            for name in chain:
                if name not in waiting and not (self._links / name).exists():
                    self._waiting.append(_link(path.parent / name, self._links / name))
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all uploads. Raises RunError if the last checkpoint could not be uploaded."""
        with self._changed:
            if self._waiting or self._busy:
                self.say(f"uploading to {self._there.root}")
            self._changed.wait_for(lambda: not (self._waiting or self._busy))
        if self._problem:
            raise RunError(
                f"the last checkpoint is not in {self._there.root}: {self._problem}; it is in "
                f"{self._directory.path}, from where --resume uploads it"
            )

    def upload_directory(self, directory: Path, name: str) -> str:
        """Upload a directory as `name`; return its URL. Raises RunError."""
        target = self._root / name
        try:
            for file in sorted(path for path in directory.rglob("*") if path.is_file()):
                (target / str(file.relative_to(directory))).upload(file, self._limit)
        except OSError as error:
            raise RunError(f"--upload-to: cannot upload {remote_files.describe(error)}") from error
        return str(target)

    def close(self) -> None:
        """End the thread: what it uploads is given up, what waits is not uploaded."""
        with self._changed:
            self._ended = True
            self._limit.cancel()
            self._changed.notify_all()
        self._thread.join()
        shutil.rmtree(self._links, ignore_errors=True)

    def upload_reports(self) -> None:
        """Upload report, metrics and settings, after the run directory was closed. A problem is a warning."""
        for name in _REPORTS:
            try:
                if (self._directory.path / name).exists():
                    (self._root / name).upload(self._directory.path / name)
            except OSError as error:
                print(f"warning: cannot upload {remote_files.describe(error)}", file=sys.stderr)
                return

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                links = self._waiting.pop(0)
                self._busy = True
            try:
                self._upload(links)
            except Cancelled:
                return
            finally:
                shutil.rmtree(links, ignore_errors=True)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _upload(self, links: Path) -> None:
        url = str(self._there.root / links.name)
        began = time.monotonic()
        self._problem = ""
        try:
            if self._there.has(links):
                return
            size = self._there.upload(links, self._limit)
            seconds = time.monotonic() - began
            self._directory.event("upload", path=url, bytes=size, seconds=round(seconds, 3))
            self.say(f"uploaded checkpoint {url} ({size / 1e6:,.1f} MB, {seconds:.1f} s)")
            self._there.prune(self._keep)
        except Cancelled:
            raise
        except OSError as error:
            self._failed(links.name, remote_files.describe(error))
        except CheckpointError as error:
            self._failed(links.name, str(error))
        except Exception as error:  # a bug: else `finish` would wait for this thread for ever
            self._failed(links.name, f"{type(error).__name__}: {error}")

    def _failed(self, name: str, problem: str) -> None:
        self._problem = problem
        self._directory.event("no_upload", path=str(self._there.root / name), message=problem)
        self.say(f"warning: cannot upload checkpoint {name}: {problem}")


def _link(path: Path, links: Path) -> Path:
    """Make a directory with links to the files of a checkpoint, where links are possible; else copies."""
    try:
        links.parent.mkdir(exist_ok=True)
        shutil.copytree(path, links, copy_function=_link_file)
    except OSError as error:
        shutil.rmtree(links, ignore_errors=True)
        raise CheckpointError(f"cannot upload {path}: {remote_files.describe(error)}") from error
    return links


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
