"""Ordinary Keras models made into models with distributed embeddings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from oe_runtime.client import Client
from oe_runtime.keras.backends import backend
from oe_runtime.keras.clone import clone
from oe_runtime.keras.embedding import Embedding, TableLayer
from oe_runtime.keras.in_worker import check_names, find_kept_layers, warn_of_embeddings
from oe_runtime.keras.keras2 import refuse_legacy
from oe_runtime.keras.matrices import written_rows
from oe_runtime.keras.model import Distributed, DistributedModel
from oe_runtime.keras.replacement_checks import check_class, check_graph
from oe_runtime.keras.served import Served, Settings
from oe_runtime.keras.servers import connect, job_client, known_workers, step_settings
from oe_runtime.keras.translate import check_constraint
from oe_runtime.keras.with_tables import WithTables

if TYPE_CHECKING:
    from oe_runtime.keras.workers import Workers


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
    """Return a model like `model`, with its large embeddings on parameter servers.

    Every `keras.layers.Embedding` with input_dim ≥ `sparse_as_dense_size`, and every
    `oe_runtime.keras.Embedding`, becomes a table on the servers of `client`, named `name_prefix` + the
    layer's name. Without a client, they are those of the job that a launcher
    started this process for, or `flags` name them. All other weights are copied; `model` stays
    unchanged. A subclassed model, whose graph is not known, is changed in place and returned. Its replaced
    layers are those in its attributes, or in its layers' attributes, lists included.

    Rows are copied from a layer whose weights differ from the output of its initializer, because training, a
    file or set_weights wrote them. The servers get them when the result is compiled. All other rows start
    from the initializer as a pure function of its seed (`seed` if it has none), the table's name and the row,
    so not with the values that the original layer drew.

    compile() creates the tables, because their rows keep the optimizer's state. `nonfinite_gradients` handles
    NaN and infinities: "refuse" raises GradientError, "skip" leaves such rows unchanged, "pass" trains them
    like Keras. `state_dtype="bfloat16"` keeps the optimizer's state of rows in two bytes per number, and
    `exchange_dtype="bfloat16"` sends gradients of rows so, unless a layer says otherwise.

    With `workers`, by default those of the job of `client` (oe_runtime.job), each process trains on its part
    of every batch. The gradients of the mean loss over all parts are applied: `workers` sum the dense ones,
    the servers those of rows; `client` must have the same rank. All start with worker 0's weights.
    Metrics and callbacks see a process's own part.

    With `pipeline`, the rows of the next batch are pulled while one computes. The results equal those of
    sequential steps, bit for bit. `fit` and `evaluate` use it; see `prefetch` for `train_on_batch`. Where the
    next batch is known, another thread pushes, and the next step, or the next request to the servers, raises
    the errors of a push. Several workers only read the next batch and make its ids unique: its rows exist
    once all workers have pushed.

    `staleness=1` sends a push while the next batch computes, on rows that always lack this one push. It is
    faster and as reproducible, but its results differ from sequential steps.

    With `micro_batches`, a training step computes its batch in that many parts, one after the other, and sums
    their gradients before it updates dense weights and pushes, once. It needs less memory. Results are equal
    within floating point for losses that are means over the examples, without BatchNormalization.

    Unless these three are named, the flags of the job count (oe_runtime.job: --pipeline, --staleness,
    --micro-batch); elsewhere they are True, 0 and 1.

    Where the servers already have rows of these tables, compile() keeps them with a warning. `fresh=True`
    drops them first, with their checkpoints in the servers' storage; it raises SpecError while other clients
    than these workers use them. `fresh=False` keeps them without the warning. A model that brings its own
    rows needs one of the two.

    `num_shards` and `override_method` are OpenEmbedding's and have no effect: all servers share the keys, and
    the methods are always those of `Distributed`. With `explicit`, an embeddings_constraint is an error;
    otherwise it is ignored with a warning.

    An embeddings_regularizer (L1, L2, L1L2) covers only the rows of the batch, with a warning.

    Layers named in `in_worker` stay unchanged, with everything inside them. A warning names other layers with
    weights in the worker's memory whose size belongs on servers.

    Raises ValueError naming the layer for what tables do not support: other regularizers, LoRA, quantization,
    other initializers, dtypes that are not floats, two layers of one name, a subclass of Embedding that
    overrides more than its constructor and configuration. Raises ValueError naming the model for a functional
    or Sequential one whose class overrides its call, its steps or its loss. compile() raises ValueError with
    several workers for clipping and regularizers, which need the gradients of all.
    """
    del num_shards, override_method
    refuse_legacy(model)
    if not isinstance(model, keras.Model):
        raise ValueError(f"a keras.Model is needed, not {type(model).__name__}")
    steps = step_settings(client, pipeline, staleness, micro_batches)
    dtypes = (state_dtype, exchange_dtype)
    settings = Settings(seed, name_prefix, nonfinite_gradients, *steps, in_worker, fresh, *dtypes)
    kinds = (Embedding, DistributedModel, Distributed)
    new: Distributed = convert(model, client, workers, settings, kinds, sparse_as_dense_size, explicit)
    return new


def convert(
    model: Any,
    client: Client | None,
    workers: Workers | None,
    settings: Settings,
    kinds: tuple[type[TableLayer], type, type],
    size: int,
    explicit: bool,
) -> Any:
    """Do as `distributed_model` for either library, with its `kinds` of layer and models."""
    embedding, functional, subclassed = kinds
    library = embedding._library
    client = client if client is not None else job_client()
    workers = check_workers(client, workers, settings)
    check_names(model, settings.in_worker)
    stays = find_kept_layers(model, settings.in_worker)

    def replace(layer: Any) -> Any:
        if id(layer) in stays:
            return None
        if isinstance(layer, TableLayer) and layer.sparse_as_dense:
            return worker_embedding(library, layer)
        if isinstance(layer, library.layers.Embedding) and layer.input_dim >= size:
            return server_embedding(embedding, layer, explicit=explicit)
        return None

    if isinstance(model, library.Sequential) or getattr(model, "inputs", None):
        if not isinstance(model, WithTables):
            check_graph(model)
        new = functional(*clone(model, replace, library), name=model.name)
    else:
        new = in_place(model, replace, subclassed, library)
    warn_of_embeddings(new, library, size, settings.in_worker)
    backend.adapt(new)
    new._bind(client if client is not None else connect(workers), workers, settings)
    warn_of_regularizers(new.served)
    return new


def check_workers(client: Any, workers: Workers | None, settings: Settings) -> Workers | None:
    """Return the workers that train a model, by default those of `flags` or the job; None for a single one.

    Raises ValueError or TypeError for options that do not fit together or with Keras's backend.
    """
    if workers is None:
        workers = known_workers() if client is None else client.workers
    several = workers is not None and workers.count > 1
    if workers is not None and several and hasattr(workers, "wish"):
        warnings.warn("Workers.wish and .wishes are now .stop_request and .stop_requests", stacklevel=4)
        workers.stop_request, workers.stop_requests = workers.wish, workers.wishes  # type: ignore[attr-defined]
    staleness, micro_batches = settings.staleness, settings.micro_batches
    backend.check(several_workers=several, staleness=staleness, micro_batches=micro_batches)
    if client is not None and not isinstance(client, Client):
        raise TypeError(f"client is a {type(client).__name__}, not an oe_runtime.Client; name the options")
    if staleness not in (0, 1):
        raise ValueError(f"staleness is 0 or 1, not {staleness!r}")
    if staleness and (not settings.pipeline or several):
        raise ValueError("staleness=1 needs the pipeline, and one worker")
    if micro_batches < 1:
        raise ValueError(f"micro_batches is 1 or more, not {micro_batches!r}")
    return workers if several else None


_STEPS = (
    "train_step",
    "test_step",
    "predict_step",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)


def in_place(model: Any, replace: Callable[[Any], Any], methods: type, library: Any) -> Any:
    """Replace the layers of a subclassed model in place and add `methods`; `library` is keras or tf_keras."""
    kind = type(model)
    if own := [name for name in _STEPS if getattr(kind, name) is not getattr(library.Model, name)]:
        raise ValueError(
            f"{kind.__name__} overrides {' and '.join(own)}, but a step with distributed embeddings pulls "
            "and pushes rows around the model's call; override call, compute_loss or compute_metrics instead"
        )
    if getattr(model, "compiled", False) or getattr(model, "_is_compiled", False):
        raise ValueError("the model is compiled already: give it to distributed_model before compile")
    _replace_attributes(model, replace, library, {})
    model.__class__ = type(kind.__name__, (methods, kind), {"__module__": kind.__module__})
    return model


def _replace_attributes(
    owner: Any, replace: Callable[[Any], Any], library: Any, known: dict[int, Any]
) -> None:
    """Replace the layers in the attributes of a layer and of its layers; `known`: replacements by id."""

    def new(value: Any) -> Any:
        """Return `value` itself where there is nothing to replace."""
        if isinstance(value, library.layers.Layer):
            if id(value) not in known:
                replacement = replace(value)
                if replacement is None:
                    replacement = _inner_model(value, replace, library, known)
                known[id(value)] = value if replacement is None else replacement
                if replacement is None:
                    _replace_attributes(value, replace, library, known)
            return known[id(value)]
        if isinstance(value, dict):
            changed: Any = {key: new(one) for key, one in value.items()}
            return changed if any(changed[key] is not one for key, one in value.items()) else value
        if isinstance(value, (list, tuple)):
            changed = [new(one) for one in value]
            return changed if any(a is not b for a, b in zip(changed, value, strict=True)) else value
        return value

    tracker: Any = getattr(owner, "_tracker", None)  # of Keras 3: refuses new layers in a built layer
    locked = tracker is not None and tracker.locked
    if locked:
        tracker.unlock()
    # On PyTorch, layers are not among the attributes but in its modules.
    for name, value in [*vars(owner).items(), *vars(owner).get("_modules", {}).items()]:
        if name.startswith("_"):  # Keras's own
            continue
        changed = new(value)
        if changed is not value:
            setattr(owner, name, changed)
    if locked:
        tracker.lock()
    if library is not keras:  # tf-keras forgets them itself
        return
    for old in [layer for layer in owner._layers if known.get(id(layer), layer) is not layer]:
        owner._tracker.untrack(old)


def _inner_model(model: Any, replace: Callable[[Any], Any], library: Any, known: dict[int, Any]) -> Any:
    """Return a copy of the library's own model with a graph, or of its Sequential, with layers replaced.

    None for other layers, and where there is nothing to replace. Layers that it shares stay shared.
    """
    stock = type(model).__module__.startswith((f"{library.__name__}.", "keras."))
    if not stock or not isinstance(model, library.Model):
        return None
    inner = model._flatten_layers(include_self=False)
    for layer in inner:
        if id(layer) not in known and (new := replace(layer)) is not None:
            known[id(layer)] = new
    replaced = [layer for layer in inner if known.get(id(layer), layer) is not layer]
    if not replaced:
        return None

    def shared(layer: Any) -> Any:
        if isinstance(layer, library.Model) and getattr(layer, "inputs", None):
            return None  # `clone` enters it
        if id(layer) not in known:
            within = _inner_model(layer, replace, library, known)
            known[id(layer)] = layer if within is None else within
        return known[id(layer)]

    if getattr(model, "inputs", None):
        copy = library.Model(*clone(model, shared, library), name=model.name)
    else:
        copy = library.Sequential([shared(layer) for layer in model.layers], name=model.name)
    if not model.trainable:
        copy.trainable = False
    for layer in replaced:  # the layers behind it know it by the graph of `model`
        for name in ("_embeddings", "embeddings"):
            vars(layer).pop(name, None)
        for variables in ("_trainable_variables", "_non_trainable_variables", "_trainable_weights"):
            if isinstance(kept := vars(layer).get(variables), list):
                kept.clear()
    return copy


def server_embedding(kind: type[TableLayer], layer: Any, *, explicit: bool) -> Any:
    """Return a layer of our `kind` for an Embedding of Keras or tf-keras."""
    if layer.embeddings_constraint is not None and not explicit:
        warnings.warn(
            f"embeddings_constraint of layer '{layer.name}' is ignored: Keras applies it to the whole "
            "matrix after each step; regularize with L2, or clip the gradients",
            stacklevel=4,
        )
    else:
        check_constraint(layer.embeddings_constraint, layer.name)
    unsupported = {
        "lora_rank": getattr(layer, "lora_rank", None),
        "quantization": getattr(layer, "quantization_mode", None),
        "sparse=True": getattr(layer, "sparse", None) or None,  # of tf-keras
    }
    for option, value in unsupported.items():
        if value is not None:
            raise ValueError(f"layer '{layer.name}': {option} is not supported for rows on parameter servers")
    check_class(layer, kind._library.layers.Embedding)
    new = _embedding_like(layer, kind)
    written = written_rows(layer)
    if written is not None:
        new.set_weights([written])
    return new


def worker_embedding(library: Any, layer: TableLayer) -> Any:
    """Return the library's own Embedding for a layer with sparse_as_dense."""
    new = _embedding_like(layer, library.layers.Embedding)
    new.sparse_as_dense = True
    return new


def _embedding_like(layer: Any, kind: Any) -> Any:
    return kind(
        layer.input_dim,
        layer.output_dim,
        layer.embeddings_initializer,
        embeddings_regularizer=layer.embeddings_regularizer,
        activity_regularizer=layer.activity_regularizer,
        mask_zero=layer.mask_zero,
        name=layer.name,
        dtype=layer.dtype_policy,
        trainable=layer.trainable,
    )


def warn_of_regularizers(served: Served) -> None:
    """Warn that regularizers cover only the rows of a batch."""
    names = [layer.name for layer in served.layers.values() if layer.embeddings_regularizer is not None]
    if names:
        warnings.warn(
            f"embeddings_regularizer of {', '.join(names)}: only the rows of a batch are regularized in its "
            "step, while Keras regularizes all rows of a matrix in every step",
            stacklevel=4,
        )
