"""One mechanism's share of a plan, as the planner puts shares together around at most one reboot."""

from typing import List, NamedTuple

from .step import Step


class Part(NamedTuple):
    """Steps before and after the reboot, kernel arguments, and whether the reboot is needed for them."""

    before: List[Step] = []
    add_arguments: List[str] = []
    remove_arguments: List[str] = []
    arguments_why: str = ""
    reboot_why: str = ""  # empty: needs no reboot
    after: List[Step] = []
    notes: List[str] = []
    problems: List[str] = []


def join(first: Part, second: Part) -> Part:
    """Both shares, the first one's steps first."""
    return Part(
        first.before + second.before,
        first.add_arguments + second.add_arguments,
        first.remove_arguments + second.remove_arguments,
        "; ".join(why for why in (first.arguments_why, second.arguments_why) if why),
        "; ".join(why for why in (first.reboot_why, second.reboot_why) if why),
        first.after + second.after,
        first.notes + second.notes,
        first.problems + second.problems,
    )
