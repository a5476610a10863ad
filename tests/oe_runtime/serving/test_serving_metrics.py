"""The page of a serving process for Prometheus, read by its own client's parser."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_serving_http import PATH, _Echo, post, talk

from oe_runtime.errors import ServingError
from oe_runtime.serving.rest import METRICS_PATHS, RestServer
from oe_runtime.support import prometheus

HTTP, GRPC = ("protocol", "http"), ("protocol", "grpc")


@pytest.fixture
def server():
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    yield server
    server.stop()


def scrape(server, path=METRICS_PATHS[0]):
    """Every sample by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_each_answer_is_counted_by_its_status(server):
    talk(server, post() + post(b'{"inputs": [1, 2, 3]}') + post(b"no"), 3)
    talk(server, b"GET /v1/models/echo HTTP/1.1\r\n\r\nGET /nothing HTTP/1.1\r\n\r\n", 2)
    talk(server, b"hello\r\n\r\n")
    samples = scrape(server)
    counted = {key[1:]: value for key, value in samples.items() if key[0] == "oe_serving_requests_total"}
    assert counted == {
        (("method", "POST"), HTTP, ("status", "200")): 2,
        (("method", "POST"), HTTP, ("status", "400")): 1,
        (("method", "GET"), HTTP, ("status", "200")): 1,
        (("method", "GET"), HTTP, ("status", "404")): 1,
        (("method", "none"), HTTP, ("status", "400")): 1,
    }
    assert samples["oe_serving_examples_total", HTTP] == 4
    assert samples["oe_serving_answer_seconds_count", HTTP] == 3
    assert samples["oe_serving_answer_seconds_bucket", ("le", "+Inf"), HTTP] == 3
    assert 0 < samples["oe_serving_answer_seconds_sum", HTTP] < 3 * 60
    assert samples["oe_serving_requests_in_progress", HTTP] == 1, "this one"
    assert samples[("oe_serving_accepted_connections_total",)] == 4
    assert samples[("oe_serving_received_bytes_total",)] > len(post()) * 3
    assert samples[("oe_serving_sent_bytes_total",)] > 0
    again = scrape(server, METRICS_PATHS[1])
    assert again["oe_serving_requests_total", ("method", "GET"), HTTP, ("status", "200")] == 2


def test_a_model_that_cannot_answer_is_not_ready(server):
    assert scrape(server)[("oe_serving_ready",)] == 1
    server.versions.main.unavailable = "the servers are gone"

    def lose(*_):
        raise ServingError(server.versions.main.unavailable)

    server.versions.main.predict_versioned = lose
    assert talk(server, post())[0][0][0] == 503
    samples = scrape(server)
    assert samples[("oe_serving_ready",)] == 0
    assert samples["oe_serving_requests_total", ("method", "POST"), HTTP, ("status", "503")] == 1


def test_freshness_is_there_once_a_checkpoint_has_followed_another(server):
    assert ("oe_serving_freshness_seconds",) not in scrape(server)
    server.versions.main.freshness, server.versions.main.seconds_behind = 0.25, 1.5
    samples = scrape(server)
    assert samples[("oe_serving_freshness_seconds",)] == 0.25
    assert samples[("oe_serving_behind_seconds",)] == 1.5


def test_connections_that_the_server_closes_are_counted():
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, max_connections=1, head_seconds=0.1)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), 60) as late:
            late.sendall(f"POST {PATH}".encode())
            assert late.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port), 60) as displaced:
            scrape(server)
            assert displaced.recv(1) == b""
        samples = scrape(server)
    finally:
        server.stop()
    closed = {
        key[1][1]: value for key, value in samples.items() if key[0] == "oe_serving_closed_connections_total"
    }
    assert (closed["late"], closed["refused"]) == (1, 0)
    assert closed["displaced"] >= 1


def test_calls_over_grpc_are_counted_beside(server):
    grpc = pytest.importorskip("grpc")
    from oe_runtime.serving.access import Access
    from oe_runtime.serving.grpc import GrpcServer
    from oe_runtime.serving.messages import message, tensor_proto

    access = Access(token="token")
    over_grpc = GrpcServer("echo", _Echo(), "127.0.0.1", 0, max_body_bytes=1 << 20, access=access)
    server.grpc_calls = over_grpc.calls
    over_grpc.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{over_grpc.port}") as channel:

            def call(method, sent, said="Bearer token"):
                metadata = [("authorization", said)]
                try:
                    channel.unary_unary(f"/tensorflow.serving.{method}")(sent, metadata=metadata, timeout=60)
                except grpc.RpcError as error:
                    return error.code().name, error.details()
                return "OK", ""

            request = message("PredictRequest")()
            request.model_spec.name = "echo"
            request.inputs["x"].CopyFrom(tensor_proto([1.0, 2.0, 3.0]))
            sent = request.SerializeToString()
            predict = "PredictionService/Predict"
            assert call(predict, sent) == ("OK", "")
            assert call(predict, sent, "Bearer wrong")[0] == "UNAUTHENTICATED"
            assert call(predict, b"\xff") == ("INVALID_ARGUMENT", "the request is not a PredictRequest")
            said = "there is no method /tensorflow.serving.PredictionService/MultiInference"
            assert call("PredictionService/MultiInference", b"") == ("UNIMPLEMENTED", said)
    finally:
        over_grpc.stop()
    samples = scrape(server)
    counted = {
        (key[1][1], key[3][1]): value for key, value in samples.items() if GRPC in key and len(key) == 4
    }
    assert counted == {
        ("Predict", "OK"): 1,
        ("Predict", "INVALID_ARGUMENT"): 1,
        ("none", "UNAUTHENTICATED"): 1,
        ("none", "UNIMPLEMENTED"): 1,
    }
    assert samples["oe_serving_examples_total", GRPC] == 3
    assert samples["oe_serving_requests_in_progress", GRPC] == 0
    assert samples["oe_serving_answer_seconds_count", GRPC] == 4
    assert samples["oe_serving_answer_seconds_bucket", ("le", "+Inf"), GRPC] == 4
    assert 0 < samples["oe_serving_answer_seconds_sum", GRPC] < 60
