"""The layers, and what a forward pass leaves for the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from oe_runtime.client import Client, Pulled
from oe_runtime.spec import TableSpec

_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass
class Lookup:
    """Rows that a forward pass has pulled, as a leaf of autograd's graph."""

    ids: NDArray[np.int64]
    pulled: Pulled
    rows: Any  # (unique ids, dim)


@dataclass
class Table:
    """A layer's table on the servers behind `client`, and the lookups since the last step."""

    client: Client
    number: int
    spec: TableSpec
    lookups: list[Lookup] = field(default_factory=list)


class _Layer(nn.Module):  # type: ignore[misc]
    """What both layers share: the table's description, and looking up."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        dtype: Any,
        name: str,
        initializer: Mapping[str, Any] | None,
        admission: Mapping[str, Any] | None,
        eviction: Sequence[Mapping[str, Any]],
        spec: TableSpec | None,
    ) -> None:
        super().__init__()
        if spec is not None:
            num_embeddings, embedding_dim = spec.input_dim if spec.index == "array" else -1, spec.dim
            dtype, name = getattr(torch, spec.dtype), spec.name
        for what, value, unbounded in (
            ("num_embeddings", num_embeddings, True),
            ("embedding_dim", embedding_dim, False),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or (value <= 0 and not (unbounded and value == -1)):
                more = ", or -1 for any 64-bit id" if unbounded else ""
                raise ValueError(f"{what} must be an integer > 0{more}, not {value!r}")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        # Row numbers count from the end in PyTorch, but any 64-bit id may be one here.
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
        self.spec = spec
        self.frozen = False
        self.client: Client | None = None  # this and the next two are distributed_model's
        self.default_name = ""
        self.seed = 0
        self.table: Table | None = None  # distributed_optimizer's
        # Nothing is in it: an optimizer takes no model without parameters, and its group says which learning
        # rate the rows have.
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)

    def table_spec(self, optimizer: Mapping[str, Any]) -> TableSpec:
        """The table that this layer needs, unless it was made with a `spec`."""
        if self.spec is not None:
            return self.spec
        return TableSpec(
            name=self.name or self.default_name,
            dim=self.embedding_dim,
            index="hash" if self.num_embeddings == -1 else "array",
            input_dim=max(self.num_embeddings, 0),
            dtype=_DTYPES[self.dtype],
            optimizer=optimizer,
            initializer={"seed": self.seed, **self.initializer},
            admission=self.admission,
            eviction=self.eviction,
        )

    def _rows(self, ids: Any) -> tuple[Any, Any]:
        """The distinct rows of `ids` (a leaf), and for each id the number of its row.

        Padding has the number of an additional row of zeros, which is the last one.
        """
        table = self.table
        if table is None:
            raise RuntimeError(
                f"{self} has no table yet: give its model to distributed_model(model, client) and the "
                "optimizer to distributed_optimizer(optimizer, model) (the rows keep the optimizer's state)"
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids must be int64 or int32, not {ids.dtype}")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        padding = None if self.padding_idx is None else flat == self.padding_idx
        keys = np.ascontiguousarray((flat if padding is None else flat[~padding]).numpy())
        pulled = table.client.pull([keys], [(table.number, 0)])
        group = pulled.groups[0]
        rows = torch.from_numpy(group.rows).to(ids.device)
        numbers = torch.from_numpy(group.inverse).to(torch.int64)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            table.lookups.append(Lookup(keys, pulled, rows))
        if padding is not None:
            every = torch.full_like(flat, len(rows))
            every[~padding] = numbers
            numbers = every
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return rows.to(self.dtype), numbers.to(ids.device).reshape(ids.shape)

    def extra_repr(self) -> str:
        """As nn.Embedding's."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class Embedding(_Layer):
    """Like `torch.nn.Embedding`, with the rows in a table of the parameter servers.

    `num_embeddings` is the number of rows, with ids in [0, num_embeddings), or -1 for any 64-bit id; a row
    then takes memory from its first update on. Rows begin with `initializer` (`oe_runtime.TableSpec`), by
    default PyTorch's N(0, 1), from a seed. `padding_idx` reads zeros and is not trained. `admission` and
    `eviction` say which ids get a row and which rows go. `spec` takes over all of it from a table that there
    is, of a Keras model for example (`saved_tables`). The table has the layer's `name`, or its place in the
    model, "tower.users". `frozen = True` keeps the rows as they are.

    ids: int64 or int32 of any shape. Output: ids.shape + (embedding_dim,), of `dtype`: float32, float64,
    bfloat16 or float16, the last two with float32 gradients and optimizer's state.
    """

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
        spec: TableSpec | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, dtype, name, initializer, admission, eviction, spec
        )

    def forward(self, input: Any) -> Any:
        """The rows of the ids."""
        rows, numbers = self._rows(input)
        return functional.embedding(numbers, rows)


class EmbeddingBag(_Layer):
    """Like `torch.nn.EmbeddingBag`, with the rows in a table of the parameter servers; see `Embedding`.

    `mode` is "sum", "mean" or "max". ids are 2-D, a bag a row, or 1-D with the `offsets` at which bags begin;
    `per_sample_weights`, for "sum", has their shape and is trained if it requires gradients.
    """

    def __init__(
        self,
        num_embeddings: int = -1,
        embedding_dim: int = 0,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: Any = None,
        name: str = "",
        initializer: Mapping[str, Any] | None = None,
        admission: Mapping[str, Any] | None = None,
        eviction: Sequence[Mapping[str, Any]] = (),
        spec: TableSpec | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, dtype, name, initializer, admission, eviction, spec
        )
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be sum, mean or max, not {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """A row a bag, (bags, embedding_dim)."""
        rows, numbers = self._rows(input)
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
        """As nn.EmbeddingBag's."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
