"""The Kubernetes API through the official client, which handles kubeconfig, credentials and TLS.

Not through kubectl: the client's answers are documents and its errors have codes, and no program has to be
installed. Its generated classes are not used, because manifests are documents already.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import yaml

from provision.cluster.errors import TrainingError

Document = dict[str, Any]
_JSON = "application/json"
_TYPES = {"PATCH": "application/merge-patch+json"}  # of bodies, by method
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0


class ApiFailure(Exception):
    """The API refused a request; ``code`` is the HTTP status, the message is the API's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def passing(self) -> bool:
        """Whether a retry may succeed: the API is busy, or partly down."""
        return self.code == 429 or self.code >= 500


class Api:
    """A cluster, as a context of the kubeconfig file names it."""

    def __init__(self, context: str = "") -> None:
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError:
            raise TrainingError(
                "--on kubernetes needs Kubernetes' client for Python: pip install 'oeprov[kubernetes]'"
            ) from None
        settings = client.Configuration()
        settings.retries = False  # the user decides whether to retry
        try:
            config.load_kube_config(
                os.environ.get("KUBECONFIG"), context=context or None, client_configuration=settings
            )
        except ConfigException as error:
            hint = f"; kubernetes_context is {context}" if context else ""
            raise TrainingError(f"no usable kubeconfig file (KUBECONFIG): {error}{hint}") from None
        except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise TrainingError(f"the kubeconfig file (KUBECONFIG) cannot be read: {error}") from None
        self.address = str(settings.host)
        self._client = client.ApiClient(settings)

    def ask(self, method: str, path: str, body: Document | None = None, **query: Any) -> Document:
        """Send one request and return its answer.

        ApiFailure if it is refused, TrainingError if nothing answers or another service does.
        """
        data = self._send(method, path, body, query).read()
        try:
            found = json.loads(data or b"{}")
        except ValueError:
            raise TrainingError(
                f"{self.address} is no Kubernetes API: its answer to {path} is not JSON"
            ) from None
        return found if isinstance(found, dict) else {}

    def text(self, path: str, **query: Any) -> str:
        """The contents of a path as text, for logs."""
        data: bytes = self._send("GET", path, None, query).read()
        return data.decode(errors="replace")

    def lines(self, path: str, **query: Any) -> Iterator[str]:
        """Lines as they come, until the API ends them; when this returns, the API has answered."""
        return self._lines(self._send("GET", path, None, query, seconds=None).response)

    def _lines(self, response: Any) -> Iterator[str]:
        rest = b""
        try:
            for part in response.stream(amt=None if response.chunked else 1):
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
        except self._broken():
            pass  # the follower asks again
        finally:
            response.close()
        if rest:
            yield rest.decode(errors="replace")

    def get(self, path: str) -> Document | None:
        """The object at a path; None if there is none."""
        try:
            return self.ask("GET", path)
        except ApiFailure as error:
            if error.code == 404:
                return None
            raise

    @staticmethod
    def _broken() -> tuple[type[Exception], ...]:
        from urllib3.exceptions import HTTPError

        return (HTTPError, OSError)

    def _send(
        self,
        method: str,
        path: str,
        body: Document | None,
        query: dict[str, Any],
        seconds: float | None = ANSWER_SECONDS,
    ) -> Any:
        words = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": _TYPES.get(method, _JSON)},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*words, _request_timeout=(CONNECT_SECONDS, seconds))
        except self._broken() as error:
            reason = str(getattr(error, "reason", "") or error).rpartition(">: ")[2]
            raise TrainingError(f"the Kubernetes API at {self.address} cannot be reached: {reason}") from None
        if response.status >= 400:
            raise ApiFailure(response.status, _message(response))
        return response


def _message(response: Any) -> str:
    data = response.read()
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason}"


def resource(kind: str) -> str:
    """The plural by which the API knows a kind."""
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


def group(document: Document) -> str:
    """The API group of an object; empty for the core's."""
    return str(document["apiVersion"]).rpartition("/")[0]


def collection(document: Document) -> str:
    """The path under which objects like this one are made."""
    version = str(document["apiVersion"])
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = document["metadata"].get("namespace")
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{resource(str(document['kind']))}"


def path(document: Document) -> str:
    """The path of an object."""
    return f"{collection(document)}/{document['metadata']['name']}"


def put(cluster: Api, document: Document, *, is_there: bool, **query: Any) -> None:
    """Make an object, or change the one that ``is_there``. Raises ApiFailure."""
    if is_there:
        cluster.ask("PATCH", path(document), document, **query)
    else:
        cluster.ask("POST", collection(document), document, **query)


def delete(cluster: Api, document: Document) -> None:
    """Delete an object; what it owns goes in the background. Raises ApiFailure."""
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    cluster.ask("DELETE", path(document), body)


def label(document: Document) -> str:
    """An object in words, as kubectl names it."""
    return f"{str(document['kind']).lower()}/{document['metadata']['name']}"
