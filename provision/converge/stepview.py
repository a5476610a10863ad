"""Follows a playbook: Ansible's results become journal entries and one printed line per step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from provision.hosts.carrier import Carried
from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.inventory import vault
from provision.jobs.screen import say
from provision.node.step import Plan, Step

_GAP = re.compile(r"<[^<>]+>")  # a value that the plan did not know yet


class StepView:
    """Keeps finished steps in ``done``; calls ``spinner`` with the current task."""

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
        plan = self.plans.get(host)
        for step in plan.role_steps(role) if plan and role else []:
            if (host, step.id) not in self._begun:
                self._begun.add((host, step.id))
                self.journal.begin(host, step.id, step.what)

    def start_carried(self, host: str, step: Step) -> None:
        """A step that Ansible does not carry out begins."""
        self.spinner(f"{host}: {step.what}")
        self.journal.begin(host, step.id, step.what)

    def carried(self, found: Carried) -> None:
        """Such a step ended."""
        item = {"id": found.step.id, "what": found.step.what, "ok": found.ok, "message": found.message}
        self._end(found.host, {**item, "seconds": found.seconds})
        if not found.ok:
            say(self.console, f"[red]✗[/] {found.host}: {escape(vault.hide(found.message))}")

    def result(self, result: TaskResult) -> None:
        """A task ended: record and print its steps as done or failed."""
        for item in result.result.get("steps") or []:
            self._end(result.host, item)

    def _end(self, host: str, item: Mapping[str, Any]) -> None:
        ok, message = bool(item["ok"]), str(item.get("message", ""))
        self.journal.end(host, item["id"], ok=ok, message=message)
        self.done.append({"host": host, **item})
        what = message if ok and message and _GAP.search(str(item["what"])) else str(item["what"])
        mark = "[green]✓[/]" if ok else "[red]✗[/]"
        say(self.console, f"{mark} {host}: {escape(what)} ({item['seconds']:.1f} s)")
