"""How a run of the tests begins and ends."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch"):
    import torch._dynamo  # noqa: F401 - does not understand sys.intern after Ansible has replaced it

_LEFT = pytest.StashKey[list[str]]()
_STUCK = pytest.StashKey[bool]()
_TEMPORARY = pytest.StashKey[Path]()
# What is in the temporary directory, and threads, with the first test after which they were seen.
_AFTER: dict[str, str] = {}
# TensorFlow's own, where the process that made them was killed; Python's of such files.
_NOT_OURS = ("__autograph_generated_file*", "__pycache__")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse another clone's packages, let SIGINT through, and give the run a temporary directory of its own.

    Started in the background of a shell, the tests and all that they start would ignore SIGINT.
    """
    for package in ("provision", "oe_runtime"):  # an editable installation comes before the current directory
        found = find_spec(package)
        origin = Path(found.origin).resolve().parents[1] if found and found.origin else None
        if origin != Path(__file__).resolve().parents[1]:
            raise pytest.UsageError(
                f"{package}: this Python has it from {origin or 'nowhere'}, not from this clone; run "
                "tools/setup.sh test here, then .venv/bin/python -m pytest"
            )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's stay where they are
    # Those of pytest-xdist's processes lie in that of the process that started them.
    directory = tempfile.mkdtemp(prefix="oe_tests_")
    config.stash[_TEMPORARY] = Path(directory)
    config.stash[_LEFT] = []
    os.environ["TMPDIR"] = tempfile.tempdir = directory


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the imports have made: TensorFlow's makes each pass long."""
    gc.collect()
    gc.freeze()


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note which test made what is left at the end."""
    for path in Path(tempfile.gettempdir()).iterdir():
        _AFTER.setdefault(f"file {path}", nodeid)
    for thread in _threads():
        _AFTER.setdefault(f"thread {thread}", nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what one of pytest-xdist's processes has found at its end; one that crashed says nothing."""
    node.config.stash[_LEFT].extend(getattr(node, "workeroutput", {}).get("left", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where tests have left threads that do not end, or temporary files."""
    gc.unfreeze()
    gc.collect()  # pools end their threads with the last of whoever held them
    deadline = time.monotonic() + 30
    stuck = _threads()
    for thread in stuck:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread for thread in stuck if thread.is_alive()]
    session.config.stash[_STUCK] = bool(stuck)
    directory = session.config.stash[_TEMPORARY]
    files = [path for path in directory.iterdir() if not any(path.match(name) for name in _NOT_OURS)]
    found = [f"thread {thread}" for thread in stuck] + [f"file {path}" for path in files]
    left = session.config.stash[_LEFT]
    left.extend(f"{one}, first seen after {_AFTER.get(one, 'the last test')}" for one in found)
    shutil.rmtree(directory, ignore_errors=True)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = left
    elif left:
        session.exitstatus = 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Name what was left, below the summary, and do not wait for threads that do not end for ever."""
    if (left := config.stash.get(_LEFT, [])) and not hasattr(config, "workeroutput"):
        print("tests have left what they should have ended or removed:", *left, sep="\n  ", flush=True)
    if config.stash.get(_STUCK, False):
        sys.stdout.flush()
        os._exit(1)
