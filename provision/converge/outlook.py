"""How long the reboots of a plan take, from what earlier runs took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from provision.hosts.journal import Journal
from provision.hosts.playbook import forks
from provision.hosts.runs import Durations, durations
from provision.node.step import Plan, Step

ASSUMED_REBOOT = 300.0  # seconds, until the journal has one: virtual hosts take 1 to 3 min, servers up to 10
_ASSUMED_STEP = 10.0


@dataclass(frozen=True)
class Outlook:
    """The turns that reboot hosts, how long they take, and what one reboot takes."""

    turns: int
    seconds: float
    reboot: float
    is_assumed: bool

    @property
    def words(self) -> str:
        """The time for people: "about 50 min (4 min per reboot, as before)"."""
        each = round_time(self.reboot).removeprefix("about ")
        how = f"{each} per reboot is assumed" if self.is_assumed else f"{each} per reboot, as before"
        return f"{round_time(self.seconds)} ({how})"


@dataclass(frozen=True)
class Pace:
    """What each step takes: the median of earlier runs, or an assumption."""

    steps: dict[str, float]
    reboot: float
    is_assumed: bool  # the reboot

    def seconds(self, step: Step) -> float:
        """What one step takes on one host."""
        return self.reboot if step.reboots else max(0.1, self.steps.get(step.id, _ASSUMED_STEP))

    def together(self, plans: Sequence[Sequence[Step]]) -> float:
        """What these steps take on hosts that do them together, as many as Ansible does at once."""
        each = [sum(map(self.seconds, steps)) for steps in plans]
        return ceil(len(each) / forks()) * max(each, default=0.0)


def pace(plans: Sequence[Plan], journal: Journal | None) -> Pace:
    """The pace of these plans; reboots of the same hosts count, or else those of all."""
    known = durations(journal) if journal else Durations()
    reboots = [seconds for plan in plans for seconds in known.reboots.get(plan.host, [])]
    reboots = reboots or [seconds for found in known.reboots.values() for seconds in found]
    steps = {name: median(found) for name, found in known.steps.items()}
    return Pace(steps, median(reboots) if reboots else ASSUMED_REBOOT, not reboots)


def look(plans: Sequence[Plan], turns: Sequence[Sequence[str]], journal: Journal | None) -> Outlook | None:
    """The outlook of the turns that reboot; None if no host reboots."""
    booting = {plan.host: plan for plan in plans if any(step.reboots for step in plan.steps)}
    if not booting:
        return None
    speed = pace(list(booting.values()), journal)
    groups = [[booting[name] for name in turn if name in booting] for turn in turns]
    groups = [group for group in groups if group]
    steps = ([in_turn(plan) for plan in group] for group in groups)
    return Outlook(len(groups), sum(map(speed.together, steps)), speed.reboot, speed.is_assumed)


def in_turn(plan: Plan) -> list[Step]:
    """The steps that a host does in its turn, not before."""
    return [step for step in plan.steps if not step.preparing]


def round_time(seconds: float) -> str:
    """A rounded time: "about 50 min"."""
    minutes = max(1, round(seconds / 60))
    minutes = minutes if minutes < 20 else 5 * round(minutes / 5)
    hours, rest = divmod(minutes, 60)
    return f"about {f'{hours} h ' * bool(hours)}{f'{rest} min' * bool(rest or not hours)}".strip()
