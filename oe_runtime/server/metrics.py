"""The metrics of a server: a JSON file, and a page for Prometheus.

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
    tables[]            name, job (Client(job=…), --job; usually empty), dim, dtype and state_dtype (of rows
                        and of the optimizer's state), rows, bytes (of rows), index_bytes, version (pushes so
                        far), pushes_at_risk (pushes in no file and no durable checkpoint),
                        nonfinite_gradients (row gradients with NaN or infinity, refused or skipped)
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
                        shared_bytes of them, away (clients whose connections broke and that may come
                        back), resumed (connections that replaced broken ones), refused.REASON
                        (core/server/refusals.h lists the reasons)
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
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import oe_runtime._core as _core
from oe_runtime.spec import CACHED, DURABLE
from oe_runtime.support import durable, prometheus
from oe_runtime.support.http_server import BoundedHttpServer

__all__ = ["Endpoint", "MetricsFile", "text"]

_SECONDS = 10.0  # limit for a silent client
_READERS = 8  # concurrent clients; more are refused

# See prometheus.read_metrics; `tables` and `workers` are all of them. A slot holds a row, an old value of a
# row that a kept checkpoint needs, or a tombstone.
_METRICS = """
gauge     oe_table_rows                 tables.rows                            Rows of a table.
gauge     oe_checkpoint_lag_pushes      tables.pushes_at_risk
    Pushes since the last checkpoint, which a loss now would lose.
counter   oe_nonfinite_gradients_total  tables.nonfinite_gradients
    Row gradients with NaN or infinity, refused or skipped.
counter   oe_admitted_rows_total        tables.admission.admitted_rows
    Rows created for keys that admission let in.
gauge     oe_admission_filter_bytes     tables.admission.filter_bytes
    Memory for the counts of keys without a row.
counter   oe_forgotten_keys_total       tables.admission.forgotten_keys
    Keys without a row whose counts were dropped: to make room, or not pushed for long.
counter   oe_evicted_rows_total         tables.eviction.policy=*.evicted_rows  Rows evicted.
counter   oe_clock_jumps_total          tables.eviction.ttl.clock_jumps
    Clock jumps, at which all rows under ttl count as pushed.
counter   oe_quarantined_rows_total     tables.damage.quarantined_rows
    Rows removed because of a wrong checksum.
counter   oe_repaired_rows_total        tables.damage.repaired_rows
    Rows with a wrong checksum that were repaired without loss.
counter   oe_scrubbed_rows_total        tables.damage.scrubbed_rows            Rows checked in the background.
counter   oe_scrubs_total               tables.damage.scrubs
    Complete background checks of all rows.
gauge     oe_pool_slots                 tables.pool.slots                      Slots of a table's pool or log.
gauge     oe_pool_free_slots            tables.pool.free                       Free slots.
gauge     oe_pool_reserved_slots        tables.pool.reserved
    Slots reserved for updates and evictions of existing rows.
gauge     oe_pool_changed_slots         tables.pool.changed
    Slots that changes take between two checkpoints.
gauge     oe_pool_headroom_rows         tables.pool.headroom
    Approximate number of new rows before they are refused; tables of one storage share it.
counter   oe_pool_refused_rows_total    tables.pool.refused
    New rows refused for lack of room.
counter   oe_cache_hits_total           tables.cache.hits
    Rows read from the cache in DRAM.
counter   oe_cache_misses_total         tables.cache.misses
    Rows read from the pool or drive.
gauge     oe_cache_rows                 tables.cache.rows                      Rows in the cache.
gauge     oe_cache_bytes                tables.cache.bytes                     DRAM of the cache.
counter   oe_cache_evictions_total      tables.cache.evictions                 Rows evicted from the cache.
counter   oe_cache_write_backs_total    tables.cache.write_backs
    Rows changed in the cache and written to the pool or drive.
counter   oe_drive_reads_total          tables.drive.reads                     Reads from the drive.
counter   oe_drive_read_bytes_total     tables.drive.read_bytes                Bytes read from the drive.
counter   oe_drive_written_bytes_total  tables.drive.written_bytes             Bytes written to the drive.
gauge     oe_log_segments               tables.drive.segments                  Segments of the log.
gauge     oe_log_free_segments          tables.drive.free_segments
    Segments of the log without rows.
gauge     oe_log_rows                   tables.drive.live
    Rows in the log, with versions that only kept checkpoints need.
gauge     oe_log_retired_rows           tables.drive.retired
    Versions of rows that only kept checkpoints need.
counter   oe_log_moved_rows_total       tables.drive.moved                     Rows that the cleaner moved.
gauge     oe_memory_bytes               memory.tier=dram,pmem,index
    Memory of the rows by tier, and of the indexes.
gauge     oe_resident_memory_bytes      memory.rss
    Resident set of the process, mapped pmem included.
