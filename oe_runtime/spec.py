"""What makes a table and where its rows live, as plain values.

The C++ core checks them (one home for the rules): a wrong field raises ``SpecError`` from
``Client.create_table`` or when a client or server opens its storage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oe_runtime import _core
from oe_runtime.errors import SpecError

__all__ = ["DTYPES", "OPTIMIZERS", "STORAGES", "TLS", "StorageSpec", "TableSpec", "Worker"]

# Whether connections are encrypted; auto: those that leave the machine.
TLS = ("auto", "on", "off")

# Of weights; see TableSpec.
DTYPES = ("float32", "float64", "bfloat16", "float16")

# Names for TableSpec.optimizer.
OPTIMIZERS = tuple(_core.optimizers())

# Kinds of memory for rows; see StorageSpec.
STORAGES = ("dram", "pmem_libpmem", "dram_pmem", "pmem_memkind")


def _adagrad() -> Mapping[str, Any]:
    return {"name": "adagrad"}


def _uniform() -> Mapping[str, Any]:
    return {"name": "uniform", "minval": -0.05, "maxval": 0.05, "seed": 0}


def _mapping(where: str, field: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    hint = f'; write {{"name": {json.dumps(value)}}}' if isinstance(value, str) else ""
    raise SpecError(f"{where}: {field!r} must be a mapping with a 'name', not {value!r}{hint}")


def _json(where: str, fields: Mapping[str, Any]) -> str:
    """NumPy's numbers and paths are values too."""

    def plain(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
            return value.item()
        raise TypeError(f"{value!r} is no number, text or mapping")

    try:
        return json.dumps(fields, sort_keys=True, allow_nan=False, default=plain)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {error}") from None


@dataclass(frozen=True)
class TableSpec:
    """An embedding table.

    ``index`` is ``"hash"`` (any of the 2**64 keys; ``input_dim`` stays 0) or ``"array"`` (keys in
    ``[0, input_dim)``). ``optimizer`` and ``initializer`` are flat mappings with a ``name`` and Keras's
    parameter names; what is left out has Keras's default. The learning rate belongs to a push.
    ``nonfinite_gradients`` says what a push does with a key whose gradient has NaN or infinity: ``"refuse"``
    changes nothing and raises ``GradientError``, ``"skip"`` leaves that row as it is, ``"pass"`` gives it to
    the optimizer unchecked, as Keras does. Servers count those that they refused or skipped.

    ``dtype`` is that of the weights, one of ``DTYPES``. float64 rows are trained in float64 from gradients in
    float64; pulls and gradients of all others are float32. bfloat16 and float16 rows keep the optimizer's
    state in float32, and are updated in float32 and rounded stochastically (reproducibly, from the seed), so
    that updates smaller than their resolution count.

    ``admission`` says which keys get a row: ``{"name": "counter", "filter_freq": n}`` those that were in
    pushed batches n times, duplicates in a batch included, and ``{"name": "cbf", "filter_freq": n,
    "max_element_size": m, "false_positive_probability": p}`` the same with a counting Bloom filter, which
    takes ``1.44 * log2(1 / p)`` bytes an element and lets a key in too early with that probability. The push
    that reaches n makes the row and updates it; until then the key reads ``default_value`` (0.0). Pulls do
    not count. A counter counts at most ``max_keys`` keys (default 1e8, of the whole table) at a time, and
    forgets first those that were not pushed lately; with ``global_step`` or ``ttl`` below, it also forgets
    keys that were not pushed for as long as a row would live, or at most twice as long. They begin at zero
    again.

    ``eviction`` lists which rows go: ``{"name": "global_step", "steps_to_live": n}`` those whose last push is
    more than n pushes of the table ago, ``{"name": "l2_weight", "threshold": t}`` those with half the sum of
    squared weights below t, ``{"name": "ttl", "seconds": s}`` those not pushed for longer (where the server's
    clock jumps by more than an hour, or the newest row is 30 days old when rows are loaded, all rows count as
    pushed at that moment). They are looked for before a save, by ``Client.evict`` and, with ``"every_steps":
    k``, in a sixteenth of the table during every k pushes, a little after each. ``{"name": "cap", "max_rows":
    n, "policy": "lru"}`` (or ``max_bytes``, or ``"lfu"``) holds each server to its share of n: a new row
    makes another one go that is not in the batch, and a key for which there is no place has no row. Servers
    count all of it. An evicted key is as one that never came, but for what a cbf has counted.
    """

    name: str
    dim: int
    index: str = "hash"
    input_dim: int = 0
    dtype: str = "float32"
    optimizer: Mapping[str, Any] = field(default_factory=_adagrad)
    initializer: Mapping[str, Any] = field(default_factory=_uniform)
    nonfinite_gradients: str = "refuse"
    admission: Mapping[str, Any] | None = None
    eviction: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> str:
        """The specification as a JSON object; ``SpecError`` if a value has no JSON form."""
        where = f"table {self.name!r}"
        fields: dict[str, Any] = {
            "name": self.name,
            "dim": self.dim,
            "index": self.index,
            "input_dim": self.input_dim,
            "dtype": self.dtype,
            "optimizer": _mapping(where, "optimizer", self.optimizer),
            "initializer": _mapping(where, "initializer", self.initializer),
            "nonfinite_gradients": self.nonfinite_gradients,
        }
        if self.admission is not None:
            fields["admission"] = _mapping(where, "admission", self.admission)
        if self.eviction and (isinstance(self.eviction, str) or not isinstance(self.eviction, Sequence)):
            raise SpecError(f"{where}: 'eviction' must be a list of mappings, not {self.eviction!r}")
        if self.eviction:
            fields["eviction"] = [
                _mapping(where, f"eviction[{i}]", policy) for i, policy in enumerate(self.eviction)
            ]
        return _json(where, fields)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> TableSpec:
        """The inverse of ``to_json``; takes the text or the parsed object."""
        fields = json.loads(text) if isinstance(text, str) else dict(text)
        try:
            return cls(**fields)
        except TypeError as error:
            raise SpecError(f"not the description of a table: {error}") from None


@dataclass(frozen=True)
class StorageSpec:
    """Where rows live: one of ``STORAGES``.

    ``"dram"``; ``"pmem_libpmem"``: persistent memory, in the directory ``path``; ``"dram_pmem"``: the same
    with the rows that are used most in ``cache_bytes`` of DRAM, for all tables of one server together;
    ``"pmem_memkind"``: persistent memory or CXL memory as NUMA nodes, or a file without a name in ``path``,
    neither of which outlives the process.

    ``capacity_bytes`` caps the rows of all tables of one server; 0 means no cap. For ``"pmem_libpmem"`` and
    ``"dram_pmem"``, ``recover`` opens the tables that the directory holds (otherwise they are removed, and
    all start empty), and ``kept_checkpoints`` (2 to 64; 1 for a single table on a single server) of
    ``Client.checkpoint`` are kept. A row that changes between two checkpoints takes one more place for each
    kept one and for the next. Where a storage does not have these places, new rows are refused
    (``StorageFull``), and updates and evictions go on.

    ``weights_only`` leaves out what optimizers and policies keep in rows: for tables that are restored from
    files and read. They refuse pushes, saves and checkpoints.
    """

    type: str = "dram"
    path: str | os.PathLike[str] = ""
    capacity_bytes: int = 0
    recover: bool = False
    kept_checkpoints: int = 2
    cache_bytes: int = 0
    weights_only: bool = False

    def to_json(self) -> str:
        """The storage as a JSON object; ``SpecError`` if a value has no JSON form."""
        return _json("storage", asdict(self))


def persistence_note(storage: str, path: str | os.PathLike[str], is_pmem: bool) -> str:
    """What is to be said, once, where rows do not lie on persistent memory; empty where there is nothing."""
    if not path:
        return ""
    if storage == "pmem_memkind":
        return f"rows in {path} under pmem_memkind are not persistent: they end with this process"
    if is_pmem:
        return ""
    return f"{path} is not persistent memory; rows there work the same, but checkpoints wait for its disk"


@dataclass(frozen=True)
class Worker:
    """Which worker of a job a client is: ``rank``, from 0, of ``of``. All must say the same but for ``wait``.

    ``mode`` is ``"sync"``: the servers hold each worker's push of a batch until those of all are there, sum
    them by key in the order of the ranks, and apply them as one push, so that the rows are those of one
    worker with the whole batch, and the same bits whoever comes first. What a worker asks of those rows after
    its own push waits for that: the next pull, a save, a checkpoint. A worker that has nothing in a batch
    pulls and pushes empty arrays. Or it is ``"async"``: a push is applied when it comes, and with
    ``staleness`` s a pull waits until no other worker is more than s pushes behind.

    ``on_lost`` says what happens when a worker's connection ends without ``Client.leave``: with ``"stop"``
    the others get ``WorkerLost`` when they wait for it or push, until all go back to a checkpoint together;
    with ``"continue"`` they go on without it, and (``"sync"``) it takes part again when all go back to a
    checkpoint. ``wait`` is how many seconds a request may wait for other workers before it raises
    ``WorkerLost``. ``generation`` counts the starts of all workers together: those of a higher one take the
    places of all of an earlier one, who get ``WorkerLost`` from then on, also where their connections are
    still open because their host has vanished.
    """

    rank: int
    of: int
    mode: str = "sync"
    staleness: int | None = None
    on_lost: str = "stop"
    wait: float = 600.0
    generation: int = 0

    def to_json(self) -> str:
        """The worker as a JSON object; ``SpecError`` if a value has no JSON form."""
        return _json(f"worker {self.rank!r}", asdict(self))
