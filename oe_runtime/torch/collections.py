"""Collections of embedding tables with the arguments and results of TorchRec's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from oe_runtime import _core
from oe_runtime.client import Bags
from oe_runtime.torch import in_backward, jagged
from oe_runtime.torch.embedding import (
    Embedding,
    EmbeddingBag,
    TableLayer,
    bring,
    check_ids,
    is_compiling,
    look_up,
)
from oe_runtime.torch.pooling import Feature, Request, plan, pooled
from oe_runtime.torch.state import refuse_tracing


class PoolingType(Enum):
    """How the rows of a bag become one embedding."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass
class EmbeddingConfig:
    """A table of a collection; the names are TorchRec's.

    `num_embeddings` is the number of rows, or -1 for any 64-bit id. `feature_names` are the features that
    look rows up in it, by default one of the table's name. Rows start uniformly between `weight_init_min` and
    `weight_init_max` (by default ∓sqrt(1 / num_embeddings), or ∓0.01 for any id), or from `initializer`
    (`oe_runtime.TableSpec`), or as `init_fn` fills a tensor (num_embeddings, embedding_dim) in place.
    `data_type` is torch.float32, bfloat16 or float16, or the name of TorchRec or FBGEMM for it. `admission`
    and `eviction` decide which ids get a row and which rows are removed; `state_dtype` is that of the
    optimizer's state, `exchange_dtype` that of gradients on their way to servers. `weights_precision` and
    `stochastic_rounding` are FBGEMM's words: another one for `data_type`, and whether rows of two bytes are
    rounded stochastically, which they always are here.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = torch.float32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Any], Any] | None = None
    initializer: Mapping[str, Any] | None = None
    admission: Mapping[str, Any] | None = None
    eviction: Sequence[Mapping[str, Any]] = ()
    state_dtype: str | None = None
    exchange_dtype: str | None = None
    weights_precision: Any = None
    stochastic_rounding: bool | None = None


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of a collection of bags: an `EmbeddingConfig`, and how a bag's rows become one embedding."""

    pooling: Any = PoolingType.SUM  # or TorchRec's, or its name


_DTYPES = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    **{str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)},
}
# Fields of TorchRec's configurations that mean nothing here, with their defaults.
_REFUSED = {
    "num_embeddings_post_pruning": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
}


@dataclass
class Planned:
    """The requests of a batch, and where its embeddings go."""

    features: Any
    lookups: list[tuple[int, str, _FeatureIds]]  # number of the table, the embedding's name, and the ids
    outputs: list[NDArray[np.float32]]
    requests: list[Request]
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.versions = _versions(self.features)

    def is_of(self, features: Any) -> bool:
        """Whether it is of this batch, which has not been changed since."""
        return features is self.features and _versions(features) == self.versions


def _versions(features: Any) -> tuple[int, ...]:
    parts = (features.values(), features.offsets(), features.weights_or_none())
    # Tensors of inference mode do not count their changes.
    return tuple(-1 if part is None or part.is_inference() else part._version for part in parts)


