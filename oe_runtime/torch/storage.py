"""dynamicemb's tables on parameter servers: rows and optimizer states that its GPU cache misses.

    class Rows(ServerStorage):
        def connect(self):
            return oe_runtime.Client(["server-0:7000"])

    DynamicEmbTableOptions(caching=True, external_storage=Rows, ...)

dynamicemb (NVIDIA/recsys-examples, `corelib/dynamicemb`) trains the rows on the GPU, with its own optimizers.
Here they are written and read as they are; the servers' optimizers do nothing. The interface is that of
`dynamicemb.types.Storage` at revision 43465aeabf61515e28d74cbb5234ff7c627dcc19 (July 2026), in which `find`
returns eight values and `preserve_existing` is about scores: values are always written. Importing this module
needs PyTorch, but neither dynamicemb nor a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import SpecError
from oe_runtime.rows import PARTS
from oe_runtime.spec import TableSpec

# By the `opt_type` of dynamicemb's optimizers, whose state is stored in the order of ours.
_OPTIMIZERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "sgd": lambda args: {"name": "sgd"},
    "adam": lambda args: {
        "name": "adam",
        "beta_1": args["beta1"],
        "beta_2": args["beta2"],
        "epsilon": args["eps"],
        "torch": True,
    },
    "exact_adagrad": lambda args: {
        "name": "adagrad",
        "initial_accumulator_value": args["initial_accumulator_value"],
        "epsilon": args["eps"],
        "torch": True,
    },
    "exact_row_wise_adagrad": lambda args: {
        "name": "rowwise_adagrad",
        "initial_accumulator_value": args["initial_accumulator_value"],
        "epsilon": args["eps"],
    },
}
_EXPORTED = 65536  # rows of a batch
_LOADED = 1 << 18  # rows of a file that are in memory at once
# Tables that storages of this process have, by client: two with one name would write over each other's rows.
_OWNED: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()
_OWNED_LOCK = threading.Lock()


class ServerStorage:
    """The external storage of some dynamicemb tables, on parameter servers or in this process.

    dynamicemb makes it of its table options and its optimizer, in every rank. The tables of all ranks are the
    same ones on the servers, so another number of ranks finds all rows. Make a subclass at the top of a
    module, so that it can be pickled: it has `connect`, and may set the attributes.

    A table has the rows in float32, whatever dynamicemb's dtype. Its name is ``name`` and its number, such as
    ``dynamicemb.0``; two storages in one process need two names. Scores are int64, in a table of their own
    (``dynamicemb.0.scores``). Without ``keep_scores`` they are dropped, and read and are dumped as 0, which
    saves a second look-up per key; LFU needs them.

    Checkpoints, incremental saves, tiers, `oeprov` and serving are those of any table (`client.save`).
    """

    name = "dynamicemb"
    keep_scores = True
    #: More fields of each table's `TableSpec`, such as ``{"index": "hash", "nonfinite_gradients": "pass"}``.
    table_fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, options: Sequence[Any], optimizer: Any) -> None:
        """Open or create the tables; raises `SpecError` for options that cannot be stored."""
        self._optimizer = optimizer
        self._options = list(options)
        if not self._options:
            raise SpecError("ServerStorage: there are no table options")
        self._dtype = self._one_of("embedding_dtype")
        self._dims = [int(option.dim) for option in self._options]
        self._state_dims = [int(optimizer.get_state_dim(dim)) for dim in self._dims]
        self._stored_dims = [int(optimizer.get_ckpt_state_dim(dim)) for dim in self._dims]
        self._max_dim = max(self._dims)
        self._width = max(self.value_dim(table) for table in range(len(self._dims)))
        if not isinstance(self._dtype, torch.dtype) or not self._dtype.is_floating_point:
            raise SpecError(f"ServerStorage: embedding_dtype {self._dtype} is no floating point dtype")
        evict = self._one_of("evict_strategy")
        strategy = str(getattr(evict, "value", evict))
        self._evict_strategy = strategy
        self._lru, self._lfu = (kind in strategy.lower() for kind in ("lru", "lfu"))
        if self._lru and self._lfu:
            raise SpecError(f"ServerStorage: {strategy} keeps two scores per key; a storage keeps one")
        self._client = self.connect()
        names = [f"{self.name}.{number}" for number in range(len(self._dims))]
        with _OWNED_LOCK:
            owned = _OWNED.setdefault(self._client, set())
            if not owned.isdisjoint(names):
                raise SpecError(
                    f"ServerStorage: another storage of this process has table '{names[0]}'; give each "
                    "its own subclass with another 'name'"
                )
            owned.update(names)
        # As soon as nobody uses the storage, another may have its tables.
        self._release = weakref.finalize(self, owned.difference_update, names)
        self._tables = [self._create(name, number) for number, name in enumerate(names)]
        self._scores = [self._create_scores(name) for name in names] if self.keep_scores else []
        self._staged = _Staging(self._client, self._tables[0])
        interface = sys.modules.get("dynamicemb.types")
        if interface is not None:
            interface.Storage.register(type(self))

    def connect(self) -> Client:
        """Return the client whose tables these are; a subclass says which. Called once per storage."""
        raise NotImplementedError(
            f"{type(self).__name__} has no 'connect': return an oe_runtime.Client of your servers there"
        )

    @property
    def client(self) -> Client:
        """The client of the tables, to save or restore them."""
        return self._client

    @property
    def num_tables(self) -> int:
        """How many tables it has."""
        return len(self._dims)

    # Rows by key.

    def find(
        self,
        unique_keys: torch.Tensor,
        table_ids: torch.Tensor,
        copy_mode: Any,
        lfu_accumulated_frequency: torch.Tensor | None = None,
    ) -> tuple[
        int,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ]:
        """Read rows, and with ``CopyMode.VALUE`` the optimizer's state, of any number of keys.

        Returns: the number of missing keys; the missing keys, their positions, their tables, and their
        frequencies or None; whether each key was found; each key's score (0 without one); and the values, of
        shape ``(keys, max_embedding_dim())`` or ``(keys, max_value_dim())``, with the state from column
        ``max_embedding_dim()`` on. The values of missing keys are zeros and the optimizer's first state. With
        LFU, frequencies are added to the scores of the keys that are found. All are on the keys' device.
        """
        mode = getattr(copy_mode, "value", copy_mode)
        if mode not in ("embedding", "value"):
            raise SpecError(f"find: copy_mode is {copy_mode}; expected CopyMode.EMBEDDING or CopyMode.VALUE")
        device = unique_keys.device
        keys, tables = self._keys(unique_keys, table_ids)
        founds = np.empty(len(keys), np.bool_)
        scores = np.zeros(len(keys), np.int64)
        frequencies = self._per_key("lfu_accumulated_frequency", lfu_accumulated_frequency, len(keys))
        width = self._width if mode == "value" else self._max_dim
        values = self._staged.take(len(keys), width, device)
        array = values.numpy()
        for table, at, where in _segments(tables, len(self._dims)):
            part = array if where is None else array[where]
            self._fill(table, part, mode == "value")
            of_keys = keys if where is None else keys[where]
            dim, state = self._dims[table], self._stored_dims[table] if mode == "value" else 0
            read = self._client.read_rows(
                self._tables[table],
                of_keys,
                out=part[:, :dim],
                state=part[:, self._max_dim : self._max_dim + state] if state else None,
            )
            founds[at] = read.found
            if where is not None and not isinstance(where, slice):
                array[where] = part
            if self._scores:
                added = None if frequencies is None or not self._lfu else frequencies[at]
                scores[at] = self._read_scores(table, of_keys, read.found, added)
        missing = np.flatnonzero(~founds)

        def on_device(part: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(part).to(device)

        return (
            len(missing),
            on_device(keys[missing]).to(unique_keys.dtype),
            on_device(missing),
            on_device(tables[missing]),
            None if frequencies is None else on_device(frequencies[missing]),
            on_device(founds),
            on_device(scores),
            self._staged.give(values, device, self._dtype),
        )

    def insert(
        self,
        keys: torch.Tensor,
        table_ids: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write rows with the optimizer's state, ``(keys, max_value_dim())`` as `find` has them, and scores.

        Keys that have a row get the new values, too: with ``preserve_existing`` they only keep their scores.
        Keys are unique within a table. Raises `SpecError` for those that are not, for numbers that are not
        finite (unless ``nonfinite_gradients`` in ``table_fields`` is "pass") and for wrong shapes; no row has
        changed then, but for those of tables that came before.
        """
        of_keys, tables = self._keys(keys, table_ids)
        if values.dim() == 1:
            values = values.unsqueeze(1)
        if tuple(values.shape) != (len(of_keys), self._width):
            raise SpecError(
                f"insert: the values are of shape {tuple(values.shape)}; expected "
                f"({len(of_keys)}, {self._width})"
            )
        of_scores = self._per_key("scores", scores, len(of_keys))
        array = self._staged.bring(values)
        for table, at, where in _segments(tables, len(self._dims)):
            part = array if where is None else array[where]
            some = of_keys if where is None else of_keys[where]
            state = part[:, self._max_dim : self._max_dim + self._stored_dims[table]]
            self._client.assign(
                self._tables[table],
                some,
                part[:, : self._dims[table]],
                state=state if self._stored_dims[table] else None,
            )
            if of_scores is not None and self._scores:
                self._write_scores(table, some, of_scores[at], preserve_existing)

    def export_keys_values(
        self, device: torch.device, batch_size: int = _EXPORTED, table_id: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield all rows of a table in batches: keys, embeddings, states or None, scores.

        Embeddings and states are float32; states are as wide as in `find`. With several ranks, each yields
        its share: keys whose remainder by the number of ranks is its rank. Meant for a table that nobody
        inserts into meanwhile.
        """
        if batch_size < 1:
            raise SpecError(f"export_keys_values: batch_size is {batch_size}; expected at least 1")
        self._require_table(table_id)
        rank, ranks = _rank()
        dim, state = self._dims[table_id], self._stored_dims[table_id]
        for part in range(PARTS):
            keys = self._client.keys(self._tables[table_id], part)
            keys = keys[keys % ranks == rank] if ranks > 1 else keys
            for begin in range(0, len(keys), batch_size):
                some = keys[begin : begin + batch_size]
                rows = np.empty((len(some), dim), np.float32)
                states = np.full(
                    (len(some), self._state_dims[table_id]), self.init_optimizer_state(), np.float32
                )
                read = self._client.read_rows(
                    self._tables[table_id], some, out=rows, state=states[:, :state] if state else None
                )
                scores = np.zeros(len(some), np.int64)
                if self._scores:
                    scores = self._read_scores(table_id, some, read.found, None)
                yield (
                    torch.from_numpy(some).to(device),
                    torch.from_numpy(rows).to(device),
                    torch.from_numpy(states).to(device) if self._state_dims[table_id] else None,
                    torch.from_numpy(scores).to(device),
                )

    # Files of dynamicemb.

    def dump(
        self,
        table_id: int,
        meta_file_path: str,
        emb_key_path: str,
        embedding_file_path: str,
        score_file_path: str | None = None,
        opt_file_path: str | None = None,
        timestamp: int = 0,
        *,
        include_optim: bool = True,
        include_meta: bool = True,
        current_score: int | None = None,
    ) -> None:
        """Write a table in dynamicemb's format: a file each of keys, embeddings, scores, states, and JSON.

        Files appear when they are complete. With LRU, scores are written as ages, ``timestamp - score``.
        """
        self._require_table(table_id)
        if include_meta:
            meta = dict(self._optimizer.get_opt_args())
            meta["evict_strategy"] = self._evict_strategy
            meta["dist_type"] = self._dist_type(table_id)
            if current_score is not None:
                meta["step_score"] = current_score
            _write(meta_file_path, lambda file: file.write(json.dumps(meta).encode()))
        state = self._stored_dims[table_id]
        paths = [emb_key_path, embedding_file_path, score_file_path, opt_file_path if include_optim else None]
        with ExitStack() as stack:
            files = [stack.enter_context(_Written(path)) if path else None for path in paths]
            cpu = torch.device("cpu")
            for keys, embeddings, states, scores in self.export_keys_values(cpu, _EXPORTED, table_id):
                of_file = timestamp - scores if self._lru else scores
                stored = states[:, :state].contiguous() if states is not None else None
                for file, array in zip(files, (keys, embeddings, of_file, stored), strict=True):
                    if file is not None and array is not None:
                        file.write(array.numpy())

    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None = None,
        opt_file_path: str | None = None,
        include_optim: bool = True,
        timestamp: int = 0,
    ) -> int | None:
        """Insert the rows of files that `dump` or dynamicemb wrote; return their ``step_score``, if any.

        Rows that the files lack stay. States of another optimizer are left out, with a warning; rows have the
        first state then. Raises `SpecError` naming the file whose size or whose table options do not fit,
        before anything changes.
        """
        self._require_table(table_id)
        meta = json.loads(Path(meta_file_path).read_text()) if os.path.exists(meta_file_path) else {}
        include_optim = self._check_meta(table_id, meta_file_path, meta, include_optim)
        dim, state = self._dims[table_id], self._stored_dims[table_id]
        opt_file_path = opt_file_path if include_optim and state and opt_file_path else None
        if opt_file_path and not os.path.exists(opt_file_path):
            warnings.warn(f"load: there is no {opt_file_path}: rows get the first state", stacklevel=2)
            opt_file_path = None
        if score_file_path and not os.path.exists(score_file_path):
            warnings.warn(f"load: there is no {score_file_path}: rows get no scores", stacklevel=2)
            score_file_path = None
        count = _count(emb_file_path, 8, None)
        _count(embedding_file_path, 4 * dim, count)
        if score_file_path:
            _count(score_file_path, 8, count)
        if opt_file_path:
            _count(opt_file_path, 4 * state, count)
        if include_optim and meta and state:
            self._optimizer.set_opt_args(meta)
        for begin in range(0, count, _LOADED):
            n = min(_LOADED, count - begin)
            keys = np.fromfile(emb_file_path, np.int64, n, offset=8 * begin)
            rows = np.fromfile(embedding_file_path, np.float32, n * dim, offset=4 * dim * begin).reshape(
                n, dim
            )
            states = np.full((n, state), self.init_optimizer_state(), np.float32)
            if opt_file_path:
                of_file = np.fromfile(opt_file_path, np.float32, n * state, offset=4 * state * begin)
                states = of_file.reshape(n, state)
            self._client.assign(self._tables[table_id], keys, rows, state=states if state else None)
            if score_file_path and self._scores:
                scores = np.fromfile(score_file_path, np.int64, n, offset=8 * begin)
                if self._lru:
                    scores = np.maximum(timestamp - scores, 0)
                self._write_scores(table_id, keys, scores, False)
        step: int | None = meta.get("step_score")
        return step

    # What dynamicemb asks of the layout.

    def embedding_dtype(self) -> torch.dtype:
        """Return the dtype of values."""
        return self._dtype

    def embedding_dim(self, table_id: int) -> int:
        """Return the dimension of a table's rows."""
        return self._dims[table_id]

    def value_dim(self, table_id: int) -> int:
        """Return how many numbers a table's rows and their states have."""
        return self._dims[table_id] + self._state_dims[table_id]

    def max_embedding_dim(self) -> int:
        """Return the largest dimension, which is the column where states begin."""
        return self._max_dim

    def max_value_dim(self) -> int:
        """Return the number of columns of values."""
        return self._width

    def embedding_dims(self, on_device: bool = False) -> torch.Tensor:
        """Return the dimensions of all tables, on the GPU if asked."""
        dims = torch.tensor(self._dims, dtype=torch.int64)
        return dims.cuda() if on_device else dims

    def all_dims_vec4(self) -> bool:
        """Return whether all dimensions, those of values too, are multiples of 4."""
        tables = range(len(self._dims))
        return all(self._dims[table] % 4 == 0 and self.value_dim(table) % 4 == 0 for table in tables)

    def init_optimizer_state(self) -> float:
        """Return the number that states begin with."""
        return float(self._optimizer.get_initial_optim_states())

    def _one_of(self, field: str) -> Any:
        """Return a field that all options must have in common."""
        values = [getattr(option, field, None) for option in self._options]
        if any(value != values[0] for value in values):
            raise SpecError(f"ServerStorage: tables of one group differ in {field}: {values}")
        return values[0]

    def _dist_type(self, table: int) -> str:
        return str(getattr(self._options[table], "dist_type", "roundrobin"))

    def _create(self, name: str, number: int) -> int:
        args = self._optimizer.get_opt_args()
        kind = args.get("opt_type")
        if kind not in _OPTIMIZERS:
            raise SpecError(
                f"ServerStorage: the state of dynamicemb's optimizer {kind!r} cannot be stored; those that "
                f"can are {', '.join(_OPTIMIZERS)}"
            )
        fields: dict[str, Any] = {"initializer": {"name": "zeros"}, **self.table_fields}
        spec = TableSpec(name, self._dims[number], optimizer=_OPTIMIZERS[kind](args), **fields)
        table = self._client.create_table(spec)
        stored = sum(self._client.slots(table).values())
        if stored != self._stored_dims[number]:
            raise SpecError(
                f"ServerStorage: {kind} has {self._stored_dims[number]} numbers of state per row of "
                f"dimension {self._dims[number]}, and table '{name}' has room for {stored}; this dynamicemb "
                "is newer than what this version knows"
            )
        return table

    def _create_scores(self, name: str) -> int:
        # The bits of an int64 are those of a float64 that nobody computes with.
        return self._client.create_table(
            TableSpec(
                f"{name}.scores",
                1,
                dtype="float64",
                optimizer={"name": "sgd"},
                initializer={"name": "zeros"},
                nonfinite_gradients="pass",
            )
        )

    def _fill(self, table: int, values: NDArray[Any], with_state: bool) -> None:
        """Fill the columns of a table that no row has: those of wider tables, and padding of states."""
        values[:, self._dims[table] : self._max_dim] = 0
        if with_state:
            values[:, self._max_dim + self._stored_dims[table] :] = self.init_optimizer_state()

    def _read_scores(
        self, table: int, keys: NDArray[np.int64], found: NDArray[np.bool_], added: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        read = np.empty((len(keys), 1))
        self._client.read_rows(self._scores[table], keys, out=read)
        scores = read.view(np.int64)[:, 0].copy()
        scores[~found] = 0  # of a row that was erased or evicted
        if added is not None and found.any():
            scores[found] += added[found]
            self._write_scores(table, keys[found], scores[found], False)
        return scores

    def _write_scores(
        self, table: int, keys: NDArray[np.int64], scores: NDArray[np.int64], preserve_existing: bool
    ) -> None:
        values = np.ascontiguousarray(scores).view(np.float64)[:, None]
        if preserve_existing:
            read = self._client.read_rows(self._scores[table], keys, out=np.empty_like(values))
            keys, values = keys[~read.found], values[~read.found]
        if len(keys) > 0:
            self._client.assign(self._scores[table], keys, values)

    def _require_table(self, table: int) -> None:
        if not 0 <= table < len(self._dims):
            raise SpecError(f"table_id is {table}; expected one of 0 to {len(self._dims) - 1}")

    def _keys(
        self, keys: torch.Tensor, table_ids: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if keys.dtype not in (torch.int64, torch.uint64) or keys.dim() != 1:
            raise SpecError(f"the keys are {keys.dtype} of {keys.dim()} dimensions; expected int64 of one")
        if tuple(table_ids.shape) != tuple(keys.shape) or table_ids.dtype not in (torch.int64, torch.int32):
            raise SpecError(
                f"the table_ids are {table_ids.dtype} of shape {tuple(table_ids.shape)}; expected int64 "
                f"of shape {tuple(keys.shape)}"
            )
        tables = np.asarray(table_ids.cpu().numpy(), np.int64)
        if len(tables) > 0:
            self._require_table(int(tables.min()))
            self._require_table(int(tables.max()))
        return np.ascontiguousarray(keys.cpu().numpy()).view(np.int64), tables

    @staticmethod
    def _per_key(what: str, values: torch.Tensor | None, n: int) -> NDArray[np.int64] | None:
        """Return scores or frequencies; None for those that are left out, as an empty tensor, too."""
        if values is None or (values.numel() == 0 and n > 0):
            return None
        if tuple(values.shape) != (n,) or values.dtype not in (torch.int64, torch.uint64):
            raise SpecError(
                f"{what}: {values.dtype} of shape {tuple(values.shape)}; expected int64 of shape ({n},)"
            )
        return np.ascontiguousarray(values.cpu().numpy()).view(np.int64)

    def _check_meta(self, table: int, path: str, meta: dict[str, Any], include_optim: bool) -> bool:
        """Return whether states can be loaded, too."""
        expected = {"evict_strategy": self._evict_strategy, "dist_type": self._dist_type(table)}
        for field, value in expected.items():
            found = meta.get(field, value)
            if found != value:
                raise SpecError(
                    f"{path}: {field} is {found}, but the table has {value}; load it with the same"
                )
        mine, theirs = self._optimizer.get_opt_args().get("opt_type"), meta.get("opt_type")
        if not include_optim or theirs in (None, mine):
            return include_optim
        warnings.warn(
            f"{path}: states are of {theirs}, not of {mine}: rows get the first state", stacklevel=3
        )
        return False


def _rank() -> tuple[int, int]:
    """Return the rank of this process and how many there are."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _segments(
    tables: NDArray[np.int64], count: int
) -> Iterator[tuple[int, Any, slice | NDArray[np.int64] | None]]:
    """Yield each table that has keys, their positions, and how to take them: None for all of them.

    Keys that come table by table, as dynamicemb's do, are taken as slices, which copies nothing.
    """
    if len(tables) == 0:
        return
    if tables[0] == tables[-1] and (tables == tables[0]).all():
        yield int(tables[0]), slice(None), None
        return
    if (np.diff(tables) >= 0).all():
        bounds = np.searchsorted(tables, np.arange(count + 1))
        for table in range(count):
            if bounds[table] < bounds[table + 1]:
                part = slice(int(bounds[table]), int(bounds[table + 1]))
                yield table, part, part
        return
    for table in range(count):
        positions = np.flatnonzero(tables == table)
        if len(positions) > 0:
            yield table, positions, positions


class _Staging:
    """Memory of this process that values pass through on their way to and from another device.

    It is reused, pinned where CUDA is there, and shared with servers of this host. Values on the CPU are read
    right into the tensor that the caller gets, and written right from the caller's.
    """

    def __init__(self, client: Client, table: int) -> None:
        self._client = client
        self._table = table
        self._memory: NDArray[Any] | None = None
        self._copied: Any = None  # an event: what was in it has left it
        self._unpin: Callable[[], Any] = lambda: None

    def take(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return a float32 tensor on the CPU, ``(rows, columns)``, to fill and `give`."""
        if device.type == "cpu":
            return torch.empty(rows, columns, dtype=torch.float32)
        if self._copied is not None:
            self._copied.synchronize()
        return torch.from_numpy(self._array(rows, columns))

    def give(self, values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the filled tensor in a dtype on the device, where its copy may still be under way."""
        if device.type == "cpu":
            return values.to(dtype)
        moved = values.to(device, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return moved.to(dtype)

    def bring(self, values: torch.Tensor) -> NDArray[Any]:
        """Return values of any device as a float32 array."""
        values = values.detach().to(torch.float32)
        if values.device.type == "cpu":
            array: NDArray[Any] = values.contiguous().numpy()
            return array
        if self._copied is not None:
            self._copied.synchronize()
        array = self._array(*values.shape)
        torch.from_numpy(array).copy_(values)  # waits for the copy
        return array

    def _array(self, rows: int, columns: int) -> NDArray[Any]:
        needed = rows * columns
        if self._memory is None or self._memory.size < needed:
            self._unpin()
            self._memory = self._client.new_array(self._table, needed + needed // 4, 1)
            if torch.cuda.is_available():
                self._pin(self._memory)
        return self._memory.reshape(-1)[:needed].reshape(rows, columns)

    def _pin(self, memory: NDArray[Any]) -> None:
        cudart = torch.cuda.cudart()
        if cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0) != cudart.cudaError.success:
            warnings.warn(
                f"CUDA does not pin {memory.nbytes} bytes of memory, so each copy of rows to and from a GPU "
                "takes longer and is waited for: look at ulimit -l",
                stacklevel=6,
            )
            return
        # It keeps the memory until no copy is on its way from there.
        unpin = weakref.finalize(self, _unpin, memory)
        unpin.atexit = False
        self._unpin = unpin


def _unpin(memory: NDArray[Any]) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _Written:
    """A file that appears under its name when the ``with`` ends without an error."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._part = self._path.with_name(self._path.name + ".part")

    def __enter__(self) -> _Written:
        self._file = self._part.open("wb")
        return self

    def write(self, array: NDArray[Any]) -> None:
        """Append the numbers of an array."""
        np.ascontiguousarray(array).tofile(self._file)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()


def _write(path: str, write: Callable[[Any], Any]) -> None:
    part = Path(path + ".part")
    with part.open("wb") as file:
        write(file)
    part.replace(path)


def _count(path: str, row_bytes: int, expected: int | None) -> int:
    """Return how many rows a file has."""
    size = os.path.getsize(path)
    if size % row_bytes != 0 or expected not in (None, size // row_bytes):
        wanted = f"a multiple of {row_bytes}" if expected is None else f"{expected * row_bytes}"
        raise SpecError(f"{path}: {size} bytes; expected {wanted}, as many rows as there are keys")
    return size // row_bytes
