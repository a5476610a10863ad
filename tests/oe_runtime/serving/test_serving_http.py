"""HTTP as hostile and as old clients speak it, byte by byte."""

from __future__ import annotations

import contextlib
import gc
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from oe_runtime.errors import ServingError
from oe_runtime.model_description import Signature, Tensor
from oe_runtime.serving.rest import RestServer

PATH = "/v1/models/echo:predict"
BODY = b'{"inputs": [1.5]}'


class _Echo:
    version = 1
    unavailable = ""
    sources = ""
    slowness = ""
    freshness = None
    seconds_behind = 0.0
    is_ending = False
    inputs = (Tensor("x", "float32", (None,)),)
    outputs = (Tensor("y", "float32", (None,)),)
    signatures = {"serving_default": Signature(inputs, outputs)}  # noqa: RUF012
    platform = "echo"

    def make_predictor(self, name):
        return None

    def lead(self, call):
        raise AssertionError(call)

    def predict_versioned(self, inputs, *signature):
        return {"y": np.asarray(inputs["x"], np.float32)}, 1


@pytest.fixture(scope="module")
def server():
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    yield server
    server.stop()


def talk(server, sent, replies=1):
    """(status, body, headers) of each reply to the bytes, and whether the server has ended the connection."""
    found = []
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(sent)
        stream = connection.makefile("rb")
        for _ in range(replies):
            status = int(stream.readline().split()[1])
            headers = http.client.parse_headers(stream)
            found.append((status, json.loads(stream.read(int(headers["Content-Length"]))), headers))
        ends = headers["Connection"] == "close"
        if ends:
            assert stream.read(1) == b""
    return found, ends


