"""Requests to a server of this process, by the way through the core and by the way through Python."""

from __future__ import annotations

import http.client
import json

import numpy as np
import pytest

from oe_runtime.serving.rest import RestServer

INFER = "/v2/models/m/infer"
_DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float64": "FP64"}


def inference(x, **more):
    """A request of the Open Inference Protocol, its data flat and in lists in turns."""
    inputs = []
    for i, (name, array) in enumerate(x.items()):
        kind, data = _DATATYPES[array.dtype.name], array if i % 2 else array.reshape(-1)
        inputs.append({"name": name, "shape": array.shape, "datatype": kind, "data": data.tolist()})
    return {"inputs": inputs, **more}


def inferred(reply):
    """The outputs of its reply."""
    return {one["name"]: np.reshape(one["data"], one["shape"]) for one in reply["outputs"]}


class Asked:
    """A server of a model; `core(body)` answers without Python, `either(body)` as it may."""

    def __init__(self, model, **options):
        self.model = model
        self._patch = pytest.MonkeyPatch()
        self.server = RestServer("m", model, "127.0.0.1", 0, **options)
        self.server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()

    def either(self, body, path="/v1/models/m:predict"):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def core(self, body, *path):
        with self._patch.context() as patch:
            patch.setattr(self.server, "_post", None)
            status, reply = self.either(body, *path)
        assert status == 200, reply
        return reply

    def python(self, body, *path):
        with self._patch.context() as patch:
            patch.setattr(self.model, "lead", None)
            return self.either(body, *path)
