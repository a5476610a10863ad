"""What a job asks of the screen that it is shown on, and how lines about jobs are printed.

``provision.cli.views`` has the screen of a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from provision.jobs.metrics import Event
    from provision.jobs.store import Job

STYLE = {"done": "green", "failed": "red", "interrupted": "yellow", "unreadable": "red"}

# What would garble a terminal; colours, and what progress bars return and go back with, stay.
_CONTROL = re.compile("(\x1b\\[[0-9;]*m|[\\b\\t\\r])|[\x00-\x1f\x7f-\x9f]")


def make_console(*, as_json: bool = False) -> Console:
    """A console for tables: on standard error beside JSON, and wide where the output is no terminal."""
    console = Console(stderr=as_json)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160  # a file or a pipe has no edge that lines must end at
    return console


def say(console: Console, text: str) -> None:
    """Print one line of Rich markup, never wrapped, so that it can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


class LogPrinter:
    """Prints lines of logs, each behind the name of its process if there are several."""

    def __init__(self, names: Collection[str]) -> None:
        self._width = max(map(len, names)) if len(names) > 1 else 0

    def put(self, name: str, text: str) -> None:
        """Print a line; on a terminal without what would garble it."""
        if sys.stdout.isatty():
            text = _CONTROL.sub(lambda found: found[1] or "\N{REPLACEMENT CHARACTER}", text)
        sys.stdout.write(f"{name:<{self._width}} | {text}\n" if self._width else f"{text}\n")


class JobScreen(Protocol):
    """Where a launch and a stop print."""

    as_json: bool  # standard output is for the report alone
    console: Console  # for lines

    def follow(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show the events of a run until the block ends; its value takes them."""

    def show_end(self, job: Job, state_dir: Path) -> None:
        """Show how a job ended, where its files are, and the next commands."""
