"""Observes all hosts at once, in one round trip per host.

This machine is observed in the same way, by a child process.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from provision.cluster.errors import HostError
from provision.cluster.inventory import DEFAULT_PYTHON, Host, Inventory
from provision.hosts import fanout, payload, remote
from provision.hosts.fanout import Cut
from provision.node import families, repositories
from provision.node.family import manager_name
from provision.node.observe import parse_os_release
from provision.node.state import OsInfo, State, decode, encode

COMMAND_TIMEOUT = 120
# The system of a host without Python: its os-release, its package managers, its architecture, whose rights.
SYSTEM_PROBE = (
    "cat /etc/os-release 2>/dev/null; echo; "
    f"for name in {' '.join(sorted({name for item in families.known() for name in item.managers}))}; do "
    'command -v "$name" >/dev/null 2>&1 && echo "OEPROV_MANAGER_$(echo $name | tr - _)=yes"; done; '
    'echo "OEPROV_MACHINE=$(uname -m)"; echo "OEPROV_USER=$(id -u)"; '
    "for path in /usr/local/bin/python3 /usr/bin/python3; do "
    '[ ! -L "$path" ] || [ -e "$path" ] || echo "OEPROV_BROKEN=\'$path -> $(readlink "$path")\'"; done; '
    "grep -shE '^(mirrorlist|baseurl)' /etc/yum.repos.d/*.repo; exit 0"
)


class NoPythonError(HostError):
    """A host has no Python that can observe it; ``reason`` says so."""


def parse(host: str, text: str) -> State:
    """The state in the output of the payload; HostError when there is none."""
    try:
        return decode(State, answer(host, text)["state"])
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(host, f"sent a state that cannot be read: {error}") from None


def answer(host: str, text: str) -> dict[str, Any]:
    """The answer in the payload's output; HostError when there is none or it reports an error."""
    try:
        found = payload.read_answer(text)
    except ValueError as error:
        raise HostError(host, f"sent a state that cannot be read: {error}") from None
    if found is None:
        said = " / ".join(line.strip() for line in text.splitlines()[-3:] if line.strip())
        raise HostError(host, f"sent no state back{': ' + said if said else ''}")
    if "error" in found:
        raise HostError(host, f"cannot be observed: {found['error']}")
    return found


def observe(inventory: Inventory) -> dict[str, State | HostError]:
    """The state of every host, or why it could not be observed; in the inventory's order."""
    # Fill the caches of settings and payload once, before all threads do it together.
    payload.pack("__main__", encode(next(iter(inventory.hosts.values())).desired()), payload.BYTECODE)
    return _without_twins(inventory, fanout.on_hosts(inventory.hosts, observe_host))


def _without_twins(inventory: Inventory, found: dict[str, State | HostError]) -> dict[str, State | HostError]:
    """The states, with an error for a host that is another name of one before it."""
    seen: dict[tuple[str, str], str] = {}
    for name, state in found.items():
        if isinstance(state, HostError) or not state.boot_id or inventory.hosts[name].connection != "ssh":
            continue
        other = seen.setdefault((state.boot_id, state.hostname), name)
        if other != name:
            why = f"is the same machine as {other} ({state.hostname}, boot {state.boot_id[:8]})"
            found[name] = HostError(name, f"{why}: give it one name and put that in all its groups")
    return found


def observe_host(host: Host, cut: Cut | None = None) -> State:
    """The state of one host; HostError says why it could not be observed and what to do."""
    try:
        return parse(host.name, text_of(host, partial(payload.pack, "__main__", encode(host.desired())), cut))
    except NoPythonError as error:
        return _bare(host, error.reason, cut)


def _bare(host: Host, why: str, cut: Cut | None) -> State:
    """The system of a host without Python, from one line of shell."""
    line = remote.elevated(host, shlex.join(["sh", "-c", SYSTEM_PROBE]))
    code, out, err = remote.run(host, line, "", remote.CONNECT_TIMEOUT, COMMAND_TIMEOUT, cut=cut)
    if code:
        raise HostError(host.name, f"cannot be observed: {remote.last_line(err) or f'exit status {code}'}")
    broken = parse_os_release(out).get("OEPROV_BROKEN", "")
    if broken:
        raise HostError(host.name, f"a Python there is a broken link ({broken}): remove or repair it")
    return State(os=bare_system(out), bare=why)


def bare_system(text: str) -> OsInfo:
    """The system in the answer of the probe."""
    found = parse_os_release(text)
    name = found.get("ID", "")
    os = OsInfo(
        id=name,
        version=found.get("VERSION_ID", ""),
        family=families.lineage(name, found.get("ID_LIKE", "").split()),
        name=found.get("PRETTY_NAME", name),
        architecture=found.get("OEPROV_MACHINE", ""),
        is_root=found.get("OEPROV_USER") == "0",
    )
    family = families.find(os)
    managers = [] if family is None else family.managers
    program = next((item for item in managers if f"OEPROV_MANAGER_{item.replace('-', '_')}" in found), "")
    return os._replace(
        package_manager=manager_name(program), mirrors_gone=repositories.are_gone(os, text.splitlines())
    )


def text_of(host: Host, given: Callable[[str], bytes], cut: Cut | None = None) -> str:
    """Run a payload on the host and return its output; HostError says why it failed and what to do.

    ``given`` packs the payload for a version of Python.
    """
    return _here(host, given) if host.is_here else _there(host, given, cut)


def _here(host: Host, given: Callable[[str], bytes]) -> str:
    try:
        done = subprocess.run(
            payload.command(sys.executable),
            input=given(payload.BYTECODE),
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


def _there(host: Host, given: Callable[[str], bytes], cut: Cut | None) -> str:
    line = remote.elevated(host, shlex.join(payload.command(host.python)))
    code, out, err = remote.run(host, line, given, remote.CONNECT_TIMEOUT, COMMAND_TIMEOUT, cut=cut)
    old = "is Python 2" if "Unknown option: -I" in err else ""
    if found := re.search(r"Python 3\.6 or newer is needed, this is (\S+)", err):
        old = f"is Python {found[1]}"
    if host.python == DEFAULT_PYTHON and code and (old or payload.NO_PYTHON in err):
        raise NoPythonError(host.name, f"python3 there {old}" if old else payload.NO_PYTHON)
    if code == 127 or (host.become and "command not found" in err):
        raise HostError(
            host.name,
            f"has no {host.python}, or it is a broken link: correct ansible_python_interpreter, or remove "
            "that line, and oeprov finds or installs one",
        )
    if code and old:
        raise HostError(
            host.name,
            f"{host.python} {old}, and oeprov needs 3.6 or newer on hosts: set ansible_python_interpreter to "
            "the path of a newer one, or remove that line, and oeprov installs one",
        )
    if code and host.become and "sudo:" in err:
        raise HostError(
            host.name,
            f"sudo refused ({remote.last_line(err)}); it must work without a password, "
            f"and `{remote.adopt(host)}` sets that up",
        )
    if code:
        raise HostError(host.name, f"cannot be observed: {remote.last_line(err) or f'exit status {code}'}")
    return out
