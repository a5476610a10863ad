"""The client of the parameter servers: ids in, rows out; gradients in."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import oe_runtime._core as _core
from oe_runtime._core import Group, Pulled
from oe_runtime.errors import OeError, SpecError
from oe_runtime.rows import Assigned, Pairs, Rows, warn_of_cap
from oe_runtime.spec import StorageSpec, TableSpec, Worker, persistence_note

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TRANSFERS", "Assigned", "Client", "Group", "Pairs", "Pulled", "Rows"]

# How checkpoints get from servers to the client's directory and back.
TRANSFERS = ("shared", "wire")


class Client:
    """A training process's view of all tables on all servers.

    Every method may be called from any thread; requests go out one after the other. After ``ServerLost``
    every request fails until ``reconnect``.
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
    ) -> None:
        """Connect to the servers ``"host:port"``; their order is their index.

        ``timeout`` is how many seconds a server may take to answer, busy, stopped or not; waits for other
        workers come on top, and what moves whole tables (``save``, ``restore``, ``checkpoint``, ``recover``,
        ``evict``, and ``create_table`` of one that is recovered) may take an hour. A server whose host has
        vanished without a farewell is lost after ``timeout`` seconds and after 30 at most, whatever it was
        asked.
        ``threads`` share the client's own work; 0 means one per core, at most 8. ``checkpoint_transfer`` says
        how ``save`` and ``restore`` move files: ``"shared"`` when the servers reach the client's directory,
        ``"wire"`` when they do not, over the connections. ``tls`` is ``"on"``, ``"off"`` or ``"auto"``, which
        encrypts connections to all servers but those on loopback; the keys are made from the token, which
        then must have 16 bytes and does not cross the network. ``job`` names the tables that this client
        works on, and is part of no file: several jobs or models may use the same servers, each with tables
        and checkpoints of its own. ``worker`` says which one of several that train the job this is; each has
        its own rank and its own part of every batch. With ``read_only`` the servers refuse, with SpecError,
        whatever would change something: ``create_table`` opens those that exist, and only pulls, lists and
        figures are answered. Rows and gradients lie in memory that servers on this host see too, instead of
        crossing a connection, where both run as the same user, outside containers of their own and without
        ``tls="on"``; ``share_memory=False`` sends them all the same. Raises ``ServerLost``, ``AuthError``,
        ``ProtocolError``, ``SpecError`` for endpoints that cannot be right or a server that is not the one
        expected there, and ``CheckpointError`` for a server without ``--checkpoint-dir`` where ``"wire"``
        needs one.
        """
        if checkpoint_transfer not in TRANSFERS:
            raise SpecError(
                f"checkpoint_transfer is {checkpoint_transfer!r}; known are {', '.join(TRANSFERS)}"
            )
        wire = checkpoint_transfer == "wire"
        self._job = job
        self._connect: Callable[[], _core.Client] | None = partial(
            _core.Client.connect,
            list(endpoints),
            token,
            timeout,
            threads,
            wire,
            tls,
            job,
            worker.to_json() if worker else "",
            read_only,
            share_memory,
        )
        self._core = self._connect()
        self._tables = 0
        self._dropped: set[int] = set()  # ids
        self._pending: Future[None] | None = None
        self.connection = 0  # counts reconnects

    @classmethod
    def in_process(cls, storage: StorageSpec | None = None, servers: int = 1, threads: int = 0) -> Client:
        """A client whose tables live in this process (in DRAM by default), with the same results.

        Warns where ``storage`` is for persistent memory and its directory is not on any.
        """
        self = cls.__new__(cls)
        self._connect = None
        self._dropped = set()
        storage = storage or StorageSpec()
        self._core = _core.Client.in_process(storage.to_json(), servers, threads)
        is_pmem = json.loads(self._core.stats())[0]["is_pmem"]
        if note := persistence_note(storage.type, storage.path, is_pmem):
            warnings.warn(note, stacklevel=2)
        self._job = ""
        self._tables = 0
        self._pending = None
        self.connection = 0
        return self

    @property
    def servers(self) -> int:
        """How many servers share the keys."""
        return self._core.servers

    def reconnect(self) -> None:
        """Connect to the same servers anew, after ``ServerLost``; the tables keep their ids.

        A server that was started again has no rows, or those of its newest checkpoint, and the others may
        have taken a push that it has not: go back to one checkpoint of all by ``recover`` or ``restore``.
        What was pulled before cannot be pushed any more. Of several workers all must reconnect, and then go
        back to the same one. Raises what a new client and ``create_table`` may raise; then it can be called
        again.
        """
        if self._connect is None:
            raise SpecError("a client in one process has no servers to connect to")
        with contextlib.suppress(OeError):
            self.settle()
        specs = [None if table in self._dropped else self._core.spec(table) for table in range(self._tables)]
        torn = self._core.torn
        self._core.close()
        core = self._connect()
        if torn:  # the servers that are left do not know it yet
            core.tear(torn)
        for spec in specs:
            if spec is None:
                core.skip_table()
            else:
                core.create_table(spec)
        self._core = core
        self.connection += 1

    def create_table(self, spec: TableSpec) -> int:
        """The id of the table, which is created if it does not exist.

        Raises ``SpecMismatch`` if it exists with another specification, ``SpecError`` for one that is wrong.
        """
        table = self._settled().create_table(spec.to_json())
        self._tables = max(self._tables, table + 1)
        return table

    def drop_table(self, table: int | str, *, force: bool = False) -> None:
        """Remove a table, by id or name, with its rows, counts and checkpoints, from all servers.

        It need not have been created by this client: servers with ``StorageSpec.recover`` drop what their
        storage holds of it, too. Files that ``save`` wrote stay. Ids of other tables stay valid; this one's
        raise ``SpecError``, here and in other clients, until it is created again (here under a new id).
        Refused with ``SpecError`` while other clients of the job are connected, unless ``force``, and for a
        table that does not exist. Several workers all drop the same; it is done once, when the last has
        asked.
        """
        name = table if isinstance(table, str) else self.spec(table).name
        if self.drop_tables([name], force=force) == 0:
            raise SpecError(f"table '{name}' is not dropped: it does not exist on the servers")

    def drop_tables(self, names: Sequence[str], *, force: bool = False) -> int:
        """As ``drop_table``, of those of several tables that exist; how many these were.

        -1: of several workers, another one's request has dropped them.
        """
        if isinstance(names, str):
            raise SpecError(f"the names of tables are a list, not '{names}'")
        return self._drop(list(names), None, force) if names else 0

    def drop_job(self, job: str, *, force: bool = False) -> int:
        """As ``drop_table``, of all tables of a job, this client's or another; how many these were."""
        return self._drop([], None if job == self._job else job, force)

    def _drop(self, names: list[str], job: str | None, force: bool) -> int:
        core = self._settled()
        if job is None:
            mine = {
                table: self.spec(table).name for table in range(self._tables) if table not in self._dropped
            }
            gone = {table for table, name in mine.items() if name in names or not names}
        else:
            gone = set()
        parts = core.drop(names, job, force)
        self._dropped |= gone
        return -1 if parts is None else -(-parts // self.servers)

    def spec(self, table: int) -> TableSpec:
        """The specification of a table, with every default filled in."""
        return TableSpec.from_json(self._settled().spec(table))

    def pull(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled:
        """The rows of a batch: for each lookup ``(table id, index into ids)``, one message per server.

        ``ids`` are int64 (or uint64) arrays of any shape; the bits are the key. The result has one group per
        distinct dim, ascending: first those of float64 tables, whose rows are float64, then of all others,
        whose rows are float32; with ``g = pulled.groups[i]``, ``g.rows[g.inverse]`` (``embeddings(g)``, only
        faster) are the embeddings of the lookups ``g.lookups``, one after the other, ``g.sizes`` ids each. A
        pull creates nothing, and counts nothing for admission and eviction.
        Raises ``KeyRangeError``, ``SpecError``, ``ServerLost``.
        """
        return self._settled().pull([_keys(array, f"ids[{i}]") for i, array in enumerate(ids)], lookups)

    def plan(self, ids: Sequence[NDArray[np.int64]], lookups: Sequence[tuple[int, int]]) -> Pulled:
        """The first half of ``pull``, which asks no server: the result has no rows before ``refresh``."""
        return self._core.plan([_keys(array, f"ids[{i}]") for i, array in enumerate(ids)], lookups)

    def refresh(self, pulled: Pulled, *, staleness: int = 0) -> None:
        """Bring the rows of a batch up to date, in place, but for the last ``staleness`` pushes.

        Does not wait for ``push_later``. Only the rows that changed are pulled, if that can be told
        (``follow``). Not for a batch whose rows are in use. Raises as ``pull`` does, and ``SpecError`` after
        ``reconnect``.
        """
        self._core.refresh(pulled, staleness)

    def embeddings(self, group: Group, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """``group.rows[group.inverse]``: the row of each id of all lookups, ``(len(inverse), dim)``.

        Into ``out``, if it is given: a contiguous array of this shape and the dtype of ``group.rows``.
        Raises ``SpecError`` for another one.
        """
        return self._core.embeddings(group, out)

    def pairs(self, group: Group) -> Pairs:
        """The distinct pairs of a lookup and a row in a group whose lookups all have as many ids.

        For functions of an embedding that differ from lookup to lookup. Raises ``SpecError`` for other
        groups.
        """
        return Pairs(*self._core.pairs(group))

    def follow(self, pulled: Pulled, before: Pulled) -> None:
        """Say that ``before`` will be pushed before ``pulled``, which has its rows already, is used.

        The next ``refresh`` then pulls only the rows that both have, unless something else has changed any.
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
    ) -> None:
        """``push`` in another thread, after the last one there. Every other request waits for it.

        What it raises, the next request does, or the next push.
        """
        self.settle()
        self._pending = thread.submit(self._push, pulled, gradients, learning_rate, summed, of_rows)

    def settle(self) -> None:
        """Wait for ``push_later``; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

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
    ) -> None:
        """Apply the optimizers: ``gradients[i]`` has shape ``(len(groups[i].inverse), dim)``.

        Its dtype is that of ``groups[i].rows``; another one is refused.

        Gradients of equal keys are summed in the order of positions; with ``summed`` they are already, and
        ``gradients[i]`` has the shape of ``groups[i].rows``. Such may also come beside them, as
        ``of_rows[i]``, which the sum then begins with; None stands in the place of the one that is missing.
        Where all lookups of a group have as many ids, ``gradients[i]`` may have the shape ``(ids of each,
        lookups, dim)`` instead. ``learning_rate`` is one number, or one per
        group. Returns when every server has applied its part, or, of several synchronous workers
        (``Worker``), has taken it. Raises ``GradientError`` for NaN and infinities (``TableSpec``), and what
        every server refuses alike; then nothing has changed. After any other error some tables or servers may
        have taken the push and others not, and every push, save, checkpoint and eviction of this job raises
        ``TornError`` until ``recover`` or ``restore``; pulls go on.
        """
        self.settle()
        self._push(pulled, gradients, learning_rate, summed, of_rows)

    def _push(
        self,
        pulled: Pulled,
        gradients: Sequence[NDArray[Any] | None],
        learning_rate: float | Sequence[float],
        summed: bool,
        of_rows: Sequence[NDArray[Any] | None],
    ) -> None:
        if summed:
            gradients, of_rows = [None] * len(gradients), gradients
        rates = _rates(learning_rate)
        of_ids, of_rows = (
            [None if part is None else np.ascontiguousarray(part) for part in parts]
            for parts in (gradients, of_rows)
        )
        self._core.push(pulled, of_ids, of_rows, rates)

    def pull_rows(self, table: int, keys: NDArray[np.int64]) -> NDArray[Any]:
        """The rows ``(n, dim)`` of ``n`` keys of one table, in their order, duplicates included.

        float64 of a float64 table, float32 of all others.
        """
        return self._settled().pull_rows(table, _keys(keys, "keys"))

    def assign(
        self,
        table: int | str,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None = None,
    ) -> Assigned:
        """Write rows by key as they are: ``rows[i]`` of shape ``(n, dim)`` becomes the row of ``keys[i]``.

        ``table`` is an id or a name. Rows that are missing are made, whatever admission says; for eviction,
        each was pushed once now. ``slots`` has the optimizer's slots by name, of the shapes of ``slots()``:
        all of them; without it, rows keep theirs, and new rows get those of a new row. Values are float64 of
        a float64 table, float32 of all others; half-precision tables round them to the nearest. No push:
        optimizers that count steps see none. What is assigned is part of the next checkpoint, save and
        increment. Of several workers one calls it, between batches.

        Where the cap of an evicting table is full, other rows are evicted first, as by a push, and rows that
        still find no room are not written: it warns, and the result has both numbers.
        Raises ``SpecError`` for wrong shapes and dtypes, a key twice, NaN or infinity (unless
        ``TableSpec.nonfinite_gradients`` is ``"pass"``) and more rows than the cap, ``KeyRangeError``; then
        nothing has changed. After a ``StorageError`` some rows may have been written; it says how many.
        """
        core, table = self._settled(), self._id(table)
        state = None if slots is None else self._state(table, slots)
        found = Assigned(*core.assign(table, _keys(keys, "keys"), np.ascontiguousarray(rows), state))
        warn_of_cap(self.spec(table).name, found, stacklevel=3)
        return found

    def check_rows(
        self,
        table: int | str,
        keys: NDArray[np.int64],
        rows: NDArray[Any],
        slots: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Raise what ``assign`` would raise before anything changes, but for keys that are there twice."""
        core, table = self._settled(), self._id(table)
        state = None if slots is None else self._state(table, slots)
        core.check_rows(table, _keys(keys, "keys"), np.ascontiguousarray(rows), state)

    def most_rows(self, table: int | str) -> int:
        """How many rows the eviction cap of a table keeps; 2^64 - 1 without a cap."""
        return self._settled().most_rows(self._id(table))

    def keys(self, table: int | str, part: int | None = None) -> NDArray[np.int64]:
        """The keys of a table that have a row, in no order: all, or those of one of ``PARTS`` parts."""
        return self._settled().keys(self._id(table), part)

    def export(self, table: int | str, path: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Write all rows of a table into one Parquet file; returns how many.

        Columns: ``key`` (int64), ``row`` (a list of ``dim`` float32, or float64), and one list for each of
        the optimizer's slots, by its name; the file's metadata has the table's specification. Some rows are
        in memory at a time. The file appears when it is whole; ``FileExistsError`` for one that is there,
        without ``overwrite``. Meant for a table that nobody pushes to meanwhile. Raises ``CheckpointError``
        naming the file. To keep all tables with the number of pushes and what policies know, use ``save``.
        """
        from oe_runtime import row_files

        return row_files.export(self, self._id(table), Path(path), overwrite=overwrite)

    def to_arrow(self, table: int | str) -> pa.Table:
        """The same as a ``pyarrow.Table``, in memory."""
        import pyarrow as pa

        from oe_runtime import row_files

        number = self._id(table)
        return pa.Table.from_batches(row_files.batches(self, number), schema=row_files.schema(self, number))

    def import_rows(
        self, table: int | str, source: str | os.PathLike[str] | pa.Table, *, slots: bool = True
    ) -> Assigned:
        """``assign`` what ``export`` wrote, or any Parquet file or ``pyarrow.Table`` with such columns.

        The optimizer's slots are taken where there are any; they must be of the same optimizer, unless
        ``slots=False`` leaves them out. Rows that are there already and not in the source stay. Some rows are
        in memory at a time, but all are checked before the first one changes. Warns where the optimizer goes
        by the number of pushes, and the export's was another. Raises ``SpecError`` naming the column that
        does not fit, and as ``assign`` does; ``CheckpointError`` for a file that cannot be read.
        """
        import pyarrow as pa

        from oe_runtime import row_files

        if not isinstance(source, pa.Table):
            source = Path(source)
        return row_files.import_rows(self, self._id(table), source, slots=slots)

    def erase(self, table: int | str, keys: NDArray[np.int64]) -> int:
        """Remove the rows of these keys; returns how many had one.

        A key without a row reads what its table's initializer gives it. Raises ``KeyRangeError``, and
        ``StorageError`` where the storage has no room for what must be written down of it.
        """
        return self._settled().erase(self._id(table), _keys(keys, "keys"))

    def slots(self, table: int | str) -> dict[str, int]:
        """The optimizer's slots of a row, in order: how many numbers each has, ``dim`` for most."""
        return dict(self._core.slots(self._id(table)))

    def read_rows(self, table: int | str, keys: NDArray[np.int64]) -> Rows:
        """Rows by key with the optimizer's slots, duplicates included, each row as of one moment.

        Where a key has no row (``found``), they are those that a new row would have. Raises
        ``KeyRangeError``.
        """
        core, table = self._settled(), self._id(table)
        found, rows, state = core.read_rows(table, _keys(keys, "keys"))
        slots: dict[str, NDArray[Any]] = {}
        at = 0
        for name, size in core.slots(table):
            slots[name] = state[:, at : at + size]
            at += size
        return Rows(found, rows, slots)

    def _id(self, table: int | str) -> int:
        if not isinstance(table, str):
            return table
        names = {
            self.spec(number).name: number for number in range(self._tables) if number not in self._dropped
        }
        if table not in names:
            raise SpecError(
                f"table '{table}' is not one of this client's: {', '.join(names) or 'it has none'}"
            )
        return names[table]

    def _state(self, table: int, slots: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
        """The slots of each row, one after the other."""
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
        """All keys of a table that have a row, ``(n,)`` in no order, and their weights ``(n, dim)``.

        Optimizer slots are left out. Meant for a table that nobody pushes to meanwhile.
        """
        keys = self._settled().keys(table)
        dim = self.spec(table).dim
        rows = np.empty((len(keys), dim), self._settled().pull_rows(table, keys[:0]).dtype)
        piece = max(1, (64 << 20) // (8 * dim))  # one message holds no more than 2 GiB
        for begin in range(0, len(keys), piece):
            rows[begin : begin + piece] = self._settled().pull_rows(table, keys[begin : begin + piece])
        return keys, rows

    def save(
        self, directory: str | os.PathLike[str], *, since: str | os.PathLike[str] | None = None
    ) -> list[dict[str, Any]]:
        """Put every server's files into an existing directory.

        The servers write them there themselves, or send them (``checkpoint_transfer``). Returns one entry a
        file: ``file, table, server, servers, rows, version, bytes, checksum, spec``. Raises
        ``CheckpointError``; then servers have no copies left that were meant for sending.

        ``since`` is the directory of the last save or restore of these servers: then the files are
        increments, with the rows written since and tombstones of the keys erased since, and their entries
        have ``base`` (the checksum of the file that they follow) and ``tombstones`` too. Where a server
        cannot tell what has changed since that one, because another was saved in between, the rows came from
        another number of servers, or most of them were erased, its file has all rows and no ``base``.
        """
        last = "" if since is None else str(Path(since).absolute())
        saved: list[dict[str, Any]] = json.loads(self._settled().save(str(Path(directory).absolute()), last))
        return saved

    def restore(self, *directories: str | os.PathLike[str]) -> None:
        """Load every table that was created from what ``save`` wrote, from any number of servers.

        An increment needs what it was made on: name all saves in their order, that of all rows first (of
        published checkpoints, ``oe_runtime.checkpoint.chain`` finds them). A server changes nothing before
        all files were verified. Several workers all restore the same; it is done once, when the last has
        asked (with ``checkpoint_transfer="wire"``, worker 0 sends the files). Raises ``CheckpointError``.
        """
        self._settled().restore([str(Path(directory).absolute()) for directory in directories])

    def apply_increment(self, directory: str | os.PathLike[str]) -> None:
        """Bring tables of this process, which nobody pushes to, from what was restored last to an increment.

        ``directory`` is what ``save`` with ``since`` that one wrote, from as many servers as this client has.
        Nothing is loaded but the increment; what admission counts is left as it was. All files are verified
        before the first row changes. Raises ``CheckpointError`` for one that does not follow; after a
        ``StorageError`` only ``restore`` goes on.
        """
        self._core.apply_increment(str(Path(directory).absolute()))

    def checkpoint(self, batch: int, *, wait: bool = False) -> None:
        """Mark what every table holds now as checkpoint ``batch``, in the storage of the servers.

        For ``pmem_libpmem``, whose rows outlive the servers. Nothing is copied: a push waits for
        microseconds, and the checkpoint is durable soon after, or at return with ``wait``. ``batch`` must be
        above that of the last one. The newest few are kept (``StorageSpec.kept_checkpoints``); while the one
        before is not durable in every table of every server yet, this waits for it, so that there always is
        one that all have. Call it between pushes; of several synchronous workers one calls
        it, and it is of the batch that this one pushed last, with all workers' shares. Raises ``SpecError``
        for a storage that keeps none, ``StorageError``.
        """
        self._settled().checkpoint(batch, wait)

    def checkpoints(self) -> list[int]:
        """The durable checkpoints in the servers' storage that every table of every server has, ascending."""
        return self._settled().checkpoints()

    def recover(self, batch: int | None = None) -> int:
        """Go back to a checkpoint in the servers' storage: ``batch``, or the newest that all have.

        Create the tables first; servers that were started again find their rows with ``StorageSpec.recover``.
        Pushes after the checkpoint are gone. Several workers all recover the same; it is done once, when the
        last has asked. Returns its batch. Raises ``CheckpointError`` if not all have it; then nothing has
        changed.
        """
        return self._settled().recover(batch)

    def evict(self) -> int:
        """Remove the rows that ``TableSpec.eviction`` no longer keeps, in all tables; how many.

        A save does so by itself. Pulls and pushes of other clients go on in between.
        Raises ``StorageFull`` where the storage has no room for what must be written down of it: what was
        evicted is gone, and after the next checkpoints there is room for the rest.
        """
        return self._settled().evict()

    def stats(self) -> dict[str, Any]:
        """What the servers hold and did: ``{"servers": [{index, pid, tables: {name: {rows, …}}, …}]}``.

        ``tables`` are those of this client's job; ``jobs`` has those of all, ``{job: {name: …}}``.
        """
        servers = json.loads(self._settled().stats())
        for server in servers:
            jobs: dict[str, Any] = {self._job: {}}
            for table in server["tables"]:
                jobs.setdefault(table["job"], {})[table["name"]] = table
            server["jobs"], server["tables"] = jobs, jobs[self._job]
        return {"servers": servers}

    def leave(self) -> None:
        """Of several workers, this one has pushed its last batch: the others go on without it.

        What it has pushed still counts, and it may still pull and save. A ``with`` block that ends without an
        exception leaves; a client that is only closed is lost to the others (``Worker.on_lost``).
        """
        self._settled().leave()

    def shutdown(self) -> None:
        """End the servers, for all jobs, and this client."""
        self._settled().shutdown()

    def close(self) -> None:
        """End this client; the servers go on. May be called twice."""
        with contextlib.suppress(OeError):
            self.settle()
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def _keys(array: NDArray[Any], what: str) -> NDArray[np.int64]:
    keys = np.asarray(array)
    if keys.dtype == np.uint64:
        keys = keys.view(np.int64)
    if keys.dtype != np.int64:
        raise SpecError(f"{what} must be int64, not {keys.dtype}")
    return np.ascontiguousarray(keys)
