"""The servers of a model without a client: OpenEmbedding's flags."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from oe_runtime.client import Client
from oe_runtime.errors import ServerLost
from oe_runtime.spec import StorageSpec, Worker
from oe_runtime.support import horovod, job_hooks

if TYPE_CHECKING:
    from oe_runtime.keras.workers import Workers
    from oe_runtime.run.tensorflow_workers import TensorFlowWorkers

_PATIENCE = 60.0  # seconds for servers to start


@dataclass
class Flags:
    """Settings of `distributed_model` without a client; set them before.

    `master_endpoint`: the servers, "host:port,host:port" in the order of their index; empty: tables in this
    process. Name all servers; OpenEmbedding asks a master for them.

    `wait_num_servers`: the required number of servers; -1: as many as are named.

    `num_workers`: the number of processes that train the job. Set above 1 under horovodrun, or with TF_CONFIG
    in the environment, it waits at once for the other processes, and `distributed_model` uses them
    (ValueError if TensorFlow has computed something before). Elsewhere pass `workers`. The workers of a job
    have met before, when this package was imported.

    `config`: YAML or JSON for tables in this process, {"server": {"pmem_pool_root_path": DIR, "cache_size":
    MB}}. Tables that the directory has go on from their newest checkpoint. OpenEmbedding's other entries, for
    its server's threads and messages, have no counterpart.

    `bind_ip`: for OpenEmbedding's own servers; here, see `python -m oe_runtime.server --host`.

    `token`: the servers' token, if they have one.
    """

    config: str = ""
    master_endpoint: str = ""
    bind_ip: str = ""
    num_workers: int = 1
    wait_num_servers: int = -1
    token: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_workers" and value > 1:
            _together.join(value)
        super().__setattr__(name, value)


class _Together:
    """The processes that a launcher started for the job, once they have met."""

    workers: TensorFlowWorkers | None = None

    def join(self, count: int) -> None:
        """Wait for the others if the environment names them."""
        if self.workers is not None:
            return
        if (met := job_hooks.join()) is not None:  # they met when oe_runtime.keras was imported
            if met.count != count:
                raise ValueError(f"flags.num_workers is {count}, but the job has {met.count} workers")
            return
        found = _endpoints(os.environ)
        if found is None:
            return
        rank, endpoints = found
        if len(endpoints) != count:
            raise ValueError(f"flags.num_workers is {count}, but {len(endpoints)} processes were started")
        from oe_runtime.run.tensorflow_workers import (
            TensorFlowWorkers,  # TensorFlow, which not every backend needs
        )

        try:
            self.workers = TensorFlowWorkers(endpoints, rank)
        except RuntimeError as error:
            raise ValueError(
                f"flags.num_workers must be set before TensorFlow computes anything, best right after the "
                f"imports: {error}"
            ) from error


_together = _Together()
flags = Flags()


def _endpoints(environment: Mapping[str, str]) -> tuple[int, Sequence[str]] | None:
    """Return rank and HOST:PORT of all processes from horovodrun or TF_CONFIG; None without either."""
    if (place := horovod.started(environment)) is not None:
        return place.rank, horovod.exchange(place, _PATIENCE)
    try:
        config = json.loads(environment.get("TF_CONFIG") or "{}")
        return int(config["task"]["index"]), [str(one) for one in config["cluster"]["worker"]]
    except (ValueError, KeyError, TypeError):
        return None


def known_workers() -> Workers | None:
    """Return the workers that `flags.num_workers` has waited for."""
    return _together.workers if flags.num_workers > 1 else None


def job_client() -> Client | None:
    """Return the client of this process's job; None without a job, and where flags name servers."""
    found: Client | None = None if flags.master_endpoint else job_hooks.client()
    return found


def step_settings(
    client: Client | None, pipeline: bool | None, staleness: int | None, micro_batches: int | None
) -> tuple[bool, int, int]:
    """Return how a model's steps go; None is what the job of `client` says, or the usual value."""
    client = client if client is not None else job_client()
    given: dict[str, Any] = {"pipeline": pipeline, "staleness": staleness, "micro_batches": micro_batches}
    known = (client or Client).steps
    pipelined, stale, parts = (known[name] if value is None else value for name, value in given.items())
    return pipelined, stale, parts


def connect(workers: Workers | None) -> Client:
    """Return a client as `flags` say. Raises ValueError naming the flag, and what `Client` raises."""
    count = 1 if workers is None else workers.count
    if flags.num_workers not in (1, count):
        raise ValueError(
            f"flags.num_workers is {flags.num_workers}, but distributed_model has {count} of them: start "
            "them by horovodrun, or give it workers=TensorFlowWorkers(endpoints, rank), made first of all"
        )
    endpoints = [part.strip() for part in flags.master_endpoint.split(",") if part.strip()]
    if not endpoints:
        if count > 1:
            raise ValueError(
                f"{count} workers need servers of their own: start python -m oe_runtime.server, and set "
                "flags.master_endpoint to host:port"
            )
        return Client.in_process(_storage())
    if flags.wait_num_servers not in (-1, len(endpoints)):
        raise ValueError(
            f"flags.wait_num_servers is {flags.wait_num_servers}, but flags.master_endpoint names "
            f"{len(endpoints)} servers; name all, separated by commas, in the order of their index"
        )
    worker = None if workers is None or count == 1 else Worker(workers.rank, of=count)
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return Client(endpoints, token=flags.token, worker=worker)
        except ServerLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def _storage() -> StorageSpec:
    try:
        config: Any = yaml.safe_load(flags.config) or {}
        server = dict(config.get("server") or {})
        path, cache = str(server.get("pmem_pool_root_path") or ""), int(server.get("cache_size") or 0)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"flags.config is not YAML of the form {{server: {{…}}}}: {flags.config!r}: {error}"
        ) from error
    if not path:
        return StorageSpec()
    kind = "dram_pmem" if cache else "pmem_libpmem"
    # A script that runs again loads the checkpoint of its last run (`restore_server_model`).
    if next(Path(path).glob("oe-*-super.pool"), None) is not None:
        warnings.warn(
            f"{path} has tables of an earlier run: their rows go on from their newest checkpoint; "
            "call load_weights to go back to a saved one, or name an empty directory to begin anew",
            stacklevel=2,
        )
    return StorageSpec(kind, path, recover=True, cache_bytes=cache << 20)
