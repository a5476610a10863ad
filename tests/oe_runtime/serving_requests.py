"""Requests to a server of this process, by the way through the core and by the way through Python."""

from __future__ import annotations

import http.client
import json

import pytest

from oe_runtime.serving.rest import RestServer


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

    def either(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", "/v1/models/m:predict", data)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def core(self, body):
        with self._patch.context() as patch:
            patch.setattr(self.server, "_post", None)
            status, reply = self.either(body)
        assert status == 200, reply
        return reply

    def python(self, body):
        with self._patch.context() as patch:
            patch.setattr(self.model, "lead", None)
            return self.either(body)
