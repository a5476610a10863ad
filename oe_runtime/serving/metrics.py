"""The page of a serving process for Prometheus: requests over HTTP, and what answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oe_runtime.support import prometheus

if TYPE_CHECKING:
    from oe_runtime.serving.model import Model

# See prometheus.read_metrics; the places are those of HttpServer::Stats() (core/front/http_server.h).
_METRICS = """
counter   oe_serving_requests_total           requests.method=*.status=*
    Requests answered over HTTP. "none" is no request, or on a connection over the limit.
counter   oe_serving_examples_total           examples
    Examples of predictions over HTTP.
histogram oe_serving_answer_seconds           times.answer
    Time from the last byte of a POST request to its answer.
gauge     oe_serving_requests_in_progress     in_progress
    Requests that wait for their answer, or are computed.
gauge     oe_serving_open_connections         connections.open         Open connections.
counter   oe_serving_accepted_connections_total connections.accepted   Connections accepted.
counter   oe_serving_closed_connections_total connections.closed.reason=*
    Connections closed by the server: refused over the limit, displaced by a new one, late with a request, or
    with a handshake of TLS that failed.
counter   oe_serving_received_bytes_total     traffic.bytes_in         Bytes received.
counter   oe_serving_sent_bytes_total         traffic.bytes_out        Bytes sent.
"""


def text(stats: Mapping[str, Any], model: Model) -> str:
    """Return the page of a server with these statistics, which serves `model`."""
    page = prometheus.Page()
    page.add("gauge", "oe_serving_model_version", "The step of the served checkpoint.", [({}, model.version)])
    ready = int(not model.unavailable)
    page.add("gauge", "oe_serving_ready", "Whether requests are answered: 1 or 0.", [({}, ready)])
    what = "Time from the publication of the served checkpoint until it was served."
    fresh: prometheus.Samples = [] if model.freshness is None else [({}, model.freshness)]
    page.add("gauge", "oe_serving_freshness_seconds", what, fresh)
    what = "Age of the newest checkpoint while it is not served yet; 0 otherwise."
    page.add("gauge", "oe_serving_behind_seconds", what, [({}, model.seconds_behind)])
    for kind, name, place, what in prometheus.read_metrics(_METRICS):
        page.add(kind, name, what, prometheus.find_samples([({}, stats)], place))
    return page.text()
