"""What an epoch costs on each server set of a price table, for a model of a given size: `oeprov cost`.

Sizes of rows are those of the runtime: weights and optimizer state without a header
(core/spec/row_format.h); in persistent memory, rows that do not straddle lines of 256 bytes, unless that
wastes a quarter or more (core/storage/row_store.h), and beside them the slots for what changes between
checkpoints (core/storage/slot_store.h). On drives, rows are packed into blocks, with room for the cleaner
(docs/design/decisions/rows-on-nvme.md).
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provision.cluster.errors import OeprovError
from provision.cluster.setting_types import Size, Text, explain
from provision.cluster.training_settings import OPTIMIZER_STATES, OPTIMIZERS

DEFAULT_PRICES = Path(__file__).with_name("prices.yml")
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
StateDtype = Literal["float32", "bfloat16"]
System = Literal["dram", "pmem_libpmem", "dram_pmem", "dram_ssd"]

_LINE = 256
_INDEX = 21  # bytes of DRAM per row: an index has 18 to 23 (docs/design/decisions/hash-index.md)
_POOL_INDEX = 18  # the same with rows in a pool, one of them for the slot
_LOG_INDEX = 12  # with many rows on drives (docs/design/decisions/compact-index.md)
_LOG_CHECKSUM = 4  # bytes of DRAM per block of a log
_LOG_BITS = 3  # of DRAM per place in a log, and one more for each kept checkpoint and the next
_SLOT = 16  # bytes of a pool's metadata per row
_BLOCK = 4096  # of a drive
_ENTRY = 20  # bytes beside a row in a log: its key, its version and its share of the block's checksum
_LOG_ROOM = 1.45  # of the rows' bytes, for a log to be cleaned at
_LOG_WRITES = 2.0  # times that a row is written then
_DAY = 86400  # seconds
_SIXTEENTH = 16  # of the rows change between checkpoints, unless the model says otherwise
USABLE = 0.9  # of a server's memory: the rest is the system's, connections', and segments' that are not full


class CostError(OeprovError):
    """A price table or a model that cannot be used; the message says where and why."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Text
    source: Text = Field(min_length=1)
    date: datetime.date


class Server(_Entry):
    """A type of server; ``price`` per hour. ``ssd``: bytes of its NVMe drives, which are rated for
    ``ssd_writes`` bytes a day together (drive writes per day times capacity); 0: unknown.
    """

    dram: Size
    pmem: Size = 0
    ssd: Size = 0
    ssd_writes: Size = 0
    price: float = Field(gt=0)


class Way(_Entry):
    """A way to keep rows; ``time``: of an epoch, as a multiple of one with rows in DRAM."""

    storage: System
    time: float = Field(gt=0)


class Prices(BaseModel):
    """A price table."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    currency: Text = "USD"
    servers: list[Server] = Field(min_length=1)
    systems: list[Way] = Field(min_length=1)


@dataclass(frozen=True)
class Model:
    """What is to be trained: rows of all tables together, of one width.

    ``changed``: how many of them change from one checkpoint in the storage to the next, a sixteenth if it is
    ``None``; ``kept``: such checkpoints. ``written``: rows per second that go from the cache to drives; 0:
    unknown.
    """

    rows: int
    dim: int
    optimizer: str
    dtype: Dtype
    changed: int | None = None
    kept: int = 3
    written: int = 0
    state_dtype: StateDtype = "float32"


@dataclass(frozen=True)
class Choice:
    """A set of servers that holds the model. Bytes of the whole model; ``hours`` and ``cost`` of an epoch.

    ``ssd_writes``: bytes a day to drives; ``ssd_wear``: how many times that is what they are rated for. 0:
    unknown.
    """

    system: str
    storage: str
    server: str
    servers: int
    row_bytes: int
    dram: int
    pmem: int
    price: float
    hours: float
    cost: float
    ssd: int = 0
    ssd_writes: int = 0
    ssd_wear: float = 0.0


def row_bytes(model: Model) -> int:
    """Bytes of a row: weights and the optimizer's state, each aligned to its numbers, and both to 4 bytes."""
    weight = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[model.dtype]
    state = 2 if model.state_dtype == "bfloat16" else max(weight, 4)
    weights = model.dim * weight
    row = weights + -weights % state + values(model) * state
    return row + -row % 4


def values(model: Model) -> int:
    """Numbers of optimizer state in a row."""
    per_weight, per_row = OPTIMIZER_STATES[model.optimizer]
    return per_weight * model.dim + per_row


