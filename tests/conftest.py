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

import pytest

if find_spec("torch"):
    import torch._dynamo  # noqa: F401 - does not understand sys.intern after Ansible has replaced it

_LEFT = pytest.StashKey[list[threading.Thread]]()
_TEMPORARY = pytest.StashKey[Path]()
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
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist inherit it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's stay where they are
        directory = tempfile.mkdtemp(prefix="oe_tests_")
        config.stash[_TEMPORARY] = Path(directory)
        os.environ["TMPDIR"] = tempfile.tempdir = directory


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the imports have made: TensorFlow's makes each pass long."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail, and name them, where tests have left threads that do not end, or temporary files."""
    gc.unfreeze()
    gc.collect()  # pools end their threads with the last of whoever held them
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    deadline = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread for thread in threads if thread.is_alive()]
    session.config.stash[_LEFT] = left
    if left:
        session.exitstatus = 1
    if temporary := session.config.stash.get(_TEMPORARY, None):
        files = [path for path in temporary.iterdir() if not any(path.match(name) for name in _NOT_OURS)]
        if files:
            print(f"tests have left files in the temporary directory: {files}", file=sys.stderr, flush=True)
            session.exitstatus = 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary directory; the interpreter would wait for threads that do not end for ever."""
    if temporary := config.stash.get(_TEMPORARY, None):
        shutil.rmtree(temporary, ignore_errors=True)
    if left := config.stash.get(_LEFT, []):
        print(f"tests have left threads that do not end: {left}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
