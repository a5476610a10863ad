"""The page of a serving process for Prometheus: requests, and what answers them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oe_runtime.support import prometheus

if TYPE_CHECKING:
    from oe_runtime.serving.versions import Versions

# See prometheus.read_metrics; the places are those of HttpServer::Stats() (core/front/http_server.h).
_METRICS = """
counter   oe_serving_requests_total           requests.method=*.status=*
    Requests answered. "none" is no request or no method, or on a connection over the limit.
counter   oe_serving_examples_total           examples
    Examples of predictions.
histogram oe_serving_answer_seconds           times.answer
    Time from the last byte of a POST request to its answer; over gRPC, from its first step to its last.
gauge     oe_serving_requests_in_progress     in_progress
    Requests that wait for their answer, or are computed.
"""
_METRICS_OF_HTTP = """
gauge     oe_serving_open_connections         connections.open         Open connections.
counter   oe_serving_accepted_connections_total connections.accepted   Connections accepted.
counter   oe_serving_closed_connections_total connections.closed.reason=*
    Connections closed by the server: refused over the limit, displaced by a new one, late with a request, or
    with a handshake of TLS that failed.
counter   oe_serving_received_bytes_total     traffic.bytes_in         Bytes received.
counter   oe_serving_sent_bytes_total         traffic.bytes_out        Bytes sent.
"""


_BOUNDS = [1e-5 * 2**i for i in range(23)]  # as of core/common/histogram.h


class Calls:
    """Counts of the calls of a server for gRPC. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_progress = 0
        self._examples = 0
        self._answers: Counter[tuple[str, str]] = Counter()
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def begin(self) -> None:
        """Count a call that is being answered."""
        with self._lock:
            self._in_progress += 1

    def end(self, method: str, status: str, seconds: float) -> None:
        """Count its answer."""
        with self._lock:
            self._in_progress -= 1
            self._answers[method, status] += 1
            self._counts[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def count(self, method: str, status: str) -> None:
        """Count a call that is answered by a stream, which may last for hours."""
        with self._lock:
            self._answers[method, status] += 1

    def add_examples(self, count: int) -> None:
        """Count predictions of examples."""
        with self._lock:
            self._examples += count

    def stats(self) -> dict[str, Any]:
        """Return the counts, at the places of HttpServer::Stats()."""
        with self._lock:
            requests: dict[str, dict[str, int]] = {}
            for (method, status), count in self._answers.items():
                requests.setdefault(method, {})[status] = count
            times = {"bounds": _BOUNDS, "counts": list(self._counts), "sum_seconds": self._seconds}
            return {
                "requests": requests,
                "examples": self._examples,
                "in_progress": self._in_progress,
                "times": {"answer": times},
            }


def text(stats: Mapping[str, Any], versions: Versions, calls: Calls | None = None) -> str:
    """Return the page of a server for HTTP with these statistics, which serves `versions`, and of `calls`."""
    page = prometheus.Page()
    model = versions.main
    what = "The step of the checkpoint that answers requests for no version."
    page.add("gauge", "oe_serving_model_version", what, [({}, versions.newest.version)])
    what = "How many versions are served."
    page.add("gauge", "oe_serving_versions", what, [({}, len(versions.models))])
    ready = int(not versions.unavailable)
    page.add("gauge", "oe_serving_ready", "Whether requests are answered: 1 or 0.", [({}, ready)])
    what = "Time from the publication of the served checkpoint until it was served."
    fresh: prometheus.Samples = [] if model.freshness is None else [({}, model.freshness)]
    page.add("gauge", "oe_serving_freshness_seconds", what, fresh)
    what = "Age of the newest checkpoint while it is not served yet; 0 otherwise."
    page.add("gauge", "oe_serving_behind_seconds", what, [({}, model.seconds_behind)])
    both: prometheus.Samples = [({"protocol": "http"}, stats)]
    if calls is not None:
        both.append(({"protocol": "grpc"}, calls.stats()))
    found: list[tuple[str, prometheus.Samples]] = [(_METRICS, both), (_METRICS_OF_HTTP, [({}, stats)])]
    for table, samples in found:
        for kind, name, place, what in prometheus.read_metrics(table):
            page.add(kind, name, what, prometheus.find_samples(samples, place))
    return page.text()
