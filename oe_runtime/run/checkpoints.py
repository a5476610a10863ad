"""The checkpoints of a run: rows, dense weights, settings and position.

The rows are files in the checkpoint's directory, or a checkpoint of the same step in the servers' own storage
(their pools on persistent memory), which the manifest names. Files may be an increment: only the rows that
changed since the previous checkpoint, which the manifest names as its base (oe_runtime.checkpoint). A pool:

    "pool": {"checkpoint": 40, "servers": 2, "storage": "pmem_libpmem", "rows": {"C1": 1460, …}}

("storage" lists the kinds that the servers report.)
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError, OeError
from oe_runtime.run.dense_state import DenseState
from oe_runtime.run.followers import restore_target
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.ranks import Ranks, deferring_losses
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.uploads import Uploads
from oe_runtime.support import dense_file
from oe_runtime.support.background import Background

_PATIENCE = 600.0  # seconds that a checkpoint waits for another process that publishes in the same directory
_POLL = 0.1  # seconds between checks whether a checkpoint in the pools is durable
_LEAST_KEPT = 2  # while a checkpoint becomes durable in some pools, all must have the previous one

# Flags of settings with other names.
_NAMES = {"embeddings": "--stock or --servers/--in-process", "max_cardinality": "--max-cardinality"}
_DEFAULTS = {"schema": "criteo"}  # where settings of earlier versions have none


def newest(run_directory: Path) -> RunCheckpoint | None:
    """Return the newest checkpoint of a run, if there is one."""
    found = checkpoint.latest(run_directory / "checkpoints")
    return None if found is None else _saved(found)


def check_resume(options: RunOptions) -> None:
    """Refuse to resume without a complete checkpoint, or with other settings; RunError names each."""
    found = checkpoint.latest(options.run_dir / "checkpoints")
    if found is None:
        raise RunError(
            f"nothing to resume: {options.run_dir} has no checkpoint; run without --resume to start"
        )
    if (_saved(found).position.queue is None) == options.workqueue:
        how = "with" if not options.workqueue else "without"
        raise RunError(f"cannot resume from {found.path}: it is of a run {how} --workqueue")
    settings = found.manifest["training"].get("settings", {})
    check_settings(found.path, settings, options.fixed())
    try:
        _verify(found.path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead_of(found.path)}") from error


def check_settings(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of the checkpoint at `path`; RunError names each."""
    differences = [
        _difference(name, saved.get(name), value)
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if differences:
        raise RunError(f"cannot resume from {path}: " + "; ".join(differences))


def _verify(path: Path) -> None:
    """Raise CheckpointError for a checkpoint with a damaged or missing file, in its bases too."""
    for part in checkpoint.chain(path):
        checkpoint.verify(part)


def _instead_of(damaged: Path) -> str:
    """Name the newest complete checkpoint before a damaged one, as the end of a sentence; empty if none."""
    for path in reversed(checkpoint.published(damaged.parent)):
        if path == damaged:
            continue
        try:
            _verify(path)
        except CheckpointError:
            continue
        return f" ({path.name} is whole: to go on from there, move {damaged} away)"
    return ""


def _saved(found: checkpoint.Checkpoint) -> RunCheckpoint:
    try:
        pool = found.manifest.get("pool")
        position = Position(**found.manifest["training"]["position"])
        if pool is not None:
            pool = {**pool, "checkpoint": int(pool["checkpoint"]), "servers": int(pool["servers"])}
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{found.path}/manifest.json: not a checkpoint of the trainer ({error})"
        ) from error
    return RunCheckpoint(found.path, position, pool)


def _difference(name: str, saved: Any, wanted: Any) -> str:
    flag = _NAMES.get(name, "--" + name.replace("_", "-"))
    saved, wanted = (_DEFAULTS.get(name) if value is None else value for value in (saved, wanted))
    tables = "tables C1 to C26 have " if name in ("dim", "optimizer") else "the checkpoint has "
    words = name.replace("_", " ")
    has = f"no {words}" if saved is None else f"{words} {saved}"
    return f"{tables}{has}, {flag} is {'not given' if wanted is None else wanted}"


