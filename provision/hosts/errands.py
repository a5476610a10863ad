"""Runs one errand of ``provision/node/job.py`` on a host over SSH, in one round trip."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import payload, remote
from provision.hosts.stop_request import StopRequest
from provision.node.job import MARKER

Errand = Literal["observe", "stop", "start", "send", "remove_pools", "remove", "check_data", "deliver_script"]
MOST_AT_ONCE = 64


def run(
    host: Host, errand: Errand, args: Mapping[str, Any], timeout: int, stop: StopRequest | None = None
) -> dict[str, Any]:
    """The errand's result; HostError when the host cannot be reached or refuses, or the errand fails.

    ``stop``: a request ends the connection, for errands that end without one.
    """
    command = remote.elevated(host, shlex.join(payload.command(host.python)))
    given = payload.pack("job", {"errand": errand, "args": args})
    # Ctrl-C reaches every process of the terminal; it must not end the ssh that carries out the stop.
    apart = errand not in ("observe", "check_data")
    code, out, err = remote.run(host, command, given, remote.CONNECT_TIMEOUT, timeout, apart=apart, stop=stop)
    for line in reversed(out.splitlines()):
        if line.startswith(MARKER):
            answer = json.loads(line[len(MARKER) :])
            if "error" in answer:
                raise HostError(host.name, str(answer["error"]))
            found: dict[str, Any] = answer["ok"]
            return found
    said = remote.last_line(err or out) or f"exit status {code}"
    raise HostError(host.name, f"{host.python} failed there: {said}")


def on_all(
    hosts: Mapping[str, Host], errand: Errand, args: Mapping[str, Any], timeout: int
) -> dict[str, dict[str, Any] | HostError]:
    """Run the same errand on all hosts at once; returns the result or the error of each."""

    def one(host: Host) -> dict[str, Any] | HostError:
        try:
            return run(host, errand, args, timeout)
        except HostError as error:
            return error

    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(hosts), MOST_AT_ONCE)) as pool:
        return dict(zip(hosts, pool.map(one, hosts.values()), strict=True))
