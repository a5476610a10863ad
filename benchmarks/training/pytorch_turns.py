"""Processor time of a step with 26 tables beside PyTorch's sparse layers and FBGEMM's, in turns.

Kinds of one process take turns of a few steps, so that other load of the machine meets all of them. Time is
that of all threads of the process. What is shown is the median of the turns, and of their multiples: a turn
is compared with those beside it, and no lucky one decides.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from processes import run
from reporting import RESULTS, header, table
from vocabularies import FIELDS, INTEGERS

SPARSE = "nn.EmbeddingBag(sparse=True)"
TBE = "FBGEMM's CPU TBE"
PLAIN = "plain layers"
COLLECTION = "EmbeddingBagCollection"
PIPELINE = "the same in a TrainPipeline"  # with a thread for the tables and one that pulls ahead
DENSE = "the dense part alone"
OURS = (PLAIN, COLLECTION, PIPELINE)
KINDS = (SPARSE, TBE, *OURS, DENSE)
IDS = ((1, 1), (3, 10))  # of a field in an example, at least and at most
STEPS = 4  # of a turn
# What a collection is to reach, as multiples of SPARSE and TBE, by the most ids and dim.
TARGETS = {(1, 16): (1.55, 1.05), (1, 64): (1.27, 1.05), (10, 16): (2.6, 1.15), (10, 64): (1.85, 1.1)}
# What a pipeline is to reach with a spare core, as multiples of SPARSE by wall time.
WALL_TARGETS = {(1, 16): 1.75, (1, 64): 1.45, (10, 16): 3.5, (10, 64): 2.5}


def main(dims: list[int], rows: int, batch_size: int, rounds: int) -> int:
    """Measure and write the table."""
    lines = []
    for (low, high), dim in itertools.product(IDS, dims):
        setup = {"dim": dim, "rows": rows, "low": low, "high": high, "batch": batch_size, "rounds": rounds}
        program = [sys.executable, str(Path(__file__).parent), "torch", "--turns-worker", json.dumps(setup)]
        ended = run(program)
        if ended.status:
            print(f"error: {setup}: the worker ended with status {ended.status}", file=sys.stderr)
            return 1
        ids = f"{low} id" if high == 1 else f"{low} to {high} ids"
        lines += _lines(ids, dim, high, json.loads(ended.output.splitlines()[-1]))
    text = header("PyTorch: processor time of a step, in turns")
    text += f"""\
{FIELDS} tables of {rows:,} rows under a dense part of 256 and 128, batch {batch_size}, Adagrad, sums of ids
by Zipf's law, one thread for the dense part. Milliseconds of processor time per step, the median of {rounds}
turns of {STEPS} steps; multiples are of the other's time, medians of those within a turn. The dense part
alone bounds them. "plain layers" are nn.EmbeddingBag after distributed_model, without other changes; FBGEMM's
tables update rows in the backward pass (EXACT_ADAGRAD). What is wanted of the pipeline is a multiple of wall
time, where another core is free for it.

"""
    names = ["ids, dim, kind", "ms", "× sparse=True", "× TBE", "wall ms", "wall × sparse=True", "wanted"]
    text += table(names, lines)
    (RESULTS / "training_torch_turns.md").write_text(text)
    print(text)
    return 0


def _lines(ids: str, dim: int, most: int, found: dict[str, Any]) -> list[list[str]]:
    lines = []
    for kind in KINDS:
        name = f"{ids}, dim {dim}, {kind}"
        if kind not in found:
            lines.append([name, *"------"])
            continue
        of_processor, wall = (1000 * statistics.median(times) for times in zip(*found[kind], strict=True))
        multiples = [_multiple(found, base, kind, 0) for base in (SPARSE, TBE)]
        wanted = "-"
        if kind == COLLECTION and (most, dim) in TARGETS:
            wanted = "{} and {}".format(*TARGETS[most, dim])
        elif kind == PIPELINE and (most, dim) in WALL_TARGETS:
            wanted = f"{WALL_TARGETS[most, dim]} wall"
        times = f"{wall:.1f}", _multiple(found, SPARSE, kind, 1)
        lines.append([name, f"{of_processor:.1f}", *multiples, *times, wanted])
    return lines


def _multiple(found: dict[str, Any], base: str, kind: str, which: int) -> str:
    """How often a step of `kind` goes into one of `base`, by processor time (0) or wall time (1)."""
    if base not in found:
        return "-"
    turns = zip(found[base], found[kind], strict=True)
    return f"{statistics.median(other[which] / own[which] for other, own in turns):.2f}"


def worker(dim: int, rows: int, low: int, high: int, batch: int, rounds: int) -> int:
    """Run all kinds in turns; prints each turn's seconds of processor and of wall time per step as JSON."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = _batches(rows, batch, low, high)
    steps = {kind: _step(kind, dim, rows, batch, data) for kind in KINDS if _is_there(kind)}
    for step in steps.values():
        for _ in range(3):
            step()
    found: dict[str, list[list[float]]] = {kind: [] for kind in steps}
    for number in range(rounds):
        for kind, step in list(steps.items())[:: 1 if number % 2 else -1]:
            step()  # the caches are another kind's
            wall, used = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step()
            found[kind].append([(time.process_time() - used) / STEPS, (time.perf_counter() - wall) / STEPS])
    print(json.dumps(found))
    return 0


