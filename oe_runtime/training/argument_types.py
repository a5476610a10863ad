"""What a word of the command line must be; each raises argparse's error for anything else."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def count(least: int) -> Callable[[str], int]:
    """A whole number, not less than `least`; 10_000 is one too."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse


def number(text: str) -> float:
    """Any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def rate(text: str) -> float:
    """A positive number."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    """From 0 to 0.9."""
    value = number(text)
    if not 0 <= value <= 0.9:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.9")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Widths of layers: `256,128`."""
    return tuple(count(1)(part) for part in text.split(","))
