"""A table among a model's variables, where a stock model has the matrix of an Embedding.

Gradients, optimizers and lists of weights refer to a layer's rows by it. It has no memory of its own: reading
and assigning it goes to the servers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

# True inside of `listing_tables()`, False inside of `listing_tables(False)`.
_listed: contextvars.ContextVar[bool | None] = contextvars.ContextVar("oe_runtime_keras_tables", default=None)


@contextlib.contextmanager
def listing_tables(listed: bool = True) -> Iterator[None]:
    """Let `weights`, `variables` and `get_weights` have the tables too, in the order of stock Keras.

    With False, `trainable_variables` of models and layers do not have them either.
    """
    token = _listed.set(listed)
    try:
        yield
    finally:
        _listed.reset(token)


def are_listed() -> bool | None:
    """Whether this call is inside of `listing_tables`; None outside of it."""
    return _listed.get()


def without_tables(variables: Iterable[Any]) -> list[Any]:
    """Return the variables that are in the worker's memory."""
    return [one for one in variables if not isinstance(one, TableVariable)]


class TableVariable:
    """Stands for the rows of a layer's table, as `embeddings` of a stock layer does.

    `embed.GradientTape.gradient` returns the gradient of its rows as tf.IndexedSlices, and the optimizer of
    `compile` pushes that when it is applied. `numpy()`, `assign()` and functions of TensorFlow read and write
    all rows of a table with an input_dim. A function of it inside a tape raises RuntimeError, because that
    would train no rows.
    """

    _should_act_as_resource_variable = True  # lets tf.GradientTape ask for `handle`
    constraint = None
    regularizer = None  # Keras adds its loss to the model's; steps add the layer's
    overwrite_with_gradient = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def name(self) -> str:
        """The name of a stock layer's matrix."""
        return "embeddings"

    @property
    def path(self) -> str:
        """The path of a stock layer's matrix."""
        return f"{getattr(self.layer, 'path', None) or self.layer.name}/embeddings"

    @property
    def shape(self) -> Any:
        """(input_dim, output_dim), the first None for a table of any id."""
        shape = (None if self.layer.input_dim == -1 else self.layer.input_dim, self.layer.output_dim)
        if keras.backend.backend() != "tensorflow":
            return shape
        import tensorflow as tf

        return tf.TensorShape(shape)

    @property
    def ndim(self) -> int:
        """2: rows and their numbers."""
        return 2

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.layer.variable_dtype

    @property
    def trainable(self) -> bool:
        """Whether the layer is."""
        return bool(self.layer.trainable)

    def numpy(self) -> Any:
        """Return all rows. Raises ValueError for a table of any id, or one that exceeds the memory."""
        return self.layer.get_weights()[0]

    def assign(self, matrix: Any) -> None:
        """Write all rows; the optimizer's state of the rows stays. Raises ValueError as `numpy` does."""
        self.layer.set_weights([matrix])

    def read_value(self) -> Any:
        """Return all rows as a tensor. Raises RuntimeError inside a tape, and as `numpy` does."""
        return self.layer.all_rows()

    @property
    def value(self) -> Any:
        """The variable itself: what tapes and functions of TensorFlow take."""
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        del copy
        rows = self.numpy()
        return rows if dtype is None else rows.astype(dtype)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(self.read_value(), dtype, name=name)

    @property
    def _unique_id(self) -> str:
        """The key by which optimizers know variables."""
        return f"{self.path}_{id(self)}"

    def _refuse(self) -> Any:
        raise RuntimeError(
            f"the rows of '{self.layer.name}' are on parameter servers: take their gradient by "
            "`with embed.GradientTape(model) as tape:`, and apply it by the optimizer of compile, or by "
            "another one as embed.distributed_optimizer(optimizer)"
        )

    # What tapes and optimizers that know no tables ask of a variable.
    handle = device = property(_refuse)
    assign_add = assign_sub = scatter_add = scatter_sub = scatter_update = device

    def __repr__(self) -> str:
        return f"<TableVariable path={self.path}, shape={tuple(self.shape)}, on parameter servers>"


class TfKerasTableVariable(TableVariable):
    """The same with the names and types of a tf.Variable."""

    @property
    def name(self) -> str:
        """The name of a stock layer's matrix."""
        return f"{self.path}:0"

    @property
    def dtype(self) -> Any:
        """The dtype of the rows, a tf.DType."""
        import tensorflow as tf

        return tf.as_dtype(self.layer.variable_dtype)

    def value(self) -> Any:
        """See `read_value`."""
        return self.read_value()


def _computing(name: str) -> Callable[..., Any]:
    def compute(self: TableVariable, *others: Any) -> Any:
        return getattr(self.read_value(), name)(*others)

    return compute


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "getitem"):
    setattr(TableVariable, f"__{_name}__", _computing(f"__{_name}__"))


def table_variable(layer: Any) -> TableVariable:
    """Return the variable of a layer, always the same one."""
    kept = vars(layer).get("_table_variable")
    if kept is None or kept.layer is not layer:  # a copy of a layer has that of the other
        kind = TableVariable if layer._library is keras else TfKerasTableVariable
        kept = vars(layer)["_table_variable"] = kind(layer)
    variable: TableVariable = kept
    return variable


def trained(layer: Any) -> list[TableVariable]:
    """Return the variable of a layer that is trained in loops, in a list; [] where only `fit` trains rows."""
    on_tensorflow = keras.backend.backend() == "tensorflow"
    return [table_variable(layer)] if on_tensorflow and layer.trainable and are_listed() is not False else []
