"""SavedModels of a model with rows on parameter servers: with the rows included, or without."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from oe_runtime.keras import dense
from oe_runtime.keras.backends.tensorflow import trigger
from oe_runtime.keras.clone import clone
from oe_runtime.keras.embedding import TableLayer
from oe_runtime.keras.feed import feeding
from oe_runtime.keras.plan import LookupPlan
from oe_runtime.keras.saving import check_export
from oe_runtime.keras.served import Table
from oe_runtime.keras.supply import Collect, Supply
from oe_runtime.keras.translate import expected_row_value
from oe_runtime.model_description import FILE, Description, Lookup, Tensor
from oe_runtime.support.directories import replacing

INT8 = "int8"

# Bytes of rows per request.
_PIECE = 64 << 20


def save_as_original_model(
    model: Any, tables: Mapping[str, Table], path: Path, *, overwrite: bool, rows: str | None = None
) -> Path:
    """Write `model` with the rows of its `tables` as a SavedModel; see the method of `WithTables`."""
    original = with_rows_inside(model, tables, rows)
    return publish(path, lambda place: original.export(place, verbose=False), overwrite)


def save_serving_model(model: Any, tables: Mapping[str, Table], path: Path) -> Path:
    """Write `model` without its rows, for `oe_runtime.serving`; see the method of `Distributed`."""
    return publish(path, lambda place: _write_serving_model(model, tables, place))


def publish(path: Path, write: Callable[[Path], Any], overwrite: bool = False) -> Path:
    """Let `write` make a SavedModel beside `path`, then rename it to `path`. Raises FileExistsError."""
    check_export(path, overwrite)
    with replacing(path) as place:
        write(place)
    return path


def _write_serving_model(model: Any, tables: Mapping[str, Table], path: Path) -> None:
    """Write two functions: inputs to the looked-up ids, and rows with inputs to outputs."""
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{type(model).__name__} has no graph: a model for serving must be functional or Sequential, "
            "whose inputs have names and shapes"
        )
    structure = model.input
    specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype, x.name) for x in model.inputs]
    plan = LookupPlan(model, structure, specs)
    first = [plan.sources.index(n) for n in range(len(set(plan.sources)))]
    numbered = [tf.TensorSpec(s.shape, s.dtype, f"input_{i}") for i, s in enumerate(specs)]
    # Each tensor costs time in every call: lookups of equal width and dtype share one.
    groups: dict[tuple[int, str], list[int]] = {}
    for i, layer in enumerate(plan.layers):
        groups.setdefault((layer.output_dim, tf.as_dtype(layer.rows_dtype).name), []).append(i)
    rows = [tf.TensorSpec([None, dim], dtype, f"rows_{i}") for i, (dim, dtype) in enumerate(groups)]
    sizes = tf.TensorSpec([len(plan.layers)], tf.int64, "sizes")

    def ids(*inputs: Any) -> dict[str, Any]:
        collect = Collect()
        with feeding(collect):
            model(keras.tree.pack_sequence_as(structure, list(inputs)), training=False)
        return {
            f"ids_{n}": tf.reshape(tf.cast(collect.ids[lookup], tf.int64), [-1])
            for n, lookup in enumerate(first)
        }

    def forward(sizes: Any, *tensors: Any) -> dict[str, Any]:
        parts: list[Any] = [None] * len(plan.layers)
        for group, together in zip(groups.values(), tensors, strict=False):
            for lookup, part in zip(group, tf.split(together, tf.gather(sizes, group)), strict=True):
                parts[lookup] = part
        inputs = keras.tree.pack_sequence_as(structure, list(tensors[len(rows) :]))
        with feeding(Supply(plan.layers, parts)):
            return _named_outputs(model(inputs, training=False))

    named = dense.model_variables(model)
    module = tf.Module()
    # Signatures, because TensorFlow takes milliseconds to check arguments of other restored functions.
    signatures = {"forward": tf.function(forward, input_signature=[sizes, *rows, *numbered], autograph=False)}
    if first:
        signatures["ids"] = tf.function(ids, input_signature=numbered, autograph=False)
    module.weights = [variable.value for variable in named.values()]
    module.model = model  # keeps the layers' other resources, such as lookup tables
    module.trigger = trigger()  # captured by the layers' graphs
    # A served model is not trained, and rows in a graph refuse gradients, even while these are saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with _rows_left_out():
        tf.saved_model.save(module, str(path), signatures, options)
    outputs = signatures["forward"].get_concrete_function().structured_outputs
    names = {id(layer): name for name, layer in model.served.layers.items()}
    Description(
        inputs=[Tensor(s.name, s.dtype.name, s.shape.as_list()) for s in specs],
        outputs=[Tensor(name, s.dtype.name, s.shape.as_list()) for name, s in outputs.items()],
        tables=[json.loads(table.client.spec(table.number).to_json()) for table in tables.values()],
        lookups=[
            Lookup(names[id(layer)], source) for layer, source in zip(plan.layers, plan.sources, strict=True)
        ],
        groups=list(groups.values()),
        weights=list(named),
    ).write(path / FILE)


@contextlib.contextmanager
def _rows_left_out() -> Iterator[None]:
    """Let TensorFlow save layers of tables, which refuse that by this method, without anything of them."""
    refusal = TableLayer._serialize_to_tensors
    del TableLayer._serialize_to_tensors
    try:
        yield
    finally:
        setattr(TableLayer, refusal.__name__, refusal)


def _named_outputs(outputs: Any) -> dict[str, Any]:
    """Name the outputs as Keras's own export does."""
    if isinstance(outputs, dict):
        return dict(outputs)
    return {f"output_{i}": output for i, output in enumerate(keras.tree.flatten(outputs))}


