"""Models with distributed embeddings, made from ordinary ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from oe_runtime.client import Client
from oe_runtime.keras.backends import backend
from oe_runtime.keras.clone import clone
from oe_runtime.keras.embedding import Embedding, TableLayer
from oe_runtime.keras.in_worker import check_names, kept, warn_of_embeddings
from oe_runtime.keras.keras2 import refuse_legacy
from oe_runtime.keras.matrices import written_rows
from oe_runtime.keras.model import Distributed, DistributedModel
from oe_runtime.keras.served import Served, Settings
from oe_runtime.keras.servers import connect, known_workers
from oe_runtime.keras.translate import check_constraint
from oe_runtime.keras.unchanged import check_class, check_graph
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
    pipeline: bool = True,
    staleness: int = 0,
    micro_batches: int = 1,
    in_worker: Sequence[str] = (),
    fresh: bool | None = None,
) -> Distributed:
    """A model like `model`, with its large embeddings on parameter servers.

    Every `keras.layers.Embedding` with input_dim ≥ `sparse_as_dense_size`, and every
    `oe_runtime.keras.Embedding`, becomes a table of the servers behind `client`, named `name_prefix` + the
    layer's name; without a client, `flags` say where the servers are. All other weights are copied; `model`
    stays as it is. A subclassed model, whose graph is not known, is changed itself and returned; in it the
    layers are replaced that are its attributes, or those of its layers, in lists too.

    Rows are brought over from a layer whose weights differ anywhere from what its initializer gives again,
    because training, a file or set_weights wrote them; the servers get them when the result is compiled. Of
    any other layer the rows begin with what its initializer means: a pure function of its seed (`seed` if
    it has none), the table's name and the row, so not with the values that the original layer drew.

    The tables are made when the result is compiled, because their rows keep the optimizer's state.
    `nonfinite_gradients` says what they do with NaN and infinities: "refuse" raises GradientError, "skip"
    leaves such rows as they are, "pass" trains them like Keras.

    With `workers`, each process trains on its part of every batch: the gradients of the mean loss over all
    parts are applied, dense ones summed by `workers`, rows' by the servers, which `client` tells the same
    rank. All start with worker 0's weights. Metrics and callbacks see a process's own part.

    With `pipeline`, the rows of the next batch are pulled while one computes; the results are those of one
    step after the other, to the bit. `fit` and `evaluate` do so by themselves; see `prefetch` for
    `train_on_batch`. Where a next batch is known, another thread pushes, and the error of a push is raised by
    the next step, or whatever asks the servers first. With several workers, only reading the batch and making
    its ids unique is done early, because the next rows are there when all have pushed. `staleness=1` lets a
    push go out while the next batch computes, on rows that lack this one push, always: faster, as
    reproducible, but not what one step after the other gives.

    With `micro_batches`, a training step computes its batch in so many parts, one after the other, and adds
    up their gradients before it updates dense weights and pushes, once. It needs less memory, and gives the
    same within floating point for losses that are means over the examples, without BatchNormalization.

    Where the servers have rows of these tables already, compile() goes on from them, and a warning says so.
    `fresh=True` drops them first, with their checkpoints in the servers' storage: SpecError while clients
    other than these workers use them. `fresh=False` goes on without the warning. A model that brings rows
    over is refused without one of the two.

    `num_shards` and `override_method` are OpenEmbedding's: keys are always shared among all servers, and
    the methods are always those of `Distributed`. With `explicit`, an embeddings_constraint is an error;
    otherwise it is left out, and a warning says so.

    An embeddings_regularizer (L1, L2, L1L2) counts for the rows of the batch only, and a warning says so.

    Layers whose names are in `in_worker` stay as they are, with all that is inside of them. A warning names
    other layers whose weights stay in the worker's memory though their size belongs on servers.

    Raises ValueError naming the layer for what tables do not support: other regularizers, LoRA,
    quantization, other initializers, dtypes that are no floats, two layers of one name, a subclass of
    Embedding that overrides more than its constructor and configuration; naming the model for a functional
    or Sequential one whose class overrides its call, its steps or its loss; and compile() with
    several workers for clipping and regularizers, which are about the gradients of all.
    """
    del num_shards, override_method
    settings = Settings(
        seed=seed,
        name_prefix=name_prefix,
        nonfinite_gradients=nonfinite_gradients,
        pipeline=pipeline,
        staleness=staleness,
        micro_batches=micro_batches,
        in_worker=tuple(in_worker),
        fresh=fresh,
    )
    workers = together(client, workers, settings)

    def replace(layer: Any) -> Any:
        if id(layer) in stays:
            return None
        if isinstance(layer, keras.layers.Embedding) and layer.input_dim >= sparse_as_dense_size:
            return server_embedding(Embedding, layer, explicit=explicit)
        return None

    refuse_legacy(model)
    if not isinstance(model, keras.Model):
        raise ValueError(f"a keras.Model is needed, not {type(model).__name__}")
    check_names(model, in_worker)
    stays = kept(model, in_worker)
    new: Distributed
    if isinstance(model, keras.Sequential) or getattr(model, "inputs", None):
        if not isinstance(model, WithTables):
            check_graph(model)
        new = DistributedModel(*clone(model, replace), name=model.name)
    else:
        new = in_place(model, replace, Distributed, keras)
    warn_of_embeddings(new, keras, sparse_as_dense_size, in_worker)
    backend.adapt(new)
    new._bind(client if client is not None else connect(workers), workers, settings)
    warn_of_regularizers(new.served)
    return new


def together(client: Any, workers: Workers | None, settings: Settings) -> Workers | None:
    """The workers that train a model, those of `flags` if none are given; None where it is one.

    Raises ValueError or TypeError for options that do not go together, or not with Keras's backend.
    """
    if client is None and workers is None:
        workers = known_workers()
    several = workers is not None and workers.count > 1
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
    """The subclassed model itself, with its layers replaced and `methods`; `library` is keras or tf_keras."""
    kind = type(model)
    if own := [name for name in _STEPS if getattr(kind, name) is not getattr(library.Model, name)]:
        raise ValueError(
            f"{kind.__name__} has a {' and a '.join(own)} of its own, but a step with distributed "
            "embeddings pulls and pushes rows around the model's call; override call, compute_loss or "
            "compute_metrics instead"
        )
    if getattr(model, "compiled", False) or getattr(model, "_is_compiled", False):
        raise ValueError("the model is compiled already: give it to distributed_model before compile")
    _replace_attributes(model, replace, library, {})
    model.__class__ = type(kind.__name__, (methods, kind), {"__module__": kind.__module__})
    return model


def _replace_attributes(
    owner: Any, replace: Callable[[Any], Any], library: Any, known: dict[int, Any]
) -> None:
    """Replaces the layers that are attributes of a layer and of its layers; `known`: by what, by id."""

    def new(value: Any) -> Any:
        """`value` itself where there is nothing to replace."""
        if isinstance(value, library.layers.Layer):
            if id(value) not in known:
                replacement = replace(value)
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

    tracker: Any = getattr(owner, "_tracker", None)  # of Keras 3: it takes no new layers where all is built
    locked = tracker is not None and tracker.locked
    if locked:
        tracker.unlock()
    # On PyTorch, layers are not among the attributes but in its modules.
    for name, value in [*vars(owner).items(), *vars(owner).get("_modules", {}).items()]:
        if name.startswith("_"):  # what Keras itself keeps track of
            continue
        changed = new(value)
        if changed is not value:
            setattr(owner, name, changed)
    if locked:
        tracker.lock()
    if library is not keras:  # which forgets them by itself
        return
    for old in [layer for layer in owner._layers if known.get(id(layer), layer) is not layer]:
        owner._tracker.untrack(old)


def server_embedding(kind: type[TableLayer], layer: Any, *, explicit: bool) -> Any:
    """A layer of our `kind` in place of an Embedding of Keras or tf-keras."""
    if layer.embeddings_constraint is not None and not explicit:
        warnings.warn(
            f"embeddings_constraint of layer '{layer.name}' is left out: Keras applies it to the whole "
            "matrix after each step; regularize with L2, or clip the gradients",
            stacklevel=4,
        )
    else:
        check_constraint(layer.embeddings_constraint, layer.name)
    unsupported = {
        "lora_rank": getattr(layer, "lora_rank", None),
        "quantization": getattr(layer, "quantization_mode", None),
    }
    for option, value in unsupported.items():
        if value is not None:
            raise ValueError(f"layer '{layer.name}': {option} is not supported for rows on parameter servers")
    check_class(layer, kind._library.layers.Embedding)
    new = kind(
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
    written = written_rows(layer)
    if written is not None:
        new.set_weights([written])
    return new


def warn_of_regularizers(served: Served) -> None:
    """Warns that they are about the rows of a batch."""
    names = [layer.name for layer in served.layers.values() if layer.embeddings_regularizer is not None]
    if names:
        warnings.warn(
            f"embeddings_regularizer of {', '.join(names)}: only the rows of a batch are regularized in its "
            "step, while Keras regularizes all rows of a matrix in every step",
            stacklevel=3,
        )
