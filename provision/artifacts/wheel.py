"""oeprov's own wheel for every kind of system in a cluster: made once per build, kept in the state directory.

``provision.node.build`` says what a build is. Where it is for systems like this one, the wheel is made here:
from the checkout, or put together again from the files of the wheel that oeprov was installed from. Else one
host of that kind makes it.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from provision.cluster import own_sources
from provision.cluster.errors import WheelError
from provision.node.build import key_of

# All that pip needs to build the wheel.
_SOURCES = (
    *own_sources.RUNTIME,
    "LICENSE",
    "README.md",
    "ansible.cfg",
    "inventory",
    "playbooks",
    "plugins",
    "provision",
    "roles",
)
_TOOLS = ("scikit-build-core>=0.10", "pybind11>=2.12")
# Needed by scikit-build-core before Python 3.11; pip would decide by this Python, not by the target's.
_OLD_TOOLS = ("exceptiongroup", "tomli", "typing-extensions")
_TIMEOUT = 3600

# Builds a wheel on a host: (archive of sources and build tools, path for the log) → where the wheel is now.
# Another flavor's sources come from its own repository: then the archive is not there.
Elsewhere = Callable[[Path, Path], Path]


def provide(build: str, state_dir: Path, elsewhere: Elsewhere) -> Path:
    """The wheel of a build, made now if there is none yet; by one process at a time.

    Raises WheelError with the failure and the path of the log; only the log is then left.
    """
    directory = state_dir.absolute() / "wheels" / key_of(build) / build.rpartition("-")[2]
    begun = time.time()
    if found := _only_wheel(directory):
        return found
    with _log_of(build, state_dir, directory) as log:
        if found := _only_wheel(directory):
            return found
        own = key_of(build) == own_sources.own_key()
        if own and log.exists() and log.stat().st_mtime >= begun:
            raise WheelError(_failure(log, "built here"))  # another process has just tried
        root = own_sources.checkout()
        if root is None and not own:
            raise WheelError(
                f"no wheel for {key_of(build)}: oeprov was installed without sources, for "
                f"{own_sources.own_key()}; run oeprov from a checkout, or put a wheel into {directory}"
            )
        _check_digest(build, root)
        log.unlink(missing_ok=True)
        with _made(directory) as into:
            if root is None:
                repack(into)
            elif own:
                _build_here(root, into, log)
                _check_digest(build, root)
            else:
                _build_there(root, build, into, log, elsewhere)
    log.unlink(missing_ok=True)
    return next(directory.glob("*.whl"))


def provide_theirs(build: str, state_dir: Path, elsewhere: Elsewhere) -> Path:
    """The wheel of another flavor, which a host builds now if there is none; by one process at a time."""
    directory = state_dir.absolute() / "wheels" / build
    with _log_of(build, state_dir, directory) as log:
        if found := _only_wheel(directory):
            return found
        with _made(directory) as into:
            wheel = elsewhere(into.parent / "nothing", log)
            wheel.rename(into / wheel.name)
    return next(directory.glob("*.whl"))


def _only_wheel(directory: Path) -> Path | None:
    return next(directory.glob("*.whl"), None)


@contextmanager
def _log_of(build: str, state_dir: Path, directory: Path) -> Iterator[Path]:
    """The log of a build whose wheel comes to ``directory``, once no other process makes that wheel."""
    log = state_dir.absolute() / "logs" / f"wheel-{build}.log"
    for path in (directory.parent, log.parent):
        path.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield log


@contextmanager
def _made(directory: Path) -> Iterator[Path]:
    """A directory that becomes ``directory`` without an error, inside a scratch one that is removed."""
    scratch = directory.with_name(".making-" + directory.name)
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
    try:
        (scratch / "wheel").mkdir(parents=True)
        yield scratch / "wheel"
        (scratch / "wheel").rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_digest(build: str, root: Path | None) -> None:
    now = own_sources.digest() if root is None else own_sources.digest_of(root)
    if build.rpartition("-")[2] != now[:16]:
        raise WheelError("the sources of the runtime have changed since the plan was made; plan again")


def archive(root: Path, tools: Path, path: Path) -> None:
    """A tar archive for a host to build: ``source/`` is what is built, ``tools/`` what pip builds with."""
    with tarfile.open(path, "w:gz", compresslevel=1) as file:
        for source in own_sources.files(root, _SOURCES):
            file.add(source, f"source/{source.relative_to(root).as_posix()}", recursive=False)
        file.add(tools, "tools")


def _build_here(root: Path, into: Path, log: Path) -> None:
    """Build in the checkout, which has what was compiled before."""
    argv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(into)]
    if all(importlib.util.find_spec(name) for name in ("scikit_build_core", "pybind11")):
        argv.append("--no-build-isolation")
    if not os.access(root, os.W_OK):
        argv.append(f"-Cbuild-dir={into.parent / 'build'}")
    _logged([*argv, str(root)], log, "built here")


def _logged(argv: list[str], log: Path, what: str) -> None:
    """Run a command with its output in ``log``; WheelError shows where that is, and its last line."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(argv)}\n")
        file.flush()
        try:
            code = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, timeout=_TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            file.write(f"gave up after {_TIMEOUT} s\n")
            code = -1
    if code:
        raise WheelError(_failure(log, what))


def _failure(log: Path, what: str) -> str:
    """One line about a build that failed: the compiler's first error, else the last line of the log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if " error: " in line or "CMake Error" in line]
    last = (errors or lines or ["it printed nothing"])[0 if errors else -1]
    return f"the runtime could not be {what}: {last} (log: {log})"


def _build_there(root: Path, build: str, into: Path, log: Path, elsewhere: Elsewhere) -> None:
    packed, tools = into.parent / "build.tar.gz", into.parent / "tools"
    tools.mkdir()
    python = key_of(build).rpartition("-py")[2]
    old = _OLD_TOOLS if int(python.split(".")[1]) < 11 else ()
    # Pure Python, all of them: what is fetched here works there, where nothing may come from PyPI.
    only = ["--only-binary=:all:", "--platform=any", f"--python-version={python}", "--implementation=py"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", *only, "--abi=none", "-d", str(tools)]
    _logged([*pip, *_TOOLS, *old], log, "built: its build tools could not be fetched")
    archive(root, tools, packed)
    _check_digest(build, root)
    wheel = elsewhere(packed, log)
    wheel.rename(into / wheel.name)


def repack(into: Path) -> Path:
    """Rebuild the wheel that oeprov was installed from, from its files."""
    distribution = Distribution.from_name("oeprov")
    tag = next(
        line.split(":", 1)[1].strip()
        for line in (distribution.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag:")
    )
    path = into / f"oeprov-{distribution.version}-{tag}.whl"
    # Written by pip when it installs; the rest came with the wheel.
    dropped = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}
    rows, info = [], f"oeprov-{distribution.version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for row in own_sources.installed_files():
            name = PurePosixPath(row[0])
            if ".." in name.parts or name.suffix == ".pyc":
                continue  # scripts and what Python compiled
            if name.parts[0] == info and name.name in dropped:
                continue
            content = Path(str(distribution.locate_file(row[0]))).read_bytes()
            sum_ = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            if row[1] and row[1] != f"sha256={sum_}":
                raise WheelError(f"{row[0]} was changed since oeprov was installed; install oeprov again")
            file.writestr(row[0], content)
            rows.append(f"{row[0]},sha256={sum_},{len(content)}\n")
        file.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path