def pool_bytes(row: int) -> float:
    """Bytes of persistent memory per row of ``row`` bytes, with its share of lines and metadata."""
    place = _LINE / (_LINE // row) if row < _LINE else math.ceil(row / _LINE) * _LINE
    return (place if row > int(place) - int(place) // 4 else row) + _SLOT


def log_bytes(row: int) -> float:
    """Bytes of a drive per row of ``row`` bytes in a log, without the cleaner's room."""
    return (_BLOCK / (_BLOCK // row) if row < _BLOCK else math.ceil(row / _BLOCK) * _BLOCK) + _ENTRY


def changed(model: Model) -> int:
    """Rows that change from one checkpoint in the storage to the next."""
    return min(model.rows, math.ceil(model.rows / _SIXTEENTH) if model.changed is None else model.changed)


def slots(model: Model) -> int:
    """Places for rows in pools: a row that changes takes one more for each kept checkpoint and for the next.

    A pool with fewer free slots refuses new rows. Beside those for known changes, it keeps a sixty-fourth of
    the rows free for each of up to 4 checkpoints.
    """
    epochs = model.kept + 1
    return model.rows + changed(model) * epochs + math.ceil(model.rows / 64) * min(epochs, 4)


def choices(model: Model, prices: Prices, hours: float) -> list[Choice]:
    """Every set that holds the model, the cheapest epoch first; ``hours``: of an epoch with rows in DRAM."""
    row = row_bytes(model)
    found = []
    for way in prices.systems:
        pmem = ssd = 0
        if way.storage == "dram":
            dram = model.rows * (row + _INDEX)
        elif way.storage == "dram_ssd":
            ssd = math.ceil(slots(model) * log_bytes(row) * _LOG_ROOM)
            dram = model.rows * _LOG_INDEX + math.ceil(ssd / _BLOCK) * _LOG_CHECKSUM
            dram += math.ceil(ssd / log_bytes(row) * (_LOG_BITS + model.kept + 1) / 8)
        else:
            dram = model.rows * _POOL_INDEX
            pmem = math.ceil(slots(model) * pool_bytes(row))
        writes = math.ceil(model.written * _DAY * log_bytes(row) * _LOG_WRITES) if ssd else 0
        for server in prices.servers:
            if (pmem and not server.pmem) or (ssd and not server.ssd):
                continue
            needs = ((dram, server.dram), (pmem, server.pmem), (ssd, server.ssd))
            count = max(1, *(math.ceil(need / (has * USABLE)) for need, has in needs if need))
            time = hours * way.time
            price = count * server.price
            found.append(
                Choice(
                    *(way.name, way.storage, server.name, count, row, dram, pmem, price, time, price * time),
                    ssd=ssd,
                    ssd_writes=writes,
                    ssd_wear=writes / (count * server.ssd_writes) if server.ssd_writes else 0.0,
                )
            )
    return sorted(found, key=lambda item: (item.cost, item.system, item.server))


def read(path: Path) -> Prices:
    """A price table; CostError names file and field."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: {getattr(error, 'strerror', None) or 'is not text'}") from None
    except yaml.YAMLError as error:
        raise CostError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    try:
        return Prices.model_validate(content)
    except ValidationError as error:
        item = error.errors()[0]
        where = ".".join(map(str, item["loc"])) or "the file"
        raise CostError(f"{path}: {where}: {explain(item)}") from None


def check(model: Model) -> None:
    """Raise CostError for a value that is out of bounds."""
    if model.rows < 1 or model.dim < 1:
        raise CostError("--rows and --dim are at least 1")
    if not 1 <= model.kept <= 64:
        raise CostError(f"--kept: found {model.kept}; 1 to 64 checkpoints are kept")
    if model.written < 0:
        raise CostError(f"--written-rows: found {model.written}; it is at least 0")
    if model.changed is not None and model.changed < 0:
        raise CostError(f"--changed-rows: found {model.changed}; it is at least 0")
    if model.optimizer not in OPTIMIZERS:
        raise CostError(f"--optimizer: found {model.optimizer!r}; allowed: {', '.join(OPTIMIZERS)}")
    if model.dtype not in get_args(Dtype):
        raise CostError(f"--dtype: found {model.dtype!r}; allowed: {', '.join(get_args(Dtype))}")
    states = get_args(StateDtype)[: 1 if model.dtype == "float64" else 2]  # whose state is float64
    if model.state_dtype not in states:
        with_dtype = f" with --dtype {model.dtype}" if model.dtype == "float64" else ""
        raise CostError(
            f"--state-dtype: found {model.state_dtype!r}; allowed{with_dtype}: {', '.join(states)}"
        )
