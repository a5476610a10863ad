"""A stop request may come at any moment of a wait, as a signal does."""

import subprocess
import sys
import threading
import time
from itertools import count
from types import FrameType
from typing import Any

from provision.hosts.stop_request import StopRequest
from provision.node import adapter


def wait_asked_at(line: int) -> tuple[StopRequest, bool]:
    """A request before this line that a wait runs, as of a signal's handler; whether the wait ended."""
    stop, left = StopRequest(), line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line" and left >= 0:
            left -= 1
            if left < 0:
                stop.ask()
        return trace

    def run() -> None:
        sys.settrace(trace)
        stop.wait(0.01)
        sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    return stop, not thread.is_alive()


def test_a_request_at_any_moment_of_a_wait_ends_it() -> None:
    for line in count():
        stop, ended = wait_asked_at(line)
        assert ended, f"a request before line {line} of a wait hangs"
        if not stop.count:
            break
        assert stop.wait(0)
    assert line > 3, "the wait was traced"


def test_a_request_wakes_all_threads_that_wait() -> None:
    stop, woken = StopRequest(), []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(30))) for _ in range(3)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    stop.ask()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 3
    assert time.monotonic() - begun < 20


# A second signal before each line that the first one's handler runs.
TWICE = """
import signal, sys, threading
from itertools import count
from provision.node import adapter

def trace(frame, event, arg):
    global left
    if event == "line":
        left -= 1
        if left == 0:
            handler(15, None)
    return trace

handlers = []
signal.signal = lambda number, handler: handlers.append(handler)
adapter.Adapter(adapter._options(["true"])).run()
threading._active_limbo_lock = threading.Lock()  # as in Python 3.6
handler = handlers[0]
for line in count(1):
    left = line
    sys.settrace(trace)
    handler(15, None)
    sys.settrace(None)
    if left > 0:
        break
assert line > 1, "the handler was traced"
"""


def test_a_signal_may_come_while_the_adapter_handles_another() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_adapter_s_waits_end_with_a_request() -> None:
    asked = adapter.StopPipe()
    assert (asked.is_set(), asked.wait(0.01)) == (False, False)
    threading.Timer(0.1, asked.set).start()
    assert asked.wait()
    for _ in range(1 << 17):  # more than a pipe holds
        asked.set()
    assert (asked.is_set(), asked.wait(30)) == (True, True)
