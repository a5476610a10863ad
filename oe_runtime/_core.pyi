from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Group:
    """The rows of all tables of one dim, float64 or not, that a pull brought."""

    @property
    def dim(self) -> int: ...
    @property
    def rows(self) -> NDArray[Any]:
        """(unique keys, dim), float64 of float64 tables, else float32; a view of C++ memory."""
    @property
    def inverse(self) -> NDArray[np.int32]:
        """Position -> row, for the ids of all lookups of this group, one after the other."""
    @property
    def tables(self) -> list[tuple[int, NDArray[np.int64], list[tuple[int, int]]]]:
        """Table id, its keys in this batch, and the ranges of ``rows`` that are theirs, in their order."""
    @property
    def lookups(self) -> list[int]:
        """Which lookups of the pull lie in this group, in the order of ``inverse``."""
    @property
    def sizes(self) -> list[int]:
        """How many ids each of ``lookups`` has."""

class Pulled:
    """What ``Client.pull`` returns."""

    @property
    def groups(self) -> list[Group]: ...

class Client:
    @staticmethod
    def in_process(storage: str, servers: int, threads: int) -> Client: ...
    @staticmethod
    def connect(
        endpoints: Sequence[str],
        token: str,
        timeout: float,
        threads: int,
        wire_checkpoints: bool,
        tls: str,
        job: str,
        worker: str,
        read_only: bool,
        share_memory: bool,
        of: int = 0,
    ) -> Client: ...
    @property
    def servers(self) -> int: ...
    def create_table(self, spec: str) -> int: ...
    def drop(self, tables: Sequence[str], job: str | None, force: bool) -> int | None: ...
    def skip_tables(self, next: int) -> None: ...
    def spec(self, table: int) -> str: ...
    def pull(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled: ...
    def plan(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled: ...
    def refresh(self, pulled: Pulled, staleness: int) -> None: ...
    def pairs(
        self, group: Group
    ) -> tuple[
        NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]
    ]: ...
    def embeddings(self, group: Group, out: NDArray[Any] | None) -> NDArray[Any]: ...
    def pool(
        self,
        group: Group,
        bags: Sequence[tuple[NDArray[np.int64], NDArray[Any] | None, bool]],
        out: Sequence[NDArray[Any]],
    ) -> None: ...
    def sum_bags(
        self,
        group: Group,
        bags: Sequence[tuple[NDArray[np.int64], NDArray[Any] | None, bool]],
        gradients: Sequence[NDArray[Any]],
    ) -> NDArray[Any]: ...
    def read_ahead(self, pulls: Sequence[Pulled]) -> None: ...
    @property
    def reads_ahead(self) -> bool: ...
    def follow(self, pulled: Pulled, before: Pulled) -> None: ...
    def push(
        self,
        pulled: Pulled,
        of_ids: Sequence[NDArray[Any] | None],
        of_rows: Sequence[NDArray[Any] | None],
        learning_rates: Sequence[float],
    ) -> None: ...
    def pull_rows(self, table: int, keys: NDArray[np.int64]) -> NDArray[Any]: ...
    def assign(
        self, table: int, keys: NDArray[np.int64], rows: NDArray[Any], slots: NDArray[Any] | None
    ) -> tuple[int, int, int]: ...
    def check_rows(
        self, table: int, keys: NDArray[np.int64], rows: NDArray[Any], slots: NDArray[Any] | None
    ) -> None: ...
    def erase(self, table: int, keys: NDArray[np.int64]) -> int: ...
    def read_rows(
        self, table: int, keys: NDArray[np.int64], rows: NDArray[Any] | None, slots: NDArray[Any] | None
    ) -> tuple[NDArray[np.bool_], NDArray[Any], NDArray[Any] | None]: ...
    def new_array(self, rows: int, columns: int, is_float64: bool) -> NDArray[Any]: ...
    def slots(self, table: int) -> list[tuple[str, int]]: ...
    def keys(self, table: int, part: int | None = None) -> NDArray[np.int64]: ...
    def most_rows(self, table: int) -> int: ...
    def save(self, directory: str, since: str, hold: bool) -> tuple[str, dict[str, bytes]]: ...
    @property
    def torn(self) -> str: ...
    def tear(self, reason: str) -> None: ...
    def restore(self, directories: Sequence[str]) -> None: ...
    def apply_increment(self, increment: Increment) -> None: ...
    def checkpoint(self, id: int, wait: bool) -> None: ...
    def checkpoints(self) -> list[int]: ...
    def recover(self, id: int | None) -> int: ...
    def evict(self) -> int: ...
    def stats(self) -> str: ...
    def exchange_shared(
        self, name: str, replaces: int | None, value: bytes
    ) -> tuple[int, bool, int, list[int], bytes | None]: ...
    def leave(self) -> None: ...
    def shutdown(self) -> None: ...
    def close(self) -> None: ...

def optimizers() -> dict[str, tuple[dict[str, float | bool], bool]]:
    """Every optimizer: its parameters' defaults, and whether updates depend on the number of the push."""

def trace_rule(
    name: str, params: dict[str, float]
) -> tuple[list[tuple[str, float, list[int]]], list[int], list[tuple[str, float]]]:
    """An optimizer's rule for one weight.

    Operations (name, value, operands), the operations that give the new weight and slots, and the slots
    (name, first value). No operations for a rule that updates rows as a whole.
    """

class PredictorCall:
    """A request that is led through its steps."""

    version: int  # of what answered

    def pull(self, client: Client) -> None: ...
    def forward(self) -> None: ...

class Program: ...

class TensorFlowFunction(Program):
    def __init__(
        self, library: str, bindings: str, context: Any, name: str, captured: list[Any], outputs: int
    ) -> None: ...

class TorchProgram(Program):
    def __init__(
        self,
        library: str,
        torch: str,
        weights: Sequence[tuple[str, str, int, Sequence[int], Sequence[int]]],
        instances: int,
    ) -> None: ...
    def call(self, arguments: Sequence[NDArray[Any]]) -> list[NDArray[Any]]: ...

class Predictor:
    def __init__(
        self,
        name: str,
        inputs: Sequence[tuple[str, str, Sequence[int]]],
        outputs: Sequence[tuple[str, str]],
        forward: Program,
        ids: Program | None,
        *,
        arguments: Sequence[tuple[str, int]],
        ids_inputs: Sequence[int] = ...,
        limits: Sequence[int] = ...,
        lookups: Sequence[tuple[int, int]] = ...,
        groups: Sequence[Sequence[int]] = ...,
    ) -> None: ...
    def batch(self, examples: int, timeout_seconds: float) -> None: ...

class Routes:
    def set(
        self,
        routes: Sequence[tuple[str, Predictor, Callable[[PredictorCall], HttpReply | None], int | None]],
    ) -> None: ...

class HttpReply:
    def __init__(
        self,
        status: int,
        body: bytes,
        type: str = "application/json",
        examples: int = 0,
        json_length: int = 0,
    ) -> None: ...

class HttpServer:
    def __init__(
        self,
        answer: Callable[[str, str, bytes, str], HttpReply],
        *,
        unpack: Callable[[bytes, int], bytes | None],
        routes: Routes,
        host: str,
        port: int,
        max_connections: int,
        max_queued_requests: int,
        max_body_bytes: int,
        head_seconds: float,
        idle_seconds: float,
        patience_seconds: float,
        threads: int,
        open_targets: Sequence[str],
    ) -> None: ...
    @property
    def port(self) -> int: ...
    def stats(self) -> str: ...
    def set_access(self, certificate: str, key: str, token: str) -> None: ...
    def start(self) -> None: ...
    def stop(self, seconds: float) -> None: ...

class Server:
    def __init__(
        self,
        *,
        host: str,
        port: int,
        index: int,
        count: int,
        storage: str,
        threads: int,
        token: str,
        checkpoint_dir: str,
        tls: str,
        max_connections: int,
        max_request_bytes: int,
        scrub_bytes_per_second: int = 0,
    ) -> None: ...
    @property
    def port(self) -> int: ...
    @property
    def stop_fd(self) -> int: ...
    @property
    def encrypted(self) -> bool: ...
    @property
    def note(self) -> str: ...
    @property
    def is_pmem(self) -> bool: ...
    def stats(self) -> str: ...
    def stop(self) -> None: ...

MAX_LINE_BYTES: int
MOST_IDS: int

def report_memory_errors() -> None: ...
def normalise(values: NDArray[np.int64]) -> NDArray[np.float32]:
    """sign(x)·log1p(|x|), any shape."""

def scale_numbers(
    values: NDArray[np.float64], logarithm: bool, shift: float, divisor: float
) -> NDArray[np.float32]:
    """sign(x)·log1p(|x|), or (x - shift) / divisor, any shape."""

def parse_number(text: str | bytes) -> float | None:
    """The number that a field of a text file is, 1 and 0 of true and false; None if it is none."""

def category_ids(
    offsets: NDArray[np.int32] | NDArray[np.int64],
    data: NDArray[np.uint8],
    cardinality: int,
    whole: bool,
    missing: Sequence[str],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids of the texts data[offsets[i]:offsets[i + 1]], 0 of empty ones; and which are no integers.

    `missing` counts where values are to be `whole`: of other columns, leave such texts empty.
    """

class TextLayout:
    """How lines of training data are divided, and which columns are which."""

    def __init__(
        self,
        delimiter: str,
        quotes: bool,
        columns: int,
        label: int,
        numbers: Sequence[tuple[int, str, bool, bool, float, float, float]],
        categories: Sequence[tuple[int, str, int, str, int, bool, bool, bool]],
        weight: int | None = None,
        positive: str = "",
        missing: Sequence[str] = (),
    ) -> None:
        """Numbers: place, name, whole, logarithm, shift, divisor, missing.

        Categories: place, name, cardinality, separator or "", length, pad before, keep last, whole.
        """
    def parse(
        self, lines: bytes
    ) -> tuple[
        NDArray[np.float32],
        NDArray[np.float32],
        NDArray[np.int64],
        NDArray[np.float32] | None,
        list[tuple[int, str]],
    ]:
        """Labels, numbers (B, n), ids (B, n; column-major), weights; broken lines: number from 0, problem."""
    def split(self, line: bytes) -> list[bytes]:
        """The fields of a line without its end; none where a quote does not end."""

def empty(rows: int, columns: int, is_float64: bool) -> NDArray[Any]:
    """An array whose values are not set, in memory that was used before where there is some."""

def hash_strings(
    offsets: NDArray[np.int32] | NDArray[np.int64], data: NDArray[np.uint8], seed: int = 0
) -> NDArray[np.uint64]: ...

class Increment:
    """The files of a save that Client.apply_increment takes."""

def read_increment(
    directory: str, tables: Sequence[str], servers: int, row_precision: str = ""
) -> Increment: ...
def packed_files(pack: str) -> list[str]: ...
def table_file(file: str) -> str: ...
def verify_table_file(file: str) -> str: ...
def verify_pools(directory: str) -> list[str]: ...
def verify_logs(directory: str) -> list[str]: ...
def table_chains(directories: Sequence[str], table: str) -> list[list[str]]: ...
def compare_tables(before: Sequence[Sequence[str]], after: Sequence[Sequence[str]], memory: int) -> str: ...
def reshard_table(
    chains: Sequence[Sequence[str]],
    table: str,
    directory: str,
    servers: int,
    dtype: str = "",
    state_dtype: str = "",
) -> str: ...
