"""The command line of a server process.

It prints one line when it listens, and serves until SIGTERM or SIGINT, until a client shuts it down, or, with
``--exit-with-parent``, until its standard input ends. Exit status: 0 after any of these, 1 when it cannot
start. `metrics` lists the fields of the metrics file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import oe_runtime._core as _core
from oe_runtime.errors import OeError
from oe_runtime.server import metrics
from oe_runtime.spec import STORAGES, TLS, StorageSpec, persistence_note
from oe_runtime.support import durable
from oe_runtime.support.argument_types import count, size
from oe_runtime.support.token_file import read_token

METRICS_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
    except (OeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.server", description="Serve one server's part of every embedding table."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=count(0, 65535), default=0, help="0 (default): any free port")
    parser.add_argument("--index", type=count(0, 2**31 - 1), default=0, help="index of this server, from 0")
    parser.add_argument("--count", type=count(1, 2**31 - 1), default=1, help="number of servers")
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        default="dram",
        help="memory of the rows: dram (default); pmem_libpmem: a directory on persistent memory; "
        "dram_pmem: the same with a cache in DRAM; dram_ssd: a directory on an NVMe drive, with a cache in "
        "DRAM; pmem_memkind: KMEM DAX memory nodes",
    )
    parser.add_argument(
        "--storage-path",
        default="",
        metavar="DIR",
        help="directory of pmem_libpmem, dram_pmem and dram_ssd, one per server; with pmem_memkind, instead "
        "of memory nodes",
    )
    parser.add_argument(
        "--storage-cache",
        type=size(),
        default=0,
        metavar="SIZE",
        help="with dram_pmem and dram_ssd: maximum DRAM for the most used rows",
    )
    parser.add_argument(
        "--storage-size",
        type=size(),
        default=0,
        metavar="SIZE",
        help="maximum bytes of rows; 0 (default): no limit",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--storage-recover",
        action="store_true",
        help="open the tables in the directory of pmem_libpmem, dram_pmem or dram_ssd. Without this and "
        "--storage-fresh, a directory with a checkpoint is refused",
    )
    kept.add_argument(
        "--storage-fresh", action="store_true", help="remove the tables in that directory and start empty"
    )
    parser.add_argument(
        "--storage-checkpoints",
        type=count(1, 64),
        default=2,
        metavar="N",
        help="checkpoints that pmem_libpmem, dram_pmem and dram_ssd keep; 1 only for a single table on a "
        "single server (default: %(default)s)",
    )
    parser.add_argument(
        "--storage-scrub",
        type=size(),
        default=32 << 20,
        metavar="SIZE",
        help="bytes per second of rows in pmem_libpmem, dram_pmem and dram_ssd whose checksums are verified "
        "in the background; 0: verify only rows that are copied, saved, or read after a recovery "
        "(default 32 MiB)",
    )
    parser.add_argument("--threads", type=count(0, 4096), default=0, help="0 (default): one per core")
    parser.add_argument(
        "--checkpoint-dir",
        default="",
        metavar="DIR",
        help="this server's own directory, through which checkpoints go to workers on other hosts; it needs "
        "room for one checkpoint",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="token that clients need; mode 0600")
    parser.add_argument(
        "--tls",
        choices=TLS,
        default="auto",
        help="encrypt with keys derived from the token; auto (default): unless --host is loopback",
    )
    parser.add_argument(
        "--max-connections",
        type=count(1, 2**31 - 1),
        default=1024,
        metavar="N",
        help="maximum number of clients; more are refused. The limit of open files (ulimit -n), which the "
        "server raises where it may, can lower it (default: %(default)s)",
    )
    parser.add_argument(
        "--max-request-bytes",
        type=size(1 << 20),
        default=4 << 30,
        metavar="SIZE",
        help="memory for requests in flight; the same for replies, and for data that waits for other "
        "workers with shared values, such as published weights. Requests over it wait, except one at a time; "
        "they are refused where only other workers could make room (default 4 GiB)",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="JSON file, written when the server listens"
    )
    parser.add_argument(
        "--metrics-file", type=Path, metavar="FILE", help="JSON file, rewritten every few seconds"
    )
    parser.add_argument(
        "--metrics-port",
        type=count(0, 65535),
        default=0,
        metavar="PORT",
        help="serve metrics for Prometheus at http://METRICS_HOST:PORT/metrics; 0 (default): do not",
    )
    parser.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address for --metrics-port; everyone who reaches it can read it (default: %(default)s)",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="end at the end of standard input")
    return parser


def _run(options: argparse.Namespace) -> int:
    token = read_token(options.token_file) if options.token_file else ""
    storage = StorageSpec(
        options.storage,
        options.storage_path,
        options.storage_size,
        recover=options.storage_recover,
        fresh=options.storage_fresh,
        kept_checkpoints=options.storage_checkpoints,
        cache_bytes=options.storage_cache,
    )
    _core.report_memory_errors()
    with _Ending(options.exit_with_parent) as ending:
        server = _core.Server(
            host=options.host,
            port=options.port,
            index=options.index,
            count=options.count,
            storage=storage.to_json(),
            threads=options.threads,
            token=token,
            checkpoint_dir=os.path.abspath(options.checkpoint_dir) if options.checkpoint_dir else "",
            tls=options.tls,
            max_connections=options.max_connections,
            max_request_bytes=options.max_request_bytes,
            scrub_bytes_per_second=options.storage_scrub,
        )
        endpoint = None
        try:
            if options.metrics_port:
                endpoint = metrics.Endpoint(options.metrics_host, options.metrics_port, server.stats)
            if note := persistence_note(options.storage, options.storage_path, server.is_pmem):
                print(f"note: {note}", file=sys.stderr)
            if options.ready_file:
                durable.write_json(options.ready_file, _ready(options, server))
            if server.note:
                print(f"note: {server.note}", file=sys.stderr)
            print(_listening(options, server), flush=True)
            why = _serve(options, server, ending)
        finally:
            if endpoint is not None:
                endpoint.close()
            server.stop()
            if options.ready_file:
                options.ready_file.unlink(missing_ok=True)
    print(f"server {options.index} of {options.count} ended: {why}", file=sys.stderr)
    return 0


def _ready(options: argparse.Namespace, server: _core.Server) -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": options.host,
        "port": server.port,
        "index": options.index,
        "count": options.count,
        "storage": options.storage,
        "is_pmem": server.is_pmem,
        "encrypted": server.encrypted,
    }


def _listening(options: argparse.Namespace, server: _core.Server) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    where = f" in {options.storage_path}" if options.storage_path else ""
    who = f"clients need the token of {options.token_file}" if options.token_file else "without a token"
    return (
        f"server {options.index} of {options.count} listens on {host}:{server.port}, rows in "
        f"{options.storage}{where}, {'encrypted' if server.encrypted else 'not encrypted'}, {who}"
    )


def _serve(options: argparse.Namespace, server: _core.Server, ending: _Ending) -> str:
    """Wait for the end; return its reason."""
    ending.watch(server.stop_fd, "a client asked for it")
    if not options.metrics_file:
        while not (why := ending.wait(None)):
            pass
        return why
    file = metrics.MetricsFile(server, options.metrics_file)
    file.write()
    while True:
        why = ending.wait(METRICS_SECONDS)
        if why:
            server.stop()  # finishes requests in flight, which count too
        # A full disk must not lose the rows; readers see an old `time`.
        with contextlib.suppress(OSError):
            file.write()
        if why:
            return why


class _Ending:
    """One wait for everything that ends the process: signals, the parent, a client."""

    def __init__(self, with_parent: bool) -> None:
        self._selector = selectors.PollSelector()  # unlike epoll, it takes files and /dev/null too
        self._with_parent = with_parent

    def __enter__(self) -> _Ending:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self.watch(self._read.fileno(), "signal")
        if self._with_parent:
            self.watch(0, "its parent is gone")
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        self._selector.close()
        self._read.close()
        self._write.close()

    def watch(self, descriptor: int, why: str) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, why)

    def wait(self, seconds: float | None) -> str | None:
        for key, _ in self._selector.select(seconds):
            if key.fd == self._read.fileno():
                return signal.Signals(self._read.recv(1)[0]).name
            if key.fd == 0 and self._with_parent and os.read(0, 4096):
                continue  # input; only its end counts
            return str(key.data)
        return None
