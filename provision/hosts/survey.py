"""One look at the cluster: every host observed at once, and a plan for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from provision.cluster.errors import HostError
from provision.cluster.inventory import Inventory
from provision.node.plan import make_plan
from provision.node.state import State
from provision.node.step import Plan


@dataclass
class ClusterSurvey:
    """What one observation of the cluster brought: states, plans, and hosts that could not be seen."""

    states: dict[str, State] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    lost: list[HostError] = field(default_factory=list)

    @property
    def pending(self) -> list[Plan]:
        """Plans with something to do."""
        return [plan for plan in self.plans.values() if plan.steps]

    @property
    def converged(self) -> bool:
        """Every host was seen and has nothing to do."""
        return not self.lost and all(plan.converged for plan in self.plans.values())


def survey(inventory: Inventory) -> ClusterSurvey:
    """Observe every host at once and plan for each."""
    from provision.hosts import remote_python
    from provision.hosts.observe import observe

    found = ClusterSurvey()
    for name, state in observe(inventory).items():
        if isinstance(state, HostError):
            found.lost.append(state)
        else:
            host = inventory.hosts[name]
            made = make_plan(state, host.desired())
            old = host.connection == "ssh" and not state.assumed and remote_python.problem(state, host.python)
            found.states[name] = state
            found.plans[name] = made._replace(problems=[*made.problems, old]) if old else made
    return found
