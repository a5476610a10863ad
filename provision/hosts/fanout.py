"""Does one thing on many hosts at once: bounded by count, without waiting for hosts that hang.

At most ``MOST_AT_ONCE`` hosts work at a time. A slow host gives its place to the next one, and at most
``MOST_SLOW`` such hosts are waited for beside the others. Slow is longer than ``PATIENCE`` and than
``SLOW`` times the answers of others: where all take long, the machine is busy, and more at once would make
them slower.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from subprocess import Popen
from typing import TypeVar

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host

MOST_AT_ONCE = 64  # keeps a few cores busy
MOST_SLOW = 64
PATIENCE = 2.0  # seconds
SLOW = 2.0
# When only slow hosts are left of a fleet, they are cut off; see ``limit``.
FLEET = 20  # answers that say what is usual
LEAST = 10.0  # seconds, as long as ssh waits for a connection
MULTIPLE = 5.0
FEWEST = 2.0
SHARE = 0.1
_NEARLY_ALL = 0.9
_TICK = 0.1  # seconds; a connection that was cut off ends soon

T = TypeVar("T")


class Cut:
    """Ends the connections of one host from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[Popen[bytes]] = set()
        self.why = ""  # empty: not cut

    def add(self, process: Popen[bytes]) -> None:
        """A connection begins."""
        with self._lock:
            self._processes.add(process)
            if self.why:
                process.kill()

    def remove(self, process: Popen[bytes]) -> None:
        """A connection ended, and its process was waited for."""
        with self._lock:
            self._processes.discard(process)

    def cut(self, why: str) -> None:
        """End all connections, present and later ones."""
        with self._lock:
            self.why = why
            for process in self._processes:
                process.kill()


@dataclass
class _Task:
    """One host's work."""

    cut: Cut = field(default_factory=Cut)
    begun: float = 0.0
    ended: float = 0.0
    answered: bool = False


def on_hosts(
    hosts: Mapping[str, Host], do: Callable[[Host, Cut], T], *, cut_off: bool = True
) -> dict[str, T | HostError]:
    """The result of ``do`` on each host, or its HostError; in the order of ``hosts``.

    Without ``cut_off`` all hosts are waited for: for work that may take long on some. ``do`` must hand its
    ``Cut`` to ``remote.run``. Other exceptions are raised when all hosts have ended.
    """
    found: dict[str, Future[T | HostError]] = {}
    tasks: dict[Future[T | HostError], _Task] = {}
    if not hosts:
        return {}

    def one(host: Host, task: _Task) -> T | HostError:
        task.begun = time.monotonic()
        try:
            found = do(host, task.cut)
            task.answered = True
            return found
        except HostError as error:
            return error
        finally:
            task.ended = time.monotonic()

    with ThreadPoolExecutor(max_workers=min(len(hosts), MOST_AT_ONCE + MOST_SLOW)) as pool:
        running: set[Future[T | HostError]] = set()
        took: deque[float] = deque(maxlen=MOST_AT_ONCE)
        try:
            for name, host in hosts.items():
                task = _Task()
                while (pause := _until_place([tasks[item].begun for item in running], took)) > 0:
                    done, running = wait(running, timeout=pause, return_when=FIRST_COMPLETED)
                    answers = [tasks[item] for item in done if tasks[item].answered and cut_off]
                    took.extend(task.ended - task.begun for task in answers)
                task.begun = time.monotonic()
                found[name] = pool.submit(one, host, task)
                tasks[found[name]] = task
                running.add(found[name])
            if cut_off:
                _wait_for_last(running, tasks)
            wait(running)
        except BaseException:
            for task in tasks.values():
                task.cut.cut("was not waited for: a stop request")
            raise
    return {name: item.result() for name, item in found.items()}


def _until_place(begun: Collection[float], took: Collection[float]) -> float:
    """Seconds until another host may begin if none ends before; 0: now.

    ``begun``: when the running hosts did; ``took``: the seconds of those that answered last.
    """
    if len(begun) >= MOST_AT_ONCE + MOST_SLOW:
        return threading.TIMEOUT_MAX
    patience = max(PATIENCE, SLOW * (statistics.median(took) if took else PATIENCE))
    slow_at = sorted(at + patience for at in begun)
    too_many = len(begun) - MOST_AT_ONCE  # these and one more must be slow
    return max(0.0, slow_at[too_many] - time.monotonic()) if too_many >= 0 else 0.0


def limit(usual: float, all_took: float) -> float:
    """Seconds until a host that has not answered hangs.

    ``usual``: nearly all others took at most that. ``all_took``: the time for all of them. The limit is five
    times the usual, but hosts that hang should cost a fleet a tenth of its time at most. So it is that tenth
    if the tenth is shorter, and never less than twice the usual, nor than 10 s.
    """
    return max(LEAST, min(MULTIPLE * usual, max(FEWEST * usual, SHARE * all_took)))


def _wait_for_last(running: set[Future[T]], tasks: Mapping[Future[T], _Task]) -> None:
    """Wait for the hosts that still run; in a fleet, cut off those that take far longer than the others."""
    total = len(tasks)
    while running:
        others = [task for task in tasks.values() if task.ended and not task.cut.why]
        answered = sorted(task.ended - task.begun for task in others)
        if len(answered) < max(FLEET, _NEARLY_ALL * total):
            _, running = wait(running, timeout=PATIENCE, return_when=FIRST_COMPLETED)
            continue
        usual = answered[int(_NEARLY_ALL * (len(answered) - 1))]
        first, last = min(task.begun for task in others), max(task.ended for task in others)
        longest = limit(usual, last - first)
        # While others still answer, these are slow: a busy machine makes all of them so.
        at = max(min(tasks[item].begun for item in running) + longest, last + usual)
        left = max(0.0, at - time.monotonic())
        _, running = wait(running, timeout=left, return_when=FIRST_COMPLETED)
        now = time.monotonic()
        for item in running if now >= at else ():
            if now - tasks[item].begun >= longest:
                tasks[item].cut.cut(
                    f"did not answer within {longest:.0f} s; {len(answered)} other hosts took "
                    f"{usual:.1f} s or little more"
                )
        if any(tasks[item].cut.why for item in running):
            _, running = wait(running, timeout=_TICK, return_when=FIRST_COMPLETED)
