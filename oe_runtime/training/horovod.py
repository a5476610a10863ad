"""Workers that horovodrun has started: they learn each other's endpoints from its rendezvous server.

That is a store of keys and values over HTTP (horovod/runner/http/http_server.py of Horovod 0.28): PUT and GET
of /SCOPE/KEY. Nothing of Horovod's package is needed in the workers.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time

from oe_runtime.errors import WorkerLost
from oe_runtime.training.options import Options
from oe_runtime.training.run_directory import RunError
from oe_runtime.training.stopping import StopRequest

_SCOPE = "oe_runtime"
_POLL = 0.1  # seconds
_TIMEOUT = 10.0


def exchange(options: Options, stop: StopRequest) -> tuple[str, ...]:
    """HOST:PORT of all workers by rank, with a free port of this one.

    Raises RunError where the server cannot be had, WorkerLost when others do not come in time or when asked
    to stop.
    """
    host, _, port = options.rendezvous.rpartition(":")
    deadline = time.monotonic() + options.worker_wait
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), _TIMEOUT)) as there:
            mine = there.getsockname()[0]  # an address by which other hosts reach this one
        with socket.create_server((mine, 0)) as free:
            endpoint = f"{mine}:{free.getsockname()[1]}"
        _request(host, int(port), "PUT", options.rank, endpoint.encode())
        found: dict[int, str] = {}
        while len(found) < options.size:
            for rank in range(options.size):
                if rank not in found and (value := _request(host, int(port), "GET", rank)) is not None:
                    found[rank] = value.decode()
            if len(found) < options.size:
                if stop or time.monotonic() > deadline:
                    missing = ", ".join(str(rank) for rank in range(options.size) if rank not in found)
                    raise WorkerLost(f"horovodrun's workers {missing} did not come")
                stop.wait(_POLL)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RunError(f"the rendezvous server of horovodrun at {options.rendezvous}: {error}") from error
    return tuple(found[rank] for rank in range(options.size))


def _request(host: str, port: int, method: str, rank: int, body: bytes | None = None) -> bytes | None:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT)) as connection:
        connection.request(method, f"/{_SCOPE}/worker-{rank}", body)
        answer = connection.getresponse()
        if answer.status == http.client.NOT_FOUND and method == "GET":
            return None
        if answer.status != http.client.OK:
            raise OSError(f"it answers {method} with {answer.status}")
        return answer.read()
