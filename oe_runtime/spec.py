"""Tables, storage and workers as plain values.

The C++ core checks them, so that the rules have one home. A wrong field raises ``SpecError`` from
``Client.create_table``, or when a client or server opens its storage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import oe_runtime._core as _core
from oe_runtime.errors import SpecError

__all__ = ["DTYPES", "OPTIMIZERS", "STORAGES", "TLS", "StorageSpec", "TableSpec", "Worker"]

# Encryption of connections; auto: only those that leave the machine.
TLS = ("auto", "on", "off")

# Dtypes of weights; see TableSpec.
DTYPES = ("float32", "float64", "bfloat16", "float16")
STATE_DTYPES = ("float32", "bfloat16")  # of the optimizer's state, but float64 of a float64 table

# Names for TableSpec.optimizer.
OPTIMIZERS = tuple(_core.optimizers())

# Kinds of memory for rows; see StorageSpec. Rows of the durable ones outlive the servers, and the cached ones
# have the most used rows in DRAM.
STORAGES = ("dram", "pmem_libpmem", "dram_pmem", "dram_ssd", "pmem_memkind")
DURABLE = ("pmem_libpmem", "dram_pmem", "dram_ssd")
CACHED = ("dram_pmem", "dram_ssd")

# StorageSpec.row_precision of rows that are only read; "" is as trained.
ROW_PRECISIONS = ("int8", "bfloat16")


def counts_pushes(optimizer: Mapping[str, Any]) -> bool:
    """Return whether updates by a table's complete optimizer depend on the number of the push."""
    _, by_its_rule = _core.optimizers()[optimizer["name"]]
    return by_its_rule or bool({"dampening", "learning_rate_decay"} & optimizer.keys())


