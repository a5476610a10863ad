"""The embedding layers, and the pull of rows for a forward pass."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from oe_runtime.client import Client, Pulled
from oe_runtime.model_tables import make_tables, rows_on_servers
from oe_runtime.spec import TableSpec
from oe_runtime.torch.gradients import Lookup, Pull, RowsParameter, Table, saves_by_hooks, track
from oe_runtime.torch.state import TORCH_DTYPES, RowState, refuse_tracing


def pull(ids: Mapping[Any, Any]) -> None:
    """Request the rows of several layers in one message per server, at the start of a model's `forward`.

        embed.pull({self.users: users, self.items: items})

    For each `Embedding` or `EmbeddingBag`, give the tensor of ids of its next call, or a list of them. The
    layers then answer from these rows. A step also pushes the rows' gradients in one message per server where
    it can: with one process, one learning rate, and one such pull since the last step. Ids that were not
    announced, or differ when they come, take a request of their own.
    """
    if _is_exporting():
        return
    asked_of = requests("pull", ids)
    for layer in ids:
        layer.ahead.clear()
    for asked in asked_of:
        supply(asked, _pulled(asked))


def read_ahead(ids: Mapping[Any, Any]) -> None:
    """Announce the ids of a later batch, whose rows servers then read from their drives before the pull.

        for batch, following in zip(batches, [*batches[1:], None]):
            if following is not None:
                embed.read_ahead({model.users: following.users, model.items: following.items})
            train(batch)

    `ids` are as for `pull`, of the next batch or the one after. A new call takes the place of what has not
    been read of the last one. It changes no result, and does nothing unless a server has storage dram_ssd:
    then it raises as the pull of these ids would.
    """
    if _is_exporting():
        return
    planned: dict[Client, list[Pulled]] = {}
    for asked in requests("read_ahead", ids):
        client = asked[0][0].bound().client
        if client.reads_ahead:
            planned.setdefault(client, []).append(plan(asked))
    for client, pulls in planned.items():
        client.read_ahead(*pulls)


_Asked: TypeAlias = list[tuple["TableLayer", Any]]  # layers, and the tensors of ids of their next calls


def requests(function: str, ids: Mapping[Any, Any]) -> list[_Asked]:
    """Group the ids of layers by the request that pulls them; `function` was given them."""
    by_request: dict[tuple[int, bool], _Asked] = {}
    for layer, tensors in ids.items():
        if not isinstance(layer, TableLayer):
            raise TypeError(f"{function}() takes layers of oe_runtime.torch, not {type(layer).__name__}")
        # A push covers all rows of its request, so frozen layers have a request of their own.
        key = (id(layer.bound().client), layer.frozen)
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            # A copy: the caller may change the tensor before the layer is called.
            own = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
            by_request.setdefault(key, []).append((layer, own))
    return list(by_request.values())


def check_ids(ids: Any) -> None:
    """Raise TypeError for ids of another type than PyTorch's own layers take."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 or int32, not {ids.dtype}")


def _keys(asked: _Asked) -> tuple[list[NDArray[np.int64]], list[Any]]:
    """Return of each tensor its ids without padding, and where it has padding."""
    keys, paddings = [], []
    for layer, ids in asked:
        check_ids(ids)
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        padding = None if layer.padding_idx is None else flat == layer.padding_idx
        keys.append(np.ascontiguousarray((flat if padding is None else flat[~padding]).numpy()))
        paddings.append(padding)
    return keys, paddings


def plan(asked: _Asked) -> Pulled:
    """Plan the request for the rows of the ids of layers of one client; it has no rows before a refresh."""
    lookups = [(layer.bound().number, i) for i, (layer, _) in enumerate(asked)]
    return asked[0][0].bound().client.plan(_keys(asked)[0], lookups)


def supply(asked: _Asked, pulled: Pulled) -> None:
    """Let the layers answer their next calls with these rows."""
    for (layer, _), found in zip(asked, split(asked, pulled), strict=True):
        layer.ahead.append(found)


def _pulled(asked: _Asked) -> Pulled:
    pulled = plan(asked)
    bring(asked[0][0].bound().client, pulled)
    return pulled


