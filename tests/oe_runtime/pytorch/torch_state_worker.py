"""One of several processes: the first saves the states of model and optimizer, all load them and go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch_worker import ROWS, Net

import oe_runtime.torch as embed
from oe_runtime import Client, Worker

IDS = torch.arange(ROWS)


def outputs(model):
    with torch.no_grad():
        return model(IDS, IDS[:, None], True)


def train(model, optimizer, rank, workers):
    for step in range(3):
        mine = (IDS + step)[rank::workers] % ROWS
        optimizer.zero_grad()
        model(mine, mine[:, None], True).square().mean().backward()
        optimizer.step()


def main() -> None:
    directory, rank, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=workers
    )
    with Client(json.loads(sys.argv[4]), worker=Worker(rank, of=workers)) as client:
        model = torch.nn.parallel.DistributedDataParallel(embed.distributed_model(Net(), client))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = embed.distributed_optimizer(optimizer, model)
        train(model, optimizer, rank, workers)
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, directory / "states.pt")
        torch.distributed.barrier()
        expected = [outputs(model)]
        torch.distributed.barrier()
        train(model, optimizer, rank, workers)
        expected.append(outputs(model))
        assert (expected[0] != expected[1]).any()
        torch.distributed.barrier()
        states = torch.load(directory / "states.pt", weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        torch.testing.assert_close(outputs(model), expected[0])
        train(model, optimizer, rank, workers)
        torch.testing.assert_close(outputs(model), expected[1])
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
