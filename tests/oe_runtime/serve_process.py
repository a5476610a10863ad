"""`python -m oe_runtime.serve` in a process of its own, asked over HTTP and gRPC as its clients do.

Tests that use it know nothing of the implementation: they hold for any server of these requests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Serving:
    """A running server; `name` is the model's."""

    def __init__(self, directory: Path, model: Path, *flags: str, name: str = "m") -> None:
        self.name = name
        self._ready = directory / f"ready-{time.monotonic_ns()}.json"
        self.errors = self._ready.with_suffix(".stderr")
        command = [sys.executable, "-m", "oe_runtime.serve", str(model), "--name", name, *flags]
        command += ["--port", "0", "--grpc-port", "0", "--ready-file", str(self._ready)]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Serving:
        deadline = time.monotonic() + 120
        while not self._ready.exists():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self._ports = json.loads(self._ready.read_text())
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> int:
        """For HTTP."""
        return self._ports["port"]

    def ask(
        self, path: str = "", body: Any = None, *, method: str | None = None, seconds: float = 60
    ) -> tuple[int, Any]:
        """Status and reply of a request for the model; a body, as JSON or bytes, makes it POST.

        A path that begins with /v2 is whole.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            method = method or ("GET" if data is None else "POST")
            target = path if path.startswith("/v2") else f"/v1/models/{self.name}{path}"
            connection.request(method, target, data)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read(), parse_constant=_no_such_number)
        finally:
            connection.close()

    def predict(self, inputs: Mapping[str, Any], seconds: float = 60) -> tuple[int, Any]:
        """Status and reply for columns."""
        return self.ask(":predict", {"inputs": inputs}, seconds=seconds)

    def state(self) -> tuple[str, str]:
        """The state of its only version and what it says about it."""
        status, reply = self.ask()
        assert status == 200, reply
        (entry,) = reply["model_version_status"]
        return entry["state"], entry["status"]["error_message"]

    @contextlib.contextmanager
    def grpc(self) -> Iterator[Grpc]:
        """Its services over gRPC."""
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self._ports['grpc_port']}") as channel:
            yield Grpc(channel, self.name)


class Grpc:
    """The stubs of tensorflow-serving-api."""

    def __init__(self, channel: Any, name: str) -> None:
        from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(channel)
        self._name = name

    def request(self, inputs: Mapping[str, Any]) -> Any:
        """A PredictRequest."""
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name = self._name
        for name, value in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        return request

    def predict(self, inputs: Mapping[str, Any], seconds: float = 60) -> dict[str, Any]:
        """Outputs by name. Raises grpc.RpcError."""
        import tensorflow as tf

        reply = self.prediction.Predict(self.request(inputs), timeout=seconds)
        return {name: tf.make_ndarray(proto) for name, proto in reply.outputs.items()}

    def refusal(self, call: Any, request: Any) -> tuple[str, str]:
        """Name of the status and message of a call that must fail."""
        import grpc

        try:
            call(request, timeout=60)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{call} was answered")


def _no_such_number(name: str) -> Any:
    raise AssertionError(f"JSON has no number {name}")
