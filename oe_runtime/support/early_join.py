"""Where the workers of a job meet: before TensorFlow computes anything in this process.

A library's package calls `join` when it is imported; a job that has several workers sets what that does.
"""

from __future__ import annotations

from collections.abc import Callable

_join: Callable[[], object] | None = None


def install(join: Callable[[], object] | None) -> None:
    """Let `join` wait for the other workers; None: there are none."""
    global _join
    _join = join


def join() -> None:
    """Meet the other workers, if there are any."""
    if _join is not None:
        _join()
