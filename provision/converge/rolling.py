"""The order in which hosts are changed, and how many at once, so that the cluster keeps serving."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, repeat
from math import ceil

from provision.cluster.inventory import Inventory
from provision.node.step import Plan

_SHOWN = 5  # turns; further ones are not described


def turns(inventory: Inventory, plans: Sequence[Plan], lost: Collection[str] = ()) -> list[list[str]]:
    """Groups of hosts that are changed together; a turn begins when all earlier ones succeeded.

    Hosts without a disturbing step come first, all at once. The others follow in the inventory's shares,
    by default one host (a parameter server if there is any), then 5 % and then 20 % at a time. A turn
    never has all reachable parameter servers, if there are several; ``lost`` are unreachable.
    """
    quiet = _quiet(plans)
    moved = [plan.host for plan in plans if plan.host not in quiet]
    servers = [name for name in moved if inventory.hosts[name].is_parameter_server]
    others = [name for name in moved if name not in servers]
    reached = set(inventory.parameter_servers).difference(lost)
    shares = inventory.rollout.shares
    found = [quiet] if quiet else []
    begun_servers = begun_others = 0
    for share in chain(shares, repeat(shares[-1])):
        left = len(servers) - begun_servers
        if not left and begun_others >= len(others):
            return found
        if isinstance(share, int):
            count = min(left, ceil(share * len(servers) / len(moved)), max(1, len(reached) - 1))
            beside = share - count
        else:
            count = min(left, _part(share, len(servers)), max(1, len(reached) - 1))
            beside = _part(share, len(others))
        found.append(
            servers[begun_servers : begun_servers + count] + others[begun_others : begun_others + beside]
        )
        begun_servers, begun_others = begun_servers + count, begun_others + beside
    raise AssertionError("shares do not end")


def _quiet(plans: Sequence[Plan]) -> list[str]:
    return [plan.host for plan in plans if all(step.preparing for step in plan.steps)]


def _part(share: str, count: int) -> int:
    """A percentage of a number, at least 1."""
    return max(1, count * int(share.removesuffix("%")) // 100)


def describe(plans: Sequence[Plan], found: Sequence[Sequence[str]]) -> str:
    """The turns in one line, with their number; empty where there is only one."""
    words = [turn[0] if len(turn) == 1 else f"{len(turn)} hosts" for turn in found]
    if len(words) < 2:
        return ""
    if set(found[0]) <= set(_quiet(plans)):
        words[0] += " (no disturbance)"
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], "…"]
    return f"turns ({len(found)}): {', '.join(words)}; a failed host stops the later turns (rollout_shares)"
