"""Parsers of words on a command line, for argparse; each raises its error for anything else."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])(?:iB)?", re.ASCII)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def count(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least`, up to `most` if given; 10_000 is one too."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if most is not None and not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse


def size(least: int = 0, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a parser of bytes from `least` to `most`: those of `count`, or `512M`, `16G`, `1.5TiB`.

    Letters are powers of 1024, as in the inventory. `64GB`, which may be either, is refused.
    """
    whole = count(least, most)

    def parse(text: str) -> int:
        if match := _SIZE.fullmatch(text.strip()):
            return whole(str(int(float(match[1]) * _UNITS[match[2]])))
        try:
            int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a size such as 512M or 16G (powers of 1024), or a number of bytes"
            ) from None
        return whole(text)

    return parse


def number(
    least: float | None = None, most: float | None = None, *, above: float | None = None
) -> Callable[[str], float]:
    """Return a parser of numbers: any, those from `least` to `most`, or finite ones.

    Finite ones are from `least`, without `most`, or above `above`.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
        if above is not None and not above < value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not a {'positive number' if above == 0 else f'number above {above}'}"
            )
        if least is not None and most is not None and not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        if least is not None and most is None and not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {least}")
        return value

    return parse


def widths(text: str) -> tuple[int, ...]:
    """Parse the widths of layers: `256,128`."""
    return tuple(count(1)(part) for part in text.split(","))
