"""The metrics of a server: a JSON file, and a page for Prometheus (text format 0.0.4).

The format is written here, not by python3-prometheus-client: servers' hosts have no packages from PyPI, and
the counters live in the core. See https://prometheus.io/docs/instrumenting/exposition_formats/.

The metrics file is one JSON object, rewritten every few seconds and at the end. Counts are since the start of
the process, sizes in bytes. ``Client.stats()`` returns the same without ``time`` and ``rates``.

    time                when the file was written, Unix seconds
    index, count        the server's index, and the number of servers; pid, threads: of the process
    storage, is_pmem    --storage, and whether the rows' directory really is on persistent memory
    storage_checkpoints checkpoints that the storage keeps (--storage-checkpoints); 0: none
    storage_recovers    --storage-recover
    storage_bytes       memory of all rows, pool headers included
    memory.dram, .pmem  memory of rows: DRAM, with caches; pools, memkind's memory or drives
    memory.index        memory of the indexes and of logs' tables of their rows, always DRAM
    memory.rss          resident set of the process, mapped persistent memory included
    tables[]            name, job (Client(job=…), --job; usually empty), dim, rows, bytes (of rows),
                        index_bytes, version (pushes so far), pushes_at_risk (pushes in no file and no durable
                        checkpoint), nonfinite_gradients (row gradients with NaN or infinity, refused or
                        skipped)
    tables[].admission  with such a policy: admitted_rows, refused_keys (in pushes), filter_bytes,
                        forgotten_keys (keys whose counts were dropped)
    tables[].eviction   by policy: evicted_rows; cap: refused_keys (no room); ttl: clock_jumps (each counts
                        all rows as pushed)
    tables[].cache      0 unless dram_pmem or dram_ssd: hits and misses (rows read from the cache, and from
                        the pool or drive), rows and bytes in the cache, evictions, write_backs (changed rows
                        written to the pool or drive)
    tables[].damage     of pools and logs: quarantined_rows (wrong checksum, removed; they start anew at the
                        next push), repaired_rows (nothing was lost), scrubbed_rows (checked by
                        --storage-scrub), scrubs (complete passes over the table)
    tables[].pool       of durable storages: slots; free slots; reserved (slots that new rows leave to
                        existing rows); changed (slots that changes take between two checkpoints); headroom
                        (about how many new rows fit; tables share the storage's free space); refused (times
                        that a new row was refused)
    tables[].drive      with dram_ssd: reads, read_bytes and written_bytes of the drive; segments and
                        free_segments of the log; live (rows in it) and retired (of these, versions that only
                        kept checkpoints need); moved (rows that the cleaner moved)
    pulls, pushes       requests and keys of each kind
    traffic             requests of every kind, bytes_in and bytes_out of their frames
    connections         open, before_hello (of these, without a hello so far), limit (with a hello), accepted,
                        encrypted, sharing_memory (clients on this host that share memory with the server) and
                        shared_bytes of them, refused.REASON (core/server/refusals.h lists the reasons)
    queue               requests waiting to be served, bytes of requests and replies in flight, and
                        connections waiting_for_memory
    workers[]           of each job with several workers: job, of (their number), mode, connected, lost, left,
                        batches (applied, per table), held (pushes and bytes that wait for the other
                        workers'), waiting (requests that wait: pulls, pushes, checkpoints, going_back)
    times               pull and push (service time), queue_wait (from a request's last byte to its service):
                        bounds in seconds, counts per bucket (the last has no bound), sum_seconds
    saved               when all tables were last saved, or durable in a checkpoint of the storage, Unix
                        seconds; 0: never
    rates               over the `seconds` since the last writing (0 in the first one): pulled_keys_per_s,
                        pushed_keys_per_s, requests_per_s, bytes_in_per_s, bytes_out_per_s
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import AF_INET, AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

import oe_runtime._core as _core
from oe_runtime.spec import CACHED, DURABLE
from oe_runtime.support import durable

__all__ = ["CONTENT_TYPE", "Endpoint", "MetricsFile", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = 10.0  # limit for a silent client
_READERS = 8  # concurrent clients; more are refused

# Per table with a cache: field, type, name of the metric, help.
_CACHE = (
    ("hits", "counter", "oe_cache_hits_total", "Rows read from the cache in DRAM."),
    ("misses", "counter", "oe_cache_misses_total", "Rows read from the pool or drive."),
    ("rows", "gauge", "oe_cache_rows", "Rows in the cache."),
    ("bytes", "gauge", "oe_cache_bytes", "DRAM of the cache."),
    ("evictions", "counter", "oe_cache_evictions_total", "Rows evicted from the cache."),
    (
        "write_backs",
        "counter",
        "oe_cache_write_backs_total",
        "Rows changed in the cache and written to the pool or drive.",
    ),
)

# Per table in a pool or log: damaged rows.
_DAMAGE = (
    ("quarantined_rows", "Rows removed because of a wrong checksum."),
    ("repaired_rows", "Rows with a wrong checksum that were repaired without loss."),
    ("scrubbed_rows", "Rows checked in the background."),
    ("scrubs", "Complete background checks of all rows."),
)

# Per table in a storage with checkpoints: its slots. Each holds a row, an old value of a row that a kept
# checkpoint needs, or a tombstone.
_POOL = (
    ("oe_pool_slots", "slots", "gauge", "Slots of a table's pool or log."),
    ("oe_pool_free_slots", "free", "gauge", "Free slots."),
    (
        "oe_pool_reserved_slots",
        "reserved",
        "gauge",
        "Slots reserved for updates and evictions of existing rows.",
    ),
    ("oe_pool_changed_slots", "changed", "gauge", "Slots that changes take between two checkpoints."),
    (
        "oe_pool_headroom_rows",
        "headroom",
        "gauge",
        "Approximate number of new rows before they are refused; tables of one storage share it.",
    ),
    ("oe_pool_refused_rows_total", "refused", "counter", "New rows refused for lack of room."),
)

# Per table on a drive: field, type, name of the metric, help.
_DRIVE = (
    ("reads", "counter", "oe_drive_reads_total", "Reads from the drive."),
    ("read_bytes", "counter", "oe_drive_read_bytes_total", "Bytes read from the drive."),
    ("written_bytes", "counter", "oe_drive_written_bytes_total", "Bytes written to the drive."),
    ("segments", "gauge", "oe_log_segments", "Segments of the log."),
    ("free_segments", "gauge", "oe_log_free_segments", "Segments of the log without rows."),
    ("live", "gauge", "oe_log_rows", "Rows in the log, with versions that only kept checkpoints need."),
    ("retired", "gauge", "oe_log_retired_rows", "Versions of rows that only kept checkpoints need."),
    ("moved", "counter", "oe_log_moved_rows_total", "Rows that the cleaner moved."),
)

Sample = tuple[Mapping[str, str], float]


def text(stats: Mapping[str, Any], now: float) -> str:
    """Return the metrics page of a server with the statistics ``stats`` at ``now``, Unix seconds."""
    page = _Page()
    page.gauge(
        "oe_server_info",
        "The server's index, the number of servers, and the storage of its rows.",
        [({"index": str(stats["index"]), "count": str(stats["count"]), "storage": stats["storage"]}, 1)],
    )
    tables = stats["tables"]
    page.gauge("oe_table_rows", "Rows of a table.", [(_labels(t), t["rows"]) for t in tables])
    if tables:
        page.gauge(
            "oe_checkpoint_lag_pushes",
            "Pushes since the last checkpoint, which a loss now would lose.",
            [(_labels(t), t["pushes_at_risk"]) for t in tables],
        )
        page.counter(
            "oe_nonfinite_gradients_total",
            "Row gradients with NaN or infinity, refused or skipped.",
            [(_labels(t), t["nonfinite_gradients"]) for t in tables],
        )
    _policies(page, tables)
    if stats["storage"] in DURABLE and tables:
        for field, what in _DAMAGE:
            page.counter(f"oe_{field}_total", what, [(_labels(t), t["damage"][field]) for t in tables])
    pools = [(_labels(t), t["pool"]) for t in tables if "pool" in t]
    for name, field, kind, what in _POOL if pools else ():
        page.add(kind, name, what, [(labels, pool[field]) for labels, pool in pools])
    if stats["storage"] in CACHED and tables:
        for field, kind, name, what in _CACHE:
            page.add(kind, name, what, [(_labels(t), t["cache"][field]) for t in tables])
    drives = [(_labels(t), t["drive"]) for t in tables if "drive" in t]
    for field, kind, name, what in _DRIVE if drives else ():
        page.add(kind, name, what, [(labels, drive[field]) for labels, drive in drives])
    page.gauge(
        "oe_memory_bytes",
        "Memory of the rows by tier, and of the indexes.",
        [({"tier": tier}, stats["memory"][tier]) for tier in ("dram", "pmem", "index")],
    )
    page.gauge(
        "oe_resident_memory_bytes",
        "Resident set of the process, mapped pmem included.",
        stats["memory"]["rss"],
    )
    for name, what in (("pulls", "Pulls"), ("pushes", "Pushes")):
        page.counter(f"oe_{name}_total", f"{what} served.", stats[name]["requests"])
    page.counter("oe_pulled_keys_total", "Keys whose rows were read.", stats["pulls"]["keys"])
    page.counter("oe_pushed_keys_total", "Keys whose rows were updated.", stats["pushes"]["keys"])
    traffic, connections, queue = stats["traffic"], stats["connections"], stats["queue"]
    page.counter("oe_requests_total", "Requests of every kind.", traffic["requests"])
    page.counter("oe_received_bytes_total", "Bytes of requests.", traffic["bytes_in"])
    page.counter("oe_sent_bytes_total", "Bytes of replies.", traffic["bytes_out"])
    page.gauge("oe_open_connections", "Open connections.", connections["open"])
    page.gauge(
        "oe_sharing_connections",
        "Connections that exchange rows and gradients through shared memory.",
        connections["sharing_memory"],
    )
    page.counter("oe_accepted_connections_total", "Connections accepted.", connections["accepted"])
    page.counter(
        "oe_refusals_total",
        "Connections and requests refused.",
        [({"reason": reason}, count) for reason, count in connections["refused"].items()],
    )
    page.gauge("oe_queued_requests", "Requests waiting to be served.", queue["requests"])
    page.gauge("oe_requests_in_flight_bytes", "Memory of requests and replies in flight.", queue["bytes"])
    page.gauge("oe_waiting_connections", "Connections waiting for memory.", queue["waiting_for_memory"])
    _workers(page, stats["workers"])
    times = stats["times"]
    page.histogram("oe_pull_duration_seconds", "Service time of a pull.", times["pull"])
    page.histogram("oe_push_duration_seconds", "Service time of a push.", times["push"])
    page.histogram("oe_queue_wait_seconds", "Time that a request waits for its service.", times["queue_wait"])
    if stats["saved"]:
        page.gauge(
            "oe_last_checkpoint_timestamp_seconds",
            "Time when all tables were last saved, or durable in the storage.",
            stats["saved"],
        )
        page.gauge(
            "oe_last_checkpoint_age_seconds",
            "Time since all tables were last saved, or durable in the storage.",
            max(0.0, now - stats["saved"]),
        )
    return page.end()


def _labels(table: Mapping[str, Any]) -> dict[str, str]:
    """Label a table, and its job if it has a name; Prometheus has a label "job" of its own."""
    return {"table": table["name"], **({"training_job": table["job"]} if table["job"] else {})}


def _policies(page: _Page, tables: Sequence[Mapping[str, Any]]) -> None:
    """Add the figures of admission and eviction, for tables that have them."""
    admission = [(_labels(t), t["admission"]) for t in tables if "admission" in t]
    eviction = [
        ({**_labels(t), "policy": policy}, counts)
        for t in tables
        for policy, counts in t.get("eviction", {}).items()
    ]
    if admission:
        page.counter(
            "oe_admitted_rows_total",
            "Rows created for keys that admission let in.",
            [(labels, counts["admitted_rows"]) for labels, counts in admission],
        )
        page.gauge(
            "oe_admission_filter_bytes",
            "Memory for the counts of keys without a row.",
            [(labels, counts["filter_bytes"]) for labels, counts in admission],
        )
        page.counter(
            "oe_forgotten_keys_total",
            "Keys without a row whose counts were dropped: to make room, or not pushed for long.",
            [(labels, counts["forgotten_keys"]) for labels, counts in admission],
        )
    if eviction:
        page.counter(
            "oe_evicted_rows_total",
            "Rows evicted.",
            [(labels, counts["evicted_rows"]) for labels, counts in eviction],
        )
    jumps = [(labels, counts["clock_jumps"]) for labels, counts in eviction if "clock_jumps" in counts]
    if jumps:
        page.counter(
            "oe_clock_jumps_total",
            "Clock jumps, at which all rows under ttl count as pushed.",
            [({k: v for k, v in labels.items() if k != "policy"}, count) for labels, count in jumps],
        )
    refused = [({**labels, "by": "admission"}, counts["refused_keys"]) for labels, counts in admission]
    refused += [
        ({**_labels(t), "by": "cap"}, t["eviction"]["cap"]["refused_keys"])
        for t in tables
        if "cap" in t.get("eviction", {})
    ]
    if refused:
        page.counter(
            "oe_refused_keys_total",
            "Pushed keys that got no row: not admitted yet, or no room under the cap.",
            refused,
        )


def _workers(page: _Page, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Add the jobs with several workers."""
    if not jobs:
        return
    of_jobs = [({"training_job": job["job"]}, job) for job in jobs]
    page.gauge(
        "oe_job_workers",
        "Workers of a job: all, connected, lost.",
        [
            ({**labels, "state": state}, job[field])
            for labels, job in of_jobs
            for state, field in (("all", "of"), ("connected", "connected"), ("lost", "lost"))
        ],
    )
    page.counter(
        "oe_worker_batches_total",
        "Batches of all workers that were applied, counted per table.",
        [(labels, job["batches"]) for labels, job in of_jobs],
    )
    page.gauge(
        "oe_worker_waiting_requests",
        "Requests waiting for other workers.",
        [({**labels, "kind": kind}, n) for labels, job in of_jobs for kind, n in job["waiting"].items()],
    )
    for field, what in (("pushes", "Pushes"), ("bytes", "Memory of pushes")):
        page.gauge(
            f"oe_worker_held_{field}",
            f"{what} held until those of other workers arrive.",
            [(labels, job["held"][field]) for labels, job in of_jobs],
        )


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, kind: str, name: str, what: str, samples: float | Sequence[Sample]) -> None:
        """Add a metric family; a number is a single sample without labels."""
        if not isinstance(samples, Sequence):
            samples = [({}, samples)]
        self._lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
        self._lines += [_line(name, labels, value) for labels, value in samples]

    gauge = partialmethod(add, "gauge")
    counter = partialmethod(add, "counter")

    def histogram(self, name: str, what: str, times: Mapping[str, Any]) -> None:
        """Add a histogram from the core's counts, which are per bucket."""
        self.add("histogram", name, what, [])
        total = 0
        for bound, count in zip([*times["bounds"], None], times["counts"], strict=True):
            total += count
            le = "+Inf" if bound is None else repr(float(bound))
            self._lines.append(_line(f"{name}_bucket", {"le": le}, total))
        self._lines += [_line(f"{name}_sum", {}, times["sum_seconds"]), _line(f"{name}_count", {}, total)]

    def end(self) -> str:
        return "\n".join(self._lines) + "\n"


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    escaped = ",".join(
        '{}="{}"'.format(key, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for key, text in labels.items()
    )
    return f"{name}{{{escaped}}} {value!r}" if escaped else f"{name} {value!r}"


class Endpoint:
    """A page ``/metrics`` on ``host:port``, served by its own threads until ``close``."""

    def __init__(self, host: str, port: int, stats: Callable[[], str]) -> None:
        """``stats`` returns the statistics as JSON. Raises ``OSError`` when it cannot listen there."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _SECONDS
            server_version = "oe_runtime"
            sys_version = ""

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = text(json.loads(stats()), time.time()).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Scrapes are not logged."""

        slots = threading.BoundedSemaphore(_READERS)

        class Server(ThreadingMixIn, TCPServer):
            daemon_threads = True
            allow_reuse_address = True
            address_family = AF_INET6 if ":" in host else AF_INET

            def process_request(self, request: Any, client_address: Any) -> None:
                if slots.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    slots.release()

            def handle_error(self, *_: Any) -> None:
                """A client that left early is not logged."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cannot serve metrics on {host}:{port}: {reason}; see --metrics-port") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MetricsFile:
    """Writes the metrics file; its rates are those since the last writing."""

    def __init__(self, server: _core.Server, path: Path) -> None:
        self._server = server
        self._path = path
        self._last: dict[str, float] | None = None
        self._when = time.monotonic()

    def write(self) -> None:
        """Write the file anew. Raises OSError."""
        stats = json.loads(self._server.stats())
        now = time.monotonic()
        totals = {
            "pulled_keys": stats["pulls"]["keys"],
            "pushed_keys": stats["pushes"]["keys"],
            **stats["traffic"],
        }
        seconds = now - self._when
        last = totals if self._last is None or seconds <= 0 else self._last
        rates = {f"{name}_per_s": (totals[name] - last[name]) / max(seconds, 1e-9) for name in totals}
        content = {"time": time.time(), **stats, "rates": {"seconds": seconds, **rates}}
        durable.write_json(self._path, content)
        self._last, self._when = totals, now