def with_rows_inside(model: Any, tables: Mapping[str, Table], precision: str | None = None) -> Any:
    """Return a plain model with the rows in its layers: as trained, or of `precision`."""
    if precision not in (None, INT8):
        raise ValueError(f"rows={precision!r} is not known; rows of an export are as trained, or '{INT8}'")
    library = model.served.library
    array, inside = _all_rows(library), _rows_inside(library)
    by_layer = {id(layer): tables[name] for name, layer in model.served.layers.items()}
    filled: list[tuple[Any, Table]] = []

    def replace(layer: Any) -> Any:
        if not isinstance(layer, TableLayer):
            return None
        table = by_layer[id(layer)]
        shared = {"name": layer.name, "dtype": layer.dtype_policy.name, "mask_zero": layer.mask_zero}
        if table.spec.index == "array" and precision is None:
            new = array(layer.input_dim, layer.output_dim, "zeros", **shared)
            filled.append((new, table))
            return new
        if table.spec.index == "array":
            pieces = [_scaled(table, keys, table.rows(keys)) for keys in _all_keys(table)]
            return inside(None, *map(np.concatenate, zip(*pieces, strict=True)), **shared)
        keys, rows = _sorted_rows(table)
        values = (rows,) if precision is None else _scaled(table, keys, rows)
        return inside(keys, *values, default=_default_value(table), **shared)

    inputs, outputs = clone(model, replace, library)
    for layer, table in filled:
        rows = _variable(layer.embeddings)
        for keys in _all_keys(table):
            rows[keys[0] : keys[-1] + 1].assign(tf.cast(table.rows(keys), rows.dtype))
    return library.Model(inputs, outputs, name=model.name)


