"""Calls a module of the node package on a host over SSH, such as ``job.py``, in one round trip."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import fanout, payload, remote
from provision.hosts.fanout import Cut
from provision.hosts.stop_request import StopRequest

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
    "pin",
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
    # Ctrl-C reaches every process of the terminal; it must not end the ssh that carries out the stop.
    apart = errand not in ("observe", "check_data")
    wanted, lost = {"errand": errand, "args": args}, f"{host.python} failed there"
    found: dict[str, Any] = call(host, "job", wanted, timeout, lost, apart=apart, stop=stop, cut=cut)
    return found


def call(
    host: Host,
    module: str,
    wanted: Mapping[str, Any],
    timeout: int,
    lost: str,
    *,
    apart: bool,
    stop: StopRequest | None = None,
    cut: Cut | None = None,
) -> Any:
    """What a module answers; HostError as of ``run``, which begins with ``lost`` where there is no answer."""
    command = remote.elevated(host, shlex.join(payload.command(host.python)))
    given = partial(payload.pack, module, wanted)
    code, out, err = remote.run(
        host, command, given, remote.CONNECT_TIMEOUT, timeout, apart=apart, stop=stop, cut=cut
    )
    try:
        answer = payload.read_answer(out)
    except ValueError as error:
        raise HostError(host.name, f"sent an answer that cannot be read: {error}") from None
    if answer is None:
        raise HostError(host.name, f"{lost}: {remote.last_line(err or out) or f'exit status {code}'}")
    if "error" in answer:
        raise HostError(host.name, str(answer["error"]))
    if "ok" not in answer:
        raise HostError(host.name, "sent an answer that cannot be read: it has neither `ok` nor `error`")
    return answer["ok"]


def on_all(
    hosts: Mapping[str, Host], errand: Errand, args: Mapping[str, Any], timeout: int
) -> dict[str, dict[str, Any] | HostError]:
    """Run the same errand on all hosts at once; returns the result or the error of each."""
    return fanout.on_hosts(
        hosts,
        lambda host, cut: run(host, errand, args, timeout, cut=cut),
        cut_off=errand == "observe",
    )
