"""One of two processes that change gradients before the step; compares with torch alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import clip_grad_norm_

import oe_runtime.torch as embed
from oe_runtime import Client, Worker

ROWS, WORKERS = 80, 2
IDS = [torch.tensor([[1, 2], [2, 7], [70, 2]]), torch.tensor([[2, 9], [9, 11], [3, 70]])]  # of each worker
OTHER = [torch.tensor([[5, 6], [7, 7]]), torch.tensor([[6, 1], [1, 2]])]


class Net(torch.nn.Module):
    """A lookup of every id, and a bag that a worker may leave out."""

    def __init__(self):
        super().__init__()
        self.users = torch.nn.Embedding(ROWS, 4)
        self.items = torch.nn.EmbeddingBag(ROWS, 3, mode="sum")
        self.dense = torch.nn.Linear(7, 1)

    def forward(self, ids, use_items=True):
        items = self.items(ids) if use_items else torch.zeros(len(ids), 3)
        return self.dense(torch.cat([self.users(ids[:, 0]), items], 1))


class Setup:
    """A model and its optimizer, of this worker or, in torch alone, of all workers in one process."""

    def __init__(self, rank, client, prefix, around, *, in_backward=False):
        torch.manual_seed(0)
        self.net = self.model = Net()
        if in_backward:
            rows = [self.net.users.weight, self.net.items.weight]
            options = {"lr": 0.1, "initial_accumulator_value": 0.1}
            _apply_optimizer_in_backward(torch.optim.Adagrad, rows, options)
        self.rank = rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if client is not None:
            embed.distributed_model(self.net, client, name_prefix=prefix)
            module = torch.nn.ModuleList([self.net]) if around else self.net
            ddp = torch.nn.parallel.DistributedDataParallel(Around(module) if around else module)
            self.model = ddp
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), 0.1, initial_accumulator_value=0.1)
        if client is not None:
            embed.distributed_optimizer(self.optimizer, self.model)

    def backward(self, ids=IDS, scale=(1, 1), use_items=(True, True), scaled=False):
        """Gradients of each worker's loss; the mean over workers is what DistributedDataParallel has."""
        losses = [
            ((self.model(ids[worker], use_items[worker]) - 1) ** 2).sum() * scale[worker]
            for worker in range(WORKERS)
            if self.rank in (None, worker)
        ]
        found = sum(losses) / len(losses)
        (self.scaler.scale(found) if scaled else found).backward()

    def outputs(self):
        ids = torch.arange(ROWS)
        with torch.no_grad():
            dense = self.net.dense
            return [self.net.users(ids), self.net.items(ids[:, None]), dense.weight, dense.bias]


class Around(torch.nn.Module):
    """A module around the one that distributed_model returned."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner[0](*inputs)


def clip(it):
    it.backward()
    clip_grad_norm_(it.model.parameters(), 0.1)
    it.optimizer.step()


def nobody_reads(it):
    it.backward()
    it.optimizer.step()


def clip_where_a_worker_has_no_items(it):
    it.backward(use_items=(True, False))
    clip_grad_norm_(it.model.parameters(), 0.1)
    it.optimizer.step()


def accumulate_and_read_between(it):
    it.backward()
    clip_grad_norm_(it.model.parameters(), 0.1)
    it.backward(OTHER)
    it.backward(IDS[::-1])
    clip_grad_norm_(it.model.parameters(), 0.2)
    it.optimizer.step()


def read_and_accumulate(it):
    it.backward()
    clip_grad_norm_(it.model.parameters(), 0.1)
    it.backward(OTHER)
    it.optimizer.step()


def infinities_on_one_worker(it):
    it.steps = getattr(it, "steps", 0) + 1
    it.backward(scale=(1, torch.inf if it.steps == 2 else 1), scaled=True)
    it.scaler.step(it.optimizer)
    it.scaler.update()


def discard(it):
    it.backward(OTHER)
    it.model.zero_grad()
    it.backward()
    it.optimizer.step()


def gradients_stay_after_a_read(it):
    it.backward()
    clip_grad_norm_(it.model.parameters(), 0.1)
    it.optimizer.step()
    it.backward(OTHER)
    it.optimizer.step()


def update_in_backward(it):
    it.backward()
    clip_grad_norm_(it.net.dense.parameters(), 0.1)
    it.optimizer.step()
    it.optimizer.zero_grad()
    it.backward(OTHER)
    it.optimizer.step()


def update_in_backward_where_a_worker_has_no_items(it):
    it.backward(use_items=(True, False))
    it.optimizer.step()


WAYS = [
    update_in_backward,
    update_in_backward_where_a_worker_has_no_items,
    clip,
    nobody_reads,
    clip_where_a_worker_has_no_items,
    accumulate_and_read_between,
    read_and_accumulate,
    infinities_on_one_worker,
    discard,
    gradients_stay_after_a_read,
]


def main() -> None:
    directory, endpoints, rank = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=WORKERS
    )
    with Client(endpoints, worker=Worker(rank, of=WORKERS)) as client:
        for way in WAYS:
            for around in (False, True):
                in_backward = way.__name__.startswith("update_in_backward")
                # DistributedDataParallel wants gradients of all parameters that it has, and an accelerator
                # for those with optimizers in backward.
                if around and (in_backward or way is clip_where_a_worker_has_no_items):
                    continue
                setups = [
                    Setup(rank, client, f"{way.__name__}.{around}.", around, in_backward=in_backward),
                    Setup(None, None, "", around, in_backward=in_backward),
                ]
                for setup in setups:
                    for _ in range(3):
                        setup.optimizer.zero_grad()
                        way(setup)
                torch.distributed.barrier()
                print(f"{way.__name__}, {around=}", file=sys.stderr)
                for ours, stock in zip(*(setup.outputs() for setup in setups), strict=True):
                    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
