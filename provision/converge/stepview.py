"""Follows a playbook: Ansible's results become journal entries and one line a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.jobs.screen import say
from provision.node.step import Plan, Step

_GAP = re.compile(r"<[^<>]+>")  # of a plan: what nobody knew yet


class StepView:
    """What was done so far is in ``done``; ``spinner`` is told what is being done."""

    def __init__(self, console: Console, journal: Journal, plans: Mapping[str, Plan]) -> None:
        self.console = console
        self.journal = journal
        self.plans = plans
        self.spinner: Callable[[str], None] = lambda words: None
        self.done: list[dict[str, Any]] = []
        self._begun: set[tuple[str, str]] = set()

    def start(self, host: str, role: str, task: str) -> None:
        """A task begins: its role's steps are written down before they are done."""
        self.spinner(f"{host}: {task}")
        for step in self._steps(host, role):
            if (host, step.id) not in self._begun:
                self._begun.add((host, step.id))
                self.journal.begin(host, step.id, step.what)

    def result(self, result: TaskResult) -> None:
        """A task ended: the steps that it did are written down as done or failed, and shown."""
        for item in result.result.get("steps") or []:
            ok, message = bool(item["ok"]), str(item.get("message", ""))
            self.journal.end(result.host, item["id"], ok=ok, message=message)
            self.done.append({"host": result.host, **item})
            what = message if ok and message and _GAP.search(str(item["what"])) else str(item["what"])
            mark = "[green]✓[/]" if ok else "[red]✗[/]"
            say(self.console, f"{mark} {result.host}: {escape(what)} ({item['seconds']:.1f} s)")

    def _steps(self, host: str, role: str) -> list[Step]:
        """The agreed steps that a role does on a host."""
        plan = self.plans.get(host)
        return plan.role_steps(role) if plan and role else []
