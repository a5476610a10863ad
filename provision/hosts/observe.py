"""Observes all hosts at once, in one round trip per host.

This machine is observed in the same way, by a child process.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from typing import Any

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import fanout, payload, remote
from provision.hosts.fanout import Cut
from provision.node import families
from provision.node.__main__ import MARKER
from provision.node.state import State

COMMAND_TIMEOUT = 120
_PYTHON = "; ".join(f"{item.name}: {item.get_python}" for item in families.known() if item.get_python)


def parse(host: str, text: str) -> State:
    """The state in the output of the payload; HostError when there is none."""
    try:
        return State.from_dict(answer(host, text)["state"])
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(host, f"sent a state that cannot be read: {error}") from None


def answer(host: str, text: str) -> dict[str, Any]:
    """The answer in the payload's output; HostError when there is none or it reports an error."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARKER):
            try:
                found: dict[str, Any] = json.loads(line[len(MARKER) :])
            except ValueError as error:
                raise HostError(host, f"sent a state that cannot be read: {error}") from None
            if "error" in found:
                raise HostError(host, f"cannot be observed: {found['error']}")
            return found
    said = " / ".join(line.strip() for line in text.splitlines()[-3:] if line.strip())
    raise HostError(host, f"sent no state back{': ' + said if said else ''}")


def observe(inventory: Inventory) -> dict[str, State | HostError]:
    """The state of every host, or why it could not be observed; in the inventory's order."""
    # Fill the payload's cache once, before the threads need it.
    payload.pack("__main__", next(iter(inventory.hosts.values())).desired().to_dict())
    return fanout.on_hosts(inventory.hosts, observe_host)


def observe_host(host: Host, cut: Cut | None = None) -> State:
    """The state of one host; HostError says why it could not be observed and what to do."""
    return parse(host.name, text_of(host, payload.pack("__main__", host.desired().to_dict()), cut))


def text_of(host: Host, given: bytes, cut: Cut | None = None) -> str:
    """Run a payload on the host and return its output; HostError says why it failed and what to do."""
    return _here(host, given) if host.connection == "local" else _there(host, given, cut)


def _here(host: Host, given: bytes) -> str:
    try:
        done = subprocess.run(
            payload.command(sys.executable),
            input=given,
            capture_output=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostError(host.name, f"did not answer within {COMMAND_TIMEOUT} s") from None
    if done.returncode:
        said = remote.last_line(remote.error_text(done.stderr))
        raise HostError(host.name, f"cannot be observed: {said}")
    return done.stdout.decode(errors="replace")


def _there(host: Host, given: bytes, cut: Cut | None) -> str:
    line = remote.elevated(host, shlex.join(payload.command(host.python)))
    code, out, err = remote.run(host, line, given, remote.CONNECT_TIMEOUT, COMMAND_TIMEOUT, cut=cut)
    if code == 127 or (host.become and "command not found" in err):
        raise HostError(
            host.name,
            f"has no {host.python}; install Python 3 ({_PYTHON}), or set ansible_python_interpreter to its "
            "path",
        )
    old = "is Python 2" if "Unknown option: -I" in err else ""
    if found := re.search(r"Python 3\.6 or newer is needed, this is (\S+)", err):
        old = f"is Python {found[1]}"
    if code and old:
        raise HostError(
            host.name,
            f"{host.python} {old}, and oeprov needs 3.6 or newer on hosts: install it there ({_PYTHON}) and "
            "set ansible_python_interpreter to its path",
        )
    if code and host.become and "sudo:" in err:
        raise HostError(host.name, f"sudo refused ({remote.last_line(err)}); it must work without a password")
    if code:
        raise HostError(host.name, f"cannot be observed: {remote.last_line(err) or f'exit status {code}'}")
    return out
