"""Prints plans: one table of all hosts' steps, with what each destroys and whether it reboots."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from provision.inventory import vault
from provision.jobs.screen import say
from provision.node.step import Plan


def show(console: Console, plans: Iterable[Plan], turns: str = "") -> None:
    """Print the steps of all plans, the line of ``turns``, then notes and problems."""
    plans = list(plans)
    table = Table("host", "step", "why", "destroys", "reboots", show_lines=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:4]:
        column.overflow = "fold"  # long paths and names wrap instead of being cut
    for plan in plans:
        for step in plan.steps:
            destroys = "\n".join(f"[red]{escape(item)}[/]" for item in step.destroys) or "nothing"
            table.add_row(
                plan.host,
                escape(vault.hide(step.what)),
                escape(vault.hide(step.why)),
                destroys,
                "[yellow]yes[/]" if step.reboots else "no",
            )
    if table.row_count:
        console.print(table)
    if turns:
        say(console, escape(turns))
    for plan in plans:
        for note in plan.notes:
            say(console, f"[dim]note[/]     {plan.host}: {escape(vault.hide(note))}")
        for problem in plan.problems:
            say(console, f"[red]problem[/]  {plan.host}: {escape(vault.hide(problem))}")
