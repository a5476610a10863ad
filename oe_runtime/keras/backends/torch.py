"""Keras on PyTorch: steps run operation by operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch
from keras import ops

from oe_runtime.keras.backends import one_by_one
from oe_runtime.keras.backends.one_by_one import Collect, PulledRows, Supply
from oe_runtime.keras.feed import (
    NanCauses,
    check_exact,
    dependent_ids_error,
    feeding,
    padding_cause,
    skeleton,
    to_keys,
)
from oe_runtime.keras.served import Served

all_rows, update_rows = one_by_one.all_rows, one_by_one.update_rows


def check(*, several_workers: bool, staleness: int, micro_batches: int) -> None:
    """See Backend."""
    one_by_one.check(
        "torch", several_workers=several_workers, staleness=staleness, micro_batches=micro_batches
    )


def adapt(model: Any) -> None:
    """See Backend: nothing to replace."""
    del model


def check_compile(served: Served, *, jit_compile: Any) -> Any:
    """See Backend."""
    del served
    if jit_compile is True:
        raise ValueError("jit_compile=True is not supported on PyTorch, where a step asks servers in between")
    return False


def steps(served: Served, *, eager: bool) -> Steps:
    """See Backend; all steps are eager here."""
    del eager
    return Steps(served)


class Steps:
    """The steps of one compiled model."""

    def __init__(self, served: Served) -> None:
        self._model = served.model
        self._client = served.client
        self._causes = NanCauses()
        self._counts: dict[Any, int] = {}  # lookups of a call, by the structure of its inputs

    def announce(self, data: Any, after: Any) -> None:
        """Ignored: nothing is prefetched."""

    def train_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function of a list of batches."""
        return lambda batches: [self._train(batch) for batch in batches][-1]

    def test_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function of a list of batches."""
        return lambda batches: [self._test(batch) for batch in batches][-1]

    def predict_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function of a list of batches."""

        def predict(batches: Sequence[Any]) -> Any:
            outputs = [self._predict(batch) for batch in batches]
            return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

        return predict

    def _train(self, data: Any) -> Any:
        model = self._model
        x, y, sample_weight = _tensors(data)
        rows = self._pull(x)
        leaves = [ops.convert_to_tensor(array) for array in rows.arrays]
        for leaf in leaves[: rows.trained]:
            leaf.requires_grad_()
        model.zero_grad()
        y_pred = self._call(x, rows, leaves, training=True)
        loss = self._loss(x, y, y_pred, sample_weight, rows, leaves, training=True)
        if loss.requires_grad:
            loss.backward()
        optimizer, variables = model.optimizer, model.trainable_variables
        with torch.no_grad():
            gradients: Sequence[Any] = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves[: rows.trained]
            ]
            dense, gradients = one_by_one.clip(
                optimizer,
                [v.value.grad for v in variables],
                gradients,
                [(table.group, table.slices) for table in rows.tables],
                [ops.convert_to_tensor(table.numbers) for table in rows.tables],
            )
            # The rate of this step: applying the gradients moves the schedule on.
            rate = float(optimizer.learning_rate)
            # Before the dense weights change: if the servers refuse it, those stay as they were.
            examples = int(keras.tree.flatten(x)[0].shape[0])
            cause = self._causes.begin_step(partial(padding_cause, rows.layers, rows.ids, examples))
            if not model.served.ends_with({"loss": loss.detach()}):
                parts = [g.cpu().numpy() for g in gradients]
                iterations = int(optimizer._iterations) + 1
                one_by_one.push(model.served, rows, parts, rate, iterations, cause)
            if variables:
                optimizer.apply(dense, variables)
            else:
                optimizer._iterations.assign_add(1)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _test(self, data: Any) -> Any:
        x, y, sample_weight = _tensors(data)
        rows = self._pull(x)
        leaves = [ops.convert_to_tensor(array) for array in rows.arrays]
        y_pred = self._call(x, rows, leaves, training=False)
        self._loss(x, y, y_pred, sample_weight, rows, leaves, training=False)
        return self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _predict(self, data: Any) -> Any:
        x, _, _ = _tensors(data)
        rows = self._pull(x)
        return self._call(x, rows, [ops.convert_to_tensor(array) for array in rows.arrays], training=False)

    def _call(self, x: Any, rows: PulledRows, leaves: Sequence[Any], *, training: bool) -> Any:
        supply = Supply(rows.layers, one_by_one.split_by_lookup(rows.layout, leaves, len(rows.layers)))
        with feeding(supply):
            y_pred = self._model(x, training=training)
        for layer, asked, pulled in zip(rows.layers, supply.ids, self._looked_up, strict=True):
            if asked.data_ptr() != pulled.data_ptr() and not torch.equal(asked, pulled):
                raise dependent_ids_error(layer.name)
        return y_pred

    def _loss(
        self,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        rows: PulledRows,
        leaves: Sequence[Any],
        *,
        training: bool,
    ) -> Any:
        model = self._model
        loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        once = [ops.convert_to_tensor(part) for part in rows.once]
        loss = loss + one_by_one.regularization(rows.layers, rows.layout, leaves[: rows.trained], once)
        examples = keras.tree.flatten(x)[0].shape[0]
        model._loss_tracker.update_state(loss.detach(), sample_weight=examples)
        return loss

    def _pull(self, x: Any) -> PulledRows:
        """Pull the rows of a batch. To learn the ids, calls the model up to its last lookup."""
        key = skeleton(x)
        collect = Collect(self._counts.get(key))
        with torch.no_grad(), feeding(collect), contextlib.suppress(one_by_one.AllSeen):
            self._model(x, training=False)
        self._counts[key] = len(collect.ids)
        self._looked_up = collect.ids
        numbers: dict[Any, int] = {}
        ids: list[Any] = []
        sources: list[int] = []
        for layer, tensor in zip(collect.layers, collect.ids, strict=True):
            # Lookups of the same tensor share their ids.
            same = (tensor.data_ptr(), tensor.dtype, tensor.numel()) if tensor.is_contiguous() else id(tensor)
            if same not in numbers:
                numbers[same] = len(ids)
                ids.append(to_keys(tensor.cpu().numpy(), layer.name))
            sources.append(numbers[same])
        return one_by_one.pull(
            self._client, getattr(self._model, "optimizer", None), collect.layers, ids, sources
        )


