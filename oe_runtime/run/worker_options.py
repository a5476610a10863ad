"""Several workers of a run: their flags, and the environment variables of launchers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import NamedTuple

from oe_runtime.errors import OeError
from oe_runtime.support import horovod

# How launchers tell a process its rank and the number of processes: horovodrun, Open MPI's mpirun, mpiexec of
# MPICH and Intel, srun.
_ENVIRONMENTS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


GROUP = (
    "several workers (a process each, all with the same flags but for --rank and --data)",
    "Each trains on its part of every batch, so that losses are those of one worker, and --resume may be "
    "with another number of them. All need the same files, and compare names, sizes and digests before "
    "the first step. Worker 0 alone writes the run directory. Start all of them; a worker "
    "that is lost ends the others (exit code 3), and --resume goes on from the last checkpoint. The "
    "connections between workers are neither encrypted nor authenticated.",
)


def endpoints(p: argparse.ArgumentParser, flag: str, text: str) -> tuple[str, ...]:
    """Parse HOST:PORT,…; a mistake ends the process, as argparse does."""
    found = tuple(e.strip() for e in text.split(","))
    for endpoint in found:
        host, colon, port = endpoint.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            p.error(f"{flag}: '{endpoint}' is not HOST:PORT")
    if len(set(found)) < len(found):
        p.error(f"{flag}: an endpoint is named twice in {text}")
    return found


class WorkerIdentity(NamedTuple):
    """The rank of this worker, and the other workers."""

    workers: tuple[str, ...] = ()  # none: it is the only one, or `rendezvous` knows them
    rank: int = 0
    size: int = 1
    rendezvous: str = ""  # HOST:PORT of horovodrun


def settle(
    p: argparse.ArgumentParser, a: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> WorkerIdentity:
    """Return the worker that flags and environment describe; a mistake ends the process."""
    if a.workers is None:
        if a.rank is not None:
            p.error("--rank goes with --workers")
        place = _read_horovodrun(p, environment)
    else:
        workers = endpoints(p, "--workers", a.workers)
        place = WorkerIdentity(workers, _rank(p, a.rank, len(workers), environment), len(workers))
    if a.workqueue:
        if a.servers is None:
            p.error("--workqueue goes with --servers")
    elif a.on_worker_lost != "stop":
        p.error("--on-worker-lost continue goes with --workqueue: other workers are in step")
    elif a.staleness:
        _check_staleness(p, a, place.size)
    if a.workqueue and a.optimizer in ("ftrl", "adamw"):
        p.error(f"--optimizer {a.optimizer} does not go with --workqueue: its updates depend on the weight")
    if place.size == 1:
        return WorkerIdentity()
    if a.servers is None:
        p.error(f"{place.size} workers need --servers: rows that all workers train are on servers")
    if a.run_dir is None:
        p.error(f"{place.size} workers need --run-dir: they would not agree on its default")
    return place


def _check_staleness(p: argparse.ArgumentParser, a: argparse.Namespace, workers: int) -> None:
    if a.staleness > 1:
        p.error(f"--staleness {a.staleness}: without --workqueue it is 0 or 1")
    if a.stock:
        p.error("--staleness: plain Keras, --stock, has none")
    if workers > 1:
        p.error(f"--staleness 1: {workers} workers train together; it goes with one, or --workqueue")
    if not a.pipeline:
        p.error("--staleness 1 is a part of the pipeline: leave out --no-pipeline")


def _read_horovodrun(p: argparse.ArgumentParser, environment: Mapping[str, str]) -> WorkerIdentity:
    try:
        place = horovod.started(environment)
    except OeError as error:
        p.error(str(error))
    return WorkerIdentity() if place is None else WorkerIdentity((), *place)


def _rank(p: argparse.ArgumentParser, rank: int | None, count: int, environment: Mapping[str, str]) -> int:
    size = count
    for of_rank, of_size in _ENVIRONMENTS:
        if rank is None and environment.get(of_rank, "").isdecimal():
            rank, size = int(environment[of_rank]), int(environment.get(of_size, size))
    if rank is None:
        p.error(f"--workers needs --rank: which of the {count} this is, from 0")
    if size != count:
        p.error(f"--workers names {count} workers, but the launcher has started {size} processes")
    if rank >= count:
        p.error(f"--rank {rank}: --workers names {count}, so it is 0 to {count - 1}")
    return rank
