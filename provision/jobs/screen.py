"""How views of jobs print: their console, one-line messages and the colours of states."""

from __future__ import annotations

import os

from rich.console import Console

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