def _is_there(kind: str) -> bool:
    return kind != TBE or importlib.util.find_spec("fbgemm_gpu") is not None


def _batches(rows: int, batch: int, low: int, high: int) -> list[Any]:
    """(integers (B, 13), ids feature by feature, their offsets (26 B + 1,), labels (B, 1))."""
    import numpy as np
    import torch

    random = np.random.default_rng(1)
    shrink = 1 - 1.05  # Zipf's exponent
    found = []
    for _ in range(12):
        lengths = random.integers(low, high + 1, FIELDS * batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ranks = ((float(rows) ** shrink - 1) * random.random(offsets[-1]) + 1) ** (1 / shrink)
        parts = (
            random.standard_normal((batch, INTEGERS), np.float32),
            ranks.astype(np.int64) * 2654435761 % rows,
            offsets,
            random.integers(0, 2, (batch, 1)).astype(np.float32),
        )
        found.append(tuple(torch.from_numpy(part) for part in parts))
    return found


def _step(kind: str, dim: int, rows: int, batch: int, data: list[Any]) -> Any:
    """Return a function that trains on the next batch."""
    import torch
    from torch import nn

    import oe_runtime.torch as embed
    from oe_runtime.client import Client

    names = [f"field{number}" for number in range(FIELDS)]

    class Clicks(nn.Module):
        """Logits of what a kind's tables are called with, and of integers (B, 13)."""

        def __init__(self) -> None:
            super().__init__()
            if kind in (SPARSE, PLAIN):
                self.fields = nn.ModuleList(
                    nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(FIELDS)
                )
            elif kind in (COLLECTION, PIPELINE):
                self.fields = embed.EmbeddingBagCollection(
                    [embed.EmbeddingBagConfig(rows, dim, name) for name in names]
                )
            elif kind == TBE:
                self.fields = _tbe(dim, rows)
            sizes = [FIELDS * dim + INTEGERS, 256, 128]
            deep = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
            self.deep = nn.Sequential(*deep, nn.Linear(sizes[-1], 1))

        def forward(self, integers: Any, *asked: Any) -> Any:
            """(B, 1)."""
            if kind in (SPARSE, PLAIN):
                found = [field(*one) for field, one in zip(self.fields, asked[0], strict=True)]
            elif kind in (COLLECTION, PIPELINE):
                found = [self.fields(*asked).values()]
            else:
                found = [self.fields(*asked) if kind == TBE else zeros]
            return self.deep(torch.cat([*found, integers], 1))

    class WithLoss(nn.Module):
        """What a TrainPipeline calls with a batch."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, all_of_batch: Any) -> Any:
            """Return the loss."""
            integers, asked, labels = all_of_batch
            return nn.functional.binary_cross_entropy_with_logits(self.model(integers, *asked), labels)

    zeros = torch.zeros(batch, FIELDS * dim, requires_grad=True)  # their gradient is a part of any step
    model: Any = Clicks()
    if kind == PIPELINE:
        model = WithLoss(model)
    if kind in OURS:
        model = embed.distributed_model(model, Client.in_process(threads=2 if kind == PIPELINE else 1))
    parameters = model.deep.parameters() if kind == TBE else model.parameters()
    optimizer = torch.optim.Adagrad(parameters, 0.01)
    if kind in OURS:
        optimizer = embed.distributed_optimizer(optimizer, model)
    batches = []
    for integers, ids, offsets, labels in data:
        asked: tuple[Any, ...] = (ids, offsets)
        if kind in (SPARSE, PLAIN):
            cuts = offsets[:: len(labels)].tolist()
            starts = offsets[:-1].reshape(FIELDS, -1)
            asked = (
                [(ids[a:b], own - a) for (a, b), own in zip(itertools.pairwise(cuts), starts, strict=True)],
            )
        elif kind in (COLLECTION, PIPELINE):
            asked = (embed.KeyedJaggedTensor(names, ids, offsets=offsets),)
        batches.append((integers, asked, labels))
    source = itertools.cycle(batches)
    if kind == PIPELINE:
        return functools.partial(embed.TrainPipeline(model, optimizer).progress, source)

    def step() -> None:
        integers, asked, labels = next(source)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(integers, *asked), labels).backward()
        optimizer.step()

    return step


def _tbe(dim: int, rows: int) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    made = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * FIELDS,
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.01,
        eps=1e-10,
    )
    made.init_embedding_weights_uniform(-0.05, 0.05)
    return made
