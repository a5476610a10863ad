"""The terminal as the screen of ``provision.converge``: lines, plans, progress, questions, a JSON report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from provision.cli.views import plan
from provision.cli.views.steps import StepView
from provision.cluster.errors import HostError
from provision.converge.outlook import Outlook, Pace
from provision.hosts.journal import Journal
from provision.jobs.screen import make_console, say
from provision.node.step import Plan


class Terminal:
    """See ``provision.converge.screen.Screen``; beside JSON it writes to standard error."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = make_console(as_json=as_json)

    @property
    def can_ask(self) -> bool:
        """Standard input is a terminal."""
        return sys.stdin.isatty()

    def confirm(self, question: str) -> bool:
        """The answer at the terminal; no unless it is yes."""
        answer = self.console.input(f"{question} [y/N] ", markup=False)  # markup would take [y/N] for a style
        return answer.strip().lower() in ("y", "yes")

    def say(self, markup: str) -> None:
        """Print one line, never wrapped."""
        say(self.console, markup)

    def status(self, words: str) -> AbstractContextManager[Any]:
        """Show a spinner with these words."""
        return self.console.status(words)

    def show_plan(self, plans: Iterable[Plan], turns: str = "", outlook: Outlook | None = None) -> None:
        """Print plans as blocks of hosts."""
        plan.show(self.console, plans, turns, outlook)

    def show_commands(self, plans: Iterable[Plan]) -> None:
        """Print the commands of each step."""
        plan.show_commands(self.console, plans)

    def show_lines(self, mark: str, lines: Iterable[tuple[str, str]]) -> None:
        """Print one line per text, with its hosts."""
        plan.show_lines(self.console, mark, lines)

    def show_lost(self, lost: Iterable[HostError]) -> None:
        """Print the hosts that could not be observed, by the reason."""
        plan.show_lost(self.console, lost)

    def follow(
        self, journal: Journal, plans: Mapping[str, Plan], turns: Sequence[Sequence[str]], pace: Pace
    ) -> StepView:
        """Print steps as they end, and who is where."""
        return StepView(self.console, journal, plans, turns, pace)

    def report(self, document: Mapping[str, Any]) -> None:
        """Print the report as JSON, if it was asked for."""
        if self.as_json:
            print(json.dumps(document))
