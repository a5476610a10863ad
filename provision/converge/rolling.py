"""The order in which hosts are changed, how many at once, and when a run stops: the cluster keeps serving."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import chain, repeat
from math import ceil

from provision.cluster.inventory import Inventory
from provision.node.step import Plan

_SHOWN = 5  # turns; further ones are not described


class Failures(str, Enum):
    """What a failed host means for the others."""

    limited = "limited"  # a failed canary stops the others, and so do more than rollout_failures
    fail_fast = "fail-fast"  # any failed host stops the others
    keep_going = "keep-going"  # only the quorum stops the others


class Rollout:
    """One rolling change: gives the turns one after another, and stops when too many hosts have failed.

    Hosts without a disturbing step come first, all at once. The others follow in the inventory's shares,
    by default one host (a parameter server if there is any), then 5 % and then 20 % at a time. The first of
    these turns is the canary. ``rollout_quorum`` servers stay up: they are neither in their turn, nor
    failed in one, nor unreachable (``lost``). ``down``: hosts that failed in earlier rounds of this run;
    ``earlier``: how many.
    """

    def __init__(
        self,
        inventory: Inventory,
        plans: Sequence[Plan],
        lost: Collection[str] = (),
        *,
        failures: Failures = Failures.limited,
        down: Collection[str] = (),
        earlier: int = 0,
    ) -> None:
        self._rollout, self._failures = inventory.rollout, failures
        self._earlier = earlier
        self._count = len(plans) + earlier
        self._quiet = _quiet(plans)
        quiet, servers = set(self._quiet), set(inventory.parameter_servers)
        self._moved = [plan.host for plan in plans if plan.host not in quiet]
        self._all_servers = servers
        self._servers = [name for name in self._moved if name in servers]
        self._others = [name for name in self._moved if name not in servers]
        self._ratio = len(self._servers), len(self._others)
        reached = len(servers.difference(lost))
        wanted = max(1, _part(self._rollout.quorum, len(servers), least=0))
        self.quorum = min(wanted, max(0, reached - 1))
        self._up = servers.difference(lost, down)  # servers that work, as far as is known
        self._shares = chain(self._rollout.shares, repeat(self._rollout.shares[-1]))
        self.failed: dict[str, None] = {}
        self.stopped = ""  # why no turn begins any more
        self._canary = self._first()

    @property
    def is_quiet(self) -> bool:
        """No host that is left is disturbed."""
        return not self._servers and not self._others

    @property
    def left(self) -> list[str]:
        """Hosts that had no turn and did not fail."""
        return [*self._quiet, *self._servers, *self._others]

    def fail(self, names: Collection[str]) -> None:
        """Take note of hosts that failed before their turn: nothing was disturbed there."""
        self.failed.update(dict.fromkeys(names))
        self._remove(names)
        self._stop_if_needed(names)

    def leave(self, names: Collection[str]) -> None:
        """Give hosts no turn, before the first one: another run of the roll-out changes them."""
        self._remove(names)
        self._canary = self._first()

    def end(self, turn: Collection[str], failed: Collection[str]) -> None:
        """A turn ended; ``failed`` are those of its hosts that may not work any more."""
        self.failed.update(dict.fromkeys(failed))
        self._up.difference_update(failed)
        self._stop_if_needed(failed)

    def next(self) -> list[str]:
        """The hosts of the next turn, which must end before the one after it; empty when there is none."""
        if self.stopped:
            return []
        if self._quiet:
            turn, self._quiet = self._quiet, []
            return turn
        if not self._servers and not self._others:
            return []
        servers, others = self._sizes(next(self._shares))
        turn = self._cut(servers, others)
        if not turn:
            self.stopped = (
                f"{len(self._up)} of {len(self._all_servers)} parameter servers are up, and {self.quorum} "
                "must stay up (rollout_quorum)"
            )
        del self._servers[:servers], self._others[:others]
        return turn

    def _remove(self, names: Collection[str]) -> None:
        gone = set(names)
        for waiting in (self._quiet, self._servers, self._others):
            waiting[:] = [name for name in waiting if name not in gone]

    def _first(self) -> set[str]:
        """The hosts of the first turn that disturbs."""
        return set(self._cut(*self._sizes(self._rollout.shares[0])))

    def _cut(self, servers: int, others: int) -> list[str]:
        return self._servers[:servers] + self._others[:others]

    def _sizes(self, share: int | str) -> tuple[int, int]:
        """Servers and others of a turn."""
        spare = len(self._up) - self.quorum
        servers, others = self._ratio
        if isinstance(share, int):
            count = min(len(self._servers), ceil(share * servers / max(1, servers + others)), spare)
            beside = share - max(0, count)
        else:
            count = min(len(self._servers), _part(share, servers), spare)
            beside = _part(share, others)
        count = max(0, count)
        return count, min(len(self._others), beside)

    def _stop_if_needed(self, names: Collection[str]) -> None:
        if self.stopped or not names or self._failures is Failures.keep_going:
            return
        canaries = [name for name in names if name in self._canary]
        most = max(1, _part(self._rollout.failures, self._count, least=0))
        if self._failures is Failures.fail_fast:
            self.stopped = f"{some(names)} failed (--fail-fast)"
        elif canaries:
            self.stopped = f"{some(canaries)}, which is changed first, failed"
        elif self._earlier + len(self.failed) > most:
            self.stopped = (
                f"{self._earlier + len(self.failed)} hosts failed, and {most} may (rollout_failures)"
            )


def turns(inventory: Inventory, plans: Sequence[Plan], lost: Collection[str] = ()) -> list[list[str]]:
    """Groups of hosts that are changed together if no host fails; see ``Rollout``."""
    rollout = Rollout(inventory, plans, lost)
    found = []
    while turn := rollout.next():
        found.append(turn)
        rollout.end(turn, [])
    return found


def some(names: Collection[str], most: int = 5) -> str:
    """The first names of many, and the number of the others."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _quiet(plans: Sequence[Plan]) -> list[str]:
    return [plan.host for plan in plans if all(step.preparing for step in plan.steps)]


def _part(share: int | str, count: int, least: int = 1) -> int:
    """A percentage of a number, or the number that the share is; at least ``least``."""
    if isinstance(share, int):
        return share
    return max(least, count * int(share.removesuffix("%")) // 100)


def describe(plans: Sequence[Plan], found: Sequence[Sequence[str]]) -> str:
    """The turns in one line, with their number; empty where there is only one."""
    words = [turn[0] if len(turn) == 1 else f"{len(turn)} hosts" for turn in found]
    if len(words) < 2:
        return ""
    if set(found[0]) <= set(_quiet(plans)):
        words[0] += " (no disturbance)"
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], "…"]
    return (
        f"turns ({len(found)}): {', '.join(words)}; a failed first turn stops the later ones (rollout_shares)"
    )
