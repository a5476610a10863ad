"""A table's rows as Arrow record batches and as a Parquet file: keys, rows, and the optimizer's slots.

For exchange with other programs. Checkpoints (``Client.save``) hold all tables of one moment with the state
of policies, and any number of servers restores them.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError, SpecError
from oe_runtime.rows import PARTS, Assigned, Rows, warn_of_cap
from oe_runtime.spec import TableSpec, counts_pushes

_PIECE = 32 << 20  # bytes of values in memory at a time, and of a row group
_SPEC = b"oe_runtime.table"  # the table's specification, JSON
_PUSHES = b"oe_runtime.pushes"  # the table's number of pushes
_KEYS_AT_ONCE = 1 << 26  # keys searched for duplicates at a time


class _Client(Protocol):
    """The methods of a client that read and write rows by key; `oe_runtime.Client` documents them."""

    def spec(self, table: int) -> TableSpec: ...
    def slots(self, table: int) -> dict[str, int]: ...
    def keys(self, table: int, part: int) -> NDArray[np.int64]: ...
    def read_rows(self, table: int, keys: NDArray[np.int64]) -> Rows: ...
    def assign(
        self,
        table: int,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None,
    ) -> Assigned: ...
    def check_rows(
        self,
        table: int,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None,
    ) -> None: ...
    def most_rows(self, table: int) -> int: ...
    def stats(self) -> dict[str, Any]: ...


def schema(client: _Client, table: int) -> pa.Schema:
    """Return the columns ``key``, ``row`` and one per slot; the metadata has the table's specification."""
    spec = client.spec(table)
    value = pa.float64() if spec.dtype == "float64" else pa.float32()
    fields = [("key", pa.int64()), ("row", pa.list_(value, spec.dim))]
    fields += [(name, pa.list_(value, size)) for name, size in client.slots(table).items()]
    metadata = {_SPEC: spec.to_json(), _PUSHES: str(_pushes(client, spec))}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields], metadata=metadata)


def batches(client: _Client, table: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a table in batches; each row is consistent."""
    columns = schema(client, table)
    piece = max(1, _PIECE // _bytes(client, table))
    for part in range(PARTS):
        keys = client.keys(table, part)
        for begin in range(0, len(keys), piece):
            some = keys[begin : begin + piece]
            read = client.read_rows(table, some)
            if not read.found.all():  # erased since the keys were listed
                some, read = some[read.found], read.select(read.found)
            arrays = [pa.array(some), *(_lists(part) for part in (read.rows, *read.slots.values()))]
            if len(some):
                yield pa.RecordBatch.from_arrays(arrays, schema=columns)


def export(client: _Client, table: int, path: Path, *, overwrite: bool) -> int:
    """Write a Parquet file, which appears when it is complete; return its number of rows."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; name another file, or export with overwrite=True")
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    rows = 0
    try:
        with pq.ParquetWriter(new, schema(client, table)) as writer:
            for batch in batches(client, table):
                writer.write_batch(batch, row_group_size=max(1, batch.num_rows))
                rows += batch.num_rows
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot export table '{client.spec(table).name}' to {path}: {error}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
    return rows