def _mapping(where: str, field: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    hint = f'; write {{"name": {json.dumps(value)}}}' if isinstance(value, str) else ""
    raise SpecError(f"{where}: {field!r} must be a mapping with a 'name', not {value!r}{hint}")


def _json(where: str, fields: Mapping[str, Any]) -> str:
    """Return fields as JSON, with NumPy's numbers and paths as values."""

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

    ``index``: ``"hash"`` takes any of the 2**64 keys (``input_dim`` stays 0); ``"array"`` takes keys in ``[0,
    input_dim)``.

    ``optimizer`` and ``initializer`` are flat mappings with a ``name`` and Keras's parameter names; missing
    parameters have Keras's defaults. The learning rate belongs to a push.

    ``nonfinite_gradients`` decides about keys whose gradient has NaN or infinity. ``"refuse"`` changes
    nothing and raises ``GradientError``; ``"skip"`` leaves that row as it is; ``"pass"`` gives it to the
    optimizer unchecked, as Keras does. Servers count refused and skipped ones.

    ``dtype`` is the dtype of the weights, one of ``DTYPES``. float64 rows are trained in float64 from float64
    gradients; pulls and gradients of all others are float32. bfloat16 and float16 rows are updated in float32
    and rounded stochastically (reproducibly, from the seed), so that updates below their resolution count.

    ``state_dtype`` is the dtype of the optimizer's state: by default float32, or float64 of a float64 table;
    or ``"bfloat16"``, which is rounded as rows are, by random numbers of its own. A float64 table refuses it,
    and so does ``adagrad_decay``, which counts in its state. float16 would not have the range of squares.

    ``exchange_dtype`` is the dtype of gradients on their way to the servers: by default float32, or float64
    of a float64 table; or ``"bfloat16"``, to which the sum of a row's gradients is rounded to nearest, once
    per push, on servers and in one process alike. It halves the bytes of pushes over TCP, and is this
    client's: others of the same table choose their own. A float64 table refuses it, and so do earlier
    servers. Pulls of bfloat16 and float16 rows take two bytes per weight over TCP without being asked.

    ``admission`` decides which keys get a row. ``{"name": "counter", "filter_freq": n}``: keys that occurred
    n times in pushed batches, duplicates included. ``{"name": "cbf", "filter_freq": n, "max_element_size": m,
    "false_positive_probability": p}``: the same with a counting Bloom filter, which takes ``1.44 * log2(1 /
    p)`` bytes per element and admits a key too early with that probability. The n-th push creates the row and
    updates it; until then the key reads ``default_value`` (0.0). Pulls do not count. A counter counts at most
    ``max_keys`` keys (default 1e8, of the whole table) and first forgets those not pushed lately. With
    ``global_step`` or ``ttl`` below it also forgets keys not pushed for as long as a row would live, or at
    most twice as long. With ``"every_steps": k`` a key that is not pushed again is forgotten within ``2 *
    (steps_to_live + 17 * k)`` pushes (``ttl``: twice the seconds and 34 * k pushes), however many new keys
    come. Forgotten keys start again at zero.

    ``eviction`` lists the rules by which rows are removed. ``{"name": "global_step", "steps_to_live": n}``:
    rows whose last push is more than n pushes of the table ago. ``{"name": "l2_weight", "threshold": t}``:
    rows with half the sum of squared weights below t. ``{"name": "ttl", "seconds": s}``: rows not pushed for
    longer; where the server's clock jumps by more than an hour, or the newest row is 30 days old at loading,
    all rows count as pushed at that moment. These rules run before a save, by ``Client.evict`` and, with
    ``"every_steps": k``, on a sixteenth of the table during every k pushes, a little after each. ``{"name":
    "cap", "max_rows": n, "policy": "lru"}`` (or ``max_bytes``, or ``"lfu"``) limits each server to its share
    of n: a new row evicts another one that is not in the batch, and a key without room gets no row. Servers
    count all of these. An evicted key is like a new one, except for the counts of a cbf.
    """

    name: str
    dim: int
    index: str = "hash"
    input_dim: int = 0
    dtype: str = "float32"
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "adagrad"})
    initializer: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "uniform", "minval": -0.05, "maxval": 0.05, "seed": 0}
    )
    nonfinite_gradients: str = "refuse"
    admission: Mapping[str, Any] | None = None
    eviction: Sequence[Mapping[str, Any]] = ()
    state_dtype: str | None = None
    exchange_dtype: str | None = None

    def __post_init__(self) -> None:
        # The default has one form, which servers of earlier versions know: none.
        for name in ("state_dtype", "exchange_dtype"):
            if getattr(self, name) == ("float64" if self.dtype == "float64" else "float32"):
                object.__setattr__(self, name, None)

    def to_json(self) -> str:
        """Return the specification as a JSON object; ``SpecError`` if a value has no JSON form."""
        where = f"table {self.name!r}"
        fields = dict(vars(self))
        for name in ("admission", "state_dtype", "exchange_dtype"):
            if fields[name] is None:
                del fields[name]
        for name in {"optimizer", "initializer", "admission"} & fields.keys():
            fields[name] = _mapping(where, name, fields[name])
        policies = fields.pop("eviction")
        if policies and (isinstance(policies, str) or not isinstance(policies, Sequence)):
            raise SpecError(f"{where}: 'eviction' must be a list of mappings, not {policies!r}")
        if policies:
            fields["eviction"] = [_mapping(where, f"eviction[{i}]", one) for i, one in enumerate(policies)]
        return _json(where, fields)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> TableSpec:
        """Return the inverse of ``to_json``; takes the text or the parsed object."""
        fields = json.loads(text) if isinstance(text, str) else dict(text)
        try:
            return cls(**fields)
        except TypeError as error:
            raise SpecError(f"not the description of a table: {error}") from None


@dataclass(frozen=True)
class StorageSpec:
    """The memory of the rows: one of ``STORAGES``.

    ``"dram"``. ``"pmem_libpmem"``: persistent memory, in the directory ``path``. ``"dram_pmem"``: the same,
    with the most used rows in ``cache_bytes`` of DRAM, for all tables of a server together.
    ``"dram_ssd"``: a directory on an NVMe drive, with such a cache; a batch's missing rows are read at once.
    ``"pmem_memkind"``: persistent or CXL memory as NUMA nodes, or an unnamed file in ``path``; neither
    outlives the process.

    ``capacity_bytes`` caps the rows of all tables of a server; 0 means no cap.

    For ``"pmem_libpmem"``, ``"dram_pmem"`` and ``"dram_ssd"``, ``recover`` opens the tables in the directory
    and ``fresh`` removes them. With neither, a directory with a checkpoint is refused (``StorageError``).
    ``kept_checkpoints`` (2 to 64; 1 for a single table on a single server) of ``Client.checkpoint`` are kept.
    A row that changes between two checkpoints takes one more slot for each kept checkpoint and for the next.

    A storage reserves these slots for as many rows as changed between earlier checkpoints; of rows for which
    no checkpoint has shown that, for a sixteenth, with more than 3 kept checkpoints for
    4 / (``kept_checkpoints`` + 1) of a sixteenth. New rows that would take reserved slots are refused
    (``StorageFull``); updates and evictions go on. Where more rows change, a full storage refuses updates
    too, until a checkpoint gives slots back: leave it more room.

    ``weights_only`` leaves out the state of optimizers and policies: for tables that are restored from files
    and only read. They refuse pushes, saves and checkpoints. ``row_precision`` keeps such weights in fewer
    bytes: ``"int8"`` as 8-bit integers and a scale for each row, 1/127 of its largest weight; ``"bfloat16"``
    each rounded to the nearest. Loading a row that has NaN or a weight beyond the precision's largest raises
    ``CheckpointError`` naming table and key. Servers refuse it (``SpecError``).
    """

    type: str = "dram"
    path: str | os.PathLike[str] = ""
    capacity_bytes: int = 0
    recover: bool = False
    kept_checkpoints: int = 2
    cache_bytes: int = 0
    weights_only: bool = False
    fresh: bool = False
    row_precision: str = ""

    def to_json(self) -> str:
        """Return the storage as a JSON object; ``SpecError`` if a value has no JSON form."""
        return _json("storage", asdict(self))


def persistence_note(storage: str, path: str | os.PathLike[str], is_pmem: bool) -> str:
    """Return a notice where rows are not on persistent memory; empty if they are."""
    if not path:
        return ""
    if storage == "pmem_memkind":
        return f"rows in {path} under pmem_memkind are not persistent: they end with this process"
    if is_pmem or storage == "dram_ssd":
        return ""
    return f"{path} is not persistent memory; rows there work the same, but checkpoints wait for its disk"


@dataclass(frozen=True)
class Worker:
    """One worker of a job: its ``rank``, from 0, among ``of`` workers.

    All workers must agree on everything except ``rank`` and ``wait``.

    ``mode`` ``"sync"``: the servers hold each worker's push of a batch until all have arrived, sum them by
    key in the order of ranks, and apply them as one push. The rows are those of one worker with the whole
    batch, and the same bits in any order of arrival. A worker's next pull, save or checkpoint after its push
    waits for that. A worker without a part of a batch pulls and pushes empty arrays. ``"async"``: a push is
    applied on arrival; with ``staleness`` s a pull waits until no other worker is more than s pushes behind.

    ``on_lost`` decides what happens when a worker's connection ends without ``Client.leave``. ``"stop"``: the
    others get ``WorkerLost`` when they wait for it or push, until all go back to a checkpoint together.
    ``"continue"``: they go on without it; in mode ``"sync"`` it takes part again when all go back to a
    checkpoint.

    ``wait``: seconds that a request may wait for other workers before it raises ``WorkerLost``.
    ``generation`` counts the starts of all workers together. Workers of a higher generation take the places
    of earlier ones, which get ``WorkerLost`` from then on, even where a vanished host left connections open.
    """

    rank: int
    of: int
    mode: str = "sync"
    staleness: int | None = None
    on_lost: str = "stop"
    wait: float = 600.0
    generation: int = 0

    def to_json(self) -> str:
        """Return the worker as a JSON object; ``SpecError`` if a value has no JSON form."""
        return _json(f"worker {self.rank!r}", asdict(self))
