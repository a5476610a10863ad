import random

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from provision.cluster.host_names import alike, fold


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["re6p-1"], "re6p-1"),
        ([f"re6p-{number:03}" for number in range(1, 97)], "re6p-[001-096]"),
        (["b2", "a", "b1", "b1"], "a,b[1-2]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2"], "10.0.[0-1].[1-2]"),
        (["ps-1.dc.example.com", "ps-2.dc.example.com"], "ps-[1-2].dc.example.com"),
        (
            ["x@y", "a1", "a2", "b[1]", "c d", "*"],
            "a[1-2],*,b[1],c d,x@y",
        ),  # NodeSet's operators are names here
    ],
)
def test_folded_names(names: list[str], folded: str) -> None:
    assert fold(names) == folded


def test_no_name_is_lost_or_added() -> None:
    some = random.Random(7)  # noqa: S311
    known = [f"r{rack:02}-n{number}" for rack in range(20) for number in range(50)]
    for count in (2, 10, 300, 999):
        names = some.sample(known, count)
        assert set(NodeSet(fold(names), resolver=RESOLVER_NOGROUP)) == set(names)


@pytest.mark.parametrize("most", [20, 60, 200])
def test_long_names_are_cut_and_the_rest_counted(most: int) -> None:
    some = random.Random(7)  # noqa: S311
    names = [f"i-{some.getrandbits(64):016x}" for _ in range(1000)]
    shown, _, more = fold(names, most).rpartition(", ")
    assert len(shown) <= max(most, 20)
    listed = NodeSet(shown, resolver=RESOLVER_NOGROUP)
    assert set(listed) <= set(names)
    assert len(listed) + int(more.removesuffix(" more")) == 1000


def test_texts_with_their_hosts() -> None:
    assert alike([("a", "x"), ("b", "y"), ("c", "x")]) == {"x": ["a", "c"], "y": ["b"]}
