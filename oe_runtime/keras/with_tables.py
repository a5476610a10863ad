"""Models with distributed embeddings: the common part of Keras 3 and tf-keras."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError
from oe_runtime.keras import backends, best_rows, dense, feed, saving, uncompiled, warm_start
from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.backends import backend
from oe_runtime.keras.embedding import TableLayer
from oe_runtime.keras.job_fit import JobFit, fit_arguments
from oe_runtime.keras.matrices import check_readable
from oe_runtime.keras.served import Served, Settings, Table
from oe_runtime.keras.table_variable import are_listed, listing_tables, without_tables
from oe_runtime.keras.translate import needs_sums
from oe_runtime.model_tables import make_tables
from oe_runtime.spec import TableSpec

if TYPE_CHECKING:
    from oe_runtime.keras.workers import Workers

_CALLBACKS = 5  # the position of `callbacks` among fit's arguments

# Keras changes the bases of every class of a functional model, so this class must not have a base.
_Model: Any = keras.Model if TYPE_CHECKING else object


class WithTables(_Model):  # type: ignore[misc]
    """A model whose embeddings are on parameter servers.

    fit, evaluate, predict and the on_batch methods are the library's. A training step pulls the rows of its
    batch, runs one compiled function, and pushes the rows' gradients. The next request to the servers, such
    as a save, finds them applied.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    _kind: type[Served] = Served
    # None in a model that was made without distributed_model, as Keras does when it copies one.
    _served: Served | None = None
    _steps: backends.Steps | None = None
    _uncompiled: tuple[backends.Steps, tuple[Table, ...]] | None = None  # before compile; with their tables
    # Of the last compile: how a rule follows from an optimizer, the tables' rule, which tables are trained.
    _compiled_with: tuple[Callable[[Any], dict[str, Any]], dict[str, Any], dict[str, bool]] | None = None
    _around: Callable[[Any], Any] | None = None  # a JobCallback's, around the function of fit

    def _bind(self, client: Client, workers: Workers | None, settings: Settings) -> None:
        """Take what `distributed_model` was given. Raises ValueError for two table layers of one name."""
        layers: dict[str, TableLayer] = {}
        for layer in self._flatten_layers(include_self=False, recursive=True):
            if not isinstance(layer, TableLayer):
                continue
            if layers.setdefault(settings.name_prefix + layer.name, layer) is not layer:
                raise ValueError(
                    f"two embedding layers have the name '{layer.name}': tables are named by their layer"
                )
            layer.initializer_spec(settings.seed)
        self._served = self._kind(self, layers, client, workers, settings)
        self._served.warn_of_large_weights()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the first call takes the dense weights that `load_weights` has kept for it."""
        if self._served is None:
            return super().__call__(*args, **kwargs)
        flat = () if self.compiled and self._served.called else keras.tree.flatten((args, kwargs))
        symbolic = any(isinstance(one, keras.KerasTensor) for one in flat)
        # Layers may have tables already, those of another model that shares them.
        lacking = not self.compiled and any(one.table is None for one in self._served.layers.values())
        if lacking and not symbolic and feed.current() is None and not backend.is_traced(flat):
            self._before_compile()
        outputs = super().__call__(*args, **kwargs)
        # Symbolic inputs leave out what a layer of a declared output shape makes.
        self._served.called = self._served.called or not symbolic
        if self._served.loaded is None or not dense.is_built(self):
            return outputs
        import tensorflow as tf  # the only backend that keeps them

        with tf.init_scope():  # once, also where a function is traced
            self._served.finish_loading()
        return super().__call__(*args, **kwargs)

    @property
    def served(self) -> Served:
        """The interface for steps, checkpoints and exports."""
        if self._served is None:
            raise RuntimeError(
                "this model has no parameter servers: make it with distributed_model(model, client)"
            )
        return self._served

    @property
    def weights(self) -> list[Any]:
        """Keras's Model.weights: those in the worker's memory, without the rows."""
        return self._without_tables(super().weights)

    @property
    def variables(self) -> list[Any]:
        """Keras's Model.variables: those in the worker's memory, without the rows."""
        return self._without_tables(super().variables)

    @property
    def trainable_weights(self) -> list[Any]:
        """Those of Keras's Model, and a TableVariable for each table, in stock Keras's order.

        An `embed.GradientTape` and the optimizer of `compile` take them, on TensorFlow. On other backends of
        Keras, tables have no variable, because only `fit` trains them.
        """
        with self._listing_tables():
            found: list[Any] = super().trainable_weights
        return found

    @property
    def trainable_variables(self) -> list[Any]:
        """See `trainable_weights`."""
        with self._listing_tables():
            found: list[Any] = super().trainable_variables
        return found

    def _without_tables(self, variables: list[Any]) -> list[Any]:
        return variables if are_listed() else without_tables(variables)

    def _listing_tables(self) -> AbstractContextManager[None]:
        if backends.NAME == "tensorflow" and are_listed() is None:
            return listing_tables()
        return nullcontext()

    def get_weights(self) -> list[Any]:
        """Return Model.get_weights with a matrix of all rows of each table, as a stock model has them.

        Raises ValueError naming the layer for a table of any id, and for matrices that exceed the memory.
        """
        weights: list[Any]
        layers = self.served.layers.values()
        if are_listed() is False:
            weights = super().get_weights()
            return weights
        check_readable(layers)
        if not self.compiled and any(layer.table is None for layer in layers):
            self._before_compile()
        with listing_tables():
            weights = super().get_weights()
        return weights

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set what `get_weights` has returned, rows included. The optimizers' state stays, as in Keras.

        Several workers make this call all. Raises ValueError as `get_weights` does, and for other shapes.
        """
        layers = self.served.layers.values()
        if are_listed() is False:
            super().set_weights(weights)
            return
        check_readable(layers)
        with listing_tables():
            super().set_weights(weights)

    def __reduce__(self) -> Any:
        """Raise TypeError: pickle and copy.deepcopy would leave the rows out."""
        raise TypeError(
            f"model '{self.name}' has rows on parameter servers, which copy.deepcopy and pickle would leave "
            "out: make a second model by distributed_model and give it set_weights(model.get_weights()), or "
            "save_weights(directory) and load_weights"
        )

    def __deepcopy__(self, _memo: Any) -> Any:
        """Raise TypeError: see `__reduce__`."""
        return self.__reduce__()

    @property
    def client(self) -> Client:
        """The client of the parameter servers."""
        return self.served.client

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables by name. The model must be compiled."""
        return {name: table.spec for name, table in self.served.tables().items()}

    def _make_tables(self, optimizer: Any, rule_of: Callable[[Any], dict[str, Any]]) -> dict[str, Table]:
        """Make the tables on the servers, trained by the rule of the `optimizer`; return them by name.

        Raises ValueError for what they do not support, and SpecMismatch when the servers have a table of the
        same name with, say, another dim or optimizer.
        """
        served, rule = self.served, rule_of(optimizer)
        self._forget_uncompiled()
        if served.workers is not None and needs_sums(optimizer, list(served.layers.values())):
            raise ValueError(
                "clipping gradients and embeddings_regularizer need the gradients of all workers, but those "
                "of rows meet at the servers only: train with one worker, or without them"
            )
        if accumulation_steps(optimizer) > 1 and (served.workers is not None or served.settings.staleness):
            raise ValueError(
                "gradient_accumulation_steps does not work with several workers, whose checkpoints would "
                "lack the gradients of rows that the others have accumulated, nor with staleness=1: leave it "
                "out, or use distributed_model(…, micro_batches=…) to save memory"
            )
        has_state = rule["name"] != "sgd" or rule["momentum"]
        if self._compiled_with is not None and has_state and rule == self._compiled_with[1]:
            former = getattr(self, "optimizer", None)
            if former is not None and former is not optimizer and int(former.iterations):
                warnings.warn(
                    "the rows keep their optimizer's state of before this compile, while the dense weights' "
                    "begins anew: compile with the same optimizer object to keep both",
                    stacklevel=4,
                )
        specs = {name: layer.table_spec(name, rule, served.settings) for name, layer in served.layers.items()}
        warm_start.choose_rows(served)
        also = getattr(served.workers, "tables", ())
        with warm_start.keeping_rows(served, specs) as bring:
            numbers = make_tables(
                served.client, list(specs.values()), served.fresh, also=also, first=served.is_first
            )
            bring(dict(zip(specs, numbers, strict=True)))
        served.fresh = False
        if getattr(self, "optimizer", None) is not optimizer:
            served.accumulated.clear()
        self._compiled_with = rule_of, rule, {name: one.trainable for name, one in served.layers.items()}
        return {
            name: Table(served.client, number, spec)
            for number, (name, spec) in zip(numbers, specs.items(), strict=True)
        }

    def _make_steps(self, served: Served, *, eager: bool) -> backends.Steps:
        """Make the steps of the model as it is served."""
        raise NotImplementedError

    def _begin(self, tables: Mapping[str, Table], steps: backends.Steps) -> None:
        """Connect the layers of the compiled model to their tables."""
        layers = self.served.layers
        for name, layer in layers.items():
            layer.table = tables[name]
        self._steps = steps
        try:
            warm_start.assign(self.served)
        except BaseException:  # nothing trains on tables with a part of their rows
            self._steps = None
            for layer in layers.values():
                layer.table = None
            raise

    def _rename_tables(self, names: Mapping[str, str]) -> None:
        """Make tables of the compiled model under other names, without their rows.

        Raises CheckpointError where the servers have a table of such a name, which is another model's.
        """
        served = self.served
        existing = {name for server in served.client.stats()["servers"] for name in server["tables"]}
        for old, new in names.items():
            if new in existing - names.keys():
                raise CheckpointError(
                    f"the file has table '{new}', which Keras names '{old}' in this model, and the servers "
                    "have a table of that name already: give the layers names of your own, or load into a "
                    "model with another client"
                )
        specs = [replace(table.spec, name=names.get(name, name)) for name, table in served.tables().items()]
        served.client.drop_tables(list(names))
        numbers = make_tables(served.client, specs, False, first=served.is_first)
        served.layers = {names.get(name, name): layer for name, layer in served.layers.items()}
        tables = {
            spec.name: Table(served.client, number, spec) for number, spec in zip(numbers, specs, strict=True)
        }
        self._begin(tables, self._make_steps(self.served, eager=bool(self.run_eagerly)))
        self.train_function = self.test_function = self.predict_function = None

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Model.fit does; all pushes are done when it returns.

        EarlyStopping(restore_best_weights=True) restores the rows too: whenever an epoch is the best so far,
        they are written to a temporary directory (TMPDIR), which needs as much disk as a checkpoint. Raises
        ValueError for it with several workers.

        With TerminateOnNaN, the push of the step whose loss is not finite is left out, and the callback ends
        training; several workers get the GradientError of their push.

        A JobCallback among the callbacks resumes it at the epoch and the batch of the job's checkpoint.
        """
        if "callbacks" not in kwargs and len(args) > _CALLBACKS:
            kwargs, args = fit_arguments(self, args, kwargs), ()
        flat = keras.tree.flatten(kwargs.get("callbacks") or [])
        jobs = [one for one in flat if isinstance(one, JobFit)]
        if jobs and self._around is None:
            if len(jobs) > 1:
                raise ValueError("fit has two JobCallbacks: give it one")
            return self._fit_in_job(jobs[0], fit_arguments(self, args, kwargs))
        if self._around is None and self.client.fit_alone:
            raise ValueError(self.client.fit_alone)
        if "callbacks" not in kwargs:
            history = super().fit(*args, **kwargs)
        else:
            served = self.served
            workers = 1 if served.workers is None else served.workers.count
            given = kwargs.pop("callbacks")
            flat = given.callbacks if isinstance(given, served.library.callbacks.CallbackList) else flat
            served.ends_on_nan = any(isinstance(one, served.library.callbacks.TerminateOnNaN) for one in flat)
            with best_rows.keeping_best_rows(given, workers=workers, library=served.library) as callbacks:
                try:
                    history = super().fit(*args, callbacks=callbacks, **kwargs)
                finally:
                    served.ends_on_nan = False
        self.client.settle()
        return history

    def _fit_in_job(self, job: JobFit, given: dict[str, Any]) -> Any:
        """Train as a part of a job's run, from its checkpoint on."""
        if (around := job.begin_fit(self, given)) is None:
            return self.served.library.callbacks.History()
        self._around = around
        try:
            history = self.fit(**given)
        finally:
            self._around = self.train_function = None
        job.end_fit()
        return history

    def make_train_function(self, force: bool = False) -> Any:
        """Return the function that `fit` calls with batches."""
        steps = self._running()
        self._check_unchanged()
        self.served.warn_of_large_weights()
        if self.train_function is None or force or self._around is not None:
            around = self._around or (lambda function: function)
            self.train_function = around(steps.train_function())
        return self.train_function

    def _check_unchanged(self) -> None:
        """Refuse changes of the optimizer since compile that would reach the dense weights only.

        Warn of changes of `trainable`, which reach no weights: some programs make them on purpose.
        """
        if self._compiled_with is None:
            return
        rule_of, rule, trained = self._compiled_with
        for name, value in rule_of(self.optimizer).items():
            if rule.get(name) != value:
                raise ValueError(
                    f"optimizer.{name} is {value} now, but the model's tables were made with "
                    f"{rule.get(name)}: their rule does not change after compile; only the learning rate may"
                )
        changed = [name for name, one in self.served.layers.items() if trained.get(name) != one.trainable]
        if changed and self.train_function is not None:
            warnings.warn(
                f"trainable of layer {', '.join(changed)} has changed since compile, which has no effect on "
                "a model that was trained: compile it again",
                stacklevel=4,
            )

    def make_test_function(self, force: bool = False) -> Any:
        """Return the function that `evaluate` calls with batches."""
        if self.test_function is None or force:
            self.test_function = self._running().test_function()
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Return the function that `predict` calls with batches."""
        steps = self._running() if self.compiled else self._before_compile()
        if self.predict_function is None or force:
            self.predict_function = steps.predict_function()
        return self.predict_function

    def _before_compile(self) -> backends.Steps:
        """Return the steps of a model that is not compiled.

        They use the tables of a compiled model that has all of its layers, and otherwise tables in this
        process. Raises RuntimeError where a compiled model has a part of them.
        """
        served = self.served
        steps, tables = self._uncompiled or (None, ())
        present = [layer.table for layer in served.layers.values()]
        if steps is not None and all(a is b for a, b in zip(present, tables, strict=True)):
            return steps
        backend.check_compile(served, jit_compile="auto")
        on_servers = [layer.on_servers for layer in served.layers.values()]
        if not any(on_servers):
            self._forget_uncompiled()
            steps = self._make_steps(uncompiled.connect(served), eager=False)
        elif all(on_servers) and all(table.client is served.client for table in present):
            steps = self._make_steps(served, eager=False)
        else:
            raise RuntimeError("compile the model first: a part of its tables is of another, compiled model")
        self._uncompiled = steps, tuple(layer.table for layer in served.layers.values())
        self.predict_function = None
        return steps

    def _forget_uncompiled(self) -> None:
        _, own = self._uncompiled or (None, ())
        uncompiled.disconnect(self.served, own)
        self._uncompiled = self.predict_function = None

    def _running(self) -> backends.Steps:
        if self._steps is None:
            raise RuntimeError("compile the model first: the rows of its tables keep the optimizer's state")
        return self._steps

    def save_dense(self, directory: str | os.PathLike[str]) -> Path:
        """Write all dense weights and the optimizer's variables into `directory`/dense.npz; return its path.

        The client saves the rows: `model.client.save(directory)`.
        """
        return dense.save(self, Path(directory))

    def load_dense(self, directory: str | os.PathLike[str]) -> None:
        """Read what `save_dense` wrote. The model must be compiled with the same kind of optimizer.

        Raises CheckpointError naming the file and the variable (with both shapes) that does not fit; the
        model is unchanged then.
        """
        dense.load(self, Path(directory))

    def _exports(self) -> Any:
        """Return the module that writes SavedModels."""
        raise NotImplementedError

    def save_as_original_model(
        self,
        path: str | os.PathLike[str],
        overwrite: bool = False,
        include_optimizer: bool = False,
        rows: str | None = None,
    ) -> Path:
        """Write a SavedModel that includes the embeddings, for TensorFlow alone to load and serve.

        All rows of a table with an input_dim are read from the servers, untrained ones with their initial
        value. For a table of any 64-bit id, the trained rows are written. For any other id the exported model
        uses the mean of the initializer (the value of Constant, (minval + maxval) / 2 of RandomUniform, the
        mean of RandomNormal), because TensorFlow cannot compute the initializer's function.

        With `rows="int8"` each row is 8-bit integers and a scale, 1/127 of its largest value, by which the
        graph multiplies them: about a quarter of the size, and values that differ by half a scale at most.

        `path` appears when it is complete. Raises FileExistsError if it exists, except for a SavedModel with
        `overwrite`. Returns it. Raises ValueError for a subclassed model, for `include_optimizer`, because a
        served model is not trained, and for a row that int8 cannot hold.
        """
        if include_optimizer:
            raise ValueError("a SavedModel for serving has no optimizer: include_optimizer must be False")
        written: Path = self._exports().save_as_original_model(
            self, self.served.tables(), Path(path), overwrite=overwrite, rows=rows
        )
        return written

    def export(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ValueError: the rows are not in the model. Use `save_as_original_model`."""
        raise ValueError("the rows of this model are on parameter servers; use save_as_original_model(path)")

    def save(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, include_optimizer: bool = True
    ) -> None:
        """Save as `save_weights` does: a Keras file could not hold the model, whose rows are on the servers.

        To load it, make the model as before, and call `load_weights`.
        """
        saving.save_weights(self, filepath, overwrite, include_optimizer)

    def save_weights(self, filepath: str | os.PathLike[str], overwrite: bool = True) -> None:
        """Write weights, optimizer's variables and all rows with their state into the directory `filepath`.

        The directory appears when it is complete. With `overwrite` it replaces an earlier one of the same
        kind; FileExistsError for anything else at the path. With several workers one of them makes this call.
        """
        saving.save_weights(self, filepath, overwrite)

    def load_weights(self, filepath: str | os.PathLike[str], skip_mismatch: bool = False) -> None:
        """Read what `save_weights` or `save` wrote, into a compiled model. All workers make this call.

        Also reads files of the stock model, before `distributed_model`: `.weights.h5`, `.keras`, `.h5`, or a
        SavedModel. Its matrices go into the tables and all other weights into this model, without the
        optimizer's state of rows; meanwhile the worker has the matrices in memory.

        Raises CheckpointError naming the file and the variable or table that does not fit, and ValueError for
        `skip_mismatch`: it loads everything or nothing.
        """
        if skip_mismatch:
            raise ValueError("skip_mismatch=True is not supported: a checkpoint is loaded completely")
        path = Path(filepath)
        if warm_start.is_stock(path):
            warm_start.load(self.served, path, super().load_weights)
        else:
            saving.load_weights(self, path)

    def count_params(self) -> int:
        """Return the number of the model's parameters, with rows of tables with an input_dim."""
        in_worker: int = super().count_params()
        return in_worker + sum(int(layer.count_params()) for layer in self.served.layers.values())

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print Model.summary, and after it the parameters on the servers, which its totals leave out."""
        with listing_tables(False):
            super().summary(*args, **kwargs)
        say = kwargs.get("print_fn") or (args[2] if len(args) > 2 else None) or print
        layers = self._served.layers if self._served is not None else {}
        say(f" Params on the servers: {sum(layer.count_params() for layer in layers.values()):,}")
        for name, layer in layers.items():
            rows = "rows created on demand" if layer.input_dim == -1 else f"{layer.input_dim:,} rows"
            say(f"   table {name}: {rows} × {layer.output_dim}, {layer.variable_dtype}")
