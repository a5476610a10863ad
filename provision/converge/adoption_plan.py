"""Plans the first login to a host: pure functions from facts to steps and refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping

from provision.cluster.inventory import Host
from provision.hosts.first_login import Facts
from provision.node import ansible_python, families
from provision.node.state import State
from provision.node.step import Part, Plan, Step

_USER = re.compile(r"[A-Za-z_][\w.-]*\$?")
_COMMENT = "# Written by oeprov adopt: oeprov and Ansible become root without a terminal.\n"


def sudoers(user: str) -> tuple[str, str]:
    """Name and text of the file in /etc/sudoers.d."""
    name = "oeprov-" + re.sub(r"[^A-Za-z0-9_-]", "_", user)
    return name, f"{_COMMENT}Defaults:{user} !requiretty\n{user} ALL=(root) NOPASSWD: ALL\n"


def plan(host: Host, facts: Facts, *, host_key: str, record_in: str, public_key: str) -> Plan:
    """The steps to a host that needs no password any more.

    ``host_key``: fingerprint of a key to record in the file ``record_in``; ``public_key``: the line to
    install. Each is empty if there is nothing to do.
    """
    steps: list[Step] = []
    notes: list[str] = []
    if host_key and record_in:
        steps.append(
            Step(
                id="host-key",
                what=f"record the host key {host_key} in {record_in}",
                why="ssh does not know it yet",
            )
        )
    if public_key:
        kind, _, *comment = public_key.split(None, 2)
        name = f" {comment[0]}" if comment else ""
        steps.append(
            Step(
                id="login-key",
                what=f"let {facts.user} in with the key {kind}{name}",
                why="it lets nobody in with one of your keys",
                commands=[["edit", "~/.ssh/authorized_keys", "+" + public_key]],
            )
        )
    needs_sudo = facts.uid != 0 or host.become
    if needs_sudo and facts.sudo == "missing":
        steps.append(
            Step(
                id="sudo",
                what="install sudo",
                why="ansible_become is set" if facts.uid == 0 else f"{facts.user} is not root",
                commands=[[facts.manager, "install", "-y", "sudo"]],
            )
        )
    if facts.uid != 0 and facts.sudo != "works":
        name, text = sudoers(facts.user)
        lines = "; ".join(line for line in text.splitlines() if not line.startswith("#"))
        steps.append(
            Step(
                id="sudoers",
                what=f"write /etc/sudoers.d/{name}: {lines}",
                why=f"{facts.user} cannot become root without a password",
                commands=[["write", f"/etc/sudoers.d/{name}", text]],
            )
        )
    if facts.uid != 0 and not host.become:
        notes.append(f"set ansible_become: true: {facts.user} is not root, and other commands need root")
    if host.login == "password":
        notes.append("oeprov_connection: password: every command logs in with the password, which is slower")
    problems = _problems(facts, steps)
    if facts.uid == 0 or host.become:
        python = python_part(host, facts)
        steps, notes, problems = steps + python.before, notes + python.notes, problems + python.problems
    return Plan(host.name, steps, notes=notes, problems=problems)


def python_part(host: Host, facts: Facts) -> Part:
    """The steps to the Pythons that oeprov and Ansible need; ``oeprov bootstrap`` has the same."""
    desired = host.desired()
    os = facts.os._replace(is_root=True)
    if desired.ansible_interpreter:
        os = os._replace(python=facts.pythons.get(host.python, ""))
        if not os.python:
            missing = (
                f"there is no {host.python} yet: correct ansible_python_interpreter, or remove that line"
            )
            return Part(notes=[missing])
        return Part(notes=ansible_python.problems(State(os=os), desired))
    found = [facts.pythons.get(name, "") for name in ansible_python.CARRIERS]
    os = os._replace(
        python=next((version for version in found if _is_usable(version)), ""),
        own_python=facts.pythons.get(ansible_python.PROGRAM, ""),
    )
    steps: list[Step] = []
    if not os.python:
        if facts.broken:
            return Part(problems=[f"a Python there is a broken link ({facts.broken}): remove or repair it"])
        bare = State(os=os, bare="there is no Python 3")
        steps = ansible_python.plan_first(bare, desired)
        if not steps:
            return Part(notes=ansible_python.problems_first(bare))
        family = families.find(os)
        fresh = family.fresh.get(families.release_of(os)) if family is not None else None
        os = os._replace(python=fresh.python if fresh is not None else "")
    steps = steps + ansible_python.plan(State(os=os), desired)
    return Part(before=steps, notes=ansible_python.problems(State(os=os), desired))


def _is_usable(version: str) -> bool:
    parts = [int(word) for word in version.split(".")[:2] if word.isdigit()]
    return tuple(parts) >= ansible_python.OLDEST


def _problems(facts: Facts, steps: list[Step]) -> list[str]:
    wanted = {step.id for step in steps}
    if "sudoers" in wanted and not _USER.fullmatch(facts.user):
        return [
            f"the name {facts.user} cannot be written into sudoers safely: let the user run sudo without a "
            "password by hand"
        ]
    if "sudo" in wanted and not facts.manager:
        return ["it has no sudo, and neither apt-get, dnf nor yum to install it: install it by hand"]
    return []


def twins(found: Mapping[str, Facts], controller: tuple[str, str, str]) -> dict[str, str]:
    """Host → why it is refused: it is the controller, or another name of a host before it."""
    seen: dict[tuple[str, str, str], str] = {}
    refused = {}
    for name, facts in found.items():
        if not facts.machine or not facts.boot:
            continue
        if facts.identity == controller:
            refused[name] = "is this machine, the controller: set ansible_connection: local for it"
            continue
        other = seen.setdefault(facts.identity, name)
        if other != name:
            refused[name] = (
                f"is the same machine as {other} ({facts.hostname}, machine-id {facts.machine}): give it one "
                "name and put that in all its groups"
            )
    return refused


def shared_keys(keys: Mapping[str, str]) -> dict[str, str]:
    """Host → why it is refused: it proved the host key (its fingerprint) of a host before it."""
    seen: dict[str, str] = {}
    refused = {}
    for name, fingerprint in keys.items():
        other = seen.setdefault(fingerprint, name)
        if other != name:
            refused[name] = (
                f"has the same host key as {other} ({fingerprint}): if they are one machine, give it one "
                "name; if it is a clone, make new keys there (rm /etc/ssh/ssh_host_*_key*; ssh-keygen -A)"
            )
    return refused
