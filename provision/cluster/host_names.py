"""Folds the names of many hosts into few letters: ``re6p-[001-096]``. Not for Ansible's patterns."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable
from functools import cache
from typing import TypeVar

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from provision.cluster.errors import OeprovError

_FOLDABLE = re.compile(r"[A-Za-z0-9._:-]+")  # other characters are operators of NodeSet
_Key = TypeVar("_Key", bound=Hashable)
_Member = TypeVar("_Member")


def fold(names: Collection[str], most: int = 0) -> str:
    """The names in one string, in order: ``gpu-7,re6p-[001-096]``.

    With ``most`` letters at most, about: the first names, and the number of the others.
    """
    text, order = _fold(frozenset(names))
    if not most or len(text) <= most:
        return text
    count = len(order)
    while count > 1 and len(text) > most:
        count = max(1, min(count - 1, count * most // len(text)))
        text, _ = _fold(frozenset(order[:count]))
    return f"{text}, {len(order) - count:,} more"


@cache  # a plan names the same hosts in several lines
def _fold(names: frozenset[str]) -> tuple[str, list[str]]:
    """The folded names, and the names in the order in which they are folded."""
    given = sorted(name for name in names if _FOLDABLE.fullmatch(name))
    if len(given) > 1:
        found = NodeSet.fromlist(given, resolver=RESOLVER_NOGROUP)
        text, order = str(found), [str(name) for name in found]
    else:
        text, order = "".join(given), given
    others = sorted(names.difference(given))
    return ",".join([text] * bool(text) + others), order + others


def named_objects(flags: Iterable[str]) -> list[str]:
    """``HOST:OBJECT`` for each host of flags such as ``re6p-[001-096]:OBJECT``, whose hosts are folded.

    OeprovError for names that cannot be read.
    """
    found = []
    for flag in flags:
        names, _, item = flag.partition(":")
        if item and re.search(r"[\[,]", names):
            try:
                hosts = NodeSet(names, resolver=RESOLVER_NOGROUP)
            except NodeSetException as error:
                raise OeprovError(f"--consent {flag}: its hosts cannot be read: {error}") from None
            found += [f"{host}:{item}" for host in hosts]
        else:
            found.append(flag)
    return found


def alike(pairs: Iterable[tuple[_Member, _Key]]) -> dict[_Key, list[_Member]]:
    """From (host, text): the hosts of each text, in the order in which the texts come first."""
    found: dict[_Key, list[_Member]] = {}
    for member, key in pairs:
        found.setdefault(key, []).append(member)
    return found
