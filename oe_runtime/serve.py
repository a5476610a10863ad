"""`python -m oe_runtime.serve`: answer TensorFlow Serving's requests with a model and its rows."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from oe_runtime.client import Client
from oe_runtime.errors import OeError
from oe_runtime.spec import STORAGES, TLS, StorageSpec
from oe_runtime.support import durable, interrupt, remote_files
from oe_runtime.support.argument_types import number, size
from oe_runtime.support.tensorflow_noise import without_noise
from oe_runtime.support.token_file import read_token

if TYPE_CHECKING:
    from oe_runtime.serving.model import Model

_FILES = 4096  # that may be open: a connection is one, and shells allow 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        # In a thread: a handler that interrupts the beginning of a wait would wait for its lock forever.
        signal.signal(name, lambda *_: threading.Thread(target=ended.set).start())
    try:
        if options.servers is None:
            return _answer(options, None, ended)
        token = "" if options.token_file is None else read_token(options.token_file)
        client = Client(
            options.servers,
            token=token,
            timeout=options.request_seconds,
            tls=options.tls,
            job=options.job,
            read_only=True,
        )
        with contextlib.closing(client):
            return _answer(options, client, ended)
    except (OeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    from oe_runtime.serving.rest import MAX_BODY_BYTES

    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.serve",
        description="Answer TensorFlow Serving's requests (POST /v1/models/NAME:predict, GET "
        "/v1/models/NAME[/metadata], and gRPC) with a trained model. Its rows come from checkpoints, also "
        "while training publishes new ones, or from running servers, read-only. There is neither encryption "
        "nor a password: put a proxy in front where it listens on other addresses than loopback.",
    )
    parser.add_argument(
        "model",
        help="a model of save_serving_model or oe_runtime.torch.export, the directory of a run, or a "
        "SavedModel that includes its rows; "
        "also by URL: s3://…",
    )
    parser.add_argument(
        "--rows",
        metavar="DIR",
        help="checkpoints: a run's directory or its checkpoints/, or one checkpoint; also by URL: s3://… "
        "(default: the run's)",
    )
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        metavar="HOST:PORT,…",
        help="ask these running servers for rows; --rows then only gives the other weights",
    )
    parser.add_argument("--token-file", type=Path, help="file with the servers' token")
    parser.add_argument("--tls", choices=TLS, default="auto", help="to the servers (default: %(default)s)")
    parser.add_argument("--job", default="", help="the tables' job, on servers of several jobs")
    parser.add_argument("--name", default="model", help="the model's name in requests (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="for HTTP (default: %(default)s; 0: any free)")
    parser.add_argument("--grpc-port", type=int, help="for gRPC (default: none; 0: any free)")
    parser.add_argument(
        "--refresh-seconds",
        type=float,
        default=10.0,
        help="seconds between checks for a newer checkpoint (default: %(default)s; 0: never)",
    )
    parser.add_argument(
        "--request-seconds",
        type=number(above=0),
        default=5.0,
        help="seconds that a request waits for --servers before it is refused (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=number(least=0),
        default=25.0,
        help="seconds after SIGTERM for requests that were sent already (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=size(1),
        default=MAX_BODY_BYTES,
        metavar="SIZE",
        help="maximum size of a request, and of all larger requests in progress together; JSON takes about "
        "forty times as much memory (default: %(default)s)",
    )
    parser.add_argument(
        "--storage", choices=STORAGES, default="dram", help="memory of the rows (default: %(default)s)"
    )
    parser.add_argument("--storage-path", default="", metavar="DIR", help="an empty directory for --storage")
    parser.add_argument(
        "--storage-cache", type=size(), default=0, metavar="SIZE", help="DRAM of dram_pmem and dram_ssd"
    )
    parser.add_argument("--ready-file", type=Path, help="JSON file with ports and pid, written at the start")
    return parser


def _answer(options: argparse.Namespace, client: Client | None, ended: threading.Event) -> int:
    from oe_runtime.serving.grpc import GrpcServer
    from oe_runtime.serving.model import Model, is_torch
    from oe_runtime.serving.rest import RestServer

    # Model.load refuses what is neither at once.
    is_there = remote_files.is_remote(options.model) or Path(options.model).is_dir()
    if is_there and not is_torch(options.model):
        with without_noise():
            import tensorflow  # noqa: F401
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    storage = StorageSpec(options.storage, options.storage_path, cache_bytes=options.storage_cache)
    with Model.load(
        options.model, options.rows, client=client, storage=storage, seconds=options.request_seconds
    ) as model:
        address = (options.name, model, options.host)
        body = options.max_body_bytes
        servers: list[RestServer | GrpcServer] = [RestServer(*address, options.port, max_body_bytes=body)]
        if options.grpc_port is not None:
            servers.append(GrpcServer(*address, options.grpc_port, max_body_bytes=body))
        for server in servers:
            server.start()
        if options.refresh_seconds > 0 or client is not None:
            model.watch(max(options.refresh_seconds, 0))
        ports = dict(zip(("port", "grpc_port"), (server.port for server in servers), strict=False))
        if options.ready_file is not None:
            durable.write_json(options.ready_file, {"pid": os.getpid(), **ports})
        served = model.checkpoint or options.model
        grpc = f", gRPC on port {ports['grpc_port']}" if "grpc_port" in ports else ""
        print(
            f"serving {served} at http://{options.host}:{ports['port']}/v1/models/{options.name}{grpc}",
            flush=True,
        )
        if model.sources:
            print(model.sources, flush=True)
        _wait(model, ended)
        model.is_ending = True
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.stop(options.drain_seconds), servers))
    return 0


def _wait(model: Model, ended: threading.Event) -> None:
    """Wait for the end; report each problem of `watch` once."""
    said: dict[str, str] = {}
    while not ended.wait(1.0):
        for what, problem in (
            ("still serving the previous checkpoint", model.problem),
            ("requests are refused", model.unavailable),
        ):
            if problem and problem != said.get(what):
                print(f"warning: {what}: {problem}", file=sys.stderr, flush=True)
            said[what] = problem


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
