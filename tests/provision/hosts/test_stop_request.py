"""A stop request may come at any moment of a wait, as a signal does."""

import sys
import threading
import time
from itertools import count
from types import FrameType
from typing import Any

from provision.hosts.stop_request import StopRequest


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