counter   oe_pulls_total                pulls.requests                         Pulls served.
counter   oe_pushes_total               pushes.requests                        Pushes served.
counter   oe_pulled_keys_total          pulls.keys                             Keys whose rows were read.
counter   oe_pushed_keys_total          pushes.keys                            Keys whose rows were updated.
counter   oe_requests_total             traffic.requests                       Requests of every kind.
counter   oe_received_bytes_total       traffic.bytes_in                       Bytes of requests.
counter   oe_sent_bytes_total           traffic.bytes_out                      Bytes of replies.
gauge     oe_open_connections           connections.open                       Open connections.
gauge     oe_sharing_connections        connections.sharing_memory
    Connections that exchange rows and gradients through shared memory.
counter   oe_accepted_connections_total connections.accepted                   Connections accepted.
counter   oe_resumed_connections_total  connections.resumed
    Connections that replaced broken ones.
counter   oe_refusals_total             connections.refused.reason=*
    Connections and requests refused.
gauge     oe_queued_requests            queue.requests                         Requests waiting to be served.
gauge     oe_requests_in_flight_bytes   queue.bytes
    Memory of requests and replies in flight.
gauge     oe_waiting_connections        queue.waiting_for_memory               Connections waiting for memory.
counter   oe_worker_batches_total       workers.batches
    Batches of all workers that were applied, counted per table.
gauge     oe_worker_waiting_requests    workers.waiting.kind=*
    Requests waiting for other workers.
gauge     oe_worker_held_pushes         workers.held.pushes
    Pushes held until those of other workers arrive.
gauge     oe_worker_held_bytes          workers.held.bytes
    Memory of pushes held until those of other workers arrive.
histogram oe_pull_duration_seconds      times.pull                             Service time of a pull.
histogram oe_push_duration_seconds      times.push                             Service time of a push.
histogram oe_queue_wait_seconds         times.queue_wait
    Time that a request waits for its service.
"""
# Tables have these figures with every storage, and they are of use with these only.
_STORAGES = {"tables.cache": CACHED, "tables.damage": DURABLE}


def text(stats: Mapping[str, Any], now: float) -> str:
    """Return the metrics page of a server with the statistics ``stats`` at ``now``, Unix seconds."""
    page = prometheus.Page()
    page.add(
        "gauge",
        "oe_server_info",
        "The server's index, the number of servers, and the storage of its rows.",
        [({"index": str(stats["index"]), "count": str(stats["count"]), "storage": stats["storage"]}, 1)],
    )
    for kind, name, place, what in prometheus.read_metrics(_METRICS):
        storages = _STORAGES.get(place.rpartition(".")[0])
        if storages is None or stats["storage"] in storages:
            page.add(kind, name, what, _samples(stats, place))
    page.add(
        "counter",
        "oe_refused_keys_total",
        "Pushed keys that got no row: not admitted yet, or no room under the cap.",
        [
            ({**labels, "by": by}, count)
            for by, place in (("admission", "tables.admission"), ("cap", "tables.eviction.cap"))
            for labels, count in _samples(stats, f"{place}.refused_keys")
        ],
    )
    page.add(
        "gauge",
        "oe_job_workers",
        "Workers of a job: all, connected, lost.",
        [
            (labels | {"state": "all"} if labels["state"] == "of" else labels, count)
            for labels, count in _samples(stats, "workers.state=of,connected,lost")
        ],
    )
    saved: list[tuple[dict[str, str], Any]] = [({}, stats["saved"])] if stats["saved"] else []
    page.add(
        "gauge",
        "oe_last_checkpoint_timestamp_seconds",
        "Time when all tables were last saved, or durable in the storage.",
        saved,
    )
    page.add(
        "gauge",
        "oe_last_checkpoint_age_seconds",
        "Time since all tables were last saved, or durable in the storage.",
        [(labels, max(0.0, now - when)) for labels, when in saved],
    )
    return page.text()


def _samples(stats: Mapping[str, Any], place: str) -> list[tuple[dict[str, str], Any]]:
    """Return what is at a place of the statistics (see _METRICS), with its labels."""
    first, _, rest = place.partition(".")
    found: list[tuple[dict[str, str], Any]] = [({}, stats)]
    if first == "tables":  # Prometheus has a label "job" of its own
        found = [
            ({"table": t["name"], **({"training_job": t["job"]} if t["job"] else {})}, t)
            for t in stats["tables"]
        ]
    elif first == "workers":
        found = [({"training_job": job["job"]}, job) for job in stats["workers"]]
    else:
        rest = place
    return prometheus.find_samples(found, rest)


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
                self.send_header("Content-Type", prometheus.CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Scrapes are not logged."""

        class Server(BoundedHttpServer):
            def handle_error(self, *_: Any) -> None:
                """A client that left early is not logged."""

        try:
            self._server = Server(host, port, Handler, _READERS)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(f"cannot serve metrics on {host}:{port}: {reason}; see --metrics-port") from None
        self._server.start("metrics")

    def close(self) -> None:
        """Stop listening."""
        self._server.stop()


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
