"""A survey of the cluster: one observation of all hosts, with a plan for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host, Inventory
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
    from provision.hosts.observe import observe

    found = ClusterSurvey()
    for name, state in observe(inventory).items():
        if isinstance(state, HostError):
            found.lost.append(state)
        else:
            found.states[name] = state
            found.plans[name] = plan_host(inventory.hosts[name], state)
    return found


def plan_host(host: Host, state: State) -> Plan:
    """The host's plan. Too old a Python for Ansible is a problem of it; of an assumed state, a note."""
    from provision.hosts import remote_python

    plan = make_plan(state, host.desired())
    old = host.connection == "ssh" and remote_python.problem(state, host.python)
    if not old:
        return plan
    if state.assumed:
        return plan._replace(notes=[*plan.notes, old])
    return plan._replace(problems=[*plan.problems, old])
