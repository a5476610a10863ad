"""In which order and how many at a time hosts are changed, so that a cluster goes on serving."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import ceil

from provision.inventory import Inventory
from provision.node.roles import prepares
from provision.node.step import Plan

SHARE = 0.2  # of the parameter servers' hosts, and of the others, at a time


def batches(inventory: Inventory, plans: Sequence[Plan]) -> tuple[list[str], list[int]]:
    """Hosts in the order of their turns, and how many take each turn together.

    Hosts on which nothing is disturbed come first, all at once. Of the others one goes alone, a parameter
    server if there is any; when it is well again, a fifth of the servers at a time (at least one, and never
    all of several), each time with a fifth of the other hosts.
    """
    quiet = [plan.host for plan in plans if all(prepares(step) for step in plan.steps)]
    moved = [plan.host for plan in plans if plan.host not in quiet]
    servers = [name for name in moved if inventory.hosts[name].is_parameter_server]
    others = [name for name in moved if name not in servers]
    first = (servers or others)[:1]
    rest = [_chunks(group, len(group)) for group in (_without(servers, first), _without(others, first))]
    turns = [quiet, first] + [more + most for more, most in zip_longest(*rest, fillvalue=[])]
    turns = [turn for turn in turns if turn]
    return [name for turn in turns for name in turn], [len(turn) for turn in turns]


def _without(names: list[str], left_out: list[str]) -> list[str]:
    return [name for name in names if name not in left_out]


def _chunks(names: list[str], count: int) -> list[list[str]]:
    size = max(1, ceil(SHARE * count))
    return [names[begin : begin + size] for begin in range(0, len(names), size)]
