"""Carries out the steps of a plan that Ansible cannot: over SSH, by the payload or by the shell alone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import errands, fanout, remote
from provision.hosts.fanout import Cut
from provision.node import packages, repositories
from provision.node.command import Result
from provision.node.state import encode
from provision.node.step import Step

_TIMEOUT = 3600
_FAILED = "OEPROV-FAILED"  # before the number of the command
_WITHOUT_PYTHON = "first-python"


class Carried(NamedTuple):
    """How a step ended on a host."""

    host: str
    step: Step
    ok: bool
    message: str
    seconds: float


def carry_out(
    hosts: Mapping[str, Host],
    steps: Mapping[str, Step],
    run: Mapping[str, Any],
    on_start: Callable[[str, Step], None],
) -> list[Carried]:
    """Carry out one step on each of these hosts, all at once; in the order of ``steps``."""
    ended: dict[str, float] = {}

    def one(host: Host, cut: Cut) -> str:
        try:
            return _carry_out(host, steps[host.name], run, cut)
        finally:
            ended[host.name] = time.monotonic()

    for name, step in steps.items():
        on_start(name, step)
    begun = time.monotonic()
    found = fanout.on_hosts({name: hosts[name] for name in steps}, one, cut_off=False)
    return [
        Carried(name, steps[name], False, said.reason, ended[name] - begun)
        if isinstance(said, HostError)
        else Carried(name, steps[name], True, said, ended[name] - begun)
        for name, said in found.items()
    ]


def _carry_out(host: Host, step: Step, run: Mapping[str, Any], cut: Cut) -> str:
    if step.id == _WITHOUT_PYTHON:
        return _by_shell(host, step, cut)
    wanted = {"steps": [encode(step)], "run": dict(run)}
    lost = "the step was cut off"
    return str(errands.call(host, "carrier", wanted, _TIMEOUT, lost, apart=True, cut=cut)[-1])


def _refresh(line: str) -> str:
    """Shell that refreshes apt's index and waits for its lock, which a new machine's first update may hold.

    Without a network the cached index may suffice, so that a failure is only printed.
    """
    return (
        f"n=0; until said=$({line} 2>&1); do "
        'case $said in *"Could not get lock"*) ;; *) n=99 ;; esac; n=$((n + 1)); '
        f'[ $n -lt {packages.UPDATE_TRIES} ] || {{ printf "%s\\n" "$said" >&2; break; }}; '
        f"sleep {packages.UPDATE_PAUSE:.0f}; done"
    )


def _until_unlocked(line: str, failed: str) -> str:
    """Shell that runs a command again while dnf or yum is locked by another."""
    return (
        f"n=0; until {line}; do code=$?; n=$((n + 1)); "
        f"[ $code = {packages.LOCKED} ] && [ $n -lt {packages.UPDATE_TRIES} ] || {failed}; "
        f"sleep {packages.UPDATE_PAUSE:.0f}; done"
    )


def _by_shell(host: Host, step: Step, cut: Cut) -> str:
    """Run the commands of a step without Python; files among them are written first."""
    commands: list[list[str]] = step.args["commands"]
    lines = ["set -e", "export DEBIAN_FRONTEND=noninteractive LC_ALL=C"]
    use = repositories.ENABLED
    for number, argv in enumerate(commands):
        if argv[0] == "write":
            use = repositories.Use(argv[1], argv[2])
            place = shlex.quote(argv[1])
            lines.append(
                f"umask 077; printf %s {shlex.quote(argv[2])} >{place}; chmod {use.mode:o} {place}; umask 022"
            )
        else:
            line = f"{shlex.join(packages.impatient(argv))} </dev/null"
            failed = f"{{ echo {_FAILED} {number} >&2; exit $code; }}"
            lines.append(_refresh(line) if argv[-1] == "update" else _until_unlocked(line, failed))
    lines.append("command -v python3 >/dev/null || { echo 'there is still no python3' >&2; exit 1; }")
    # On standard input: an address may have a password, and arguments can be read by others.
    text = "\n".join(lines) + "\n"
    code, out, err = remote.run(
        host, remote.elevated(host, "sh -s"), text, remote.CONNECT_TIMEOUT, _TIMEOUT, apart=True, cut=cut
    )
    if code:
        err, _, which = err.partition(_FAILED)
        which = which.strip()
        result = Result(commands[int(which) if which.isdigit() else -1], code, out, err)
        said = err + "\n" + out
        why = repositories.signature_problem(said, use) or packages.lock_problem(result.argv, said)
        raise HostError(
            host.name, why or result._replace(out="", err=packages.first_errors(result)).explain()
        )
    return step.what.replace("install", "installed", 1)