def post(body=BODY, *headers, version="1.1"):
    lines = [f"POST {PATH} HTTP/{version}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


REFUSED = [
    (b"hello\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
    (b"POST " + b"/" * 70_000, 431),
    (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431),
    (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
    (b"GET / HTTP/2.0\r\n\r\n", 505),
    (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX : y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX: y\r\n folded\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX: a\nContent-Length: 3\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\na", 411),
    (b"POST / HTTP/1.1\r\n\r\n", 411),
    (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
    (b"PUT / HTTP/1.1\r\n\r\n", 501),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
]


@pytest.mark.parametrize(("sent", "status"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_a_request_is_refused_and_ends_the_connection(server, sent, status):
    ((found, body, _),), ends = talk(server, sent)
    assert (found, list(body), ends) == (status, ["error"], True)
    assert talk(server, post())[0][0][:2] == (200, {"outputs": [1.5]})


def test_requests_one_behind_the_other_are_answered_in_order(server):
    bodies = [json.dumps({"inputs": [float(i)]}).encode() for i in range(20)]
    found, ends = talk(server, b"".join(post(body) for body in bodies), len(bodies))
    assert [(status, body) for status, body, _ in found] == [(200, {"outputs": [i]}) for i in range(20)]
    assert not ends


def test_the_body_of_a_get_is_not_the_next_request(server):
    hidden = b"GET /v1/models/other HTTP/1.1\r\n\r\n"
    first = f"GET /v1/models/echo HTTP/1.1\r\nContent-Length: {len(hidden)}\r\n\r\n".encode() + hidden
    found, _ = talk(server, first + post(), 2)
    assert [status for status, *_ in found] == [200, 200]


def test_a_body_that_is_announced_is_asked_for(server):
    body = json.dumps({"inputs": [0.5] * 50_000}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(post(body, "Expect: 100-continue")[: -len(body)])
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())) == (200, {"outputs": [0.5] * 50_000})
    old = talk(server, post(body, "Expect: 100-continue", version="1.0"))[0]
    assert old[0][0] == 200, "which does not know 100 Continue"
    too_long = post(b"", "Expect: 100-continue").replace(b"Length: 0", b"Length: 9999999")
    assert talk(server, too_long)[0][0][0] == 413, "before the body is sent"


@pytest.mark.parametrize(
    ("headers", "version", "ends"),
    [
        ((), "1.1", False),
        ((), "1.0", True),
        (("Connection: x, Close",), "1.1", True),
        (("Connection: close, keep-alive",), "1.1", True),
        (("Connection: close", "Connection: keep-alive"), "1.0", True),
        (("connection: keep-alive",), "1.0", False),
    ],
)
def test_connections_end_as_clients_ask(server, headers, version, ends):
    assert talk(server, post(BODY, *headers, version=version))[1] is ends


def test_the_answer_to_head_has_no_body(server):
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\n\r\n")
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 ")
    assert body == b""


def test_a_server_that_has_ended_is_freed():
    for starts in (True, False):
        server = RestServer("echo", _Echo(), "127.0.0.1", 0)
        if starts:
            server.start()
            assert talk(server, post())[0][0][0] == 200
        server.stop()
        freed = weakref.ref(server)
        del server
        gc.collect()
        assert freed() is None


def test_a_process_that_stops_no_server_ends():
    program = """
import http.client, threading, time
from test_serving_http import PATH, BODY, _Echo
from oe_runtime.serving.rest import RestServer

class Slow(_Echo):
    def predict_versioned(self, inputs, *signature):
        begun.set()
        time.sleep(0.5)
        return super().predict_versioned(inputs, *signature)

begun = threading.Event()
server = RestServer("echo", Slow(), "127.0.0.1", 0)
server.start()
connection = http.client.HTTPConnection("127.0.0.1", server.port)
connection.request("POST", PATH, BODY)
begun.wait()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_requests_come_in_pieces_of_any_size(server):
    sent = b"\r\n" + post()
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in sent:
            connection.sendall(bytes([byte]))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_leaves_early_disturbs_nobody(server):
    for cut in (1, 30, len(post()) - 1, len(post())):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(post()[:cut])
    assert talk(server, post())[0][0][0] == 200


def chunked(*parts, headers=(), end=b"0\r\n\r\n"):
    head = "\r\n".join([f"POST {PATH} HTTP/1.1", "Transfer-Encoding: Chunked", *headers, "", ""]).encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


def bodies(size):
    """A body of about as many bytes, and its answer."""
    numbers = [0.5] * (size // 5)
    return json.dumps({"inputs": numbers}).encode(), {"outputs": numbers}


def random_bodies(size):
    """As `bodies`, of numbers that gzip does not make much smaller."""
    numbers = (np.random.default_rng(1).integers(0, 10**7, size // 10) / 2**5).astype(np.float32).tolist()
    return json.dumps({"inputs": numbers}).encode(), {"outputs": numbers}


def pieces(body, size):
    return [body[at : at + size] for at in range(0, len(body), size)]


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"000;x=y\r\nX-Sum: 1\r\n\r\n"])
@pytest.mark.parametrize(("size", "of_chunk"), [(20, 1), (20, 9999), (300_000, 7000), (900_000, 900_000)])
def test_bodies_may_come_in_chunks(server, size, of_chunk, end):
    body, wanted = bodies(size)
    sent = chunked(*pieces(body, of_chunk), end=end) + post()
    found, ends = talk(server, sent, 2)
    assert [answer[:2] for answer in found] == [(200, wanted), (200, {"outputs": [1.5]})]
    assert not ends


def test_chunks_come_in_pieces_of_any_size(server):
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in chunked(*pieces(BODY, 3), end=b"0 ;a\r\nX: y\r\n\r\n"):
            connection.sendall(bytes([byte]))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_chunks_that_are_announced_are_asked_for(server):
    sent = chunked(BODY, headers=["Expect: 100-continue"])
    head, _, rest = sent.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(rest)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (chunked(end=b"x\r\n"), 400),
        (chunked(end=b"-1\r\n"), 400),
        (chunked(end=b"0x1\r\na\r\n"), 400),
        (chunked(end=b"\r\n"), 400),
        (chunked(end=b"1\na\r\n"), 400),
        (chunked(end=b"1 1\r\na\r\n"), 400),
        (chunked(end=b"1\r\nab\r\n0\r\n\r\n"), 400),
        (chunked(end=b"1;" + b"x" * 300), 400),
        (chunked(end=b"1" * 16 + b"\r\n"), 400),
        (chunked(end=b"0\r\n" + b"X: y\r\n" * 2000 + b"\r\n"), 400),
        (chunked(end=b"0\r\nX: " + b"y" * 9000), 400),
        (chunked(headers=["Content-Length: 3"]), 400),
        (chunked(headers=["Transfer-Encoding: chunked"]), 400),
        (chunked().replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
        (chunked().replace(b"Chunked", b"gzip, chunked"), 501),
        (chunked(*[b" " * 65_536] * 17), 413),
        (chunked(end=b"fffffff\r\n" + b" " * (1 << 21)), 413),
    ],
    ids=range(17),
)
def test_bad_chunks_are_refused(server, sent, status):
    ((found, body, _),), ends = talk(server, sent)
    assert (found, list(body), ends) == (status, ["error"], True)
    assert talk(server, chunked(BODY))[0][0][0] == 200


def test_bodies_that_grow_do_not_wait_for_each_other(server):
    body, wanted = bodies(700_000)
    noise, numbers = random_bodies(700_000)
    packed, header = gzip.compress(noise), ["Content-Encoding: gzip"]
    assert 2 * len(packed) < 1 << 20 < len(packed) + len(noise)
    kinds = [
        (chunked(*pieces(body, 50_000)), wanted),
        (chunked(*pieces(packed, 50_000), headers=header), numbers),
        (post(packed, *header), numbers),
        (post(body), wanted),
    ]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: talk(server, kinds[i % 4][0])[0][0][:2], range(12)))
    assert found == [(200, answer) for _, answer in kinds * 3]


@pytest.mark.parametrize("size", [20, 300_000, 900_000])
@pytest.mark.parametrize("coding", ["gzip", "X-GZIP"])
def test_bodies_may_be_compressed(server, size, coding):
    body, wanted = bodies(size)
    packed, header = gzip.compress(body), f"Content-Encoding: {coding}"
    sent = post(packed, header) + chunked(*pieces(packed, 100), headers=[header]) + post(BODY)
    found, ends = talk(server, sent, 3)
    assert [answer[:2] for answer in found] == [(200, wanted), (200, wanted), (200, {"outputs": [1.5]})]
    assert not ends


GZIP = gzip.compress(BODY)


@pytest.mark.parametrize(
    ("packed", "coding", "status"),
    [
        (BODY, "gzip", 400),
        (BODY * 4, "gzip", 400),
        (b"", "gzip", 400),
        (GZIP[:-5] + b"\x00" + GZIP[-4:], "gzip", 400),  # another checksum
        (GZIP[:-4] + b"\x05\x00\x00\x00", "gzip", 400),  # another size
        (GZIP[:12] + GZIP[-8:], "gzip", 400),
        (GZIP + GZIP, "gzip", 400),
        (gzip.compress(b" " * (2 << 20)), "gzip", 413),
        (gzip.compress(b" " * (2 << 20))[:-4] + b"\x05\x00\x00\x00", "gzip", 400),  # a bomb that denies it
        (BODY, "br", 415),
        (BODY, "gzip, gzip", 415),
        (BODY, "identity", 200),
    ],
    ids=range(12),
)
def test_bad_compressed_bodies_are_refused(server, packed, coding, status):
    ((found, body, _),), _ = talk(server, post(packed, f"Content-Encoding: {coding}"))
    assert (found, "error" in body) == (status, status != 200)
    assert talk(server, post(GZIP, "Content-Encoding: gzip"))[0][0][0] == 200


def test_more_requests_than_may_wait_are_refused_at_once():
    class Slow(_Echo):
        def predict_versioned(self, inputs, *signature):
            begun.release()
            assert go_on.wait(60)
            return super().predict_versioned(inputs, *signature)

    begun, go_on = threading.Semaphore(0), threading.Event()
    server = RestServer("echo", Slow(), "127.0.0.1", 0, max_queued_requests=2)
    server.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(talk, server, post()) for _ in range(2)]
            for _ in waiting:
                assert begun.acquire(timeout=60)
            try:
                found, ends = talk(server, post() + post() + b"GET /v1/models/echo HTTP/1.1\r\n\r\n", 3)
            finally:
                go_on.set()
            assert [status for status, *_ in found] == [503, 503, 200]
            assert (found[0][2]["Retry-After"], ends) == ("1", False)
            assert [one.result()[0][0][0] for one in waiting] == [200, 200]
        assert talk(server, post())[0][0][0] == 200
    finally:
        server.stop()


def test_a_body_that_grows_has_one_deadline():
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, max_body_bytes=1 << 20, head_seconds=1)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(chunked(end=b""))
            for size in (70_000, 140_000, 280_000):  # each needs more room than the one before
                connection.sendall(b"%x\r\n" % size + b" " * size + b"\r\n")
                time.sleep(0.8)  # which a deadline for each would allow
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"0\r\n\r\n")
                assert connection.recv(100) == b""
    finally:
        server.stop()


def test_a_slow_body_that_grows_keeps_no_other_waiting():
    body, wanted = bodies(300_000)
    options = {"max_body_bytes": 1 << 20, "head_seconds": 600, "patience_seconds": 600}
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, **options)
    server.start()
    slow = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(2)]
    try:
        for connection in slow:
            connection.sendall(chunked(b" " * 200_000, end=b""))
        assert talk(server, chunked(*pieces(body, 5000)))[0][0][:2] == (200, wanted)
        # Where both need what the other has, one of them goes.
        for connection in slow:
            connection.sendall(b"%x\r\n" % 600_000 + b" " * 600_000 + b"\r\n0\r\n\r\n")
        said = sorted(connection.recv(12) for connection in slow)
        assert said == [b"HTTP/1.1 400", b"HTTP/1.1 503"]
    finally:
        for connection in slow:
            connection.close()
        server.stop()


def test_what_cannot_be_computed_together_is_refused():
    with pytest.raises(
        ServingError, match="--max-batch-size: requests for this model are computed in Python"
    ):
        RestServer("echo", _Echo(), "127.0.0.1", 0, max_batch_size=8)
