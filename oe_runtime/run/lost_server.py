"""Recovery from a lost server: wait for it, go back to a checkpoint, continue.

The same, without a wait, from a worker of a work queue that was lost in its push.

Several workers do so together. All get here from the same place of the run (run.ranks), or, with a work
queue, the queue goes back too (run.shared_input).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from oe_runtime.client import Client
from oe_runtime.errors import ServerLost
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.course import Course
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks, deferring_losses
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.run.shared_input import LostInPush
from oe_runtime.run.stopping import StopRequest

_Found = TypeVar("_Found")

_PAUSE = 0.3  # seconds between attempts to reach the servers again
MOST_LOSSES = 5  # consecutive losses without a new checkpoint


class ServerRecovery:
    """Continues a run after ServerLost."""

    def __init__(
        self,
        options: RunOptions,
        client: Client | None,
        checkpoints: Checkpoints | FollowingCheckpoints,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        ranks: Ranks,
    ) -> None:
        self._options = options
        self._client = client
        self._checkpoints = checkpoints
        self._directory = directory
        self._view = view
        self._stop = stop
        self._ranks = ranks
        self._losses = 0
        self._last: RunCheckpoint | None = None  # the checkpoint after the last loss

    def recover(self, lost: ServerLost, loop: Course) -> Position:
        """Wait for the lost server and go back to the newest checkpoint; return its position.

        Raises ServerLost when the server does not return in time or is lost too often, Interrupted after a
        stop request, and the error of a server that returns as another one.
        """
        known = loop.saved is not None or self._ranks.rank > 0
        if not self._options.server_wait or self._client is None or not known:
            raise lost
        lost = self._agree(lost)
        started = time.monotonic()

        def go_back() -> tuple[RunCheckpoint, str]:
            assert self._client is not None  # noqa: S101 - else raised above
            if self._ranks.stop_requested(self._stop):
                raise loop.interrupted()
            with deferring_losses(self._ranks):
                self._client.reconnect()
            self._ranks.barrier()  # all are connected
            self._client.fixed = ""  # until the next step
            with self._stop.without_time_limit():
                return self._checkpoints.roll_back()

        of_worker = isinstance(lost, LostInPush)
        if of_worker:
            self._view.say(f"{lost}: all workers go back to the last checkpoint")
            try:
                saved, words = go_back()
            except ServerLost as again:
                return self.recover(again, loop)
        else:
            saved, words = wait_for_server(
                lost, go_back, self._options, self._directory, self._view.say, self._stop
            )
            self._count(lost, saved)
        waited = time.monotonic() - started
        loop.rolled_back(saved, waited)
        if words:
            self._view.say(words)
        step, seconds = saved.position.step, round(waited, 1)
        if of_worker:
            self._directory.event("went_back", message=str(lost), step=step, seconds=seconds)
            what = "went back"
        else:
            self._directory.event("server_back", endpoint=lost.endpoint, step=step, seconds=seconds)
            what = f"{server_name(lost.endpoint, self._options)} is back"
        self._view.say(f"{what} after {waited:.1f} s; going on from step {step}, {saved.path}")
        return saved.position

    def _agree(self, lost: ServerLost) -> ServerLost:
        """Return the loss with its server, which only one of several workers may have noticed."""
        servers = self._options.servers
        seen = self._ranks.sum(np.array([lost.endpoint == server for server in servers], np.int32))
        if lost.endpoint in servers or not seen.any():
            return lost
        endpoint = servers[int(np.argmax(seen))]
        return ServerLost(endpoint, f"{server_name(endpoint, self._options)} was lost by another worker")

    def _count(self, lost: ServerLost, saved: RunCheckpoint) -> None:
        """Count losses since the last progress, which all workers see alike when they have gone back."""
        progress = self._last is None or saved.position.step > self._last.position.step
        self._losses = 1 if progress else self._losses + 1
        self._last = saved
        refuse_many(lost, self._losses)


def wait_for_server(
    lost: ServerLost,
    go_on: Callable[[], _Found],
    options: RunOptions,
    directory: RunDirectory | FollowingDirectory,
    say: Callable[[str], None],
    stop: StopRequest,
) -> _Found:
    """Call `go_on` until it does not raise ServerLost any more; return its result.

    Raises ServerLost when the server has not come back within --server-wait, and what else `go_on` raises.
    """
    name, seconds = server_name(lost.endpoint, options), options.server_wait
    reason = str(lost).partition(";")[0]
    directory.event("server_gone", endpoint=lost.endpoint, message=reason, wait_s=seconds)
    say(f"{name} is gone; waiting up to {seconds} s for it to come back ({reason})")
    started = time.monotonic()
    while True:
        try:
            return go_on()
        except ServerLost as again:
            if time.monotonic() - started > seconds:
                missing = server_name(again.endpoint, options)
                raise ServerLost(again.endpoint, f"{missing} did not come back within {seconds} s") from lost
            stop.wait(_PAUSE)


def refuse_many(lost: ServerLost, losses: int) -> None:
    """Raise ServerLost when servers are lost repeatedly without a new checkpoint."""
    if losses > MOST_LOSSES:
        raise ServerLost(
            lost.endpoint,
            f"{str(lost).partition(';')[0]}; that was loss {losses} of a server without a new checkpoint in "
            "between: look at its log",
        )


def server_name(endpoint: str, options: RunOptions) -> str:
    """Return how messages name a server."""
    if endpoint not in options.servers:
        return f"server {endpoint}" if endpoint else "a server"
    return f"server {options.servers.index(endpoint)} at {endpoint}"
