"""How a run of the tests ends."""

import os
import sys
import threading

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Name the threads that are left, for which the interpreter would wait."""
    session.config.stash[_STATUS] = int(exitstatus)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            print(f"\nleft by a test: {thread}", file=sys.stderr)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End here: the verdict is out.

    An interpreter with TensorFlow's threads in it can hang at its end (one CI run did, for an hour); how the
    programs of this project end is tested with processes of their own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _STATUS in config.stash:
        os._exit(config.stash[_STATUS])


_STATUS = pytest.StashKey[int]()
