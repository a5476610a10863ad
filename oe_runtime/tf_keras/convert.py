"""Ordinary tf-keras models made into models with distributed embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tf_keras

from oe_runtime.client import Client
from oe_runtime.keras.convert import convert
from oe_runtime.keras.served import Settings
from oe_runtime.keras.servers import step_settings
from oe_runtime.keras.workers import Workers
from oe_runtime.tf_keras.embedding import Embedding
from oe_runtime.tf_keras.model import Distributed, DistributedModel, refuse_strategy


def distributed_model(
    model: Any,
    client: Client | None = None,
    *,
    sparse_as_dense_size: int = 64,
    num_shards: int | None = None,
    override_method: bool = True,
    explicit: bool = False,
    seed: int = 0,
    name_prefix: str = "",
    nonfinite_gradients: str = "refuse",
    workers: Workers | None = None,
    pipeline: bool | None = None,
    staleness: int | None = None,
    micro_batches: int | None = None,
    in_worker: Sequence[str] = (),
    fresh: bool | None = None,
    state_dtype: str | None = None,
    exchange_dtype: str | None = None,
) -> Distributed:
    """Return a tf-keras model like `model`, with its large embeddings on parameter servers.

    See `oe_runtime.keras.distributed_model` for the options and for subclassed models. Raises ValueError
    naming the layer for what tables do not support, and for a model of Keras 3.
    """
    del num_shards, override_method
    if isinstance(model, keras.Model):
        raise ValueError(f"{type(model).__name__} is of Keras 3: write `import oe_runtime.keras as embed`")
    if not isinstance(model, tf_keras.Model):
        raise ValueError(f"a tf_keras.Model is needed, not {type(model).__name__}")
    refuse_strategy()
    steps = step_settings(client, pipeline, staleness, micro_batches)
    dtypes = (state_dtype, exchange_dtype)
    settings = Settings(seed, name_prefix, nonfinite_gradients, *steps, in_worker, fresh, *dtypes)
    if getattr(model, "inputs", None):
        _check_additions(model)
    elif isinstance(model, tf_keras.Sequential):
        raise ValueError("the Sequential model has no Input yet: add one before distributed_model")
    kinds = (Embedding, DistributedModel, Distributed)
    new: Distributed = convert(model, client, workers, settings, kinds, sparse_as_dense_size, explicit)
    return new


def _check_additions(model: Any) -> None:
    """Raise ValueError for losses and metrics of a model's tensors, which a copy of its graph would lack."""
    names = {"AddLoss": "add_loss", "AddMetric": "add_metric"}
    added = sorted({names[kind] for one in model.layers if (kind := type(one).__name__) in names})
    if added:
        raise ValueError(
            f"model '{model.name}': {' and '.join(added)} of a model is not supported here: use "
            "self.add_loss(…) in the call of a custom layer, or pass the loss to compile"
        )
