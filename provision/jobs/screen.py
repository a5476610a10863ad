"""What a job asks of the screen that it is shown on, and how lines about jobs are printed.

``provision.cli.views`` has the screen of a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from provision.jobs.metrics import Event
    from provision.jobs.store import Job

STYLE = {"done": "green", "failed": "red", "interrupted": "yellow", "unreadable": "red"}


def make_console(*, as_json: bool = False) -> Console:
    """A console for tables: on standard error beside JSON, and wide where the output is no terminal."""
    console = Console(stderr=as_json)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a file or a pipe has no edge that lines must end at
    return console


def say(console: Console, text: str) -> None:
    """Print one line of Rich markup, never wrapped, so that it can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


class JobScreen(Protocol):
    """Where a launch and a stop print."""

    as_json: bool  # standard output is for the report alone
    console: Console  # for lines

    def follow(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show the events of a run until the block ends; its value takes them."""

    def show_end(self, job: Job, state_dir: Path) -> None:
        """Show how a job ended, where its files are, and the next commands."""