class Unpublished(CheckpointError):
    """The checkpoint of an earlier step could not be published."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(problem)
        self.step = step


class Checkpoints:
    """The checkpoints of one run: takes them during training, and goes back to them."""

    def __init__(
        self, options: RunOptions, state: DenseState, client: Client | None, ranks: Ranks | None = None
    ) -> None:
        """The tables of `state` exist. Raises RunError for unusable pools."""
        self._options = options
        self.settings = options.fixed()  # a resumed run must share them
        self._ranks = ranks or Ranks()
        self._directory = options.run_dir / "checkpoints"
        self._state = state
        self._client = client
        self.in_pools = _use_pools(options, client)
        self._uploads: Uploads | None = None
        self._pending: _Pending | None = None
        self._background = Background("checkpoint")
        self._asked = 0.0
        self._in_files: Path | None = None  # the servers' last save or restore
        # Whether `take_now` leaves the rows in files though there are pools: other servers restore them.
        self.wants_files: Callable[[], bool] = lambda: False

    def upload_to(self, uploads: Uploads, resumed: RunCheckpoint | None) -> None:
        """Upload each checkpoint in files from now on, and the one that the run goes on from."""
        self._uploads = uploads
        if self.in_pools and not self._options.export_checkpoints:
            uploads.say("checkpoints in pools are not uploaded, except the last; see --export-checkpoints")
        if resumed is not None and resumed.pool is None:
            uploads.offer(resumed.path)

    def take(self, position: Position) -> RunCheckpoint | None:
        """Take a checkpoint between two steps.

        In pools it is only marked, and of a run with increments the rest is left to a thread: None. `settle`
        publishes it when it is durable. If an earlier one is not durable yet, this waits for both.
        """
        if self._pending is not None:
            return self.take_now(position)
        if self.in_pools:
            self._pending = self._mark(position, wait=False)
        elif not self._options.checkpoint_increments:
            return self.take_files(position)
        else:
            self._pending = self._begin_later(_Pending(position, self._state.values(), None))
        return None

    def _begin_later(self, pending: _Pending) -> _Pending:
        """Leave all but the copy of the dense weights to a thread. The client's next request waits for it.

        Other workers would go on meanwhile: they wait until the servers have their part of it.
        """
        if self._client is None or self._options.workers or self._options.workqueue:
            return replace(pending, path=self._background.submit(self._begin(pending)))
        begun = self._client.save_later(self._background, lambda save: self._begin(pending, save))
        return replace(pending, path=self._background.submit(lambda: begun.result()()))

    def take_now(self, position: Position) -> RunCheckpoint:
        """Take a checkpoint and publish it before the return."""
        taken = self._pending is not None and self._pending.position.step == position.step
        if not self.in_pools or taken or self.wants_files():  # pools take each number once
            return self.take_files(position)
        self._pending = None
        return self._publish(self._mark(position, wait=True))

    def take_files(self, position: Position) -> RunCheckpoint:
        """Take a checkpoint with its rows in files, which can be used without a server."""
        with contextlib.suppress(Unpublished):  # this one says so, too, if the problem has not gone
            earlier = self.settle_files()
            if earlier is not None and earlier.position == position:
                return earlier
        self._pending = None
        return self._publish(_Pending(position, self._state.values(), None))

    def settle(self, *, wait: bool = False) -> RunCheckpoint | None:
        """Publish the marked checkpoint if all servers have it by now.

        Of one in files this returns what became of it, at its end, for which it may `wait`. Raises
        Unpublished.
        """
        pending = self._pending
        if pending is not None and pending.path is not None:
            return self.settle_files() if wait or pending.path.done() else None
        if pending is None or self._client is None or time.monotonic() - self._asked < _POLL:
            return None
        self._asked = time.monotonic()
        if pending.position.step not in self._client.checkpoints():
            return None
        self._pending = None
        return self._publish(pending)

    def settle_files(self) -> RunCheckpoint | None:
        """Wait for files that are being published; return their checkpoint. Raises Unpublished."""
        pending = self._pending
        if pending is None or pending.path is None:
            return None
        self._pending = None
        try:
            self._in_files = pending.path.result()
        except OeError as error:  # of a lost server, which the next request says too, for instance
            raise Unpublished(pending.position.step, str(error)) from error
        return RunCheckpoint(self._in_files, pending.position, None)

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """Restore the newest usable checkpoint to the servers and the model.

        Returns it, and a message about newer ones that the servers have lost. Raises CheckpointError, and
        ServerLost in all workers.
        """
        self._asked = 0.0
        choice: tuple[RunCheckpoint, str] | None = None
        with deferring_losses(self._ranks):
            with contextlib.suppress(Unpublished):
                self.settle(wait=True)  # one may have become durable everywhere just before
            choice = self._choose()
        self._pending = None
        self._ranks.barrier()
        assert choice is not None  # noqa: S101 - else `meet` has raised
        saved, lost = choice
        if self._client is not None:
            target = {
                "path": str(saved.path),
                "pool": saved.pool,
                "files": [] if saved.pool else [str(one.absolute()) for one in checkpoint.chain(saved.path)],
                "position": saved.position.to_json(),
            }
            self._chosen(saved, target)
            self._ranks.share(json.dumps(target).encode())
            with deferring_losses(self._ranks):
                restore_target(self._client, target)
                if saved.pool is not None:
                    self._check_rows(saved, self._rows(self._client.stats()["servers"]))
            self._ranks.barrier()
            self._in_files = saved.path if saved.pool is None else None
        self._state.load(saved.path)
        self._ranks.share((saved.path / dense_file.FILE).read_bytes())
        return saved, lost

    def _chosen(self, saved: RunCheckpoint, target: Mapping[str, Any]) -> None:
        """Do something before the servers go back to `saved`, as `target` says; for subclasses."""

    def _mark(self, position: Position, *, wait: bool) -> _Pending:
        assert self._client is not None  # noqa: S101 - pools are on servers
        servers = self._client.stats()["servers"]
        pool = {
            "checkpoint": position.step,
            "servers": len(servers),
            "storage": ", ".join(sorted({server["storage"] for server in servers})),
            "rows": self._rows(servers),
        }
        arrays = self._state.values()
        # After a return behind a lost checkpoint its number is used again: remove the old one.
        checkpoint.remove_from(self._directory, position.step)
        # Worker 0 may have ended after its first checkpoint, without rows, before publishing it.
        if position.step or self._client.checkpoints() != [0]:
            self._client.checkpoint(position.step, wait=wait)
        return _Pending(position, arrays, pool)

    def _publish(self, pending: _Pending) -> RunCheckpoint:
        path = self._begin(pending)()
        if pending.pool is None:
            self._in_files = path
        return RunCheckpoint(path, pending.position, pending.pool)

    def _begin(self, pending: _Pending, save: Callable[..., Any] | None = None) -> Callable[[], Path]:
        """Return what publishes it, while training may go on. `save` is the client's, where it lends it."""
        base = self._base() if pending.pool is None else None

        contents: dict[str, bytes] = {}
        training = {
            "settings": {**self.settings},
            "position": pending.position.to_json(),
            "taken": round(time.time(), 3),
        }

        def content(path: Path) -> Callable[[], Mapping[str, Any]]:
            tables: list[dict[str, Any]] = []
            if self._client is not None and pending.pool is None:
                tables = (save or self._client.save)(path, since=base, contents=contents)

            def rest() -> Mapping[str, Any]:
                for name, held in contents.items():
                    (path / name).write_bytes(held)
                self._state.write(pending.arrays, path)
                pool = {} if pending.pool is None else {"pool": pending.pool}
                return {"training": training, "tables": tables, **pool}

            return rest

        # Pools may be lost with their servers: keep the newest rows in files.
        spare = (
            next((one.path for one in self._published() if one.pool is None), None) if pending.pool else None
        )
        keep = self._options.keep_checkpoints
        step = pending.position.step
        # `oeprov reshard` may be publishing at the same time.
        end = checkpoint.begin(
            self._directory, step, content, keep=keep, spare=spare, base=base, patience=_PATIENCE
        )

        def publish() -> Path:
            path = end()
            if pending.pool is None and self._uploads is not None:
                self._uploads.offer(path)
            return path

        return publish

    def _base(self) -> Path | None:
        """Return the checkpoint that the next increment builds on; None: the next files have all rows."""
        if self._in_files is None or not self._options.checkpoint_increments:
            return None
        try:
            length = len(checkpoint.chain(self._in_files))
        except CheckpointError:  # removed, because the run went back behind it
            return None
        return self._in_files if length <= self._options.checkpoint_increments else None

    def _published(self) -> list[RunCheckpoint]:
        """Return the published checkpoints, newest first."""
        return [_saved(checkpoint.read(path)) for path in reversed(checkpoint.published(self._directory))]

    def _choose(self) -> tuple[RunCheckpoint, str]:
        found = self._published()
        kept = self._client.checkpoints() if self._client and any(one.pool for one in found) else []
        servers = self._client.servers if self._client else 0
        for saved in found:
            pool = saved.pool
            if pool is None or (pool["servers"] == servers and pool["checkpoint"] in kept):
                if saved is found[0]:
                    return saved, ""
                _verify(saved.path)
                return saved, f"{_lost(found[0], servers, kept)}; going back to {saved.path}"
        if not found:
            raise CheckpointError(f"{self._directory} has no checkpoint to return to")
        raise CheckpointError(
            f"{_lost(found[0], servers, kept)}, and no older checkpoint can be used; start the servers that "
            "wrote it, all of them, with --storage-recover and the --storage-path that they had"
        )

    def _rows(self, servers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return the rows of each table from the `servers`' stats. All must have had the same pushes."""
        names = self._state.tables
        if len({server["tables"][name]["version"] for server in servers for name in names}) > 1:
            raise RunError("the servers have not had the same pushes; go on from the last checkpoint")
        return {name: sum(server["tables"][name]["rows"] for server in servers) for name in names}

    def _check_rows(self, saved: RunCheckpoint, found: Mapping[str, int]) -> None:
        wanted = (saved.pool or {}).get("rows", {})
        for name, rows in found.items():
            if wanted.get(name) != rows:
                raise CheckpointError(
                    f"checkpoint {saved.position.step} in the storage of these servers is of another run: "
                    f"table {name} has {rows} rows there, {saved.path}/manifest.json says {wanted.get(name)}"
                )


@dataclass(frozen=True)
class _Pending:
    """The content of a checkpoint to publish."""

    position: Position
    arrays: Mapping[str, NDArray[Any]]
    pool: Mapping[str, Any] | None
    path: Future[Path] | None = None  # of one in files, which is being published


def _use_pools(options: RunOptions, client: Client | None) -> bool:
    if client is None or options.in_process or options.checkpoint_rows == "files":
        return False
    refusal = ""
    for server in client.stats()["servers"]:
        name = f"server {server['index']} ({options.servers[server['index']]})"
        if not server["storage_checkpoints"]:
            refusal = refusal or f"{name} has storage {server['storage']}, which keeps no checkpoints"
        elif server["storage_checkpoints"] < _LEAST_KEPT:
            refusal = refusal or f"{name} keeps one checkpoint only; give it --storage-checkpoints 2 or more"
        elif not server["storage_recovers"]:
            refusal = refusal or f"{name} was started without --storage-recover"
    if refusal and options.checkpoint_rows == "pool":
        raise RunError(f"--checkpoint-rows pool: {refusal}")
    return not refusal


def _lost(saved: RunCheckpoint, servers: int, kept: list[int]) -> str:
    pool = saved.pool or {}
    what = f"checkpoint {saved.path} has its rows in the storage of {pool.get('servers')} server"
    what += "" if pool.get("servers") == 1 else "s"
    if pool.get("servers") != servers:
        return f"{what}, but there are {servers} now"
    have = ", ".join(map(str, kept)) or "none"
    return f"{what}, which have lost it (checkpoints that all have: {have})"
