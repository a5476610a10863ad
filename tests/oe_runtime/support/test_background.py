"""Work in a second thread, and the end of the program that asked for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from oe_runtime.support.background import Background


def test_work_is_done_in_its_order_and_the_thread_ends_with_its_owner() -> None:
    background, done = Background("test-background"), []
    futures = [background.submit(done.append, number) for number in range(100)]
    broken = background.submit(int, "x")
    assert [one.result() for one in futures] == [None] * 100
    assert done == [*range(100)]
    with pytest.raises(ValueError, match="invalid literal"):
        broken.result()
    (thread,) = [one for one in threading.enumerate() if one.name == "test-background"]
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_shutdown_waits_for_the_work() -> None:
    with Background("test-background") as background:
        background.submit(int)
    assert not [one for one in threading.enumerate() if one.name == "test-background"]


@pytest.mark.process
@pytest.mark.parametrize(("seconds", "said"), [(0.5, "done\n"), (60, "")])
def test_the_end_of_a_process_waits_for_work_but_not_for_ever(seconds: float, said: str) -> None:
    text = f"""
import time
from oe_runtime.support import background
background._EXIT_SECONDS = 3.0
kept = background.Background("kept")
kept.submit(lambda: (time.sleep({seconds}), print("done", flush=True)))
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=True
    )
    assert (done.stdout, done.stderr) == (said, "")
