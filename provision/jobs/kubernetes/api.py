"""The Kubernetes API by the official client: kubeconfig, credentials and TLS are its affair, paths are ours.

The client and not kubectl: its answers are documents and its failures have codes and reasons, where kubectl's
words for people change; and there is no program to install. Its generated classes are left alone, because
manifests are documents already.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import yaml

from provision.cluster.errors import TrainingError

Document = dict[str, Any]
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0


class ApiFailure(Exception):
    """The API refused a request; ``code`` is HTTP's, the message the API's own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def passing(self) -> bool:
        """The API is busy, or some of it is down: another time it may answer."""
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
        settings.retries = False  # a try again is for people to decide
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
        """One request and its answer.

        ApiFailure when it is refused, TrainingError when nothing answers, or another service does.
        """
        data = self._send(method, path, body, query).read()
        try:
            found = json.loads(data or b"{}")
        except ValueError:
            raise TrainingError(
                f"what answers at {self.address} is no Kubernetes API: its answer to {path} is not JSON"
            ) from None
        return found if isinstance(found, dict) else {}

    def text(self, path: str, **query: Any) -> str:
        """What a path has, as text: a log."""
        data: bytes = self._send("GET", path, None, query).read()
        return data.decode(errors="replace")

    def lines(self, path: str, **query: Any) -> Iterator[str]:
        """Lines as they come, until the other side ends them; it has answered when this returns."""
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
        """What is there; None when it is not."""
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
            header_params={"Accept": "application/json, */*", "Content-Type": "application/json"},
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


def label(document: Document) -> str:
    """An object in words, as kubectl names it."""
    return f"{str(document['kind']).lower()}/{document['metadata']['name']}"
