"""One errand of ``provision/node/job.py`` on a host over SSH: one round trip, nothing installed there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import payload, remote
from provision.node.job import MARKER

Errand = Literal["observe", "stop", "start", "send", "remove_pools", "remove", "check_data"]
CONNECT_TIMEOUT = 10
MOST_AT_ONCE = 64


def run(host: Host, errand: Errand, args: Mapping[str, Any], timeout: int) -> dict[str, Any]:
    """The function's result; HostError when the host cannot be reached, refuses, or the errand failed."""
    command = remote.elevated(host, shlex.join(payload.command(host.python)))
    given = payload.pack("job", {"errand": errand, "args": args})
    # Ctrl-C reaches all processes of the terminal, and must not end an errand that stops the job.
    apart = errand not in ("observe", "check_data")
    code, out, err = remote.run(host, command, given, CONNECT_TIMEOUT, timeout, apart=apart)
    for line in reversed(out.splitlines()):
        if line.startswith(MARKER):
            answer = json.loads(line[len(MARKER) :])
            if "error" in answer:
                raise HostError(host.name, str(answer["error"]))
            found: dict[str, Any] = answer["ok"]
            return found
    said = [line.strip() for line in (err or out).splitlines() if line.strip()]
    raise HostError(host.name, f"{host.python} failed there: {said[-1] if said else f'exit status {code}'}")


def on_all(
    hosts: Mapping[str, Host], errand: Errand, args: Mapping[str, Any], timeout: int
) -> dict[str, dict[str, Any] | HostError]:
    """The same errand on every host at once; a host where it failed has the error."""

    def one(host: Host) -> dict[str, Any] | HostError:
        try:
            return run(host, errand, args, timeout)
        except HostError as error:
            return error

    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(hosts), MOST_AT_ONCE)) as pool:
        return dict(zip(hosts, pool.map(one, hosts.values()), strict=True))