class Collection(nn.Module):  # type: ignore[misc]
    """The common part: a layer for each table, and the ids of a batch."""

    def __init__(self, tables: Sequence[Any], layers: dict[str, TableLayer]) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a collection has at least one table")
        self._tables = list(tables)
        self.layers = list(layers.values())
        self.ahead: list[Planned] = []  # of batches whose rows are pulled already
        self.number = 0  # by which operators find it
        self._feature_names = [list(table.feature_names) or [table.name] for table in tables]
        every = [name for names in self._feature_names for name in names]
        # As in TorchRec: a feature of several tables is named with the table.
        self._embedding_names = [
            [f"{name}@{table.name}" if every.count(name) > 1 else name for name in names]
            for table, names in zip(tables, self._feature_names, strict=True)
        ]

        names = zip(tables, self._embedding_names, strict=True)
        every_name = [(table.embedding_dim, name) for table, of_table in names for name in of_table]
        self._dims, self._names = [dim for dim, _ in every_name], [name for _, name in every_name]

    def plan(self, features: Any) -> Planned:
        """Plan the requests for the rows of a batch."""
        raise NotImplementedError

    def shape_of(self, ids: int, lists: int, features: int) -> tuple[Any, ...]:
        """Return the shape of the output for a batch of so many ids in so many lists of so many features."""
        raise NotImplementedError

    def _compiled(self, features: Any, weights: Any = None) -> Any:
        """Return the output in a program that torch.compile makes, by an operator (`operators`)."""
        anchors = [layer._parameters["anchor"] for layer in self.layers]
        trains = torch.is_grad_enabled() and any(anchor.requires_grad for anchor in anchors)
        anchors += [self.witness] if trains else []
        return look_up(
            features.values(),
            features.offsets(),
            None if weights is None else weights.contiguous(),
            anchors,
            "\n".join(features.keys()),
            self.number,
            trains,
        )

    def _pooled(self, features: Any) -> tuple[Planned, list[Any]]:
        """Return what a batch asks for, and its outputs."""
        refuse_tracing(self, features.values() if hasattr(features, "stride_per_key") else torch.empty(0))
        planned = next((one for one in self.ahead if one.is_of(features)), None)
        if planned is not None:
            self.ahead.remove(planned)
        else:
            planned = self.plan(features)
            for request in planned.requests:
                bring(request.client, request.pulled)
        return planned, pooled(planned.requests, planned.outputs, features.values().device)

    def _lookups(self, features: Any, weighted: bool) -> list[tuple[int, str, _FeatureIds]]:
        """Return the number of the table, the embedding's name and the ids of each lookup."""
        parts = _parts(features, weighted)
        return [(number, name, parts[feature]) for number, name, feature in self._named(parts)]

    def _named(self, features: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
        """Yield the number of the table, the embedding's name and the feature of each lookup."""
        for number, table in enumerate(self._tables):
            for feature, name in zip(self._feature_names[number], self._embedding_names[number], strict=True):
                if feature not in features:
                    raise ValueError(
                        f"the batch has no feature '{feature}', which table '{table.name}' looks up; it has "
                        f"{', '.join(features) or 'none'}"
                    )
                yield number, name, feature

    def lookups(self, features: Sequence[str] | Mapping[str, Any]) -> list[tuple[TableLayer, str, str]]:
        """Return the layer, the embedding's name and the feature of each lookup of a batch of `features`."""
        return [(self.layers[number], name, feature) for number, name, feature in self._named(features)]


class EmbeddingBagCollection(Collection):
    """TorchRec's EmbeddingBagCollection, with the tables on the parameter servers.

    Called with a KeyedJaggedTensor (this package's or TorchRec's) of int64 or int32 ids, it returns a
    KeyedTensor of the same package: for each feature of each table, in the order of the tables, an embedding
    per example, float32. With `is_weighted` each id's row is multiplied by its weight, which is trained if it
    requires gradients; without, weights are ignored, as in TorchRec. All tables take one request per step.

    Raises ValueError for configurations and batches that do not fit, and KeyRangeError for ids beyond a
    table's rows.
    """

    def __init__(self, tables: Sequence[Any], is_weighted: bool = False, device: Any = None) -> None:
        layers: dict[str, TableLayer] = {}
        for table in tables:
            pooling = _name_of(getattr(table, "pooling", "SUM"))
            if pooling not in ("SUM", "MEAN"):
                raise ValueError(f"table '{table.name}': pooling must be SUM or MEAN, not {pooling}")
            if pooling == "MEAN" and is_weighted:
                raise ValueError(f"table '{table.name}': pooling MEAN does not go with is_weighted=True")
            _add(
                layers, table, EmbeddingBag(**_options(table), mode=pooling.lower(), include_last_offset=True)
            )
        super().__init__(tables, layers)
        self.embedding_bags = nn.ModuleDict(layers).to(device)
        self._is_weighted = is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """Return the tables' configurations."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether ids have weights."""
        return self._is_weighted

    def plan(self, features: Any) -> Planned:
        """See Collection."""
        lookups = self._lookups(features, self._is_weighted)
        dims = [self._tables[number].embedding_dim for number, *_ in lookups]
        counts = [len(part.offsets) - 1 for *_, part in lookups]
        if _inverse(features) is not None:
            outputs = [_core.empty(n, dim, False) for n, dim in zip(counts, dims, strict=True)]
            places = [(i, (slice(None), slice(None))) for i in range(len(lookups))]
        else:
            if len(set(counts)) > 1:
                uneven = ", ".join(f"{name} {n}" for (_, name, _), n in zip(lookups, counts, strict=True))
                raise ValueError(
                    "features of a batch have different numbers of examples, and the batch has no "
                    f"inverse_indices to say which list is whose: {uneven}"
                )
            columns = list(accumulate(dims, initial=0))
            outputs = [_core.empty(counts[0], columns[-1], False)]
            places = [(0, (slice(None), slice(*pair))) for pair in pairwise(columns)]
        asked = []
        for (number, _, part), place in zip(lookups, places, strict=True):
            layer = self.layers[number]
            bags = Bags(part.offsets, part.array, layer.mode == "mean")
            asked.append(Feature(layer, part.ids, bags, part.weights, *place))
        return Planned(features, lookups, outputs, plan(asked))

    def shape_of(self, ids: int, lists: int, features: int) -> tuple[Any, ...]:
        """See Collection."""
        return lists // features, sum(self._dims)

    def forward(self, features: Any) -> Any:
        """Return the embedding of each feature and example, a KeyedTensor."""
        if is_compiling() and features.inverse_indices_or_none() is None:
            values = self._compiled(features, features.weights_or_none() if self._is_weighted else None)
            return package_of(features).KeyedTensor(list(self._names), list(self._dims), values)
        return self._look_up(features)

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _look_up(self, features: Any) -> Any:
        planned, values = self._pooled(features)
        if (inverse := _inverse(features)) is not None:
            values = [torch.cat(_by_example(values, planned.lookups, inverse), dim=1)]
        names = [name for _, name, _ in planned.lookups]
        dims = [self._tables[number].embedding_dim for number, *_ in planned.lookups]
        return package_of(features).KeyedTensor(names, dims, values[0])


class EmbeddingCollection(Collection):
    """TorchRec's EmbeddingCollection, with the tables on the parameter servers.

    Called with a KeyedJaggedTensor (this package's or TorchRec's) of int64 or int32 ids, it returns for each
    feature a JaggedTensor with the embedding of each id, float32; with `need_indices` its weights are the
    ids. All tables have one `embedding_dim`, and take one request per step.

    Raises ValueError for configurations and batches that do not fit, and KeyRangeError for ids beyond a
    table's rows.
    """

    def __init__(self, tables: Sequence[Any], device: Any = None, need_indices: bool = False) -> None:
        layers: dict[str, TableLayer] = {}
        for table in tables:
            _add(layers, table, Embedding(**_options(table)))
            if table.embedding_dim != tables[0].embedding_dim:
                raise ValueError(
                    f"tables of an EmbeddingCollection have one embedding_dim; '{tables[0].name}' has "
                    f"{tables[0].embedding_dim}, '{table.name}' {table.embedding_dim}"
                )
        super().__init__(tables, layers)
        self.embeddings = nn.ModuleDict(layers).to(device)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[Any]:
        """Return the tables' configurations."""
        return self._tables

    def embedding_dim(self) -> int:
        """Return the tables' dim."""
        return int(self._tables[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the embeddings of each table."""
        return self._embedding_names

    def need_indices(self) -> bool:
        """Whether the result has the ids."""
        return self._need_indices

    def plan(self, features: Any) -> Planned:
        """See Collection."""
        lookups = self._lookups(features, weighted=False)
        ends = list(accumulate((len(part.ids) for *_, part in lookups), initial=0))
        output = _core.empty(ends[-1], self.embedding_dim(), False)
        asked = []
        for (number, _, part), pair in zip(lookups, pairwise(ends), strict=True):
            bags = Bags(np.arange(len(part.ids) + 1))  # of one id each
            asked.append(Feature(self.layers[number], part.ids, bags, None, 0, (slice(*pair), slice(None))))
        return Planned(features, lookups, [output], plan(asked))

    def shape_of(self, ids: int, lists: int, features: int) -> tuple[Any, ...]:
        """See Collection."""
        return ids, self._dims[0]

    def forward(self, features: Any) -> dict[str, Any]:
        """Return the embedding of each id, by feature."""
        # How many ids each of several features has is not known while a program is compiled.
        if is_compiling() and len(self._names) == 1 and features.keys() == self._feature_names[0]:
            values, indices = self._compiled(features), features.values() if self._need_indices else None
            kind = package_of(features).JaggedTensor
            return {self._names[0]: kind(values=values, lengths=features.lengths(), weights=indices)}
        found: dict[str, Any] = self._look_up(features)
        return found

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _look_up(self, features: Any) -> dict[str, Any]:
        planned, (values,) = self._pooled(features)
        kind = package_of(features).JaggedTensor
        found = {}
        rows = values.split([len(part.ids) for *_, part in planned.lookups])
        for (_, name, part), own in zip(planned.lookups, rows, strict=True):
            lengths = torch.from_numpy(np.diff(part.offsets)).to(values.device)
            indices = torch.from_numpy(part.ids).to(values.device) if self._need_indices else None
            found[name] = kind(values=own, lengths=lengths, weights=indices)
        return found


def replacement(layer: Any, size: int) -> Collection | None:
    """Return a collection in place of one of TorchRec's that has a table of `size` rows or more, or None."""
    if type(layer).__module__ != "torchrec.modules.embedding_modules":
        return None
    new: Collection
    if type(layer).__name__ == "EmbeddingBagCollection":
        tables, stock = layer.embedding_bag_configs(), layer.embedding_bags
        new = EmbeddingBagCollection(_without_rows(tables, stock), layer.is_weighted())
    elif type(layer).__name__ == "EmbeddingCollection":
        tables, stock = layer.embedding_configs(), layer.embeddings
        new = EmbeddingCollection(_without_rows(tables, stock), need_indices=layer.need_indices())
    else:
        return None
    if all(table.num_embeddings < size for table in tables):
        return None
    for table, own in zip(tables, new.layers, strict=True):
        weight = stock[table.name].weight
        in_backward.take(own, weight)
        own.frozen = not weight.requires_grad
        if not weight.is_meta:
            own.set_rows(weight)
    new.train(layer.training)
    return new


def _without_rows(tables: Sequence[Any], stock: Any) -> list[Any]:
    """Return the tables without the functions of first rows that the layers of `stock` have called.

    Those on the meta device have no rows yet.
    """
    return [table if stock[table.name].weight.is_meta else replace(table, init_fn=None) for table in tables]


@dataclass
class _FeatureIds:
    """One feature of a batch."""

    name: str
    ids: NDArray[np.int64]
    offsets: NDArray[np.int64]  # of its lists, from 0
    weights: Any  # a tensor; None: none
    array: NDArray[np.float32] | None  # the same


def _parts(features: Any, weighted: bool) -> dict[str, _FeatureIds]:
    """Return the features of a batch. Raises ValueError and TypeError naming the one that is wrong."""
    try:
        keys, values, strides = features.keys(), features.values(), features.stride_per_key()
        offsets = features.offsets().detach().to("cpu", torch.int64).numpy()
    except AttributeError:
        raise TypeError(
            f"a collection takes a KeyedJaggedTensor of oe_runtime.torch or of TorchRec, not "
            f"{type(features).__name__}"
        ) from None
    check_ids(values)
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"the batch has two features of the name '{twice[0]}'")
    ids = values.detach().reshape(-1).to("cpu", torch.int64).numpy()
    ends = list(accumulate(strides, initial=0))
    _check_offsets(keys, ends, offsets, len(ids))
    weights, array = None, None
    if weighted:
        weights = features.weights_or_none()
        if weights is None:
            raise ValueError("the collection is weighted (is_weighted=True), but the batch has no weights")
        if weights.shape != (len(ids),):
            raise ValueError(f"the batch has {len(ids)} ids, but weights of shape {tuple(weights.shape)}")
        array = weights.detach().to("cpu", torch.float32).contiguous().numpy()
    found = {}
    for key, (first, last) in zip(keys, pairwise(ends), strict=True):
        begin, end = int(offsets[first]), int(offsets[last])
        found[key] = _FeatureIds(
            key,
            ids[begin:end],
            offsets[first : last + 1] - begin,
            None if weights is None else weights[begin:end],
            None if array is None else array[begin:end],
        )
    return found


def _check_offsets(keys: Sequence[str], ends: Sequence[int], offsets: NDArray[np.int64], ids: int) -> None:
    if len(offsets) != ends[-1] + 1 or (len(offsets) and offsets[0] != 0):
        raise ValueError(
            f"the batch has {ends[-1]} lists of ids, but {len(offsets)} offsets, which begin with "
            f"{offsets[0] if len(offsets) else 'none'}"
        )
    if (down := offsets[1:] < offsets[:-1]).any():
        place = int(down.argmax())
        number = next(i for i, end in enumerate(ends[1:]) if place < end)
        raise ValueError(
            f"feature '{keys[number]}': list {place - ends[number]} has the length "
            f"{offsets[place + 1] - offsets[place]}"
        )
    if offsets[-1] != ids:
        raise ValueError(f"the lengths of the batch's lists sum to {offsets[-1]}, but it has {ids} ids")


def _inverse(features: Any) -> tuple[Sequence[str], Any] | None:
    """Return which list of a feature an example has, by feature; None if it has that of its own number."""
    found: tuple[Sequence[str], Any] | None = features.inverse_indices_or_none()
    return found


def _by_example(
    values: Sequence[Any], lookups: Sequence[tuple[int, str, _FeatureIds]], inverse: tuple[Sequence[str], Any]
) -> list[Any]:
    """Return each example's embeddings where examples share lists of ids."""
    rows = dict(zip(inverse[0], inverse[1], strict=True))
    found = []
    for value, (*_, part) in zip(values, lookups, strict=True):
        if part.name not in rows:
            raise ValueError(f"the batch's inverse_indices have no feature '{part.name}'")
        found.append(value.index_select(0, rows[part.name].to(value.device)))
    return found


def _add(layers: dict[str, TableLayer], table: Any, layer: TableLayer) -> None:
    if not table.name:
        raise ValueError("each table of a collection has a name")
    if "." in table.name or hasattr(nn.ModuleDict(), table.name):
        raise ValueError(f"table '{table.name}': PyTorch does not take this name for a layer; choose another")
    if table.name in layers:
        raise ValueError(f"two tables of the collection have the name '{table.name}'")
    if table.init_fn is not None and not _is_uniform(table.init_fn) and table.num_embeddings != -1:
        rows = torch.empty(table.num_embeddings, table.embedding_dim)
        with torch.no_grad():
            table.init_fn(rows)
        layer.set_rows(rows)
    layers[table.name] = layer


def _options(table: Any) -> dict[str, Any]:
    """Return the arguments of a table's layer. Raises ValueError for what tables here do not have."""
    where = f"table '{table.name}'"
    for option, default in _REFUSED.items():
        if getattr(table, option, default) != default:
            raise ValueError(f"{where}: {option} is not offered for tables on parameter servers")
    dtype = _dtype(table, where)
    initializer = getattr(table, "initializer", None)
    if table.num_embeddings == -1 and table.init_fn is not None and not _is_uniform(table.init_fn):
        raise ValueError(f"{where}: init_fn fills all rows at once, but num_embeddings=-1 has any id")
    if initializer is None:
        bound = 0.01 if table.num_embeddings <= 0 else math.sqrt(1 / table.num_embeddings)
        low = -bound if table.weight_init_min is None else table.weight_init_min
        high = bound if table.weight_init_max is None else table.weight_init_max
        if _is_uniform(table.init_fn):
            low, high = table.init_fn.keywords["a"], table.init_fn.keywords["b"]
        initializer = {"name": "uniform", "minval": float(low), "maxval": float(high)}
    return {
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": dtype,
        "name": table.name,
        "initializer": initializer,
        "admission": getattr(table, "admission", None),
        "eviction": getattr(table, "eviction", ()),
        "state_dtype": getattr(table, "state_dtype", None),
        "exchange_dtype": getattr(table, "exchange_dtype", None),
    }


def _dtype(table: Any, where: str) -> Any:
    """Return the type of a table's rows, by TorchRec's word or FBGEMM's. Raises ValueError."""
    dtype = _type_of(table.data_type, f"{where}: data_type")
    precision = getattr(table, "weights_precision", None)
    if precision is not None:
        asked, dtype = dtype, _type_of(precision, f"{where}: weights_precision")
        if asked not in (dtype, torch.float32):
            raise ValueError(
                f"{where}: data_type is {table.data_type}, but weights_precision {precision}; set one of them"
            )
    in_backward.check_rounding(where, dtype, getattr(table, "stochastic_rounding", None))
    return dtype


def _type_of(value: Any, option: str) -> Any:
    word = _name_of(value).removeprefix("torch.")
    dtype = _DTYPES.get(word) or _DTYPES.get(word.upper())  # FBGEMM's are small
    if dtype is None:
        raise ValueError(f"{option} must be float32, bfloat16 or float16, not {value}")
    return dtype


def _is_uniform(function: Any) -> bool:
    """Whether it is what TorchRec's configurations have by default, which an initializer of ours does too."""
    uniform = isinstance(function, partial) and function.func is nn.init.uniform_
    return uniform and not function.args and function.keywords.keys() == {"a", "b"}


def _name_of(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def package_of(features: Any) -> Any:
    """Return the module whose classes a result has: that of the batch's."""
    if type(features).__module__.startswith("torchrec."):
        from torchrec.sparse import jagged_tensor

        return jagged_tensor
    return jagged
