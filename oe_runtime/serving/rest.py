"""A model over HTTP: what TensorFlow Serving's REST paths and those of the Open Inference Protocol mean.

The core's server reads and writes.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import weakref
import zlib
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote

from oe_runtime import _core
from oe_runtime.errors import InputError, OeError, ServerLost, ServingError
from oe_runtime.model_description import Signature
from oe_runtime.serving import examples, metrics, open_inference, requests
from oe_runtime.serving.access import Access
from oe_runtime.serving.model import Model, Unloaded
from oe_runtime.serving.versions import Asked, Versions, wrap
from oe_runtime.support import prometheus

_STATUS = {
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "FAILED_PRECONDITION": HTTPStatus.PRECONDITION_FAILED,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
_PATH = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
    r"(?P<verb>:\w+|/metadata)?"
)
_INFERENCE_PATH = re.compile(
    r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<verb>/ready|/infer)?"
)
HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready")  # they need no token
METRICS_PATHS = ("/metrics", "/monitoring/prometheus/metrics")  # the latter as TensorFlow Serving
MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 10_000
MAX_QUEUED_REQUESTS = 1_000
BATCH_TIMEOUT_MS = 1.0
_LARGE = re.compile(rb"[eE]\+?\d{3}|\d{309}")  # whatever may be a number outside of float64
_THREADS = max(8, 2 * len(os.sched_getaffinity(0)))  # that compute answers
_MOST_THREADS = 64  # likewise, if requests wait for each other


class RestServer:
    """Listens from its creation; `start` begins to answer."""

    def __init__(
        self,
        name: str,
        model: Model | Versions,
        host: str,
        port: int,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        max_batch_size: int = 1,
        batch_timeout_ms: float = BATCH_TIMEOUT_MS,
        head_seconds: float = 10.0,
        patience_seconds: float = 10.0,
    ) -> None:
        """Raises ServingError for an unavailable address, and for a model that cannot compute batches.

        Requests above 64 KiB that are read and computed at a time share `max_body_bytes`, as each takes about
        forty times its size in memory. Others wait for `patience_seconds` and are then refused. A client has
        `head_seconds` for the headers of a request. Of connections over the limit, the one that has waited
        longest for its client is closed. Of POST requests, `max_queued_requests` may be computed or wait for
        it; others are refused at once. With `max_batch_size` above 1, requests that wait at the same time are
        computed together, up to as many examples. They wait for others for `batch_timeout_ms`; 0: only while
        the processors are busy.
        """
        self.name = name
        self.versions = wrap(name, model)
        self.max_body_bytes = max_body_bytes
        self.grpc_calls: metrics.Calls | None = None  # that /metrics shows too
        self._batches = max_batch_size, batch_timeout_ms / 1000
        self._predictors: dict[Model, _core.Predictor | None] = {}
        self._routes = _core.Routes()
        self._routing = threading.Lock()
        self._route()
        threads = _THREADS
        if max_batch_size > 1:
            threads = max(threads, min(max_batch_size, _MOST_THREADS))  # each holds a request that waits
        try:
            self._server = _core.HttpServer(
                self._answer,
                unpack=_unpack,
                routes=self._routes,
                host=host,
                port=port,
                max_connections=max_connections,
                max_queued_requests=max_queued_requests,
                max_body_bytes=max_body_bytes,
                head_seconds=head_seconds,
                idle_seconds=60.0,
                patience_seconds=patience_seconds,
                threads=threads,
                open_targets=HEALTH_PATHS,
            )
        except OeError as error:
            raise ServingError(str(error)) from error
        # Its threads must not need the interpreter after its end.
        weakref.finalize(self, self._server.stop, 0)
        self.versions.on_change = self._route

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def use_access(self, access: Access) -> None:
        """Let later connections and requests need this. Raises ServingError for a bad certificate or key."""
        try:
            self._server.set_access(access.certificate, access.key, access.token)
        except OeError as error:
            raise ServingError(str(error)) from error

    def start(self) -> None:
        """Start answering requests, in threads."""
        self._server.start()

    def stop(self, seconds: float = 0) -> None:
        """End in order: answer requests that were sent, for at most `seconds`, and end their connections.

        Others are accepted for a moment, because clients learn the end from the last answer. Returns when no
        answer is computed any more. It does not start again.
        """
        self._server.stop(seconds)
        self.versions.on_change = lambda: None
        self._routes.set([])

    def _route(self) -> None:
        """Let the core answer predictions of what is served now."""
        with self._routing:
            versions, labels, newest = self.versions.models, self.versions.labels, self.versions.newest
            models = {model: self._predictor(model) for model in {newest, *versions.values()}}
            self._predictors = models
            routes = []
            for part, number in (
                ("", None),
                *((f"/versions/{version}", version) for version in versions),
                *((f"/labels/{quote(label, safe='')}", of) for label, of in labels.items()),
            ):
                model = newest if number is None else versions.get(number)
                predictor = None if model is None else models[model]
                if model is None or predictor is None:
                    continue
                lead = partial(_lead, model)
                routes.append((f"/v1/models/{self.name}{part}:predict", predictor, lead, number))
                routes.append((f"/v2/models/{self.name}{part}/infer", predictor, lead, number))
            self._routes.set(routes)

    def _predictor(self, model: Model) -> _core.Predictor | None:
        """Return what answers predictions of a model in the core. Raises ServingError."""
        if model in self._predictors:
            return self._predictors[model]
        predictor = model.make_predictor(self.name)
        examples, seconds = self._batches
        if examples > 1:
            if predictor is None:
                raise ServingError(
                    "--max-batch-size: requests for this model are computed in Python, one at a time; leave "
                    "it out"
                )
            try:
                predictor.batch(examples, seconds)
            except OeError as error:
                raise ServingError(f"--max-batch-size: {error}; leave it out") from error
        return predictor

    def _answer(self, method: str, target: str, body: bytes, json_length: str) -> _core.HttpReply:
        try:
            if method != "GET":
                return self._post(target, body, json_length)
            if target.partition("?")[0] in METRICS_PATHS:
                return _core.HttpReply(200, self._metrics(), prometheus.CONTENT_TYPE)
            return _core.HttpReply(200, _to_json(self._get(target)))
        except _Refusal as refusal:
            return _core.HttpReply(refusal.status, json.dumps({"error": str(refusal)}).encode())
        except Exception as error:
            return _refuse(error)

    @property
    def _signatures(self) -> dict[str, Signature]:
        return self.versions.main.signatures  # those of all

    def _metrics(self) -> bytes:
        stats = json.loads(self._server.stats())
        return metrics.text(stats, self.versions, self.grpc_calls).encode()

    def _parse_target(self, target: str) -> tuple[str | None, Asked]:
        """Return the verb and the asked version of a request of TensorFlow Serving."""
        match = _PATH.fullmatch(target.partition("?")[0])
        if match is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"there is nothing at {target}; see /v1/models/NAME")
        requests.check_name(match["name"], self.name)
        version, label = match["version"], match["label"]
        if version is not None and len(version) > requests.LONGEST_VERSION:
            raise self.versions.not_found(f"a version of {len(version)} digits")
        number = None if version is None else int(version)
        asked = Asked(number, None if label is None else unquote(label))
        self.versions.find(asked)  # before the body is read
        return match["verb"], asked

    def _parse_inference_target(self, target: str) -> tuple[str | None, Asked]:
        """Return the verb and the version of a request of the Open Inference Protocol."""
        match = _INFERENCE_PATH.fullmatch(target.partition("?")[0])
        if match is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"there is nothing at {target}; see /v2/models/NAME")
        requests.check_name(unquote(match["name"]), self.name)
        return match["verb"], open_inference.find_version(unquote(match["version"] or ""), self.versions)

    def _get(self, target: str) -> Any:
        path = target.partition("?")[0]
        if path == "/v2":
            return open_inference.server_metadata()
        if path.startswith("/v2/"):
            return self._get_inference(path)
        verb, asked = self._parse_target(target)
        if verb is None:
            return requests.status(self.versions, asked)
        if verb == "/metadata":
            return requests.metadata(self.name, *self.versions.find(asked))
        raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{verb[1:]} takes POST")

    def _get_inference(self, path: str) -> Any:
        verb = None if path in HEALTH_PATHS else self._parse_inference_target(path)[0]
        if verb == "/infer":
            raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "infer takes POST")
        if path.endswith("/ready") and (problem := self.versions.unavailable):
            raise _Refusal(HTTPStatus.SERVICE_UNAVAILABLE, problem)
        if path in HEALTH_PATHS:
            return {path.rpartition("/")[2]: True}
        if verb == "/ready":
            return {"name": self.name, "ready": True}
        return open_inference.model_metadata(self.versions)

    def _post(self, target: str, body: bytes, json_length: str) -> _core.HttpReply:
        if target.startswith("/v2/"):
            return self._infer(target, body, json_length)
        verb, asked = self._parse_target(target)
        if verb in (":classify", ":regress"):
            return self._score(verb[1:], asked, body)
        if verb != ":predict":
            raise _Refusal(
                HTTPStatus.NOT_FOUND,
                f"{target}: of a model only :predict, :classify and :regress take POST",
            )
        signature, inputs, by_row = requests.parse_inputs(_from_json(body), self._signatures)
        outputs, _ = self.versions.predict(asked, inputs, signature)
        reply = requests.make_reply(outputs, inputs, by_row=by_row)
        return _core.HttpReply(200, _to_json(reply), examples=requests.count_examples(outputs))

    def _score(self, method: str, asked: Asked, body: bytes) -> _core.HttpReply:
        signature, sent = examples.parse_examples(_from_json(body), method, self._signatures)
        result, _ = examples.compute(self.versions, asked, method, signature, sent)
        requests.to_finite(*examples.numbers(method, result), {})
        return _core.HttpReply(200, _to_json({"result": result}), examples=len(sent))

    def _infer(self, target: str, body: bytes, json_length: str) -> _core.HttpReply:
        verb, which = self._parse_inference_target(target)
        if verb != "/infer":
            raise _Refusal(HTTPStatus.NOT_FOUND, f"{target}: of a model only /infer takes POST")
        size = len(body)
        if json_length:
            is_number = json_length.isascii() and json_length.isdecimal() and len(json_length) < 20
            size = int(json_length) if is_number else -1
            if not 0 <= size <= len(body):
                raise InputError(
                    f"Inference-Header-Content-Length is {json_length[:40]!r}; the body has {len(body)} bytes"
                )
        request = _from_json(body[:size])
        asked = open_inference.parse_request(request, self._signatures, body[size:])
        outputs, answered = self.versions.predict(which, asked.inputs, asked.signature)
        reply, binary = open_inference.make_reply(self.name, answered, asked, outputs)
        said, examples = _to_json(reply), requests.count_examples(outputs)
        if not binary:
            return _core.HttpReply(200, said, examples=examples)
        return _core.HttpReply(200, said + binary, "application/octet-stream", examples, len(said))


def _lead(model: Model, call: _core.PredictorCall) -> _core.HttpReply | None:
    """Return the answer for rows that are not there now, which Python need not wait for again."""
    try:
        model.lead(call)
    except (InputError, Unloaded):
        raise
    except (ServerLost, ServingError) as error:
        return _refuse(error)
    return None


def _to_json(reply: Any) -> bytes:
    return json.dumps(reply, allow_nan=False).encode()


def _from_json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_float=_read_float if _LARGE.search(body) else None)
    except (ValueError, RecursionError) as error:
        raise _Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None


def _read_float(text: str) -> float:
    """Return a number. Raises InputError for one that would be infinity, which has a word of its own."""
    value = float(text)
    if math.isinf(value):
        raise InputError(f"the number {text[:20]} is outside of float64")
    return value


def _unpack(body: bytes, size: int) -> bytes | None:
    """Return the `size` bytes that gzip made `body` of; None if it has others. Reads no more."""
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        found = reader.decompress(body, size + 1)
    except zlib.error:
        return None
    return found if reader.eof and len(found) == size and not reader.unused_data else None


def _refuse(error: Exception) -> _core.HttpReply:
    kind, message = requests.describe_error(error)
    return _core.HttpReply(_STATUS[kind], json.dumps({"error": message}).encode())


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
