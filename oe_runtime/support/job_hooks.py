"""What a library's package takes from the job that its process is a part of, which stands above it.

A package of TensorFlow calls `join` when it is imported: workers meet before TensorFlow computes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_join: Callable[[], Any] | None = None
_client: Callable[[], Any] | None = None


def install(join: Callable[[], Any] | None, client: Callable[[], Any] | None) -> None:
    """Set what the two functions do: meet the other workers, and return a client. None: there is no job."""
    global _join, _client
    _join, _client = join, client


def join() -> Any:
    """Meet the other workers and return them; None for a single one, and without a job."""
    return None if _join is None else _join()


def client() -> Any:
    """Return the client of the job; None without one."""
    return None if _client is None else _client()
