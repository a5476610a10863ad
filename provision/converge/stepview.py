"""Follow a playbook: record each step in the journal, and show it in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.node.step import Plan, Step

_GAP = re.compile(r"<[^<>]+>")  # a value that the plan could not know


class StepView:
    """Records and shows steps; ``done`` has the finished ones, ``spinner`` gets the current task."""

    def __init__(self, console: Console, journal: Journal, plans: Mapping[str, Plan]) -> None:
        self.console = console
        self.journal = journal
        self.plans = plans
        self.spinner: Callable[[str], None] = lambda words: None
        self.done: list[dict[str, Any]] = []
        self._begun: set[tuple[str, str]] = set()

    def start(self, host: str, role: str, task: str) -> None:
        """A task begins: record its role's steps before they are done."""
        self.spinner(f"{host}: {task}")
        for step in self._steps(host, role):
            if (host, step.id) not in self._begun:
                self._begun.add((host, step.id))
                self.journal.begin(host, step.id, step.what)

    def result(self, result: TaskResult) -> None:
        """A task ended: record its steps as done or failed, and show them."""
        for item in result.result.get("steps") or []:
            ok, message = bool(item["ok"]), str(item.get("message", ""))
            self.journal.end(result.host, item["id"], ok=ok, message=message)
            self.done.append({"host": result.host, **item})
            what = message if ok and message and _GAP.search(str(item["what"])) else str(item["what"])
            mark = "[green]✓[/]" if ok else "[red]✗[/]"
            self.console.print(
                f"{mark} {result.host}: {escape(what)} ({item['seconds']:.1f} s)",
                highlight=False,
                soft_wrap=True,
            )

    def _steps(self, host: str, role: str) -> list[Step]:
        """The agreed steps that a role does on a host."""
        plan = self.plans.get(host)
        return plan.role_steps(role) if plan and role else []
