"""A survey of the cluster: one observation of all hosts, with a plan for each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ansible import release

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import observe
from provision.node import families
from provision.node.plan import make_plan
from provision.node.state import OsInfo, State
from provision.node.step import Plan

# https://docs.ansible.com/ansible/latest/reference_appendices/release_and_maintenance.html, "Target Python"
_SINCE = {(2, 16): (3, 6), (2, 17): (3, 7), (2, 18): (3, 8), (2, 19): (3, 8), (2, 20): (3, 9)}


@dataclass
class ClusterSurvey:
    """States and plans by host, and the hosts that could not be observed."""

    states: dict[str, State] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    lost: list[HostError] = field(default_factory=list)

    @property
    def pending(self) -> list[Plan]:
        """Plans with something to do."""
        return [plan for plan in self.plans.values() if plan.steps]

    @property
    def converged(self) -> bool:
        """Whether every host was observed and has nothing to do."""
        return not self.lost and all(plan.converged for plan in self.plans.values())


def survey(inventory: Inventory) -> ClusterSurvey:
    """Observe every host at once and plan for each."""
    found = ClusterSurvey()
    for name, state in observe.observe(inventory).items():
        if isinstance(state, HostError):
            found.lost.append(state)
        else:
            found.states[name] = state
            found.plans[name] = plan_host(inventory.hosts[name], state)
    return found


def plan_host(host: Host, state: State) -> Plan:
    """The plan of one host; a Python too old for Ansible is a problem, or a note of an assumed state."""
    plan = make_plan(state, host.desired())
    problem = python_problem(state, host.python) if host.connection == "ssh" else ""
    if not problem:
        return plan
    if state.assumed:
        return plan._replace(notes=[*plan.notes, problem])
    return plan._replace(problems=[*plan.problems, problem])


def python_problem(state: State, python: str, core: str = "") -> str:
    """Why the installed Ansible cannot change a host, and what to do; empty when it can.

    ``python``: the interpreter that observed the host; ``core``: ansible-core's version (default: installed).
    """
    core = core or release.__version__
    least = _SINCE.get(_pair(core), max(_SINCE.values()))
    if not state.os.python or _pair(state.os.python) >= least:
        return ""
    how = _package(state.os)
    return (
        f"ansible-core {core} here needs Python {least[0]}.{least[1]} on hosts, and {python} there is "
        f"{state.os.python}: install a newer one there{how} and set ansible_python_interpreter to its "
        "path, or run oeprov with ansible-core 2.16, the last that can: pip install 'ansible-core<2.17'"
    )


def _package(os: OsInfo) -> str:
    """How the distribution's own package of a newer Python is installed, in brackets."""
    named = [name for name in families.names(os, "venv") if re.fullmatch(r"python3[.]\d+", name)]
    if named:
        return f" ({os.package_manager} install {named[0]})"
    return f" ({families.treated_as(os)} has no package of one)" if families.lacks(os, "venv") else ""


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
