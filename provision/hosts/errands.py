"""Runs one errand of ``provision/node/job.py`` on a host over SSH, in one round trip."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import fanout, payload, remote
from provision.hosts.fanout import Cut
from provision.hosts.stop_request import StopRequest
from provision.node.job import MARKER

Errand = Literal[
    "observe",
    "stop",
    "start",
    "send",
    "remove_pools",
    "remove",
    "check_data",
    "worker_ports",
    "deliver_script",
]
MOST_AT_ONCE = 64


def run(
    host: Host,
    errand: Errand,
    args: Mapping[str, Any],
    timeout: int,
    stop: StopRequest | None = None,
    cut: Cut | None = None,
) -> dict[str, Any]:
    """The errand's result; HostError when the host cannot be reached or refuses, or the errand fails.

    ``stop``: a request ends the connection, for errands that end without one.
    """
    command = remote.elevated(host, shlex.join(payload.command(host.python)))
    given = partial(payload.pack, "job", {"errand": errand, "args": args})
    # Ctrl-C reaches every process of the terminal; it must not end the ssh that carries out the stop.
    apart = errand not in ("observe", "check_data")
    code, out, err = remote.run(
        host, command, given, remote.CONNECT_TIMEOUT, timeout, apart=apart, stop=stop, cut=cut
    )
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
    return fanout.on_hosts(
        hosts,
        lambda host, cut: run(host, errand, args, timeout, cut=cut),
        cut_off=errand == "observe",
    )
