"""The workers of a PyTorch job: they agree through a gloo group of their own, beside the script's."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from oe_runtime.errors import WorkerLost
from oe_runtime.run import processes
from oe_runtime.run.options import RunOptions
from oe_runtime.run.ranks import SeveralRanks, Stopped
from oe_runtime.run.stopping import StopRequest

_POLL = 0.1  # seconds
_EXEC_SECONDS = 5.0  # that worker 0 may take to begin anew


class TorchRanks(SeveralRanks):
    """Several workers, each with torch.distributed's default group initialised by its script."""

    in_place = False

    def __init__(self, options: RunOptions, stop: StopRequest) -> None:
        """Raises ValueError where the script has not initialised its group, or another one."""
        if not distributed.is_initialized():
            raise ValueError(
                f"a PyTorch job of {options.size} workers needs its process group first: call "
                'torch.distributed.init_process_group("gloo"), and wrap the model that distributed_model '
                "returns in torch.nn.parallel.DistributedDataParallel"
            )
        found = distributed.get_rank(), distributed.get_world_size()
        if found != (options.rank, options.size):
            raise ValueError(
                f"torch.distributed has rank {found[0]} of {found[1]}, the job {options.rank} of "
                f"{options.size}: call init_process_group without rank and world_size, or with the job's"
            )
        super().__init__(options.rank, options.size, stop)
        wait = timedelta(seconds=options.worker_wait)
        # Another group than the script's, whose backend may be NCCL; in the same store, which worker 0 keeps.
        self._port = int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            self._port,
            self.count,
            self.rank == 0,
            wait,
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._store = distributed.PrefixStore("oe_runtime", store)
        self._wait = float(options.worker_wait)
        self._group = distributed.ProcessGroupGloo(self._store, self.rank, self.count, wait)

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """See Ranks."""
        total = torch.from_numpy(np.array(values).reshape(-1))
        with self._stop.waiting():
            self._group.allreduce([total]).wait()
        summed: NDArray[Any] = total.numpy().reshape(values.shape)
        return summed

    def break_off(self, keep: Collection[int]) -> None:
        """See Ranks. The others may wait in a collective of their scripts, which only a lost peer ends."""
        processes.shut_connections({*keep, self._port})

    def wait_to_start_anew(self) -> None:
        """See Ranks. Worker 0 has the store, so it waits for all, and they for the end of its program."""
        self._store.set(f"anew/{self.rank}", "")
        if self.rank == 0:
            self._wait_for([f"anew/{rank}" for rank in range(self.count)], self._wait)
            self._store.set("go", "")
            return
        with contextlib.suppress(RuntimeError):  # the store has ended
            self._wait_for(["go"], self._wait)
            self._wait_for(["never"], _EXEC_SECONDS)

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if self._stop:
                raise Stopped
            if time.monotonic() > deadline:
                raise WorkerLost("the other workers did not come back after the loss of a server")
            self._stop.wait(_POLL)


def loss_of_worker(error: Exception) -> WorkerLost | None:
    """Return the loss of another worker that an error of torch.distributed means; None for another error."""
    kind = getattr(distributed, "DistError", ())
    words = str(error).lower()
    if not isinstance(error, RuntimeError) or not (isinstance(error, kind) or "gloo" in words):
        return None
    if "timed out" in words or "timeout" in words:
        return WorkerLost("another worker has kept this one waiting for too long")
    return WorkerLost("another worker was lost")