def bring(client: Client, pulled: Pulled) -> None:
    """Bring the rows of a planned request, with all pushes before it."""
    client.settle()
    client.refresh(pulled)


def split(asked: _Asked, pulled: Pulled) -> list[tuple[Lookup, Any]]:
    """Return of each layer its lookup in a request, and its rows.

    Rows are (unique ids, dim), functions of the layer's parameter if that trains.
    """
    keys, paddings = _keys(asked)
    tables = [layer.bound() for layer, _ in asked]
    whole = Pull(pulled, len(asked))
    found: dict[int, tuple[Lookup, Any]] = {}
    for number, group in enumerate(pulled.groups):
        begin = 0
        for i, size in zip(group.lookups, group.sizes, strict=True):
            ids = asked[i][1]
            inverse = group.inverse[begin : begin + size]
            begin += size
            places, numbers = _places(inverse)
            rows = group.rows[places]
            lookup = Lookup(tables[i], ids, keys[i], paddings[i], whole, number, places, numbers, len(rows))
            found[i] = lookup, torch.from_numpy(rows).to(ids.device)
    lookups, every = zip(*(found[i] for i in range(len(asked))), strict=True)
    if asked[0][0].trains():  # as all others of the request
        every = track(lookups, every, [layer.anchor for layer, _ in asked])
    return list(zip(lookups, every, strict=True))


@dataclass
class Call:
    """A call of a layer."""

    layer: TableLayer
    ids: Any
    offsets: Any = None  # of an EmbeddingBag, if they are given
    is_weighted: bool = False

    def equals(self, other: Call) -> bool:
        """Whether both are of the same layer, ids and offsets."""
        return (
            self.layer is other.layer
            and not self.is_weighted
            and not other.is_weighted
            and _are_equal(self.ids, other.ids)
            and _are_equal(self.offsets, other.offsets)
        )


def _are_equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a.dtype == b.dtype and torch.equal(a, b))


@dataclass
class Answer:
    """What a call will return: its output, or the rows from which the layer makes that."""

    call: Call
    found: tuple[Lookup, Any] | None
    output: Any = None

    def __post_init__(self) -> None:
        self._replacements = self.call.layer.bound().client.replacements

    def is_current(self) -> bool:
        """Whether the rows are still so, and are trained or not as the layer is now."""
        layer, values = self.call.layer, self.output if self.found is None else self.found[1]
        is_same = self._replacements == layer.bound().client.replacements
        return is_same and bool(values.requires_grad) == layer.trains()


@dataclass
class Forward:
    """A forward pass of a module: what was pulled for it, and the calls that pulled rows of their own."""

    owner: Any
    answers: list[Answer]
    missed: list[Call]


_state = threading.local()


def forwards() -> list[Forward]:
    """Return the forward passes that this thread is in, the outermost first (`forward_pull`)."""
    if not hasattr(_state, "forwards"):
        _state.forwards = []
    found: list[Forward] = _state.forwards
    return found


def _answer(call: Call, *, output: bool) -> Answer | None:
    """Take what a forward pass has pulled for a call, its output or its rows, if it has."""
    # A checkpoint calls the layer again in the backward pass, and both calls must save the same tensors.
    if output and saves_by_hooks():
        return None
    for forward in reversed(forwards()):
        for i, answer in enumerate(forward.answers):
            if (answer.found is None) != output or answer.call.layer is not call.layer:
                continue
            same = answer.call.equals(call) if output else _are_equal(answer.call.ids, call.ids)
            if same and answer.is_current():
                return forward.answers.pop(i)
    return None


