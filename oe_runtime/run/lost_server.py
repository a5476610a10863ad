"""Recovery from a lost server: wait for it, go back to a checkpoint, continue.

Several workers do so together. All get here from the same place of the run (run.ranks), or, with a work
queue, the queue goes back too (run.shared_input).
"""

from __future__ import annotations

import time

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
from oe_runtime.run.stopping import StopRequest

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
        seconds = self._options.server_wait
        if not seconds or self._client is None or (loop.saved is None and not self._ranks.rank):
            raise lost
        lost = self._agree(lost)
        self._count(lost, loop.saved)
        started = time.monotonic()
        name = self._name(lost.endpoint)
        reason = str(lost).partition(";")[0]
        self._directory.event("server_gone", endpoint=lost.endpoint, message=reason, wait_s=seconds)
        self._view.say(f"{name} is gone; waiting up to {seconds} s for it to come back ({reason})")
        while True:
            if self._ranks.stop_requested(self._stop):
                raise loop.interrupted()
            try:
                with deferring_losses(self._ranks):
                    self._client.reconnect()
                self._ranks.barrier()  # all are connected
                with self._stop.without_time_limit():
                    saved, words = self._checkpoints.roll_back()
                break
            except ServerLost as again:
                if time.monotonic() - started > seconds:
                    raise ServerLost(
                        again.endpoint, f"{self._name(again.endpoint)} did not come back within {seconds} s"
                    ) from lost
                self._stop.wait(_PAUSE)
        waited = time.monotonic() - started
        self._last = saved
        loop.rolled_back(saved, waited)
        if words:
            self._view.say(words)
        step = saved.position.step
        self._directory.event("server_back", endpoint=lost.endpoint, step=step, seconds=round(waited, 1))
        self._view.say(f"{name} is back after {waited:.1f} s; going on from step {step}, {saved.path}")
        return saved.position

    def _agree(self, lost: ServerLost) -> ServerLost:
        """Return the loss with its server, which only one of several workers may have noticed."""
        servers = self._options.servers
        seen = self._ranks.sum(np.array([lost.endpoint == server for server in servers], np.int32))
        if lost.endpoint in servers or not seen.any():
            return lost
        endpoint = servers[int(np.argmax(seen))]
        return ServerLost(endpoint, f"{self._name(endpoint)} was lost by another worker")

    def _count(self, lost: ServerLost, saved: RunCheckpoint | None) -> None:
        """Give up when servers are lost repeatedly without progress."""
        if saved is None or self._last is None or saved.position.step > self._last.position.step:
            self._losses = 0
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise ServerLost(
                lost.endpoint,
                f"{str(lost).partition(';')[0]}; that was loss {self._losses} of a server without a new "
                "checkpoint in between: look at its log",
            )

    def _name(self, endpoint: str) -> str:
        if not endpoint:
            return "a server"
        if endpoint not in self._options.servers:
            return f"server {endpoint}"
        return f"server {self._options.servers.index(endpoint)} at {endpoint}"
