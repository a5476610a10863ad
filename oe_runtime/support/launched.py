"""The job that a launcher started this process for, as scripts that do not know of it find its servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_client: Callable[[], Any] | None = None


def install(client: Callable[[], Any] | None) -> None:
    """Let `client` connect to the job's servers; None: this process is in no launcher's job."""
    global _client
    _client = client


def is_job() -> bool:
    """Whether a launcher started this process for a job."""
    return _client is not None


def client() -> Any:
    """Return the client of the job; None outside of one."""
    return None if _client is None else _client()
