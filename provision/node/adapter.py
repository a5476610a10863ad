"""Run a foreign program as a process of a job: ``python adapter.py [OPTIONS] -- PROGRAM …``.

A job's servers write a ready file once they listen, its workers write events into ``metrics.jsonl``, and all
of them stop on request or without their launcher, with their children. This does it for programs that do not.
It is one file for Python 3.6 and later, put beside the job.
"""

import argparse
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Set, Tuple

POLL = 0.2
GRACE = 20.0  # seconds that a program may take to end
INTERRUPTED = 130  # exit status of a worker after a stop request
_SUBREAPER = 36  # prctl: orphans of the program become our children
_DEATH_SIGNAL = 1  # prctl: the program ends with us


def _options(argv: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ready-file", help="of a server: written once --listens accepts connections")
    parser.add_argument("--listens", metavar="HOST:PORT", default="")
    parser.add_argument("--storage", default="dram")
    parser.add_argument("--metrics", help="of a worker: file that events are appended to")
    parser.add_argument("--model", default="")
    parser.add_argument(
        "--progress", default="", help="pattern of lines with (?P<step>), or (?P<more>) steps"
    )
    parser.add_argument("--export", default="", help="directory that the program makes at its end")
    parser.add_argument("--directory", default="", help="made before the program starts")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input does")
    parser.add_argument("program", nargs="+")
    return parser.parse_args(argv)


class StopPipe:
    """A stop request. Signal handlers set it: one that interrupts an Event's wait would hang in its lock."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()  # what is in it stays there
        os.set_blocking(self._write, False)

    def set(self, *_: Any) -> None:
        """Ask; fits as a signal handler."""
        try:
            os.write(self._write, b"1")
        except BlockingIOError:
            pass  # it is full

    def is_set(self) -> bool:
        """Whether there was a request."""
        return self.wait(0)

    def wait(self, seconds: Optional[float] = None) -> bool:
        """Sleep, at most until there is a request; whether there was one."""
        return bool(select.select([self._read], [], [], seconds)[0])


class Adapter:
    """One program and its children."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.asked = StopPipe()
        self.step = 0
        self.begun = time.time()

    def run(self) -> int:
        """Run the program to its end; returns the exit status for the launcher."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.asked.set)
        self._say("start", model=self.options.model)
        try:
            if self.options.directory:
                os.makedirs(self.options.directory, 0o700, exist_ok=True)
            program = subprocess.Popen(
                self.options.program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            return self._failed(f"{error.filename}: {error.strerror}")
        reader = threading.Thread(target=self._read, args=(program.stdout,), daemon=True)
        reader.start()
        if self.options.exit_with_parent:
            threading.Thread(target=self._watch_parent, daemon=True).start()
        if self.options.ready_file:
            threading.Thread(target=self._watch_port, args=(program.pid,), daemon=True).start()
        while program.poll() is None and not self.asked.wait(POLL):
            pass
        if self.options.ready_file and program.poll() == 0:
            # OpenEmbedding's server ends after its last client: that is not a lost server.
            print("the program has ended in order", flush=True)
            self.asked.wait()
        code = self._end(program)
        reader.join(GRACE)
        return self._result(code)

    def _result(self, code: int) -> int:
        if self.options.ready_file:
            if os.path.exists(self.options.ready_file):
                os.unlink(self.options.ready_file)
            return 0 if self.asked.is_set() else self._failed(_how(code), code)
        if self.asked.is_set():
            self._say("interrupted", step=self.step)
            return INTERRUPTED
        if code:
            return self._failed(_how(code), code)
        if self.options.export and os.path.isdir(self.options.export):
            self._say("export", path=self.options.export)
        self._say("end", steps=self.step, seconds=round(time.time() - self.begun, 1))
        return 0

    def _failed(self, message: str, code: int = 1) -> int:
        print("error: " + message, flush=True)
        self._say("error", message=message)
        return code if code > 0 else 1

    def _read(self, stream: Any) -> None:
        pattern = re.compile(self.options.progress) if self.options.progress else None
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip("\n")
            try:
                print(text, flush=True)
            except OSError:
                pass  # nobody reads our output any more
            match = pattern.search(text) if pattern else None
            if match:
                self._progress({key: value for key, value in match.groupdict().items() if value})

    def _progress(self, found: Dict[str, str]) -> None:
        self.step = int(found["step"]) if "step" in found else self.step + int(found.get("more", 0))
        figures = {name: float(found[name]) for name in ("loss", "auc") if name in found}
        self._say("step", step=self.step, **figures)

    def _say(self, event: str, **fields: Any) -> None:
        if self.options.metrics:
            with open(self.options.metrics, "a") as file:
                file.write(json.dumps(dict(fields, event=event)) + "\n")

    def _watch_parent(self) -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        self.asked.set()

    def _watch_port(self, pid: int) -> None:
        host, _, port = self.options.listens.rpartition(":")
        while not self.asked.is_set():
            try:
                socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
                break
            except OSError:
                time.sleep(POLL)
        ready = {"pid": os.getpid(), "host": host, "port": int(port), "storage": self.options.storage}
        temporary = self.options.ready_file + ".new"
        with open(temporary, "w") as file:
            json.dump(dict(ready, is_pmem=False, program=pid), file)
        os.rename(temporary, self.options.ready_file)

    def _end(self, program: Any) -> int:
        """Stop the program and all its descendants; returns its exit status."""
        deadline = time.time() + GRACE
        number = int(signal.SIGTERM)
        told: Set[Tuple[int, int]] = set()
        while True:
            program.poll()
            _reap(program.pid)
            left = descendants(os.getpid())
            if not left:
                break
            if time.time() > deadline:
                number = int(signal.SIGKILL)
            for pid in left:
                if (pid, number) not in told:
                    told.add((pid, number))
                    _kill(pid, number)
            time.sleep(0.05)
        return int(program.wait())


def _how(code: int) -> str:
    if code < 0:
        return f"the program was killed by signal {-code}"
    return f"the program ended with exit status {code}"


def descendants(top: int) -> List[int]:
    """All processes below ``top``, from /proc."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(name)] = int(fields[1])
    found = []
    for pid in parents:
        above = parents.get(pid, 0)
        while above and above != top:
            above = parents.get(above, 0)
        if above == top:
            found.append(pid)
    return found


def _reap(program: int) -> None:
    """Reap orphans that have ended, but not the program itself."""
    try:
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == program:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(Adapter(_options(sys.argv[1:])).run())
