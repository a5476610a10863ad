"""What benchmarks start: servers, workers, programs of the core, and peers.

Peers are fetched and built in a cache that Git ignores; nothing of them is committed or installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Where `make test` builds, with the same options: what is there already is not built twice.
BUILD = ROOT / "build" / "test"
PROGRAMS = BUILD / "oe_runtime" / "core"
CACHE = ROOT / ".cache" / "benchmarks"
# In the environment: peers that are not in the cache yet are left out.
OFFLINE = "OEPROV_BENCHMARKS_OFFLINE"
# Pools in memory are flushed as persistent memory is: CLWB and fences instead of msync.
AS_PMEM = {"PMEM_IS_PMEM_FORCE": "1"}


class Missing(Exception):
    """A peer that cannot be had here, and why."""


@dataclass
class Ended:
    """A process that ended: status, output, and the most memory it ever had resident, in bytes."""

    status: int
    output: str
    peak: int


class Server:
    """`python -m oe_runtime.server` on loopback; `peak` is its peak resident memory once it ended."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        storage: str = "dram",
        token: str = "",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until it listens. ``prefix``: the command that starts it."""
        directory.mkdir(parents=True)
        ready = directory / "ready.json"
        command = [*prefix, sys.executable, "-m", "oe_runtime.server", "--host", "127.0.0.1", "--port", "0"]
        command += ["--storage", storage, "--ready-file", str(ready), "--exit-with-parent"]
        if storage != "dram":
            command += ["--storage-path", str(directory / "storage")]
            (directory / "storage").mkdir()
        if token:
            self.token_file = directory / "token"
            self.token_file.touch(0o600)
            self.token_file.write_text(token)
            command += ["--token-file", str(self.token_file)]
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
        )
        self.peak = 0
        deadline = time.monotonic() + 60
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: a server did not start: {(directory / 'log').read_text()}")
            time.sleep(0.05)
        self.endpoint = f"127.0.0.1:{json.loads(ready.read_text())['port']}"

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the server and note its peak memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.peak = _wait(self._process)[1]
        self._log.close()


@contextlib.contextmanager
def server(storage: str, base: Path, *flags: str, **more: Any) -> Iterator[Server]:
    """A server whose files lie in a fresh directory under `base`; `flags` and `more` are `Server`'s."""
    with tempfile.TemporaryDirectory(dir=base) as directory:
        running = Server(Path(directory) / "server", *flags, storage=storage, **more)
        try:
            yield running
        finally:
            running.stop()


def run(command: Sequence[str]) -> Ended:
    """Run a command to its end, output captured; stderr passes through."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    status, peak = _wait(process)
    process.stdout.close()
    return Ended(status, output, peak)


def _wait(process: subprocess.Popen) -> tuple[int, int]:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024


def build(*names: str) -> None:
    """Build programs of the core, or of benchmarks that link it (oe_runtime/core/CMakeLists.txt)."""
    options = ["-DOE_BUILD_PYTHON=OFF", "-DOE_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # benchmarks of bench-quick run at once
        subprocess.run(
            ["cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, *options], check=True, stdout=sys.stderr
        )
        subprocess.run(["cmake", "--build", BUILD, "--target", *names], check=True, stdout=sys.stderr)


def compile_peer(source: Path, *flags: str | Path) -> Path:
    """The program of a source file that needs a peer's headers and libraries; compiled if it is not there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    program = CACHE / f"{source.stem}.program"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        checked("g++", "-std=c++17", "-O3", "-march=x86-64-v3", source, "-o", program, *flags)
    return program


def environment(name: str, requirements: Sequence[str], module: str) -> Path:
    """The Python of a virtual environment with what pip installs for the requirements."""
    python = CACHE / name / "bin" / "python"
    if not (CACHE / name / "complete").exists():
        _may_fetch(name)
        checked(sys.executable, "-m", "venv", "--clear", CACHE / name)
        checked(python, "-m", "pip", "install", "-q", *requirements)
        checked(python, "-c", f"import {module}")
        (CACHE / name / "complete").touch()
    return python


def package_source(name: str, version: str) -> Path:
    """The unpacked sources of a Python package."""
    folder = CACHE / f"{name}-{version}"
    if not folder.exists():
        _may_fetch(name)
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
        checked(*pip, "--no-binary", ":all:", "-d", CACHE, f"{name}=={version}")
        checked("tar", "-xzf", f"{folder}.tar.gz", "-C", CACHE)
    return folder


def debian(name: str, packages: Sequence[str]) -> Path:
    """A directory with what Debian's packages have; `usr` is in it."""
    folder = CACHE / name
    if not (folder / "complete").exists():
        _may_fetch(name)
        folder.mkdir(parents=True, exist_ok=True)
        checked("apt-get", "-qq", "download", *packages, cwd=folder)
        for package in folder.glob("*.deb"):
            checked("dpkg", "-x", package, folder)
        (folder / "complete").touch()
    return folder


def _may_fetch(name: str) -> None:
    if os.environ.get(OFFLINE):
        raise Missing(f"{name} is not in {CACHE.relative_to(ROOT)}")


def checked(*command: str | Path, cwd: Path | None = None, **environment: str) -> None:
    """Run a step of fetching or building a peer. Raises `Missing` with its last words."""
    words = [str(word) for word in command]
    try:
        subprocess.run(
            words, check=True, capture_output=True, text=True, cwd=cwd, env=os.environ | environment
        )
    except FileNotFoundError as error:
        raise Missing(f"{words[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no output").splitlines()[-1]
        raise Missing(f"{Path(words[0]).name} failed: {last[:150]}") from error
