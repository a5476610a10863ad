"""A model with its rows in a directory, and OpenEmbedding's functions for the rows alone.

A directory appears complete or not at all. `save_weights` writes dense.npz and the servers' table files,
`save_server_model` only the table files, `persist_server_model` the number of a checkpoint in the servers'
storage.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oe_runtime.errors import CheckpointError
from oe_runtime.keras import dense
from oe_runtime.support import durable

_Path = str | os.PathLike[str]

_PERSISTED = "persisted.json"
# Lets keras.models.load_model explain such a directory; see `oe_runtime.keras.model.WeightsOnly`.
_CONFIG = {
    "class_name": "WeightsOnly",
    "config": {},
    "module": "oe_runtime.keras.model",
    "registered_name": "oe_runtime>WeightsOnly",
}
# Batches between checkpoints in storage; they then cost about 2 % of training (benchmarks/results/pmem.md).
_PERSIST_EVERY = 1000


def save_weights(model: Any, filepath: _Path, overwrite: bool = True, include_optimizer: bool = True) -> None:
    """See `WithTables.save_weights`."""
    arrays = dense.values(model)
    if not include_optimizer:
        arrays = {name: value for name, value in arrays.items() if not name.startswith("optimizer/")}
    with _published(Path(filepath), overwrite=overwrite, ours=dense.FILE) as directory:
        dense.write(arrays, directory)
        model.client.save(directory)
        (directory / "config.json").write_text(json.dumps(_CONFIG))


def load_weights(model: Any, filepath: _Path) -> None:
    """See `WithTables.load_weights`."""
    arrays = dense.read(model, Path(filepath))
    model.client.restore(filepath)
    dense.assign(model, arrays)


def check_export(filepath: _Path, overwrite: bool = False) -> None:
    """Raise FileExistsError where `save_as_original_model` would: before training, not after it."""
    path = Path(filepath)
    if os.path.lexists(path) and not (overwrite and (path / "saved_model.pb").is_file()):
        what = "is not a SavedModel" if overwrite else "exists already"
        raise FileExistsError(
            f"{path} {what}: nothing was written; choose another path, or replace a SavedModel by "
            "overwrite=True (check_export(path) says so before training)"
        )


def save_server_model(model: Any, filepath: _Path, include_optimizer: bool = True) -> None:
    """Write the rows of a model's tables, with the optimizer's state, into the new directory `filepath`.

    `include_optimizer` is OpenEmbedding's; the state of a row is always included. Raises FileExistsError when
    `filepath` exists.
    """
    del include_optimizer
    with _published(Path(filepath), overwrite=False) as directory:
        model.client.save(directory)


def load_server_model(model: Any, filepath: _Path) -> None:
    """Restore the rows that `save_server_model`, `save_weights` or `Client.save` wrote.

    All workers make this call. Raises CheckpointError naming the file that does not fit; nothing has changed
    then.
    """
    model.client.restore(filepath)


def save_as_original_model(
    model: Any, filepath: _Path, overwrite: bool = False, include_optimizer: bool = False
) -> None:
    """Call `model.save_as_original_model`, under OpenEmbedding's name."""
    model.save_as_original_model(filepath, overwrite=overwrite, include_optimizer=include_optimizer)


def should_persist_server_model(model: Any) -> bool:
    """Whether `persist_server_model` is due: 1,000 batches after the last, if the storage keeps any."""
    if int(model.optimizer.iterations) - model.served.persisted < _PERSIST_EVERY:
        return False
    return all(server["storage_checkpoints"] > 0 for server in model.client.stats()["servers"])


def persist_server_model(model: Any, filepath: _Path, persist_pending_window: int = 0) -> None:
    """Mark the present rows as a checkpoint in the servers' storage; see `Client.checkpoint`.

    Nothing is copied; the new directory `filepath` holds the checkpoint's number. With a
    `persist_pending_window` above 0 it may become durable after the return. Raises SpecError for storage
    without checkpoints.
    """
    batch = int(model.optimizer.iterations)
    with _published(Path(filepath), overwrite=False) as directory:
        model.client.checkpoint(batch, wait=persist_pending_window <= 0)
        (directory / _PERSISTED).write_text(json.dumps({"batch": batch}))
    model.served.persisted = batch


def restore_server_model(model: Any, filepath: _Path) -> None:
    """Go back to the rows of `persist_server_model`; see `Client.recover`.

    The storage keeps the newest few. Raises CheckpointError when it no longer has this one; nothing has
    changed then.
    """
    path = Path(filepath) / _PERSISTED
    try:
        batch = int(json.loads(path.read_text())["batch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: does not say which checkpoint it is: {error}") from error
    model.client.recover(batch)
    model.served.persisted = batch


@contextlib.contextmanager
def _published(path: Path, *, overwrite: bool, ours: str = "") -> Iterator[Path]:
    """Yield a temporary directory that becomes `path`; `overwrite` replaces a directory with `ours`."""
    if os.path.lexists(path) and not (overwrite and (path / ours).is_file()):
        what = f"is not a directory with {ours}" if overwrite else "exists already"
        raise FileExistsError(f"{path} {what}; choose another path or remove it")
    with replacing(path) as new:
        new.mkdir()
        yield new


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for the block to make; it then becomes `path`, in place of what was there before."""
    replaces = os.path.lexists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that one rename publishes it.
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary / "new"
        if replaces:
            os.rename(path, temporary / "old")
        if os.path.lexists(path):
            raise FileExistsError(f"{path} was created by another process in the meantime")
        durable.rename(temporary / "new", path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
