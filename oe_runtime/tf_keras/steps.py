"""The batches of a model of tf-keras: the steps of Keras 3 on TensorFlow, in the shape of its trainer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from oe_runtime.keras.backends import tensorflow


class Steps(tensorflow.Steps):
    """The steps of one compiled model of tf-keras, in a pipeline."""

    def predict_function(self) -> Callable[[Any], Any]:
        """Of an iterator over batches."""
        of_batches = super().predict_function()

        def predict(iterator: Any) -> Any:
            batches = list(islice(iterator, self._model.steps_per_execution))
            if not batches:
                raise StopIteration
            return of_batches(batches)

        return predict
