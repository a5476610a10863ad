"""The pipeline gives, bit for bit, what steps one after the other give."""

import gc
import itertools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client


@dataclass
class Batch:
    features: Any
    more: dict[str, Any]


class Model(nn.Module):
    """A collection, and layers of one id each; `derived` looks ids up that are not in the batch."""

    def __init__(self, *, derived=False):
        super().__init__()
        self.tables = embed.EmbeddingBagCollection(
            [
                embed.EmbeddingBagConfig(60, 8, "words", feature_names=["a", "b"]),
                embed.EmbeddingBagConfig(-1, 4, "shops", feature_names=["c"]),
            ]
        )
        self.user = embed.Embedding(40, 8, name="user")
        self.kind = embed.EmbeddingBag(30, 4, mode="sum", name="kind")
        self.top = nn.Linear(8 * 3 + 4 * 2, 1)
        self.derived = derived

    def forward(self, batch):
        found = self.tables(batch.features).values()
        user, kinds = batch.more["ids"]
        if self.derived:
            user = user // 2
        both = torch.cat([found, self.user(user), self.kind(kinds)], 1)
        scores = self.top(both)[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.more["labels"]), scores


def batches(count, seed=0):
    random = np.random.default_rng(seed)
    for number in range(count):
        size = (16, 1, 33)[number % 3]
        lengths = random.integers(0, 4, 3 * size)
        yield Batch(
            embed.KeyedJaggedTensor(
                ["a", "b", "c"],
                torch.from_numpy(random.integers(0, 60, lengths.sum())),
                lengths=torch.from_numpy(lengths),
            ),
            {
                "ids": (
                    torch.from_numpy(random.integers(0, 40, size)),
                    torch.from_numpy(random.integers(0, 30, (size, 2))),
                ),
                "labels": torch.from_numpy(random.integers(0, 2, size).astype(np.float32)),
            },
        )


def make(client, **options):
    torch.manual_seed(0)
    model = embed.distributed_model(Model(**options), client)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
    return model, embed.distributed_optimizer(optimizer, model)


def rows(client):
    return {
        name: client.pull_rows(client.create_table(client.spec(number)), np.arange(30))
        for number, name in enumerate(["words", "shops", "user", "kind"])
    }


def sequential(model, optimizer, data):
    outputs = []
    for batch in data:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def piped(model, optimizer, data, **options):
    pipeline, found = embed.TrainPipeline(model, optimizer, **options), []
    data = iter(data)
    while True:
        try:
            found.append(pipeline.progress(data).detach())
        except StopIteration:
            return found


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_pipeline_equals_steps_one_after_the_other(servers, monkeypatch):
    one, two = Client.in_process(servers=servers), Client.in_process(servers=servers)
    expected = sequential(*make(one), batches(12))
    followed = []
    follow = two.follow
    monkeypatch.setattr(two, "follow", lambda *a: (followed.append(a), follow(*a)))
    assert equal(piped(*make(two), batches(12)), expected)
    for name, values in rows(one).items():
        assert np.array_equal(rows(two)[name], values), name
    assert len(followed) > 12  # of all batches but the first two, the collection's request and the layers'


def test_ids_that_are_computed_in_the_model_are_named_and_right():
    one, two = Client.in_process(), Client.in_process()
    expected = sequential(*make(one, derived=True), batches(6))
    with pytest.warns(UserWarning, match="layer 'user': its rows are pulled when it is called, not ahead"):
        assert equal(piped(*make(two, derived=True), batches(6)), expected)


def test_staleness_1_lacks_the_last_step():
    one, two = Client.in_process(), Client.in_process()
    expected = sequential(*make(one), batches(8))
    found = piped(*make(two), batches(8), staleness=1)
    assert equal(found[:2], expected[:2])  # the second learns what is looked up where
    assert not equal(found, expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.5, atol=0.5)


def test_a_batch_that_is_changed_after_it_was_pulled_is_pulled_again():
    one, two = Client.in_process(), Client.in_process()

    def changing(data):
        """Change each batch in place, one batch after it was yielded."""
        for batch, following in itertools.pairwise([*data, None]):
            yield batch
            if following is not None:
                following.features.values().add_(1).remainder_(60)

    expected = sequential(*make(one), changing(batches(6)))
    model, optimizer = make(two)
    pipeline, found, data = embed.TrainPipeline(model, optimizer), [], list(batches(6))
    source = iter(data)
    for number in range(6):
        found.append(pipeline.progress(source).detach())
        pipeline._waiting[id(source)][1].result()  # the next batch's rows are there
        if number < 5:
            data[number + 1].features.values().add_(1).remainder_(60)
    assert equal(found, expected)


