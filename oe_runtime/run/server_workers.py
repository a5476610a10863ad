"""Asynchronous workers of a job: their dense weights, which the servers sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.run.run_directory import RunError
from oe_runtime.spec import TableSpec


class ServerWorkers:
    """Asynchronous workers: their dense weights are on the servers, and no worker waits.

    The counterpart of DeepRec's parameter servers. A table holds the sum of updates to the first weights, so
    its optimizer's updates must not depend on the weight: no decay, no FTRL. Around each step, `pull` gets
    the weights and `push` sends the gradients of the mean loss of this worker's batch, which the step keeps;
    the updates of the model's own optimizer in between are overwritten.
    """

    NAME, _DIM = "dense_weights", 64
    tables = (NAME,)

    def __init__(self, client: Client, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.stop_request = self.stop_requests = None
        self._client = client

    def bind(
        self, variables: Sequence[Any], rule: Mapping[str, Any], learning_rate: Callable[[], float]
    ) -> None:
        """Make the table of a model's trainable variables. Raises RunError for its optimizer's `rule`.

        A variable has a `shape`, its values as an array, and `assign`.
        """
        if rule["name"] == "ftrl" or rule.get("weight_decay") or rule.get("coupled_weight_decay"):
            raise RunError(f"optimizer {rule['name']}: asynchronous workers need one without decay")
        if rule["name"] == "rowwise_adagrad":
            raise RunError(
                "optimizer rowwise_adagrad: asynchronous workers keep dense weights in rows that are not the "
                "variables' own; use another optimizer, or synchronous workers"
            )
        self._learning_rate = learning_rate
        self._variables = variables
        self._size = sum(int(np.prod(v.shape)) for v in self._variables)
        self._keys = np.arange(-(-self._size // self._DIM), dtype=np.int64)
        zero = {"name": "constant", "value": 0.0}
        spec = TableSpec(self.NAME, self._DIM, "array", len(self._keys), optimizer=rule, initializer=zero)
        self._table = self._client.create_table(spec)
        self._gradients: NDArray[np.float32] | None = None  # of this step
        self.rebase()

    def rebase(self) -> None:
        """Take the model's weights as those of the table's rows, as after a restore."""
        mine = np.concatenate([np.ravel(np.asarray(v, np.float32)) for v in self._variables])
        self._first = mine - self._rows(self._client.pull_rows(self._table, self._keys))

    def pull(self) -> None:
        """Give the model the present weights."""
        self._pulled = self._client.pull([self._keys], [(self._table, 0)])
        weights = self._first + self._rows(self._client.embeddings(self._pulled.groups[0]))
        for variable in self._variables:
            size = int(np.prod(variable.shape))
            variable.assign(np.reshape(weights[:size], variable.shape))
            weights = weights[size:]

    def push(self) -> None:
        """Push the step's gradients, if it has kept any."""
        kept, self._gradients = self._kept(), None
        if kept is not None:
            gradients = np.zeros((len(self._keys), self._DIM), np.float32)
            gradients.reshape(-1)[: self._size] = kept
            self._client.push(self._pulled, [gradients], self._learning_rate())

    def keep(self, dense: Sequence[Any]) -> None:
        """In a step, keep the gradients for `push`."""
        self._gradients = np.concatenate([np.ravel(np.asarray(g, np.float32)) for g in dense])

    def _kept(self) -> NDArray[np.float32] | None:
        return self._gradients

    def sum(self, values: Any, what: int) -> Any:
        """Raise RuntimeError: asynchronous workers sum nothing."""
        raise RuntimeError(f"asynchronous workers sum nothing (sum {what})")

    def _rows(self, rows: Any) -> Any:
        return np.asarray(rows, np.float32).reshape(-1)[: self._size]
