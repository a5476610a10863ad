"""Bags of a pull's rows: pooled, and their gradients summed by row."""

import numpy as np
import pytest

from oe_runtime import Client, SpecError, TableSpec
from oe_runtime.client import Bags

BAGS = [
    Bags(np.array([0, 2, 2, 5])),
    Bags(np.array([0, 1, 4]), np.array([0.5, -1, 2, 3], np.float32), mean=False),
    Bags(np.array([0, 3]), mean=True),
]
IDS = [np.array([7, 5, 7, 7, 6]), np.array([5, 9, 5, 7]), np.array([1, 1, 9])]


def pulled(servers):
    client = Client.in_process(servers=servers)
    a, b = client.create_table(TableSpec("a", 3)), client.create_table(TableSpec("b", 3))
    found = client.pull(IDS, [(a, 0), (b, 1), (a, 2)])
    rows = {
        (table, key): client.pull_rows(table, np.array([key]))[0]
        for table, ids in ((a, IDS[0]), (b, IDS[1]), (a, IDS[2]))
        for key in ids.tolist()
    }
    return client, (a, b, a), found, rows


def parts(tables):
    """(table, id, lookup, bag, weight) of each id."""
    for lookup, (table, ids, bags) in enumerate(zip(tables, IDS, BAGS, strict=True)):
        for bag, (begin, end) in enumerate(zip(bags.offsets[:-1], bags.offsets[1:], strict=True)):
            for i in range(begin, end):
                weight = 1.0 if bags.weights is None else bags.weights[i]
                yield table, int(ids[i]), lookup, bag, weight / (end - begin if bags.mean else 1)


@pytest.mark.parametrize("servers", [1, 3])
def test_bags_are_pooled_into_columns_and_gradients_summed_by_row(servers):
    client, tables, found, rows = pulled(servers)
    (group,) = found.groups
    assert group.lookups == [0, 1, 2]
    wide = [np.full((len(bags.offsets) - 1, 7), 99, np.float32) for bags in BAGS]
    client.pool(group, BAGS, [one[:, 2:5] for one in wide])
    expected = [np.zeros((len(one), 3)) for one in wide]
    for table, key, lookup, bag, weight in parts(tables):
        expected[lookup][bag] += weight * rows[table, key]
    for one, wanted in zip(wide, expected, strict=True):
        np.testing.assert_allclose(one[:, 2:5], wanted, rtol=1e-6)
        assert (one[:, [0, 1, 5, 6]] == 99).all()

    gradients = [np.random.default_rng(i).random((len(one), 3), np.float32) for i, one in enumerate(wide)]
    sums = client.sum_bags(group, BAGS, gradients)
    total = dict.fromkeys(rows, 0.0)
    for table, key, lookup, bag, weight in parts(tables):
        total[table, key] = total[table, key] + weight * gradients[lookup][bag]
    seen = 0
    for table, keys, ranges in group.tables:
        places = np.concatenate([np.arange(begin, end) for begin, end in ranges])
        assert len(ranges) == 1 or servers > 1
        np.testing.assert_allclose(sums[places], [total[table, key] for key in keys.tolist()], rtol=1e-6)
        np.testing.assert_array_equal(group.rows[places], client.pull_rows(table, keys))
        seen += len(places)
    assert seen == len(sums) == len(total)
    client.push(found, [sums], 0.1, summed=True)


def test_bags_that_do_not_fit_are_refused():
    client, _, found, _ = pulled(1)
    (group,) = found.groups
    out = [np.empty((len(bags.offsets) - 1, 3), np.float32) for bags in BAGS]

    def refused(words, lookup=0, bags=None, array=None):
        some, arrays = [*BAGS], [*out]
        some[lookup] = bags or some[lookup]
        arrays[lookup] = arrays[lookup] if array is None else array
        with pytest.raises(SpecError, match=words):
            client.pool(group, some, arrays)
        with pytest.raises(SpecError, match=words):
            client.sum_bags(group, some, arrays)

    refused("lookup 0: the offsets go down from 4 to 3", bags=Bags(np.array([0, 4, 3, 5])))
    refused("lookup 0: the offsets begin with 1, not 0", bags=Bags(np.array([1, 2, 2, 5])))
    refused("lookup 1: the offsets end with 3; there are 4 ids", 1, Bags(np.array([0, 1, 3])))
    refused("at least one offset", bags=Bags(np.empty(0, np.int64)))
    refused(
        "lookup 2: the weights are not a float32 array of shape", 2, Bags(np.array([0, 3]), np.ones(2, "f"))
    )
    refused("lookup 2: the weights are not a float32 array of shape", 2, Bags(np.array([0, 3]), np.ones(3)))
    shape = r"lookup 0: the embeddings of bags are not a float32 array of shape \(3, 3\)"
    for wrong in (np.empty((2, 3), np.float32), np.empty((3, 3)), np.empty((3, 3), np.float32).T):
        refused(shape, array=wrong)
    with pytest.raises(SpecError, match="the group has 3 lookups"):
        client.pool(group, BAGS[:2], out[:2])
    out[0].flags.writeable = False
    with pytest.raises(SpecError, match="may not be written to"):
        client.pool(group, BAGS, out)
