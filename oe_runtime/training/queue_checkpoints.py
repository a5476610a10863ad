"""The checkpoints of asynchronous workers: all of them read them, and their queue goes back with the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oe_runtime.client import Client
from oe_runtime.training.checkpoints import Checkpoints
from oe_runtime.training.options import Options
from oe_runtime.training.position import Saved
from oe_runtime.training.ranks import Ranks
from oe_runtime.training.shared_input import SharedInput


class QueueCheckpoints(Checkpoints):
    """Worker 0 takes them; all go back to them, together."""

    def __init__(
        self,
        options: Options,
        model: Any,
        client: Client,
        ranks: Ranks,
        shared: SharedInput,
        excuse: Callable[[int], None],
    ) -> None:
        """`excuse` tells the servers that another worker, of that rank, will not come any more."""
        super().__init__(options, model, client, ranks)
        self._shared = shared
        self._excuse = excuse

    def go_back(self) -> tuple[Saved, str]:
        """See Checkpoints; after a loss, when all are connected anew."""
        with self._shared.losses():
            if self._options.rank:
                self._shared.await_begin()
            else:
                for rank in self._shared.await_others():
                    self._excuse(rank)
            return self.begin()

    def begin(self) -> tuple[Saved, str]:
        """The same when all workers start: those that come first wait at the servers."""
        if self._options.rank:
            found = super().go_back()
        else:
            with self._shared.alone():  # until all is looked at, nobody pushes
                found = super().go_back()
        self._shared.check_input()
        self._shared.follow()
        return found

    def _chosen(self, saved: Saved) -> None:
        if not self._options.rank:
            self._shared.begin(saved.position.queue)
