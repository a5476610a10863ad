"""Certificates and tokens of a serving process, with clients of OpenSSL and gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from test_serving_http import BODY, PATH, _Echo, post

from oe_runtime import serve
from oe_runtime.errors import ServingError
from oe_runtime.serving.access import Access, AccessFiles
from oe_runtime.serving.rest import HEALTH_PATHS, RestServer

TOKEN = "a-token-of-27-characters-00"
KEY_FORMAT = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)


def make_certificate(directory: Path, name: str = "one", password: bytes | None = None) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 that issued itself, and its key; return both."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now()
    places = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    builder = x509.CertificateBuilder(own, own, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=2))
    builder = builder.add_extension(x509.SubjectAlternativeName(places), False)
    signed = builder.add_extension(x509.BasicConstraints(True, None), True).sign(key, hashes.SHA256())
    files = directory / f"{name}.crt", directory / f"{name}.key"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    cipher = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    files[1].touch(0o600)
    files[1].write_bytes(key.private_bytes(*KEY_FORMAT, cipher))
    return files


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def access_of(certificate: tuple[Path, Path], token: str = "") -> Access:
    return Access(certificate[0].read_text(), certificate[1].read_text(), token)


@contextlib.contextmanager
def serving(access: Access, **limits: Any) -> Iterator[RestServer]:
    server = RestServer("echo", _Echo(), "127.0.0.1", 0, **limits)  # type: ignore[arg-type]
    server.use_access(access)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(certificate: tuple[Path, Path]) -> Iterator[RestServer]:
    with serving(access_of(certificate, TOKEN)) as server:
        yield server


def client(certificate: tuple[Path, Path], **bounds: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    for name, value in bounds.items():
        setattr(context, name, value)
    return context


def ask(
    port: int,
    context: ssl.SSLContext | None,
    method: str,
    path: str,
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, bytes, Any]:
    """Return the status, the body and the headers of an answer."""
    if context is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_requests_are_answered_encrypted(server, certificate, version):
    context = client(certificate, minimum_version=version, maximum_version=version)
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    with contextlib.closing(connection):
        for size in (1, 20, 70_000):  # the last one is larger than what is read at a time
            body = json.dumps({"inputs": [0.5] * size}).encode()
            connection.request("POST", PATH, body, BEARER)
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.load(answer) == {"outputs": [0.5] * size}


def test_requests_one_behind_the_other_are_answered(server, certificate):
    sent = b"".join(
        post(json.dumps({"inputs": [float(i)]}).encode(), f"Authorization: bearer  {TOKEN}")
        for i in range(30)
    )
    with (
        socket.create_connection(("127.0.0.1", server.port), 60) as plain,
        client(certificate).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(sent)
        stream = connection.makefile("rb")
        for i in range(30):
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = http.client.parse_headers(stream)
            assert json.loads(stream.read(int(headers["Content-Length"]))) == {"outputs": [i]}


def test_slow_readers_get_whole_answers(certificate):
    with serving(access_of(certificate)) as server:
        body = json.dumps({"inputs": [0.25] * 1_000_000}).encode()
        with (
            socket.create_connection(("127.0.0.1", server.port), 60) as plain,
            client(certificate).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(post(body))
            time.sleep(1)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert json.load(answer) == {"outputs": [0.25] * 1_000_000}
            answer.close()


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "none was sent"),
        ({"Authorization": "Bearer "}, "another one was sent"),
        ({"Authorization": TOKEN}, "another one was sent"),
        ({"Authorization": f"Basic {TOKEN}"}, "another one was sent"),
        ({"Authorization": f"Bearer {TOKEN}0"}, "another one was sent"),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, "another one was sent"),
        ({"Authorization": f"Bearer {TOKEN * 2}"}, "another one was sent"),
        ({"Authorization": f"Bearer {TOKEN[:-1]}1"}, "another one was sent"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", PATH), ("GET", "/v1/models/echo"), ("GET", "/metrics"), ("PUT", "/")]
)
def test_requests_without_the_token_are_refused_before_their_body(
    server, certificate, headers, said, method, path
):
    body = BODY if method == "POST" else None
    status, reply, answered = ask(server.port, client(certificate), method, path, body, **headers)
    assert (status, answered["WWW-Authenticate"], answered["Connection"]) == (401, "Bearer", "close")
    assert said in json.loads(reply)["error"]
    assert TOKEN.encode() not in reply


def test_health_needs_no_token(server, certificate):
    for path in HEALTH_PATHS:
        assert ask(server.port, client(certificate), "GET", path)[0] == 200
    assert ask(server.port, client(certificate), "GET", HEALTH_PATHS[0] + "/../../v1")[0] == 401
    page = ask(server.port, client(certificate), "GET", "/metrics", **BEARER)[1].decode()
    assert 'oe_serving_requests_total{protocol="http",method="GET",status="401"}' in page


def test_two_tokens_are_no_request(server, certificate):
    with (
        socket.create_connection(("127.0.0.1", server.port), 60) as plain,
        client(certificate).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(post(BODY, f"Authorization: Bearer {TOKEN}", "Authorization: Bearer x"))
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_clients_without_encryption_are_told(server):
    status, reply, _ = ask(server.port, None, "GET", "/v2/health/live")
    assert (status, "https://" in json.loads(reply)["error"]) == (400, True)


def test_clients_that_trust_others_and_old_ones_do_not_connect(server, certificate, tmp_path):
    other = make_certificate(tmp_path, "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server.port, client(other), "GET", "/v2/health/live")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(certificate[0])
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(server.port, old, "GET", "/v2/health/live")
    with socket.create_connection(("127.0.0.1", server.port), 60) as plain:
        plain.sendall(b"\x16\x03\x01\x00\x05hello")
        with contextlib.suppress(ConnectionError):
            while plain.recv(100):
                pass
    page = ask(server.port, client(certificate), "GET", "/metrics", **BEARER)[1].decode()
    (line,) = [one for one in page.splitlines() if 'reason="handshake"' in one]
    assert int(line.split()[-1]) >= 3


def test_a_client_that_does_not_shake_hands_is_late(certificate):
    with serving(access_of(certificate), head_seconds=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as plain:
            assert plain.recv(1) == b""
        assert ask(server.port, client(certificate), "GET", "/v2/health/live")[0] == 200


def test_connections_over_the_limit_are_told_encrypted(certificate):
    with serving(access_of(certificate), max_connections=1) as server:
        answered = threading.Event()
        server.versions.main.predict_versioned = lambda inputs, *_: (
            answered.wait(60),
            _Echo().predict_versioned(inputs),
        )[1]
        busy = threading.Thread(target=ask, args=(server.port, client(certificate), "POST", PATH, BODY))
        busy.start()
        try:
            deadline = time.monotonic() + 60
            while json.loads(server._server.stats())["in_progress"] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert ask(server.port, client(certificate), "GET", "/v2/health/live")[0] == 503
        finally:
            answered.set()
            busy.join()


def test_nothing_is_lost_at_the_end(certificate):
    server = RestServer("echo", _Echo(), "127.0.0.1", 0)
    server.use_access(access_of(certificate))
    server.start()
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=client(certificate))
    with contextlib.closing(connection):
        connection.request("POST", PATH, BODY)
        assert connection.getresponse().read() == b'{"outputs": [1.5]}'
        ending = threading.Thread(target=server.stop, args=(20,))
        ending.start()
        time.sleep(0.3)
        connection.request("POST", PATH, BODY)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        answer.read()
    ending.join(20)
    assert not ending.is_alive()


def test_what_is_no_certificate_is_refused_by_name(certificate, tmp_path):
    other = make_certificate(tmp_path, "other")
    secret = make_certificate(tmp_path, "secret", b"password")
    server = RestServer("echo", _Echo(), "127.0.0.1", 0)
    good = access_of(certificate)
    for access, said in [
        (Access("nothing", good.key), "the certificate: "),
        (Access(good.certificate, "nothing"), "the key: "),
        (Access(good.certificate, other[1].read_text()), "the key: key values mismatch"),
        (access_of(secret), "the key: "),
    ]:
        with pytest.raises(ServingError, match=said) as error:
            server.use_access(access)
        assert "\n" not in str(error.value)
    server.stop()


def test_files_are_read_as_secrets(certificate, tmp_path):
    with pytest.raises(ServingError, match="--tls-cert needs --tls-key"):
        AccessFiles(certificate[0], None, None)
    token = tmp_path / "token"
    for mode, text, said in [
        (0o644, "x", "others may read or change the token file"),
        (0o660, "x", "others may read or change the token file"),
        (0o600, " \n", "the token file .* is empty"),
    ]:
        token.write_text(text)
        token.chmod(mode)
        with pytest.raises(ValueError, match=said):
            AccessFiles(None, None, token).read()
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o640)
    files = AccessFiles(None, None, token)
    assert files.read() == Access("", "", TOKEN)
    assert not files.have_changed()
    token.write_text(f"{TOKEN}1\n")
    assert files.have_changed()
    with pytest.raises(ValueError, match="cannot read the certificate file"):
        AccessFiles(tmp_path / "none", certificate[1], None).read()


@pytest.mark.parametrize(
    ("host", "has_tls", "has_token", "said"),
    [
        ("127.0.0.1", False, False, ""),
        ("::1", False, False, ""),
        ("localhost", False, False, ""),
        ("0.0.0.0", True, True, ""),  # noqa: S104
        ("0.0.0.0", False, False, "without a token and without encryption"),  # noqa: S104
        ("::", True, False, "without a token; set --request-token-file"),
        ("example.org", False, True, "without encryption, so that the token can be read"),
    ],
)
def test_others_that_reach_it_are_warned_of(certificate, tmp_path, host, has_tls, has_token, said):
    pair = certificate if has_tls else (None, None)
    found = AccessFiles(*pair, tmp_path if has_token else None).describe_risk(host)
    assert (said in found) if said else not found


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_a_process_takes_new_certificates_and_tokens(tmp_path):
    grpc = pytest.importorskip("grpc")
    from serving_models import Training, batch

    from oe_runtime.serving.messages import message, tensor_proto

    pair, token, ready = make_certificate(tmp_path), tmp_path / "token", tmp_path / "ready.json"
    token.touch(0o600)
    token.write_text(TOKEN)
    with Training(tmp_path) as training:
        training.fit()
        training.publish(100)
        command = [sys.executable, "-m", "oe_runtime.serve", str(training.export())]
        command += ["--rows", str(training.checkpoints), "--name", "ctr", "--host", "0.0.0.0"]  # noqa: S104
        command += ["--tls-cert", str(pair[0]), "--tls-key", str(pair[1])]
        command += ["--port", "0", "--grpc-port", "0", "--ready-file", str(ready)]
        command += ["--request-token-file", str(token)]
        x, _ = batch(2)
        request = message("PredictRequest")()
        request.model_spec.name = "ctr"
        for name, array in x.items():
            request.inputs[name].CopyFrom(tensor_proto(array))
        body = json.dumps({"inputs": {name: array.tolist() for name, array in x.items()}}).encode()
        errors = tmp_path / "errors"
        with (
            errors.open("w") as written,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as process,
        ):
            try:
                until(lambda: ready.exists() or process.poll() is not None)
                assert process.poll() is None, errors.read_text()
                ports = json.loads(ready.read_text())
                assert ports["scheme"] == "https"

                def rest(certificate: tuple[Path, Path], token: str) -> int:
                    headers = {"Authorization": f"Bearer {token}"}
                    context = client(certificate)
                    return ask(ports["port"], context, "POST", "/v1/models/ctr:predict", body, **headers)[0]

                def over_grpc(certificate: tuple[Path, Path], *tokens: str) -> str:
                    trusted = grpc.ssl_channel_credentials(certificate[0].read_bytes())
                    with grpc.secure_channel(f"127.0.0.1:{ports['grpc_port']}", trusted) as channel:
                        predict = channel.unary_unary(
                            "/tensorflow.serving.PredictionService/Predict",
                            request_serializer=lambda one: one.SerializeToString(),
                            response_deserializer=message("PredictResponse").FromString,
                        )
                        metadata = [("authorization", f"Bearer {one}") for one in tokens]
                        try:
                            answer = predict(request, metadata=metadata, timeout=20)
                        except grpc.RpcError as error:
                            return str(error.code().name)
                        return f"{len(answer.outputs['output_0'].float_val)} values"

                assert [rest(pair, TOKEN), rest(pair, "wrong")] == [200, 401]
                assert over_grpc(pair, TOKEN) == "2 values"
                assert [over_grpc(pair), over_grpc(pair, "wrong")] == ["UNAUTHENTICATED"] * 2
                plain = grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}")
                with plain as channel, pytest.raises(grpc.RpcError):
                    channel.unary_unary("/tensorflow.serving.PredictionService/Predict")(b"", timeout=20)

                newer = make_certificate(tmp_path, "newer")
                os.replace(newer[0], pair[0])  # its key comes later
                token.write_text("new-" + TOKEN)
                until(lambda: "key values mismatch" in errors.read_text())
                os.replace(newer[1], pair[1])

                def is_new() -> bool:
                    with contextlib.suppress(ssl.SSLError):
                        return rest(pair, "new-" + TOKEN) == 200
                    return False

                until(is_new)
                assert rest(pair, TOKEN) == 401
                assert over_grpc(pair, "new-" + TOKEN) == "2 values"
                assert over_grpc(pair, TOKEN) == "UNAUTHENTICATED"
            finally:
                process.terminate()
            out, _ = process.communicate(timeout=60)
    err = errors.read_text()
    assert process.returncode == 0, err
    assert "serving" in out
    assert "at https://0.0.0.0:" in out
    assert "with a token only" in out
    assert "requests need what they needed before: the key: key values mismatch" in err
    assert TOKEN not in out + err
    assert "is reached from other machines" not in err


def test_half_of_a_pair_is_one_line(certificate, capsys, monkeypatch):
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    assert serve.main([".", "--tls-cert", str(certificate[0])]) == 1
    assert capsys.readouterr().err == "error: --tls-cert needs --tls-key\n"
