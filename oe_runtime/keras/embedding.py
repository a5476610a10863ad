"""The embedding layer whose rows live on parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common.symbolic_scope import in_symbolic_scope  # it has no public name

from oe_runtime.keras import feed, matrices
from oe_runtime.keras.backends import backend
from oe_runtime.keras.served import Settings, Table
from oe_runtime.keras.table_variable import are_listed, table_variable, trained, without_tables
from oe_runtime.keras.translate import check_constraint, check_regularizer, table_initializer
from oe_runtime.spec import DTYPES, TableSpec

_Layer: Any = keras.layers.Layer if TYPE_CHECKING else object


class TableLayer(_Layer):  # type: ignore[misc]
    """Like the library's own Embedding, with the rows in a table of the parameter servers.

    `input_dim` is the number of rows, with ids in [0, input_dim), or -1 for any 64-bit id; a row then takes
    memory from its first update on. `mask_zero` masks id 0. `embeddings_regularizer` (L1, L2 or L1L2) adds
    the loss of the batch's rows, each once; Keras adds that of all rows in every batch. `admission` and
    `eviction` decide which ids get a row and which rows are removed, as in `oe_runtime.TableSpec`. The layer
    has no variables. Use it in a model and pass that to `distributed_model`, which connects it to the
    servers; the table has the layer's name.

    `weights=[matrix]`, `Constant(matrix)` as the initializer, and `set_weights([matrix])` at any time give
    all rows to a table with an input_dim.

    OpenEmbedding's arguments: `num_shards` has no effect, because all servers share the keys;
    with `sparse_as_dense` and an `input_dim`, `distributed_model` makes it the
    library's own layer, whose matrix stays in the worker; without `explicit` an
    `embeddings_constraint` is ignored, otherwise refused.

    ids: integers of any shape. Output: float32 (or the dtype policy's compute dtype), ids.shape +
    (output_dim,). Rows have the policy's variable dtype: float32, float64, bfloat16 or float16. `state_dtype`
    is that of the optimizer's state, `exchange_dtype` that of gradients on their way to servers: "bfloat16",
    or by default distributed_model's (`oe_runtime.TableSpec`).
    """

    _library: Any  # keras or tf_keras

    def __init__(
        self,
        input_dim: int | None = -1,
        output_dim: int = 0,
        embeddings_initializer: Any = "uniform",
        *,
        mask_zero: bool = False,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        weights: Any = None,
        num_shards: int | None = None,
        sparse_as_dense: bool = False,
        explicit: bool = True,
        admission: Mapping[str, Any] | None = None,
        eviction: Sequence[Mapping[str, Any]] = (),
        state_dtype: str | None = None,
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        del num_shards
        if input_dim is None:
            input_dim = -1
        self.sparse_as_dense = bool(sparse_as_dense) and input_dim != -1
        if not explicit:
            embeddings_constraint = None
        # A library's arithmetic on data makes them NumPy's.
        input_dim, output_dim = (int(n) if isinstance(n, np.integer) else n for n in (input_dim, output_dim))
        if not isinstance(output_dim, int) or isinstance(output_dim, bool) or output_dim <= 0:
            raise ValueError(
                f"Embedding '{self.name}': output_dim must be an integer > 0, not {output_dim!r}"
            )
        if (
            not isinstance(input_dim, int)
            or isinstance(input_dim, bool)
            or (input_dim <= 0 and input_dim != -1)
        ):
            raise ValueError(
                f"Embedding '{self.name}': input_dim must be an integer > 0, or -1 for any 64-bit id, "
                f"not {input_dim!r}"
            )
        self.embeddings_regularizer = self._library.regularizers.get(embeddings_regularizer)
        check_regularizer(self._keras3(self.embeddings_regularizer), self.name)
        check_constraint(embeddings_constraint, self.name)
        if self.variable_dtype not in DTYPES:
            raise ValueError(
                f"layer '{self.name}': rows on parameter servers are {', '.join(DTYPES)}, but the layer's "
                f"dtype policy keeps variables as {self.variable_dtype}"
            )
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = self._library.initializers.get(embeddings_initializer)
        self.admission = dict(admission) if admission is not None else None
        self.eviction = [dict(policy) for policy in eviction]
        self.state_dtype = state_dtype
        self.exchange_dtype = exchange_dtype
        self.initializer_spec(0)
        # The table's first rows, in place of the initializer's.
        self.first_rows: Any = matrices.matrix_of(self.embeddings_initializer, self)
        if weights is not None:
            self.first_rows = matrices.one_matrix(
                weights if isinstance(weights, (list, tuple)) else [weights], self
            )
        self.bringing_rows = False  # whether an assignment of these was interrupted
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        self.autocast = False  # ids must not become float16
        self.table: Table | None = None
        self.built = True

    @staticmethod
    def _keras3(part: Any) -> Any:
        """Return the equivalent initializer or regularizer of Keras 3, for `translate`."""
        return part

    @property
    def rows_dtype(self) -> str:
        """The dtype of rows and gradients on their way from and to the servers."""
        return "float64" if self.variable_dtype == "float64" else "float32"

    def initializer_spec(self, seed: int) -> dict[str, Any]:
        """Return the table's initializer; `seed` is for an initializer without one."""
        initializer = self._keras3(self.embeddings_initializer)
        if matrices.matrix_of(initializer, self) is not None:
            initializer = keras.initializers.Zeros()  # every row is assigned
        return table_initializer(initializer, seed, self.name, self.input_dim, self.output_dim)

    def table_spec(self, name: str, optimizer: dict[str, Any], settings: Settings) -> TableSpec:
        """Return the specification of this layer's table."""
        return TableSpec(
            name=name,
            dim=self.output_dim,
            dtype=self.variable_dtype,
            state_dtype=self.state_dtype or settings.state_dtype,
            exchange_dtype=self.exchange_dtype or settings.exchange_dtype,
            index="hash" if self.input_dim == -1 else "array",
            input_dim=max(self.input_dim, 0),
            optimizer=optimizer,
            initializer=self.initializer_spec(settings.seed),
            nonfinite_gradients=settings.nonfinite_gradients,
            admission=self.admission,
            eviction=self.eviction,
        )

    def set_weights(self, weights: Any) -> None:
        """Set all rows of a table with an input_dim, as [matrix]: at once, or when the table is created.

        The optimizer's state of the rows stays. All workers make this call. For a table of any id, use
        `model.client.assign(layer.table.number, keys, rows)`.
        """
        matrix = matrices.one_matrix(weights, self)
        if self.on_servers:
            self.bound().assign(matrix)
        else:
            self.keep_rows(matrix)

    @property
    def on_servers(self) -> bool:
        """Whether the layer has the table of `compile`."""
        return self.table is not None and not self.table.until_compile

    def keep_rows(self, matrix: Any) -> None:
        """Keep all rows for the table that `compile` makes."""
        self.first_rows = matrix
        self.table = None  # one from before compile has other rows

    def get_weights(self) -> list[Any]:
        """Return [matrix] of all rows of a table with an input_dim, pulled from the servers.

        Raises ValueError for a table of any id, and for a matrix that exceeds the memory.
        """
        matrices.check_readable([self])
        if self.table is None and self.first_rows is not None:
            return [keras.ops.convert_to_numpy(self.first_rows)]
        return [self.bound().rows(np.arange(self.input_dim))]

    @property
    def weights(self) -> list[Any]:
        """The variables of the layer in the worker, none; with its table inside of `listing_tables`."""
        return self._with_table(super().weights)

    @property
    def variables(self) -> list[Any]:
        """See `weights`."""
        return self._with_table(super().variables)

    def _with_table(self, variables: Sequence[Any]) -> list[Any]:
        tables = [table_variable(self)] if are_listed() else []
        return [*without_tables(variables), *tables]

    @property
    def trainable_weights(self) -> list[Any]:
        """The layer's table, as the matrix of a stock layer; [] where only `fit` trains rows."""
        return [*without_tables(super().trainable_weights), *trained(self)]

    @property
    def trainable_variables(self) -> list[Any]:
        """See `trainable_weights`."""
        return [*without_tables(super().trainable_variables), *trained(self)]

    def save_own_variables(self, _store: Any) -> None:
        """Raise ValueError: files of Keras would not have the rows."""
        raise ValueError(
            f"the rows of '{self.name}' are on parameter servers, and files of Keras and TensorFlow would "
            "not have them: use model.save_weights(directory) and load_weights, or, to serve the model, "
            "save_as_original_model(path)"
        )

    def _serialize_to_tensors(self) -> Any:
        """Raise ValueError when TensorFlow writes a checkpoint or a SavedModel of the layer."""
        return self.save_own_variables(None)

    def count_params(self) -> int:
        """Return the parameters on the servers: input_dim × output_dim, 0 for a table of any id."""
        return max(self.input_dim, 0) * self.output_dim

    def take_first_rows(self, other: TableLayer) -> None:
        """Take the first rows of the layer that this one copies."""
        if other.on_servers:
            raise ValueError(
                f"layer '{other.name}' has rows on servers already, which a copy of it would not have: "
                "convert a model with new layers, and load_weights what this one's save_weights wrote"
            )
        self.first_rows = other.first_rows

    def __getattr__(self, name: str) -> Any:
        if name == "embeddings":
            raise AttributeError(
                f"layer '{self.name}' has no `embeddings`, because its rows are on parameter servers: "
                "layer.get_weights()[0] is a copy of all of them, for keras_rs retrieval for example, and "
                f"distributed_model(…, in_worker=['{self.name}']) keeps the matrix in the worker"
            )
        more = getattr(super(), "__getattr__", None)
        if more is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return more(name)

    def build(self, input_shape: Any = None) -> None:
        """Build nothing: the layer has no variables."""

    def call(self, inputs: Any) -> Any:
        """Return the embeddings of ids: from the running step's rows, or pulled now outside of a step."""
        ids = backend.integer_ids(inputs, self.name)
        step = feed.current()
        rows = self._pull(ids) if step is None else step.lookup(self, ids)
        return keras.ops.cast(rows, self.compute_dtype)

    def bound(self) -> Table:
        """Return the layer's table. Raises RuntimeError if there is none yet."""
        if self.table is None:
            raise RuntimeError(
                f"Embedding '{self.name}' has no table yet: give its model to distributed_model(model, "
                "client) and compile that with an optimizer (the rows keep the optimizer's state)"
            )
        return self.table

    def _pull(self, ids: Any) -> Any:
        if self.bound().until_compile and backend.is_traced([ids]) and not in_symbolic_scope():
            raise RuntimeError(
                f"Embedding '{self.name}' is called in a graph before its model is compiled, and the graph "
                "would keep the rows of that time: compile the model first, or call it outside of functions"
            )
        return backend.pull(self, ids)

    def all_rows(self) -> Any:
        """Return all rows as a tensor. Raises RuntimeError inside a tape, which would train none by that."""
        return backend.all_rows(self)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return False where the id is 0, if mask_zero is set."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the ids' shape + (output_dim,)."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = super().get_config()
        if self.activity_regularizer is not None:  # tf-keras's Layer leaves it out
            config["activity_regularizer"] = self._library.regularizers.serialize(self.activity_regularizer)
        return {
            **config,
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": self._library.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": self._library.regularizers.serialize(self.embeddings_regularizer),
            "mask_zero": self.mask_zero,
            "admission": self.admission,
            "eviction": self.eviction,
            "state_dtype": self.state_dtype,
            "exchange_dtype": self.exchange_dtype,
        }


@keras.saving.register_keras_serializable(package="oe_runtime")
class Embedding(TableLayer, keras.layers.Layer):  # type: ignore[misc]
    """keras.layers.Embedding with its rows on parameter servers; TableLayer documents the arguments."""

    _library = keras

    def add_stock_variable(self) -> Any:
        """Add the variable of keras.layers.Embedding, filled with zeros."""
        self._tracker.unlock()
        variable = self.add_weight(
            name="embeddings", shape=(self.input_dim, self.output_dim), initializer="zeros"
        )
        self._tracker.lock()
        return variable

    def remove_stock_variable(self, variable: Any) -> None:
        """Remove the variable of `add_stock_variable`."""
        self._untrack_variable(variable)
