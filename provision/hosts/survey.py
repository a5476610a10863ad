"""A survey of the cluster: one observation of all hosts, with a plan for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import observe
from provision.node import ansible_python
from provision.node.plan import make_plan
from provision.node.state import State
from provision.node.step import Plan


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
    """The plan of one host."""
    return make_plan(state, host.desired())


def interpreter(host: Host, state: State | None) -> dict[str, str]:
    """Ansible's variable for the Python that it uses on a host, if that is not the one that observed it."""
    found = ansible_python.program(state.os, host.desired()) if state is not None else ""
    return {"ansible_python_interpreter": found} if found else {}
