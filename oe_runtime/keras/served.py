"""What a model with tables gives to its steps, checkpoints, exports and tapes: one object, `model.served`.

They use it and the public interface of keras.Model, and nothing else of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.keras import dense
from oe_runtime.keras.accumulation import Accumulated, accumulation_steps
from oe_runtime.keras.feed import to_keys
from oe_runtime.keras.in_worker import warn_of_weights
from oe_runtime.model_tables import assign_all
from oe_runtime.spec import TableSpec

if TYPE_CHECKING:
    from oe_runtime.keras.workers import Workers


@dataclass(frozen=True)
class Settings:
    """The options of `distributed_model`, which documents them."""

    seed: int = 0
    name_prefix: str = ""
    nonfinite_gradients: str = "refuse"
    pipeline: bool = True
    staleness: int = 0
    micro_batches: int = 1
    in_worker: Sequence[str] = ()
    fresh: bool | None = None
    state_dtype: str | None = None
    exchange_dtype: str | None = None


@dataclass(frozen=True)
class Table:
    """A layer's table on the servers behind `client`."""

    client: Client
    number: int
    spec: TableSpec
    until_compile: bool = False  # in this process; see `uncompiled`

    def rows(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of ids of any shape: ids.shape + (dim,). Floats: see `to_keys`."""
        return self.client.pull_rows(self.number, to_keys(ids, self.spec.name)).reshape(
            *ids.shape, self.spec.dim
        )

    def assign(self, matrix: Any) -> None:
        """Assign the row of every id of a table with an input_dim; the optimizer's state stays."""
        assign_all(self.client, self.number, self.spec, matrix, keras.ops.convert_to_numpy)


class Served:
    """A model of Keras 3 whose embeddings are tables on the servers behind `client`.

    `layers` are its table layers (`embedding.TableLayer`) by table name. `workers` train it together; None
    for a single process.
    """

    library: Any = keras

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, Any],
        client: Client,
        workers: Workers | None,
        settings: Settings,
    ) -> None:
        self.model = model
        self.layers = layers
        self.client = client
        self.workers = workers
        self.settings = settings
        self.xla = False  # whether XLA compiles the model's call in training
        self.fresh = settings.fresh  # False after the first compile, which goes on with the model's own rows
        self.losses: Any = None  # a variable: the sum of losses times examples, and of examples (TensorFlow)
        self.accumulated = Accumulated()
        self.persisted = 0  # the batch of the last persist_server_model
        # Dense weights of load_weights for a model that makes its variables with the first batch.
        self.loaded: tuple[Path, dict[str, NDArray[Any]]] | None = None
        self.called = False  # the model, with a batch
        self.ends_on_nan = False  # whether fit has the callback TerminateOnNaN
        self._warned = False  # of large weights

    @property
    def is_first(self) -> bool:
        """Whether this worker acts for all: the only one, or worker 0."""
        return self.workers is None or self.workers.rank == 0

    def finish_loading(self) -> None:
        """Assign the dense weights that load_weights has kept for a model without variables yet.

        Raises CheckpointError where they do not fit, in this call and every later one.
        """
        if self.loaded is not None:
            dense.assign(self.model, dense.check(self.model, *self.loaded))
            self.loaded = None

    def tables(self) -> dict[str, Table]:
        """The tables by name. Raises RuntimeError before compile."""
        tables = {}
        for name, layer in self.layers.items():
            if not layer.on_servers:
                raise RuntimeError(f"table '{name}' does not exist yet: compile the model first")
            tables[name] = layer.table
        return tables

    def push_accumulated(self, iterations: Any, push: Callable[..., None]) -> None:
        """After step `iterations`, counted from 1: `push` the accumulated gradients if it ends an update."""
        steps = accumulation_steps(self.model.optimizer)
        if int(iterations) % steps == 0:
            numbers = {table.spec.name: table.number for table in self.tables().values()}
            self.accumulated.push(self.client, numbers, steps, push)

    def run(self, body: Any, *args: Any) -> Any:
        """In a step: call `body`, one of `bodies`."""
        return body(self, *args)

    def batch_loss(
        self, row_losses: Sequence[Any], x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
    ) -> Any:
        """In a step: Keras's loss plus those of the rows' regularizers; its mean is in the logs."""
        model = self.model
        loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        for term in row_losses:
            loss = loss + ops.cast(term, loss.dtype)
        model._loss_tracker.update_state(loss, sample_weight=ops.shape(keras.tree.flatten(x)[0])[0])
        return loss

    def ends_with(self, logs: Mapping[str, Any]) -> bool:
        """Whether TerminateOnNaN is to end fit after the step of these logs, whose push is left out then.

        Several workers push together: there the push raises its error.
        """
        if not self.ends_on_nan or self.workers is not None or logs.get("loss") is None:
            return False
        return not np.isfinite(float(ops.convert_to_numpy(logs["loss"])))

    def learning_rate(self) -> Any:
        """In a step, before the optimizer's update: the learning rate of this step."""
        return ops.convert_to_tensor(self.model.optimizer.learning_rate)

    def warn_of_large_weights(self) -> None:
        """Warn once, as soon as all weights are made, of those of a size that belongs on servers."""
        if not self._warned and all(layer.built for layer in self.model._flatten_layers()):
            self._warned = True
            warn_of_weights(self.model, self.library, self.settings.in_worker)