def _places(inverse: NDArray[Any]) -> tuple[slice | NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct places in `inverse`, ascending, as an index, and each one's number among them."""
    if not len(inverse):
        return slice(0, 0), inverse.astype(np.int64)
    # A server's rows come table by table, so these are often one contiguous part of the group.
    low, high = int(inverse.min()), int(inverse.max()) + 1
    numbers = inverse.astype(np.int64) - low
    seen = np.zeros(high - low, bool)
    seen[numbers] = True
    if seen.all():
        return slice(low, high), numbers
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[numbers]


def is_compiling() -> bool:
    """Whether torch.compile makes a program of what calls this, and not torch.export."""
    return bool(torch.compiler.is_compiling() and not torch.compiler.is_exporting())


def _is_exporting() -> bool:
    """Whether this is called for a program of torch.export, which looks up all rows at once anyway."""
    return bool(torch.compiler.is_compiling() and torch.compiler.is_exporting())


def look_up(*arguments: Any) -> Any:
    """Call the operator of that name (`operators`), in a program that torch.compile makes."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.oe_runtime.look_up.default(*arguments)[0]


def process() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, by torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _whole(what: str, value: Any, *, any_id: bool = False) -> int:
    """Return an integer > 0 of any integer type, such as NumPy's; -1 stands for any id."""
    try:
        number = -2 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -2
    if number <= 0 and not (any_id and number == -1):
        more = ", or -1 for any 64-bit id" if any_id else ""
        raise ValueError(f"{what} must be an integer > 0{more}, not {value!r}")
    return number


class TableLayer(RowState):
    """The common part of both layers: the table's description, and lookups."""

    def __init__(
        self,
        num_embeddings: int = -1,
        embedding_dim: int = 0,
        padding_idx: int | None = None,
        *,
        dtype: Any = None,
        name: str = "",
        initializer: Mapping[str, Any] | None = None,
        admission: Mapping[str, Any] | None = None,
        eviction: Sequence[Mapping[str, Any]] = (),
        state_dtype: str | None = None,
        exchange_dtype: str | None = None,
        spec: TableSpec | None = None,
    ) -> None:
        super().__init__()
        if spec is not None:
            num_embeddings, embedding_dim = spec.input_dim if spec.index == "array" else -1, spec.dim
            dtype, name = getattr(torch, spec.dtype), spec.name
        num_embeddings = _whole("num_embeddings", num_embeddings, any_id=True)
        embedding_dim = _whole("embedding_dim", embedding_dim)
        dtype = dtype or torch.get_default_dtype()
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, TORCH_DTYPES))}, not {dtype}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        # Row numbers count from the end in PyTorch, but any 64-bit id may be one here.
        if padding_idx is not None:
            padding_idx = operator.index(padding_idx)
        if padding_idx is not None and num_embeddings != -1:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is not in the {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        self.dtype = dtype
        self.name = name
        self.initializer = dict(initializer or {"name": "normal", "mean": 0.0, "stddev": 1.0})
        self.admission = admission
        self.eviction = eviction
        self.state_dtype = state_dtype
        self.exchange_dtype = exchange_dtype
        self.spec = spec
        self.first_rows = None
        self.are_first_rows_given = self.is_table_private = False
        self.bringing_rows = False  # whether an assignment of these was interrupted
        self.client: Client | None = None  # set by distributed_model, as the next three
        self.default_name = ""
        self.seed = 0
        self.fresh: bool | None = None
        self.table: Table | None = None  # set by distributed_optimizer
        self.ahead: list[tuple[Lookup, Any]] = []  # the lookups of `pull`, and their rows
        self.number = 0  # by which operators find it
        self._padding: tuple[Any, Any] | None = None  # its row, after what it depends on
        # Empty: it has the rows' gradients, and its group of the optimizer their learning rate.
        self.anchor = RowsParameter(torch.empty(0, self.embedding_dim))

    @property
    def frozen(self) -> bool:
        """Whether the rows stay unchanged: `requires_grad_(False)` of the layer or its parameter."""
        return not self.anchor.trains

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.anchor.requires_grad_(not frozen)

    def table_spec(self, optimizer: Mapping[str, Any]) -> TableSpec:
        """Return the table of this layer, or its `spec` if it was made with one."""
        if self.spec is not None:
            return self.spec
        return TableSpec(
            name=self.name or self.default_name,
            dim=self.embedding_dim,
            index="hash" if self.num_embeddings == -1 else "array",
            input_dim=max(self.num_embeddings, 0),
            dtype=TORCH_DTYPES[self.dtype],
            state_dtype=self.state_dtype,
            exchange_dtype=self.exchange_dtype,
            optimizer=optimizer,
            initializer={"seed": self.seed, **self.initializer},
            admission=self.admission,
            eviction=self.eviction,
        )

    def bound(self) -> Table:
        """Return the layer's table. Raises RuntimeError if there are no servers yet.

        Without an optimizer it is a table of the layer's own in this process, unless a `spec` says what the
        servers' table is.
        """
        if self.table is None and self.client is not None:
            self._make_table(self.client)
        if self.table is None:
            raise RuntimeError(
                f"{self} has no table yet: give its model to distributed_model(model, client), and to train "
                "it the optimizer to distributed_optimizer(optimizer, model) (rows have its state)"
            )
        return self.table

    def _make_table(self, client: Client) -> None:
        spec = self.table_spec({"name": "sgd"})
        if self.spec is None:
            if rows := rows_on_servers(client, [spec.name])[spec.name]:
                raise RuntimeError(
                    f"{self}: table '{spec.name}' is on the servers with {rows:,} rows, and without its "
                    "optimizer it cannot be opened: call distributed_optimizer with that of its training, or "
                    "make the layer with its specification (spec=…, of saved_tables)"
                )
            client = Client.in_process()
            spec = replace(spec, admission=None, eviction=())  # the rows are those that are given
        (number,) = make_tables(client, [spec], self.fresh if self.spec else None, first=process()[0] == 0)
        self.table = Table(client, number, client.spec(number))
        self.is_table_private = self.spec is None
        self.bring_rows()

    def bring_rows(self) -> None:
        """Assign the first rows to the table, which exists now; on servers only the first process does so."""
        if self.first_rows is not None and (self.is_table_private or process()[0] == 0):
            table = self.bound()
            # Existing rows are of an earlier run, which this one continues (`fresh`), or of an interrupted
            # assignment.
            name = table.spec.name
            given = (
                self.bringing_rows
                or self.are_first_rows_given
                or not rows_on_servers(table.client, [name])[name]
            )
            if given and not table.client.restores:
                self.bringing_rows = True
                try:
                    self._assign(self.first_rows)
                except BaseException:  # nothing trains on a table with a part of its rows
                    self.table = None
                    raise
                self.bringing_rows = False
        self.first_rows, self.are_first_rows_given = None, False

    def trains(self) -> bool:
        """Whether gradients of the next lookup are wanted."""
        return bool(torch.is_grad_enabled()) and not self.frozen

    @property
    def is_pooled(self) -> bool:
        """Whether the core can make the layer's outputs."""
        return bool(self.dtype == torch.float32) and getattr(self, "mode", "") != "max"

    def _compiled(self, ids: Any, offsets: Any = None, weights: Any = None) -> Any:
        """Return the output in a program that torch.compile makes, by an operator (`operators`)."""
        trains = torch.is_grad_enabled() and self.anchor.requires_grad
        anchors = [self.anchor, self.witness] if trains else [self.anchor]
        return look_up(ids, offsets, weights, anchors, "", self.number, trains)

    def _rows(self, ids: Any, call: Call | None = None) -> tuple[Any, Any]:
        """Return the distinct rows of `ids`, and for each id the number of its row.

        Padding has the number of an additional last row, which is not trained. `call` is the layer's, if any.
        """
        found = self._announced(ids, call)
        if found is None:
            asked = [(self, ids.clone())]  # the push needs them, when the caller may have changed the tensor
            (found,) = split(asked, _pulled(asked))
        lookup, rows = found
        numbers = torch.from_numpy(lookup.numbers)
        if lookup.padding is not None:
            every = torch.full((len(lookup.padding),), len(rows))
            every[~lookup.padding] = numbers
            numbers = every
            rows = torch.cat([rows, self.padding_row().to(rows)])
        return rows.to(self.dtype), numbers.to(ids.device).reshape(ids.shape)

    def padding_row(self) -> Any:
        """Return the row of padding, (1, dim): zeros unless one was given with the weights."""
        table = self.bound()
        # No push has the padding, so only these calls change it.
        now = (table.client, table.number, table.client.replacements)
        if self._padding is None or self._padding[0] != now:
            read = table.client.read_rows(table.number, np.array([self.padding_idx], np.int64))
            row = read.rows if read.found[0] else np.zeros_like(read.rows)
            self._padding = (now, torch.from_numpy(row))
        return self._padding[1]

    def _announced(self, ids: Any, call: Call | None) -> tuple[Lookup, Any] | None:
        """Return the lookup of `pull` for these ids and the same purpose, if there is one."""
        for i, (lookup, rows) in enumerate(self.ahead):
            if _are_equal(lookup.asked, ids) and rows.requires_grad == self.trains():
                return self.ahead.pop(i)
        if call is not None:
            if (answer := _answer(call, output=False)) is not None:
                return answer.found
            for forward in forwards():
                forward.missed.append(call)
        return None

    def extra_repr(self) -> str:
        """Return the arguments as nn.Embedding shows them."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class Embedding(TableLayer):
    """Like `torch.nn.Embedding`, with the rows in a table of the parameter servers.

    `num_embeddings` is the number of rows, with ids in [0, num_embeddings), or -1 for any 64-bit id; a row
    then takes memory from its first update on. Rows start from `initializer` (`oe_runtime.TableSpec`), by
    default PyTorch's N(0, 1), from a seed. `padding_idx` is not trained and reads zeros, or the
    row that it has in weights that were given (in a bag it does not count). `admission` and
    `eviction` decide which ids get a row and which rows are removed. `spec` takes all of these from an
    existing table, for example of a Keras model (`saved_tables`). The table has the layer's `name`, or its
    path in the model, "tower.users". `frozen = True` keeps the rows unchanged.

    `state_dict()` has the rows as `weight`, those of any id with `ids`, and `load_state_dict` sets them.
    `weight` is a tensor of all rows (`oe_runtime.torch.Rows`) of a layer with a `num_embeddings`.

    ids: int64 or int32 of any shape. Output: ids.shape + (embedding_dim,), of `dtype`: float32, float64,
    bfloat16 or float16, the last two with float32 gradients. `state_dtype` is that of the optimizer's state,
    `exchange_dtype` that of gradients on their way to servers: "bfloat16", or by default distributed_model's.
    """

    def forward(self, input: Any) -> Any:
        """Return the rows of the ids."""
        if is_compiling() and self.is_pooled:
            return self._compiled(input)
        return self._look_up(input)

    # torch.compile breaks its graph here. torch.compiler.disable would import its compiler at once.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _look_up(self, ids: Any) -> Any:
        refuse_tracing(self, ids)
        call = Call(self, ids)
        if (answer := _answer(call, output=True)) is not None:
            return answer.output
        rows, numbers = self._rows(ids, call)
        return functional.embedding(numbers, rows)


class EmbeddingBag(TableLayer):
    """Like `torch.nn.EmbeddingBag`, with the rows in a table of the parameter servers; see `Embedding`.

    `mode` is "sum", "mean" or "max". ids are 2-D, one bag per row, or 1-D with the `offsets` at which bags
    begin. `per_sample_weights`, for "sum", have their shape and are trained if they require gradients.
    `options` are those of `Embedding`, by name.
    """

    def __init__(
        self,
        num_embeddings: int = -1,
        embedding_dim: int = 0,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be sum, mean or max, not {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Return one row per bag, (bags, embedding_dim)."""
        if is_compiling() and self.is_pooled:
            weights = per_sample_weights
            are_bags = input.dim() == 2 if offsets is None else input.dim() == 1
            if are_bags and weights is None:
                return self._compiled(input, offsets)
            if are_bags and self.mode == "sum" and self.padding_idx is None and weights.shape == input.shape:
                return self._compiled(input, offsets, weights.reshape(-1))
        return self._look_up(input, offsets, per_sample_weights)

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _look_up(self, ids: Any, offsets: Any, per_sample_weights: Any) -> Any:
        refuse_tracing(self, ids)
        call = Call(self, ids, offsets, per_sample_weights is not None)
        if (answer := _answer(call, output=True)) is not None:
            return answer.output
        rows, numbers = self._rows(ids, call)
        return functional.embedding_bag(
            numbers,
            rows,
            None if offsets is None else offsets.to(numbers.dtype),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else len(rows) - 1,
        )

    def extra_repr(self) -> str:
        """Return the arguments as nn.EmbeddingBag shows them."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