def test_errors_of_batches_and_ends_come_in_their_turn():
    client = Client.in_process()
    model, optimizer = make(client)
    pipeline = embed.TrainPipeline(model, optimizer)

    def broken():
        yield from batches(2)
        raise OSError("the file is gone")

    source = broken()
    pipeline.progress(source)
    pipeline.progress(source)
    with pytest.raises(OSError, match="the file is gone"):
        pipeline.progress(source)
    with pytest.raises(StopIteration):
        pipeline.progress(iter(()))
    pipeline.progress(batches(3))  # another iterator, whose first batch is not the one that was read ahead
    with pytest.raises(ValueError, match="staleness must be 0 or 1, not 2"):
        embed.TrainPipeline(model, optimizer, staleness=2)
    with pytest.raises(ValueError, match="for batches in memory, not on cuda:0: train in a plain loop"):
        embed.TrainPipeline(model, optimizer, "cuda:0")
    with pytest.raises(ValueError, match="the model has no tables"):
        embed.TrainPipeline(nn.Linear(2, 2), optimizer)


def test_iterators_in_turns_lose_no_batch():
    one, two = Client.in_process(), Client.in_process()
    by_turns = [batch for pair in zip(batches(4), batches(4, seed=1), strict=True) for batch in pair]
    expected = sequential(*make(one), by_turns)
    model, optimizer = make(two)
    pipeline, found = embed.TrainPipeline(model, optimizer), []
    first, second = batches(4), batches(4, seed=1)
    for _ in range(4):
        found += [pipeline.progress(source).detach() for source in (first, second)]
    assert equal(found, expected)
    for seed in range(6):
        pipeline.progress(batches(2, seed))
    with pytest.warns(UserWarning, match="more than 8 iterators were left before their ends"):
        pipeline.progress(batches(2))


def test_a_failed_pull_ahead_is_done_again_by_its_step(monkeypatch):
    for staleness in (0, 1):
        one, two = Client.in_process(), Client.in_process()
        expected = sequential(*make(one), batches(2))
        model, optimizer = make(two)
        refresh, fails = two.refresh, iter([False, False, True])

        def failing(pulled, *more, _refresh=refresh, _fails=fails, **named):
            if threading.current_thread() is not threading.main_thread() and next(_fails, False):
                raise ConnectionError("lost for a moment")
            return _refresh(pulled, *more, **named)

        monkeypatch.setattr(two, "refresh", failing)
        found = piped(model, optimizer, batches(5), staleness=staleness)
        assert equal(found[:2], expected)
        assert all(bool(one.isfinite().all()) and float(one.abs().max()) < 100 for one in found)


def test_a_table_that_is_frozen_between_steps():
    one, two = Client.in_process(), Client.in_process()

    def train(model, optimizer, run):
        outputs = []
        for number, batch in enumerate(batches(6)):
            model.tables.embedding_bags["words"].frozen = number in (2, 3)
            outputs.append(run(model, optimizer, batch))
        return outputs

    expected = train(*make(one), lambda model, optimizer, batch: sequential(model, optimizer, [batch])[0])
    model, optimizer = make(two)
    pipeline, source, found = embed.TrainPipeline(model, optimizer), batches(6), []
    for number in range(6):
        model.tables.embedding_bags["words"].frozen = number in (2, 3)
        found.append(pipeline.progress(source).detach())
    assert equal(found, expected)


def test_ids_that_are_changed_after_pull():
    layer = embed.distributed_model(embed.Embedding(50, 4), Client.in_process())
    ids = torch.arange(40, 44)
    expected = layer(ids % 7).detach()
    embed.pull({layer: ids})
    ids.remainder_(7)
    assert torch.equal(layer(ids), expected)


def test_a_pipeline_that_is_gone_keeps_nothing():
    model, optimizer = make(Client.in_process())
    before = [len(one._forward_pre_hooks) for one in model.modules()]
    for _ in range(3):
        piped(model, optimizer, batches(2))
    gc.collect()
    assert [len(one._forward_pre_hooks) for one in model.modules()] == before