def import_rows(client: _Client, table: int, source: Path | pa.Table, *, slots: bool) -> Assigned:
    """Assign the rows of a Parquet file or an Arrow table, after checking all of them."""
    try:
        incoming = _Source(client, table, source, slots=slots)
        incoming.check()
        sums = [0, 0, 0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning of the cap follows below
            for keys, rows, state in incoming.pieces():
                counts = client.assign(table, keys, rows, state)
                sums = [a + b for a, b in zip(sums, counts, strict=True)]
    except (OSError, pa.ArrowInvalid) as error:
        raise CheckpointError(f"cannot read rows from {source}: {error}") from error
    result = Assigned(*sums)
    warn_of_cap(client.spec(table).name, result, stacklevel=4)
    return result


class _Source:
    """Rows to assign to a table, from a file or an Arrow table."""

    def __init__(self, client: _Client, table: int, source: Path | pa.Table, *, slots: bool) -> None:
        self._client, self._table = client, table
        self._spec = client.spec(table)
        self._source = source if isinstance(source, pa.Table) else pq.ParquetFile(source)
        self._columns: pa.Schema = (
            source.schema if isinstance(source, pa.Table) else self._source.schema_arrow
        )
        self._what = "the Arrow table" if isinstance(source, pa.Table) else str(source)
        self._value = np.dtype(np.float64 if self._spec.dtype == "float64" else np.float32)
        sizes = client.slots(table)
        there = [name for name in self._columns.names if name not in ("key", "row")]
        self._slots = dict(sizes) if slots and there else {}
        self._check_columns(there if slots else [], sizes)

    def _refuse(self, problem: str) -> SpecError:
        return SpecError(f"{self._what} does not fit table '{self._spec.name}': {problem}")

    def _check_columns(self, slots: list[str], sizes: dict[str, int]) -> None:
        for name in ("key", "row"):
            if self._columns.names.count(name) != 1:
                raise self._refuse(f"it has no column '{name}'; it has {', '.join(self._columns.names)}")
        if self._columns.field("key").type != pa.int64():
            raise self._refuse(f"'key' is {self._columns.field('key').type}, not int64")
        known = self._metadata()
        if known is not None and known.dim != self._spec.dim:
            raise self._refuse(f"its rows have dim {known.dim}, the table's {self._spec.dim}")
        if slots and sorted(slots) != sorted(sizes):
            raise self._refuse(
                f"it has the slots {', '.join(slots)}, but optimizer {self._spec.optimizer['name']} has "
                f"{', '.join(sizes) or 'none'}; import with slots=False to leave them out"
            )
        if slots and known is not None and known.optimizer != self._spec.optimizer:
            raise self._refuse(
                f"its slots are of optimizer {json.dumps(dict(known.optimizer))}, the table's is "
                f"{json.dumps(dict(self._spec.optimizer))}; import with slots=False to leave them out"
            )
        for name, size in {"row": self._spec.dim, **self._slots}.items():
            kind = self._columns.field(name).type
            if not (
                pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            ):
                raise self._refuse(f"'{name}' is {kind}, not a list of numbers")
            if kind.value_type != pa.from_numpy_dtype(self._value):
                raise self._refuse(f"'{name}' has {kind.value_type}, the table {self._value}")
            if pa.types.is_fixed_size_list(kind) and kind.list_size != size:
                raise self._refuse(f"'{name}' has lists of {kind.list_size}, the table of {size}")

    def _metadata(self) -> TableSpec | None:
        text = (self._columns.metadata or {}).get(_SPEC)
        if text is None:
            return None
        try:
            return TableSpec.from_json(text.decode())
        except (ValueError, SpecError) as error:
            raise self._refuse(f"its metadata is not a table's specification: {error}") from None

    def check(self) -> None:
        """Raise SpecError or KeyRangeError for the first row that cannot be assigned."""
        rows = 0
        for keys, values, state in self.pieces():
            self._client.check_rows(self._table, keys, values, state)
            rows += len(keys)
        if rows > (most := self._client.most_rows(self._table)):
            raise self._refuse(f"it has {rows} rows, more than the {most} of its 'eviction' cap")
        turns = -(-rows // _KEYS_AT_ONCE)
        for turn in range(turns):
            some = np.concatenate([keys[keys % turns == turn] for keys in self._keys()])
            some.sort()
            if (twice := some[1:][some[1:] == some[:-1]]).size:
                raise self._refuse(f"key {twice[0]} is there twice")
        self._warn_of_pushes()

    def _warn_of_pushes(self) -> None:
        name = self._spec.optimizer["name"]
        if not self._slots or not counts_pushes(self._spec.optimizer):
            return
        pushes = (self._columns.metadata or {}).get(_PUSHES, b"").decode()
        now = str(_pushes(self._client, self._spec))
        if pushes not in ("", now):
            warnings.warn(
                f"table '{self._spec.name}': optimizer {name} depends on the number of pushes, which was "
                f"{pushes} at the export and is {now} in this table: its first updates differ from those of "
                "continued training; a checkpoint keeps the number",
                stacklevel=5,
            )

    def pieces(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], dict[str, NDArray[Any]] | None]]:
        """Yield keys, rows and slots in pieces."""
        names = ["key", "row", *self._slots]
        for batch in self._batches(names, max(1, _PIECE // _bytes(self._client, self._table))):
            sizes = {"row": self._spec.dim, **self._slots}
            values = {name: self._values(batch.column(name), name, size) for name, size in sizes.items()}
            keys = self._no_nulls(batch.column("key"), "key").to_numpy()
            yield keys, values.pop("row"), values or None

    def _keys(self) -> Iterator[NDArray[np.int64]]:
        for batch in self._batches(["key"], 1 << 20):
            yield batch.column("key").to_numpy()

    def _batches(self, names: list[str], size: int) -> Iterator[pa.RecordBatch]:
        if isinstance(self._source, pa.Table):
            return iter(self._source.select(names).to_batches(max_chunksize=size))
        batches: Iterator[pa.RecordBatch] = self._source.iter_batches(size, columns=names)
        return batches

    def _no_nulls(self, column: pa.Array, name: str) -> pa.Array:
        if column.null_count:
            raise self._refuse(f"'{name}' has {column.null_count} nulls")
        return column

    def _values(self, column: pa.Array, name: str, size: int) -> NDArray[Any]:
        flat = self._no_nulls(self._no_nulls(column, name).flatten(), name)
        if not pa.types.is_fixed_size_list(column.type):
            lengths = column.value_lengths().to_numpy()
            if (lengths != size).any():
                raise self._refuse(
                    f"'{name}' has a list of {lengths[lengths != size][0]}, the table of {size}"
                )
        values: NDArray[Any] = flat.to_numpy().reshape(len(column), size)
        return values


def _lists(values: NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _bytes(client: _Client, table: int) -> int:
    """Return the bytes of a key with all its values."""
    spec = client.spec(table)
    return 8 + (spec.dim + sum(client.slots(table).values())) * (8 if spec.dtype == "float64" else 4)


def _pushes(client: _Client, spec: TableSpec) -> int:
    return max(int(server["tables"][spec.name]["version"]) for server in client.stats()["servers"])
