"""How a run of the tests begins and ends."""

import gc
import os
import signal
import sys
import threading
from importlib.util import find_spec

import pytest

if find_spec("torch"):
    import torch._dynamo  # noqa: F401 - does not understand sys.intern after Ansible has replaced it

_LEFT = pytest.StashKey[list[threading.Thread]]()


def pytest_configure() -> None:
    """Started in the background of a shell, the tests and all that they start would ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail, and name them, where tests have left threads that do not end."""
    gc.collect()  # pools end their threads with the last of whoever held them
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in threads:
        thread.join(30)
    left = [thread for thread in threads if thread.is_alive()]
    session.config.stash[_LEFT] = left
    if left:
        session.exitstatus = 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The interpreter would wait for such threads for ever."""
    if left := config.stash.get(_LEFT, []):
        print(f"tests have left threads that do not end: {left}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