def _all_keys(table: Table) -> Iterator[Any]:
    """Yield the keys of a table of ids in [0, input_dim), in pieces."""
    step = max(1, _PIECE // (4 * table.spec.dim))
    for begin in range(0, table.spec.input_dim, step):
        yield np.arange(begin, min(begin + step, table.spec.input_dim), dtype=np.int64)


def _scaled(table: Table, keys: Any, rows: Any) -> tuple[Any, Any]:
    """Return rows as int8 and the scale of each, by which they are to be multiplied: 1/127 of its largest."""
    rows = np.asarray(rows, np.float32)
    most = np.abs(rows).max(axis=1)
    for key in keys[~np.isfinite(most)]:
        raise ValueError(
            f"table '{table.spec.name}': the row of id {key} has a value that is not finite, which int8 "
            "cannot hold; nothing was written"
        )
    scales = most / np.float32(127)
    # A scale that is subnormal may be too small.
    steps = np.rint(rows / np.where(scales > 0, scales, 1)[:, None]).clip(-127, 127)
    return steps.astype(np.int8), scales


def _default_value(table: Table) -> float:
    """Return the value for ids that a table of any id does not have."""
    admission = table.spec.admission
    if admission is None:
        return expected_row_value(table.spec.initializer)
    return float(admission.get("default_value", 0.0))


def _sorted_rows(table: Table) -> tuple[Any, Any]:
    """Return the keys of a table of any id, ascending, and their rows."""
    keys, rows = table.client.export_rows(table.number)
    keys = np.asarray(keys).view(np.int64)
    order = np.argsort(keys)
    keys, rows = keys[order], np.asarray(rows)[order]
    if not len(keys):  # the search needs at least one key
        keys, rows = np.zeros(1, np.int64), np.full((1, table.spec.dim), _default_value(table), rows.dtype)
    return keys, rows


def _all_rows(library: Any) -> Callable[..., Any]:
    """Return the class of a layer of the rows of all ids in [0, input_dim).

    TensorFlow refuses other ids on a CPU. Embedding itself counts negative ids from the end and takes the
    lower 32 bits of others, so it would answer with another id's row, where servers refuse the id.
    """

    class AllRows(library.layers.Embedding):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return tf.cast(tf.gather(_variable(self.embeddings), _as_keys(inputs)), self.compute_dtype)

    return AllRows


def _variable(weight: Any) -> Any:
    """Return the tf.Variable of a weight of Keras or tf-keras."""
    return weight if isinstance(weight, tf.Variable) else weight.value


def _as_keys(ids: Any) -> Any:
    """Return ids as servers know them: uint64 by its bits."""
    ids = tf.convert_to_tensor(ids)
    return tf.bitcast(ids, tf.int64) if ids.dtype == tf.uint64 else tf.cast(ids, tf.int64)


def _rows_inside(library: Any) -> Callable[..., Any]:
    """Return the class of a layer of the rows of a table, in pure TensorFlow.

    Of sorted keys and a binary search among them, or, without keys, of all ids in [0, input_dim). The rows
    are as they are, or to be multiplied by a scale each.
    """
    autocast = "autocast" if library is keras else "experimental_autocast"

    class RowsInside(library.layers.Layer):  # type: ignore[misc]
        def __init__(
            self,
            keys: Any,
            rows: Any,
            scales: Any = None,
            *,
            default: float = 0.0,
            mask_zero: bool,
            **kwargs: Any,
        ) -> None:
            super().__init__(autocast=False, **kwargs)
            self.mask_zero = self.supports_masking = mask_zero
            self._default = default
            self.rows = self._constant("rows", rows)
            self.keys = None if keys is None else self._constant("keys", keys)
            self.scales = None if scales is None else self._constant("scales", scales)
            self.built = True

        def _constant(self, name: str, values: Any) -> Any:
            weight = self.add_weight(
                name=name,
                shape=values.shape,
                dtype=values.dtype.name,
                initializer="zeros",
                trainable=False,
                **{autocast: False},
            )
            weight.assign(values)
            return weight

        def build(self, input_shape: Any = None) -> None:
            """Build nothing."""

        def call(self, inputs: Any) -> Any:
            ids = _as_keys(inputs)
            if self.keys is None:
                return tf.cast(self._gather(ids), self.compute_dtype)
            keys, flat = _variable(self.keys), tf.reshape(ids, [-1])
            places = tf.minimum(tf.searchsorted(keys, flat), tf.size(keys) - 1)
            known = tf.equal(tf.gather(keys, places), flat)
            found = tf.where(known[:, None], self._gather(places), self._default)
            dim = self.rows.shape[1]
            found = tf.reshape(found, tf.concat([tf.shape(ids), [dim]], 0))
            found.set_shape((*ids.shape, dim))
            return tf.cast(found, self.compute_dtype)

        def _gather(self, places: Any) -> Any:
            rows = tf.gather(_variable(self.rows), places)
            if self.scales is None:
                return rows
            return tf.cast(rows, tf.float32) * tf.gather(_variable(self.scales), places)[..., None]

        def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
            return getattr(library, "ops", tf).not_equal(inputs, 0) if self.mask_zero else None

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "mask_zero": self.mask_zero}

    return RowsInside
