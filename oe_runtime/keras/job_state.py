"""What the checkpoints of a job hold of a Keras model besides its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.keras import dense
from oe_runtime.keras.model_settings import keras_settings
from oe_runtime.keras.translate import table_optimizer
from oe_runtime.run.callback_state import CallbackStates
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.script_state import ScriptState
from oe_runtime.spec import TableSpec
from oe_runtime.support import dense_file


class KerasState:
    """That of a compiled model of Keras 3 or tf-keras with tables."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """See DenseState."""
        tables: Mapping[str, TableSpec] = getattr(self._model, "tables", {})  # a stock model has none
        return tables

    def values(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        return dense.values(self._model)

    def weights(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        return dense.weights(self._model)

    def write(self, arrays: Mapping[str, NDArray[Any]], directory: Path) -> None:
        """See DenseState."""
        dense_file.write(arrays, directory)

    def load(self, directory: Path, content: bytes | None = None) -> None:
        """See DenseState."""
        dense.load(self._model, directory, content)


class KerasScriptState(ScriptState):
    """A Keras model with its metrics, whose running means belong to the epoch, or to a window of steps.

    Checkpoints end a window, so they have no metrics then.
    """

    def __init__(self, model: Any, *, windows: bool = False) -> None:
        super().__init__(model, KerasState(model))
        self._windows = windows
        self._optimizer: Any = None  # that has the checkpoint's variables
        self.callbacks: CallbackStates | None = None  # of the present fit, once they have begun

    @property
    def batches_ahead(self) -> int:
        """See ScriptState."""
        if not hasattr(self.model, "prefetch"):
            return 0  # tf-keras, and stock models
        return 2 if self.model.client.reads_ahead else 1

    def announce(self, batch: Any, following: Sequence[Any]) -> None:
        """See ScriptState; for train_on_batch."""
        known = [one for one in following if isinstance(one, tuple) and 1 <= len(one) <= 3]
        if known and len(known) == len(following):
            self.model.prefetch(*known[0], after=known[1] if known[1:] else None)

    def settings(self) -> Mapping[str, Any]:
        """See ScriptState."""
        return keras_settings(self.model)

    def load(self, directory: Path, content: bytes | None = None) -> None:
        """See ScriptState."""
        super().load(directory, content)
        self._optimizer = self.model.optimizer

    def load_again(self, ranks: Ranks, directory: Path) -> None:
        """Load the checkpoint once more where the script has compiled the model anew since."""
        if self._optimizer is None or self._optimizer is self.model.optimizer:
            return
        content = ranks.share(b"" if ranks.rank else (directory / dense_file.FILE).read_bytes())
        self._dense.load(directory, content)

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        if self.callbacks is None:
            return {}
        return {"callbacks": np.frombuffer(json.dumps(self.callbacks.changed()).encode(), np.uint8)}

    def own(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState: of this worker's part of the data."""
        of_epoch = [] if self._windows else self._metrics()
        metrics = {f"metric/{i}": np.asarray(v).copy() for i, v in enumerate(of_epoch)}
        states = {f"random/{i}": one.state.numpy() for i, one in enumerate(self._generators())}
        return {**metrics, **states}

    def gradients(self) -> int:
        """See ScriptState."""
        return sum(math.prod(v.shape) for v in dense.trainable(self.model))

    def bind(self, workers: Any) -> None:
        """See ScriptState."""
        if hasattr(self.model, "served") and self.model.served.library.__name__ != "keras":
            super().bind(workers)
        optimizer = self.model.optimizer
        workers.bind(
            dense.trainable(self.model), table_optimizer(optimizer), lambda: float(optimizer.learning_rate)
        )

    def begin_window(self) -> None:
        """See ScriptState."""
        if self._windows:
            self.model.reset_metrics()

    def window(self, ranks: Ranks, metrics: Mapping[str, Any]) -> tuple[float, float | None]:
        """See ScriptState; AUC is Keras's, over thresholds, of a metric of that name."""
        if ranks.count > 1:
            variables = self._metrics()
            sums = ranks.sum(np.concatenate([np.ravel(v) for v in variables]))
            for variable in variables:
                size = int(np.prod(variable.shape))
                variable.assign(np.reshape(sums[:size], variable.shape))
                sums = sums[size:]
            metrics = self.model.get_metrics_result()
        self.begin_window()
        found = {name.lower(): float(value) for name, value in metrics.items()}
        return found["loss"], found.get("auc")

    def load_extra(self, arrays: dict[str, NDArray[Any]]) -> None:
        """See ScriptState."""
        super().load_extra(arrays)
        for i, generator in enumerate(self._generators()):
            if (state := self.loaded_own(f"random/{i}")) is not None:
                generator.state.assign(state)

    def unsaved_random_layers(self) -> list[str]:
        """Return the names of layers of tf-keras whose random numbers go on otherwise after a resume."""
        return [layer.name for layer, generator in self._random_layers() if generator is None]

    def _generators(self) -> list[Any]:
        """Return the random generators of tf-keras's layers; Keras 3 has theirs among the variables."""
        return [generator for _, generator in self._random_layers() if generator is not None]

    def _random_layers(self) -> list[tuple[Any, Any]]:
        layers = self.model._flatten_layers(include_self=False, recursive=True)
        random = [(one, one._random_generator) for one in layers if hasattr(one, "_random_generator")]
        stateful = [(one, found) for one, found in random if found._rng_type != found.RNG_STATELESS]
        return [(one, getattr(found, "_generator", None)) for one, found in stateful]

    def restore_callbacks(self) -> None:
        """Give the callbacks the state that they had at the checkpoint."""
        if self.callbacks is not None and (state := self.loaded.get("callbacks")) is not None:
            self.callbacks.restore(json.loads(state.tobytes()))

    def restore_metrics(self) -> None:
        """Give the metrics the values that they had at the checkpoint, where they are the same metrics."""
        variables = self._metrics()
        values = [self.loaded_own(f"metric/{i}") for i in range(len(variables))]
        if all(v is not None and v.shape == m.shape for v, m in zip(values, variables, strict=True)):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _metrics(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]
