"""Workers under horovodrun: they learn each other's endpoints from its rendezvous server.

The server is a key-value store over HTTP (horovod/runner/http/http_server.py of Horovod 0.28): PUT and GET of
/SCOPE/KEY. The workers need no Horovod package.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from oe_runtime.errors import OeError, WorkerLost

_SCOPE = "oe_runtime"
_POLL = 0.1  # seconds
_TIMEOUT = 10.0


class Started(NamedTuple):
    """The rank of this process, the number of processes, and horovodrun's rendezvous server."""

    rank: int
    size: int
    rendezvous: str  # HOST:PORT


def started(environment: Mapping[str, str]) -> Started | None:
    """Return horovodrun's settings of this process; None without it. Raises OeError for its elastic mode."""
    address, port = (environment.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    rank, size = (environment.get(f"HOROVOD_{name}", "") for name in ("RANK", "SIZE"))
    if not (address and port and rank.isdecimal() and size.isdecimal()):
        return None
    if environment.get("HOROVOD_ELASTIC") == "1":
        raise OeError("horovodrun's elastic mode is not supported; start again with another -np instead")
    return Started(int(rank), int(size), f"{address}:{port}")


def exchange(place: Started, wait: float, stop: object = None) -> tuple[str, ...]:
    """Return HOST:PORT of all workers by rank, with a free port of this one.

    Raises WorkerLost when others do not come within `wait` seconds, or once `stop` is true; else OeError.
    """
    host, _, port = place.rendezvous.rpartition(":")
    deadline = time.monotonic() + wait
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), _TIMEOUT)) as there:
            mine = there.getsockname()[0]  # an address that other hosts can reach
        with socket.create_server((mine, 0)) as free:
            endpoint = f"{mine}:{free.getsockname()[1]}"
        _request(host, int(port), "PUT", place.rank, endpoint.encode())
        found: dict[int, str] = {}
        while len(found) < place.size:
            for rank in range(place.size):
                if rank not in found and (value := _request(host, int(port), "GET", rank)) is not None:
                    found[rank] = value.decode()
            if len(found) < place.size:
                if stop or time.monotonic() > deadline:
                    missing = ", ".join(str(rank) for rank in range(place.size) if rank not in found)
                    raise WorkerLost(f"horovodrun's workers {missing} did not come")
                time.sleep(_POLL)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OeError(f"the rendezvous server of horovodrun at {place.rendezvous}: {error}") from error
    return tuple(found[rank] for rank in range(place.size))


def _request(host: str, port: int, method: str, rank: int, body: bytes | None = None) -> bytes | None:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT)) as connection:
        connection.request(method, f"/{_SCOPE}/worker-{rank}", body)
        answer = connection.getresponse()
        if answer.status == http.client.NOT_FOUND and method == "GET":
            return None
        if answer.status != http.client.OK:
            raise OSError(f"it answers {method} with {answer.status}")
        return answer.read()
