"""The client of the parameter servers: pulls rows of ids, pushes gradients."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import oe_runtime._core as _core
from oe_runtime._core import Group, Pulled
from oe_runtime.converted import converted
from oe_runtime.errors import GradientError, OeError, SpecError
from oe_runtime.rows import Assigned, Bags, Pairs, Rows, warn_of_cap
from oe_runtime.spec import StorageSpec, TableSpec, Worker, persistence_note

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TRANSFERS", "Assigned", "Bags", "Client", "Group", "Pairs", "Pulled", "Rows"]

# How checkpoints get from servers to the client's directory and back.
TRANSFERS = ("shared", "wire")

_T = TypeVar("_T")


class Client:
    """A training process's view of all tables on all servers.

    Methods may be called from any thread; requests go out one after the other. After ``ServerLost`` every
    request fails until ``reconnect``.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        token: str = "",
        timeout: float = 60.0,
        threads: int = 0,
        checkpoint_transfer: str = "shared",
        tls: str = "auto",
        job: str = "",
        worker: Worker | None = None,
        read_only: bool = False,
        share_memory: bool = True,
        read_ahead: bool = True,
    ) -> None:
        """Connect to the servers ``"host:port"``; their order is their index.

        ``timeout``: seconds that a server may take to answer. Waits for other workers are added to it.
        Requests that move whole tables (``save``, ``restore``, ``checkpoint``, ``recover``, ``evict``, and
        ``create_table`` of a recovered one) may take an hour. A server whose host vanished counts as lost
        after ``timeout`` seconds, and after at most 30, whatever the request.

        ``threads``: threads for the client's own work; 0 takes one per core, at most 8.

        ``checkpoint_transfer``: how ``save`` and ``restore`` move files. ``"shared"``: the servers reach the
        client's directory. ``"wire"``: over the connections.

        ``tls``: ``"on"``, ``"off"``, or ``"auto"``, which encrypts connections to all servers except those on
        loopback. The keys are derived from the token, which then needs 16 bytes and does not cross the
        network.

        ``job``: the namespace of this client's tables and checkpoints, so that several jobs or models can
        share servers. It is not part of any file.

        ``worker``: which of several workers of the job this is. Each has its own rank and its own part of
        every batch.

        ``read_only``: the servers refuse changes with SpecError. ``create_table`` opens existing tables; only
        pulls, lists and statistics are answered.

        ``share_memory``: exchange rows and gradients through memory shared with servers on this host. It
        needs the same user, no container of its own on either side, and not ``tls="on"``. False sends them
        over the connection.

        ``read_ahead``: announce batches to servers with rows on a drive, which then read them ahead.

        Raises ``ServerLost``, ``AuthError``, ``ProtocolError``; ``SpecError`` for impossible endpoints or
        another server than expected; ``CheckpointError`` where ``"wire"`` meets a server without
        ``--checkpoint-dir``.
        """
        if checkpoint_transfer not in TRANSFERS:
            raise SpecError(
                f"checkpoint_transfer is {checkpoint_transfer!r}; known are {', '.join(TRANSFERS)}"
            )
        wire = checkpoint_transfer == "wire"
        self._connect = partial(
            _core.Client.connect,
            list(endpoints),
            token,
            timeout=timeout,
            threads=threads,
            wire_checkpoints=wire,
            tls=tls,
            job=job,
            worker=worker.to_json() if worker else "",
            read_only=read_only,
            share_memory=share_memory,
        )
        self._begin(self._connect(), job)
        self._read_ahead = read_ahead

    _read_ahead = False
    _connect: partial[_core.Client] | None = None  # None: the tables are in this process

    restores = False  # whether a checkpoint will replace all rows: models bring none (oe_runtime.job)
    # The optimizers of the tables in the files of that checkpoint, by table (oe_runtime.job).
    saved_optimizers: Mapping[str, Mapping[str, Any]] = {}
    fit_alone = ""  # why `fit` may not train without a JobCallback (oe_runtime.job)
    fixed = ""  # why a script may not change tables now (oe_runtime.job)
    # How steps go unless models say it; a job's flags may say otherwise (oe_runtime.job).
    steps: Mapping[str, Any] = {"pipeline": True, "staleness": 0, "micro_batches": 1}
    workers: Any = None  # the workers of the job that made this client (oe_runtime.job)

    def _begin(self, core: _core.Client, job: str = "") -> None:
        self._core = core
        self._job = job
        self._tables: dict[int, str] = {}  # names by id, without those that this client has dropped
        self._next_table = 0
        self._pending: Future[None] | None = None  # a push
        self._saving: Future[None] | None = None  # a save, for which all threads wait
        self.connection = 0  # counts reconnects
        self.replacements = 0  # counts calls that change rows otherwise than by pushes

    @classmethod
    def in_process(cls, storage: StorageSpec | None = None, servers: int = 1, threads: int = 0) -> Client:
        """Return a client whose tables are in this process, in DRAM by default, with the same results.

        Warns where ``storage`` is for persistent memory but its directory is not on it.
        """
        self = cls.__new__(cls)
        storage = storage or StorageSpec()
        self._begin(_core.Client.in_process(storage.to_json(), servers, threads))
        is_pmem = json.loads(self._core.stats())[0]["is_pmem"]
        if note := persistence_note(storage.type, storage.path, is_pmem):
            warnings.warn(note, stacklevel=2)
        return self

    @property
    def servers(self) -> int:
        """How many servers share the keys."""
        return self._core.servers

    @property
    def core(self) -> _core.Client:
        """The client of the core, until it connects again."""
        return self._core

    def reconnect(self) -> None:
        """Connect to the same servers again after ``ServerLost``; the tables keep their ids.

        A restarted server has no rows, or those of its newest checkpoint; other servers may have later
        pushes. So go back to a checkpoint of all servers by ``recover`` or ``restore``. Batches pulled before
        cannot be pushed any more. All workers of a job must reconnect, and then go back to the same
        checkpoint. Raises the errors of a new client and of ``create_table``; call it again then.
        """
        self._refuse_in_process()
        with contextlib.suppress(OeError):
            self.settle()
        specs = self._specs()
        torn = self._core.torn
        self._core.close()
        self._core = self._connected(specs, torn)
        self.connection += 1
        self.replacements += 1

    def another(self, *, timeout: float | None = None) -> Client:
        """Return another client of the same servers, whose tables have the ids that they have here.

        For lookups in parallel. ``timeout`` is instead of this client's. Raises as ``reconnect`` does.
        """
        connect = self._refuse_in_process()
        other = copy.copy(self)
        other._connect = connect if timeout is None else partial(connect, timeout=timeout)
        other._core = other._connected(self._specs())
        other._tables, other._pending, other._saving = dict(self._tables), None, None
        return other

    @property
    def is_remote(self) -> bool:
        """Whether the tables are on servers, not in this process."""
        return self._connect is not None

    def _specs(self) -> dict[int, str]:
        return {table: self._core.spec(table) for table in sorted(self._tables)}

    def _refuse_in_process(self) -> partial[_core.Client]:
        if self._connect is None:
            raise SpecError("this client keeps its tables in this process: it has no servers to connect to")
        return self._connect

    def _connected(self, specs: Mapping[int, str], torn: str = "") -> _core.Client:
        core = self._refuse_in_process()()
        if torn:  # the remaining servers do not know it yet
            core.tear(torn)
        for table, spec in specs.items():
            core.skip_tables(table)
            core.create_table(spec)
        core.skip_tables(self._next_table)
        return core

    def create_table(self, spec: TableSpec) -> int:
        """Create the table unless it exists; return its id.

        Raises ``SpecMismatch`` if it exists with another specification, ``SpecError`` for an invalid one.
        """
        self._refuse_change("create_table")
        table = self._settled().create_table(spec.to_json())
        self._tables[table] = spec.name
        self._next_table = max(self._next_table, table + 1)
        return table

    def drop_table(self, table: int | str, *, force: bool = False) -> None:
        """Remove a table, by id or name, with its rows, counts and checkpoints, from all servers.

        This client need not have created it; servers with ``StorageSpec.recover`` also drop it from their
        storage. Files that ``save`` wrote stay. Ids of other tables stay valid. This one's id raises
        ``SpecError``, in other clients too, until the table is created again (here under a new id).

        Raises ``SpecError`` for a table that does not exist, and, unless ``force``, while any server has
        other clients of the job; nothing has changed then. Several workers must all make the same call; the
        last one drops the table.
        """
        name = table if isinstance(table, str) else self.spec(table).name
        if self.drop_tables([name], force=force) == 0:
            raise SpecError(f"table '{name}' is not dropped: it does not exist on the servers")

    def drop_tables(self, names: Sequence[str], *, force: bool = False) -> int:
        """Drop those of several tables that exist, as ``drop_table`` does; return their number.

        Returns -1 where the request of another worker dropped them.
        """
        if isinstance(names, str):
            raise SpecError(f"the names of tables are a list, not '{names}'")
        return self._drop(list(names), None, force) if names else 0

    def drop_job(self, job: str, *, force: bool = False) -> int:
        """Drop all tables of a job, this client's or another; return their number."""
        return self._drop([], None if job == self._job else job, force)

    def _refuse_change(self, what: str) -> None:
        if self.fixed:
            raise SpecError(f"{what}: {self.fixed}")

    def _drop(self, names: list[str], job: str | None, force: bool) -> int:
        if job is None:
            self._refuse_change("dropping tables")
        core = self._settled()
        self.replacements += 1
        if job is None:
            gone = {table for table, name in list(self._tables.items()) if name in names or not names}
        else:
            gone = set()
        parts = core.drop(names, job, force)
        for table in gone:
            self._tables.pop(table, None)
        return -1 if parts is None else -(-parts // self.servers)

    def spec(self, table: int) -> TableSpec:
        """Return the specification of a table, with all defaults filled in."""
        return TableSpec.from_json(self._settled().spec(table))

    def pull(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled:
        """Pull the rows of a batch with one message per server.

        ``lookups`` are pairs ``(table id, index into ids)``. ``ids`` are int64 (or uint64) arrays of any
        shape; their bits are the keys. The result has one group per distinct dim, ascending: first those of
        float64 tables, with float64 rows, then all others, with float32 rows. For ``g = pulled.groups[i]``,
        ``g.rows[g.inverse]`` are the embeddings of the lookups ``g.lookups``, one after the other,
        ``g.sizes`` ids each (``embeddings(g)`` is the same, faster). A pull creates no row and does not count
        for admission or eviction. Raises ``KeyRangeError``, ``SpecError``, ``ServerLost``.
        """
        return self._settled().pull([_keys(array, f"ids[{i}]") for i, array in enumerate(ids)], lookups)

    def plan(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled:
        """Prepare a ``pull`` without asking a server; the result has no rows before ``refresh``."""
        return self._core.plan([_keys(array, f"ids[{i}]") for i, array in enumerate(ids)], lookups)

    def refresh(self, pulled: Pulled, *, staleness: int = 0) -> None:
        """Bring the rows of a batch up to date, in place, except for the last ``staleness`` pushes.

        Does not wait for ``push_later``. Pulls only changed rows where it knows them (``follow``). The rows
        must not be in use. Raises as ``pull`` does, and ``SpecError`` after ``reconnect``.
        """
        self._core.refresh(pulled, staleness)

    def embeddings(self, group: Group, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return ``group.rows[group.inverse]``: the row of each id of all lookups, ``(len(inverse), dim)``.

        ``out`` is an optional target: a contiguous array of this shape and the dtype of ``group.rows``.
        Raises ``SpecError`` for another one.
        """
        return self._core.embeddings(group, out)

    def pairs(self, group: Group) -> Pairs:
        """Return the distinct pairs of a lookup and a row, in a group with equally many ids per lookup.

        For functions of an embedding that differ between lookups. Raises ``SpecError`` for other groups.
        """
        return Pairs(*self._core.pairs(group))

    def pool(self, group: Group, bags: Sequence[Bags], out: Sequence[NDArray[Any]]) -> None:
        """Pool the rows of each bag of ids into ``out``, as an embedding bag does; an empty bag is zeros.

        ``bags[i]`` are those of ``group.lookups[i]``, and ``out[i]`` is their target, ``(bags, dim)`` of the
        dtype of ``group.rows``; it may be some columns of a wider array. Raises ``SpecError`` for others.
        """
        self._core.pool(group, bags, out)

    def sum_bags(self, group: Group, bags: Sequence[Bags], gradients: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return the gradient of ``group.rows``, for ``push(summed=True)``, from those of what ``pool`` made.

        A row's parts are added in the order of lookups and ids. Raises ``SpecError`` as ``pool`` does.
        """
        return self._core.sum_bags(group, bags, gradients)

    @property
    def reads_ahead(self) -> bool:
        """Whether batches are to be announced, because a server reads rows from a drive before their pull."""
        return self._read_ahead and self._core.reads_ahead

    def read_ahead(self, *pulls: Pulled) -> None:
        """Declare what ``plan`` returned for a batch that will be pulled after what is under way.

        Servers with rows on a drive read those that they do not have in DRAM meanwhile, unless another call
        comes before they do. Other servers, and tables of this process, do nothing. Returns at once. Does not
        wait for ``push_later``. Raises as ``pull`` does, and ``SpecError`` after ``reconnect``.
        """
        self._core.read_ahead(pulls)

    def follow(self, pulled: Pulled, before: Pulled) -> None:
        """Declare that ``before`` will be pushed before ``pulled`` is used, whose rows are pulled already.

        The next ``refresh`` of ``pulled`` then pulls only the rows that both have, unless anything else has
        changed rows.
        """
        self._core.follow(pulled, before)

    def push_later(
        self,
        thread: Executor,
        pulled: Pulled,
        gradients: Sequence[NDArray[Any] | None],
        learning_rate: float | Sequence[float],
        *,
        summed: bool = False,
        of_rows: Sequence[NDArray[Any] | None] = (),
        cause: Callable[[], str] = str,
    ) -> None:
        """Push in another thread, after its last push. Every other request waits for it.

        The next request, or the next push, raises its errors.
        """
        self.settle()
        self._pending = thread.submit(self._push, pulled, gradients, learning_rate, summed, of_rows, cause)

    def settle(self) -> None:
        """Wait for ``push_later`` and raise its errors; wait for ``save_later``."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        if (saving := self._saving) is not None:
            saving.result()

    def _settled(self) -> _core.Client:
        self.settle()
        return self._core

    def push(
        self,
        pulled: Pulled,
        gradients: Sequence[NDArray[Any] | None],
        learning_rate: float | Sequence[float],
        *,
        summed: bool = False,
        of_rows: Sequence[NDArray[Any] | None] = (),
        cause: Callable[[], str] = str,
    ) -> None:
        """Apply the optimizers: ``gradients[i]`` has shape ``(len(groups[i].inverse), dim)``.

        Its dtype is that of ``groups[i].rows``; others are refused.

        Gradients of equal keys are summed in the order of positions. With ``summed`` they are summed already,
        and ``gradients[i]`` has the shape of ``groups[i].rows``. Such sums may also be passed as
        ``of_rows[i]`` besides ``gradients[i]``; the sum then begins with them. None stands for a missing
        part. Where all lookups of a group have equally many ids, ``gradients[i]`` may have the shape ``(ids
        per lookup, lookups, dim)``. ``learning_rate`` is one number, or one per group.

        Returns when every server has applied its part; with several synchronous workers (``Worker``), when
        every server has received it. Raises ``GradientError`` for NaN and infinities (``TableSpec``), and
        errors that all servers share; nothing has changed then. After any other error some tables or servers
        may have applied the push. Pulls go on, but every push, save, checkpoint and eviction of this job
        raises ``TornError`` until ``recover`` or ``restore``.

        ``cause`` is called for a ``GradientError``, whose message then names the cause that it returns, with
        what to do, if any.
        """
        self.settle()
        self._push(pulled, gradients, learning_rate, summed, of_rows, cause)

    def _push(
        self,
        pulled: Pulled,
        gradients: Sequence[NDArray[Any] | None],
        learning_rate: float | Sequence[float],
        summed: bool,
        of_rows: Sequence[NDArray[Any] | None],
        cause: Callable[[], str],
    ) -> None:
        if summed:
            gradients, of_rows = [None] * len(gradients), gradients
        rates = _rates(learning_rate)
        of_ids, of_rows = (
            [None if part is None else np.ascontiguousarray(part) for part in parts]
            for parts in (gradients, of_rows)
        )
        try:
            self._core.push(pulled, of_ids, of_rows, rates)
        except GradientError as error:
            found = cause()
            if not found:
                raise
            what, _, advice = str(error).rpartition("; ")
            raise GradientError(f"{what}; {found}; otherwise {advice}") from None

    def pull_rows(self, table: int, keys: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows ``(n, dim)`` of ``n`` keys of one table, in their order, duplicates included.

        float64 for a float64 table, float32 for all others.
        """
        return self._settled().pull_rows(table, _keys(keys, "keys"))

    def assign(
        self,
        table: int | str,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None = None,
        *,
        state: NDArray[Any] | None = None,
    ) -> Assigned:
        """Write rows by key: ``rows[i]`` of shape ``(n, dim)`` becomes the row of ``keys[i]``.

        ``table`` is an id or a name. Missing rows are created, whatever the admission; for eviction, each row
        counts as pushed once now. ``slots`` are all of the optimizer's slots by name, in the shapes of
        ``slots()``. Without them existing rows keep theirs, and new rows get initial ones. ``state`` is the
        same in one array ``(n, sum of slots().values())``, in their order, which is not copied. ``rows`` and
        ``state`` may be columns of a wider array. Values are float64
        for a float64 table, float32 for all others; half-precision tables round them to the nearest. An
        assignment is not a push: optimizers that count steps do not count it. The next checkpoint, save and
        increment include the rows. With several workers, one of them calls it, between batches.

        Where the cap of an evicting table is full, other rows are evicted first, as for a push. Assigned rows
        that still find no room are not written: a warning and the result give both numbers.

        Raises ``SpecError`` for wrong shapes and dtypes, duplicate keys, NaN or infinity (unless
        ``TableSpec.nonfinite_gradients`` is ``"pass"``) and more rows than the cap, and ``KeyRangeError``;
        nothing has changed then. After a ``StorageError`` some rows may have been written; it says how many.
        If one server refused its rows and another wrote its own, later calls raise ``TornError`` until the
        job goes back.
        """
        core, table = self._settled(), self._id(table)
        if slots is not None:
            if state is not None:
                raise SpecError("'slots' and 'state' are the same numbers; give one of them")
            state = self._state(table, slots)
        state = None if state is None else _columns(state)
        self.replacements += 1
        found = Assigned(*core.assign(table, _keys(keys, "keys"), _columns(rows), state))
        warn_of_cap(self.spec(table).name, found, stacklevel=3)
        return found

    def check_rows(
        self,
        table: int | str,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Raise what ``assign`` would raise before any change, except for duplicate keys."""
        core, table = self._settled(), self._id(table)
        state = None if slots is None else self._state(table, slots)
        core.check_rows(table, _keys(keys, "keys"), _columns(rows), state)

    def most_rows(self, table: int | str) -> int:
        """Return how many rows the eviction cap of a table allows; 2^64 - 1 without a cap."""
        return self._settled().most_rows(self._id(table))

    def keys(self, table: int | str, part: int | None = None) -> NDArray[np.int64]:
        """Return the keys that have a row, unordered: all, or those of one of ``PARTS`` parts."""
        return self._settled().keys(self._id(table), part)

    def export(self, table: int | str, path: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Write all rows of a table into one Parquet file; return their number.

        Columns: ``key`` (int64), ``row`` (a list of ``dim`` float32 or float64), and one list per slot of the
        optimizer, under the slot's name. The file's metadata holds the table's specification. Only part of
        the rows is in memory at a time. The file appears when it is complete; ``FileExistsError`` if it
        exists, unless ``overwrite``. Meant for a table that is not pushed to meanwhile. Raises
        ``CheckpointError`` naming the file. To keep all tables with the number of pushes and the state of
        policies, use ``save``.
        """
        from oe_runtime import row_files

        return row_files.export(self, self._id(table), Path(path), overwrite=overwrite)

    def to_arrow(self, table: int | str) -> pa.Table:
        """Return the same as a ``pyarrow.Table``, in memory."""
        import pyarrow as pa

        from oe_runtime import row_files

        number = self._id(table)
        return pa.Table.from_batches(row_files.batches(self, number), schema=row_files.schema(self, number))

    def import_rows(
        self, table: int | str, source: str | os.PathLike[str] | pa.Table, *, slots: bool = True
    ) -> Assigned:
        """Assign the rows that ``export`` wrote, or of any Parquet file or ``pyarrow.Table`` with such
        columns.

        Takes the optimizer's slots where the source has them; they must be of the same optimizer.
        ``slots=False`` leaves them out. Existing rows that the source lacks stay. Only part of the rows is in
        memory at a time, but all are checked before the first change. Warns where the optimizer depends on
        the number of pushes and the export had another. Raises ``SpecError`` naming the column that does not
        fit, ``CheckpointError`` for an unreadable file, and what ``assign`` raises.
        """
        import pyarrow as pa

        from oe_runtime import row_files

        if not isinstance(source, pa.Table):
            source = Path(source)
        return row_files.import_rows(self, self._id(table), source, slots=slots)

    def erase(self, table: int | str, keys: NDArray[np.int64]) -> int:
        """Remove the rows of these keys; return how many had one.

        A key without a row reads as its initial value. Raises ``KeyRangeError``, and ``StorageError`` where
        the storage has no room for the tombstones; as for ``assign``, rows of some servers only tear the job.
        """
        self.replacements += 1
        return self._settled().erase(self._id(table), _keys(keys, "keys"))

    def slots(self, table: int | str) -> dict[str, int]:
        """Return the optimizer's slots of a row, in order: the numbers per slot, ``dim`` for most."""
        return dict(self._core.slots(self._id(table)))

    def read_rows(
        self,
        table: int | str,
        keys: NDArray[np.int64],
        *,
        out: NDArray[Any] | None = None,
        state: NDArray[Any] | None = None,
    ) -> Rows:
        """Return rows by key with the optimizer's slots, duplicates included; each row is consistent.

        A key without a row (``found``) reads as a new row. Rows go into ``out`` of shape ``(n, dim)`` where
        it is given, and the slots, in the order of ``slots()``, into ``state`` of shape
        ``(n, sum of slots().values())``; with ``out`` alone they are not read. Both may be columns of a wider
        array. Raises ``KeyRangeError``, and ``SpecError`` for arrays of another shape or dtype.
        """
        core, table = self._settled(), self._id(table)
        if out is None and state is not None:
            raise SpecError("'state' needs 'out', where the rows go")
        for name, given in (("out", out), ("state", state)):
            if given is not None and not isinstance(given, np.ndarray):
                raise SpecError(f"'{name}' must be an array of NumPy, not {type(given).__name__}")
        found, rows, state = core.read_rows(table, _keys(keys, "keys"), out, state)
        slots: dict[str, NDArray[Any]] = {}
        if state is None:
            return Rows(found, rows, slots)
        at = 0
        for name, size in core.slots(table):
            slots[name] = state[:, at : at + size]
            at += size
        return Rows(found, rows, slots)

    def new_array(self, table: int | str, rows: int, columns: int) -> NDArray[Any]:
        """Return an uninitialized array in a table's dtype for calls of ``read_rows`` and ``assign``.

        Where servers of this host share memory with this client, the array lies there: a server reads and
        writes contiguous rows of it without a copy.
        """
        is_float64 = self.spec(self._id(table)).dtype == "float64"
        return self._core.new_array(rows, columns, is_float64)

    def _id(self, table: int | str) -> int:
        if not isinstance(table, str):
            return table
        names = {name: number for number, name in list(self._tables.items())}  # other threads make some
        if table not in names:
            raise SpecError(
                f"table '{table}' is not one of this client's: {', '.join(names) or 'it has none'}"
            )
        return names[table]

    def _state(self, table: int, slots: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
        """Concatenate the slots of each row."""
        sizes = self.slots(table)
        if set(slots) != set(sizes):
            spec = self.spec(table)
            raise SpecError(
                f"table '{spec.name}': the slots are {', '.join(sorted(slots)) or 'none'}; its optimizer "
                f"{spec.optimizer['name']} has {', '.join(sizes) or 'none'}"
            )
        parts = [np.asarray(slots[name]) for name in sizes]
        for name, part in zip(sizes, parts, strict=True):
            if part.ndim != 2 or part.shape[1] != sizes[name]:
                raise SpecError(
                    f"table '{self.spec(table).name}': slot {name} has shape {part.shape}; expected "
                    f"(rows, {sizes[name]})"
                )
        if len({(part.dtype, len(part)) for part in parts}) > 1:
            raise SpecError(f"table '{self.spec(table).name}': the slots differ in rows or dtype")
        if not parts:
            return None
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def export_rows(self, table: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return all keys of a table that have a row, ``(n,)`` unordered, and their weights ``(n, dim)``.

        Leaves out the optimizer's slots. Meant for a table that is not pushed to meanwhile.
        """
        keys = self._settled().keys(table)
        dim = self.spec(table).dim
        rows = np.empty((len(keys), dim), self._settled().pull_rows(table, keys[:0]).dtype)
        piece = max(1, (64 << 20) // (8 * dim))  # one message holds no more than 2 GiB
        for begin in range(0, len(keys), piece):
            rows[begin : begin + piece] = self._settled().pull_rows(table, keys[begin : begin + piece])
        return keys, rows

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        since: str | os.PathLike[str] | None = None,
        contents: dict[str, bytes] | None = None,
    ) -> list[dict[str, Any]]:
        """Write every server's files into an existing directory.

        The servers write them there, or send them (``checkpoint_transfer``). Returns one entry per file:
        ``file, table, server, servers, rows, version, bytes, checksum, spec``. Raises ``CheckpointError``;
        servers keep no copies for sending then.

        ``since`` is the directory of the last save or restore of these servers. The files are then
        increments: the rows written since and tombstones of the keys erased since. Their entries also have
        ``base`` (the checksum of the file that they follow) and ``tombstones``. A server's file has all rows
        and no ``base`` where the server cannot tell the changes, because of another save in between, rows
        from another number of servers, or mostly erased rows.

        With `contents`, files that take little memory (32 MiB a server) may be left to the caller to write:
        it gets one pack per server, by name, which holds them. Training may go on while packs are written.
        """
        self.settle()
        return self._save(directory, since=since, contents=contents)

    def save_later(self, thread: Executor, work: Callable[[Callable[..., Any]], _T]) -> Future[_T]:
        """Call `work` in another thread with what is `save` there. Every other request waits for its end.

        Its errors are those of the result only.
        """
        self.settle()
        found = thread.submit(work, self._save)
        ended: Future[None] = Future()
        self._saving = ended
        found.add_done_callback(lambda _: ended.set_result(None))
        return found

    def _save(
        self,
        directory: str | os.PathLike[str],
        *,
        since: str | os.PathLike[str] | None = None,
        contents: dict[str, bytes] | None = None,
    ) -> list[dict[str, Any]]:
        last = "" if since is None else str(Path(since).absolute())
        text, held = self._core.save(str(Path(directory).absolute()), last, contents is not None)
        if contents is not None:
            contents.update(held)
        saved: list[dict[str, Any]] = json.loads(text)
        return saved

    def restore(self, *directories: str | os.PathLike[str], convert: bool = False) -> None:
        """Load every created table from files of ``save``, written by any number of servers.

        An increment needs the saves that it builds on: name all in their order, the complete one first
        (``oe_runtime.checkpoint.chain`` finds those of published checkpoints). A server changes nothing
        before it has verified all files. Several workers must all make the same call; the last one restores
        (with ``checkpoint_transfer="wire"``, worker 0 sends the files). Raises ``CheckpointError``.

        With ``convert``, rows and optimizer's states of other dtypes than the tables' become theirs, each
        number rounded to the nearest; NaN, infinity and a number beyond the new dtype's largest raise
        ``CheckpointError`` naming table and key. A converted copy lies beside the last directory meanwhile.
        Workers cannot convert (``SpecError``): run ``oeprov reshard`` once instead.
        """
        self._refuse_change("restore")
        paths = [str(Path(directory).absolute()) for directory in directories]
        if convert and self._connect is not None and self._connect.keywords["worker"]:
            raise SpecError(
                "restore(convert=True) is not for workers; convert the checkpoint once, by oeprov reshard"
            )
        specs = [self.spec(table) for table in self._tables]
        with converted(paths, specs, self.servers) if convert else contextlib.nullcontext(paths) as found:
            self.replacements += 1
            self._settled().restore(found)

    def apply_increment(self, directory: str | os.PathLike[str], read: _core.Increment | None = None) -> None:
        """Bring tables of this process, which are not pushed to, from the last restore to an increment.

        ``directory`` was written by ``save`` with ``since`` that restore, by as many servers as this client
        has. Reads only the increment; admission counts stay. Verifies all files before the first change.
        Raises ``CheckpointError`` for one that does not follow; after a ``StorageError`` only ``restore``
        helps. ``read`` is what ``_core.read_increment`` returned for the directory before.
        """
        if read is None:
            names = [self.spec(table).name for table in self._tables]
            read = _core.read_increment(str(Path(directory).absolute()), names, self.servers)
        self.replacements += 1
        self._core.apply_increment(read)

    def checkpoint(self, batch: int, *, wait: bool = False) -> None:
        """Mark the present state of every table as checkpoint ``batch`` in the servers' storage.

        For storages whose rows outlive the servers (``spec.DURABLE``). Nothing is copied: a push waits for
        microseconds, and the checkpoint becomes durable soon after, or before the return with ``wait``.
        ``batch`` must exceed the last one. The storage keeps the newest few
        (``StorageSpec.kept_checkpoints``). This waits until the previous checkpoint is durable in every table
        of every server, so that all servers always share one. Call it between pushes. With several
        synchronous workers one of them calls it, and it covers the batch that this worker pushed last, with
        all workers' parts. Raises ``StorageError``, and ``SpecError`` for a storage without checkpoints.
        """
        self._settled().checkpoint(batch, wait)

    def checkpoints(self) -> list[int]:
        """Return the checkpoints that are durable in every table of every server, ascending."""
        return self._settled().checkpoints()

    def recover(self, batch: int | None = None) -> int:
        """Go back to a checkpoint in the servers' storage: ``batch``, or the newest that all have.

        Create the tables first; restarted servers find their rows with ``StorageSpec.recover``. Later pushes
        are lost. Several workers must all make the same call; the last one recovers. Returns the checkpoint's
        batch. Raises ``CheckpointError`` unless all servers have it; nothing has changed then.
        """
        self._refuse_change("recover")
        self.replacements += 1
        return self._settled().recover(batch)

    def evict(self) -> int:
        """Remove the rows that ``TableSpec.eviction`` no longer keeps, in all tables; return their number.

        A save does so itself. Pulls and pushes of other clients go on in between. Raises ``StorageFull``
        where the storage has no room for the tombstones: evicted rows are gone, and the next checkpoints make
        room for the rest.
        """
        return self._settled().evict()

    def stats(self) -> dict[str, Any]:
        """Return the servers' statistics: ``{"servers": [{index, pid, tables: {name: {rows, …}}, …}]}``.

        ``tables`` are those of this client's job; ``jobs`` has the tables of all, ``{job: {name: …}}``. The
        fields are described in `oe_runtime.server.metrics`.
        """
        servers = json.loads(self._settled().stats())
        for server in servers:
            jobs: dict[str, Any] = {self._job: {}}
            for table in server["tables"]:
                jobs.setdefault(table["job"], {})[table["name"]] = table
            server["jobs"], server["tables"] = jobs, jobs[self._job]
        return {"servers": servers}

    def leave(self) -> None:
        """Tell the other workers to go on without this one, which has pushed its last batch.

        Its pushes still count, and it may still pull and save. A ``with`` block that ends without an
        exception leaves. A client that is only closed counts as lost (``Worker.on_lost``).
        """
        self._settled().leave()

    def shutdown(self) -> None:
        """End the servers, for all jobs, and close this client."""
        self._settled().shutdown()

    def close(self) -> None:
        """Close this client; the servers go on. May be called twice."""
        with contextlib.suppress(OeError):
            self.settle()
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(OeError):  # it is closed, or its server is gone
                self.leave()
        self.close()


def _rates(learning_rate: float | Sequence[float]) -> list[float]:
    try:
        rates = np.asarray(learning_rate, np.float64)
    except (TypeError, ValueError):
        rates = None
    if rates is None or rates.ndim > 1 or isinstance(learning_rate, (str, type(None))):
        raise SpecError(f"the learning rate must be a number, or one for each group, not {learning_rate!r}")
    return [float(rate) for rate in np.atleast_1d(rates)]


def _columns(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose rows are contiguous: itself, where it is a matrix of such rows."""
    array = np.asarray(array)
    if array.ndim != 2 or array.strides[1] != array.itemsize or array.strides[0] % array.itemsize != 0:
        return np.ascontiguousarray(array)
    return array if array.strides[0] >= array.shape[1] * array.itemsize else np.ascontiguousarray(array)


def _keys(array: NDArray[Any], what: str) -> NDArray[np.int64]:
    keys = np.asarray(array)
    if keys.dtype == np.uint64:
        keys = keys.view(np.int64)
    if keys.dtype != np.int64:
        raise SpecError(f"{what} must be int64, not {keys.dtype}")
    return np.ascontiguousarray(keys)
