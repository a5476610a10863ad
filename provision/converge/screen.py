"""What a change of hosts asks of the screen that it is shown on; ``provision.cli.views`` has the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from provision.cluster.errors import HostError
from provision.converge.outlook import Outlook, Pace
from provision.hosts.carrier import Carried
from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.node.step import Plan, Step


class Progress(Protocol):
    """Follows the steps of a change: records them in the journal, and shows them."""

    done: list[dict[str, Any]]  # steps that ended

    def show_by(self, spinner: Callable[[Any], None]) -> AbstractContextManager[None]:
        """Show progress by ``spinner`` until the block ends."""

    def start(self, host: str, role: str, task: str) -> None:
        """A task of a playbook begins."""

    def result(self, result: TaskResult) -> None:
        """A task ended."""

    def start_carried(self, host: str, step: Step) -> None:
        """A step that Ansible does not carry out begins."""

    def carried(self, found: Carried) -> None:
        """Such a step ended."""

    def fail(self, names: Collection[str]) -> None:
        """These hosts are left out of the rest of the run."""


class Screen(Protocol):
    """Shows what happens, and asks the user. ``markup`` is Rich's; everything else is shown as it is."""

    as_json: bool  # standard output is for the report alone

    @property
    def can_ask(self) -> bool:
        """Somebody can answer."""

    def confirm(self, question: str) -> bool:
        """The answer; no unless it is yes."""

    def say(self, markup: str) -> None:
        """Show one line."""

    def status(self, words: str) -> AbstractContextManager[Any]:
        """Show what is done while the block runs; its value has ``stop`` and ``start``."""

    def show_plan(self, plans: Iterable[Plan], turns: str = "", outlook: Outlook | None = None) -> None:
        """Show what is lost and what reboots, the steps, the line of ``turns``, notes and problems."""

    def show_commands(self, plans: Iterable[Plan]) -> None:
        """Show the commands of each step."""

    def show_lines(self, mark: str, lines: Iterable[tuple[str, str]]) -> None:
        """Show one line per text with the hosts that it is about; ``mark`` is markup."""

    def show_lost(self, lost: Iterable[HostError]) -> None:
        """Show the hosts that could not be observed."""

    def follow(
        self, journal: Journal, plans: Mapping[str, Plan], turns: Sequence[Sequence[str]], pace: Pace
    ) -> Progress:
        """Show the steps of these plans while they are carried out."""

    def report(self, document: Mapping[str, Any]) -> None:
        """Print the report, if it was asked for."""
