"""The connection of a run to its servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from oe_runtime.client import Client
from oe_runtime.errors import OeError
from oe_runtime.published_weights import WeightsPublisher
from oe_runtime.run.options import RunOptions
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.shared_input import HoldingClient
from oe_runtime.shared_values import SharedValues, connect_first
from oe_runtime.spec import StorageSpec, Worker
from oe_runtime.support.token_file import read_token


def connect(options: RunOptions) -> Client | None:
    """Return the run's client; None for stock Keras. Raises RunError for an unusable token file."""
    if options.stock:
        return None
    if options.in_process:
        storage = StorageSpec(
            options.storage,
            options.storage_path,
            options.storage_size,
            recover=options.storage_recover,
            fresh=options.storage_fresh,
            cache_bytes=options.storage_cache,
        )
        return Client.in_process(storage)
    worker = None
    if options.workers or options.generation:  # a single remaining worker must take the others' places
        worker = Worker(
            options.rank,
            options.size,
            "async" if options.workqueue else "sync",
            options.staleness if options.workqueue else None,
            options.on_worker_lost,
            float(options.worker_wait),
            options.generation,
        )
    return (HoldingClient if options.workqueue else Client)(
        options.servers,
        token=_token(options),
        tls=options.tls,
        checkpoint_transfer=options.checkpoint_transfer,
        job=options.job,
        worker=worker,
    )


def connect_values(options: RunOptions) -> SharedValues:
    """Return the connection for what asynchronous workers share. Raises as `connect`."""
    return SharedValues(options.servers, token=_token(options), tls=options.tls, job=options.job)


def connect_publisher(options: RunOptions, say: Callable[[str], None]) -> WeightsPublisher | None:
    """Return what publishes dense weights; None for a process that does not."""
    if options.rank or not options.servers or not options.publish_seconds:
        return None
    connect_ = partial(
        connect_first, options.servers, token=_token(options), tls=options.tls, job=options.job
    )
    return WeightsPublisher(connect_, options.publish_seconds, say)


def _token(options: RunOptions) -> str:
    if options.token_file is None:
        return ""
    try:
        return read_token(options.token_file)
    except ValueError as error:
        raise RunError(str(error)) from error


def leave(client: Client | None) -> None:
    """Tell the servers that this is an end, not a loss."""
    if client is not None:
        with contextlib.suppress(OeError):
            client.leave()


def refuse_trained(client: Client) -> None:
    """Refuse servers with rows of another run, with which this run would silently begin."""
    for server in client.stats()["servers"]:
        for name, table in server["tables"].items():
            if table["rows"]:
                raise RunError(
                    f"server {server['index']} already holds {table['rows']:,} trained rows of table {name}; "
                    "start fresh servers, or continue the run that trained them with --resume"
                )
    kept = client.checkpoints()
    if kept and kept != [0]:  # one of step 0 has no rows
        raise RunError(
            f"the storage of the servers already holds checkpoint {kept[-1]} of another run; continue that "
            "run with --resume, or start the servers with another --storage-path, or with --storage-fresh, "
            "which removes it (in a job of oeprov: oeprov resume JOB --consent JOB)"
        )