def _tensors(data: Any) -> tuple[Any, Any, Any]:
    tensors = keras.tree.map_structure(lambda v: None if v is None else ops.convert_to_tensor(v), data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tensors)
    one_by_one.all_inputs(x)
    return x, y, sample_weight


def integer_ids(ids: Any, layer: str) -> Any:
    """See Backend."""
    ids = ops.convert_to_tensor(ids)
    if ids.dtype == torch.uint64:
        return ids.view(torch.int64)
    if ids.is_floating_point() and not ids.is_meta:
        # Float64, because NumPy has no bfloat16.
        values = ids.detach().cpu().double().numpy().reshape(-1)
        check_exact(values, keras.backend.standardize_dtype(ids.dtype), layer)
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int64)


def is_traced(values: Sequence[Any]) -> bool:
    """See Backend."""
    return any(getattr(value, "is_meta", False) for value in values)


def pull(layer: Any, ids: Any) -> Any:
    """See Backend. A backward pass through trainable rows raises RuntimeError."""
    if ids.is_meta:  # Keras asks for shapes only
        return ops.zeros((*ids.shape, layer.output_dim), layer.rows_dtype)
    rows = ops.convert_to_tensor(layer.table.rows(ids.detach().cpu().numpy()))
    if layer.trainable and torch.is_grad_enabled():
        rows.requires_grad_()
        rows.register_hook(partial(_refuse, layer.name))
    return rows


def _refuse(layer: str, _gradient: Any) -> None:
    raise RuntimeError(
        f"Embedding '{layer}' is in a backward pass outside of fit and train_on_batch, which alone train "
        "rows on parameter servers: train with those, or call the model in `with torch.no_grad():`"
    )
