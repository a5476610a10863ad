"""The rows of a model: OpenEmbedding's functions for them, which a script may replace by assignment.

    embed.exb.save_server_model = save_server_model
    embed.exb.load_server_model = embed.restore_server_model

`save`, `save_weights`, `load_weights` and ModelCheckpoint call what is assigned here. The functions get the
path of a subdirectory `openembedding` of the save, which appears with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from oe_runtime.errors import CheckpointError
from oe_runtime.support.directories import published

_Path = str | os.PathLike[str]

_ROWS = "openembedding"
_PERSISTED = "persisted.json"
_NOWHERE = "mem://"  # OpenEmbedding's file system that keeps nothing
# Batches between checkpoints in storage; they then cost about 2 % of training (benchmarks/results/pmem.md).
_PERSIST_EVERY = 1000


def save_server_model(model: Any, filepath: _Path, include_optimizer: bool = True) -> None:
    """Write the rows of a model's tables, with the optimizer's state, into the new directory `filepath`.

    `include_optimizer` is OpenEmbedding's; the state of a row is always included. Raises FileExistsError when
    `filepath` exists.
    """
    del include_optimizer
    with published(Path(filepath), overwrite=False) as directory:
        model.client.save(directory)


def load_server_model(model: Any, filepath: _Path) -> None:
    """Restore the rows that `save_server_model`, `save_weights` or `Client.save` wrote.

    All workers make this call. Raises CheckpointError naming the file that does not fit; nothing has changed
    then.
    """
    model.client.restore(filepath)


def should_persist_server_model(model: Any) -> bool:
    """Whether `persist_server_model` is due: 1,000 batches after the last, if the storage keeps any."""
    if int(model.optimizer.iterations) - model.served.persisted < _PERSIST_EVERY:
        return False
    return all(server["storage_checkpoints"] > 0 for server in model.client.stats()["servers"])


def persist_server_model(model: Any, filepath: _Path, persist_pending_window: int = 0) -> None:
    """Mark the present rows as a checkpoint in the servers' storage; see `Client.checkpoint`.

    Nothing is copied; the new directory `filepath` holds the checkpoint's number (none for "mem://…"). With a
    `persist_pending_window` above 0 it may become durable after the return. Raises SpecError for storage
    without checkpoints.
    """
    batch = int(model.optimizer.iterations)
    wait = persist_pending_window <= 0
    # The last epoch's ModelCheckpoint and a save after fit are of the same batch.
    is_new = batch == 0 or batch != model.served.persisted
    if str(filepath).startswith(_NOWHERE):
        if is_new:
            model.client.checkpoint(batch, wait=wait)
    else:
        with published(Path(filepath), overwrite=False) as directory:
            if is_new:
                model.client.checkpoint(batch, wait=wait)
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


_save_rows, _load_rows = save_server_model, load_server_model


def save_rows(model: Any, directory: Path, include_optimizer: bool) -> None:
    """Write the rows of a save into its `directory`, by the function that the script has assigned."""
    if save_server_model is _save_rows:
        model.client.save(directory)
    else:
        save_server_model(model, str(directory / _ROWS), include_optimizer=include_optimizer)


def load_rows(model: Any, directory: Path) -> None:
    """Load what `save_rows` wrote, by the function that the script has assigned."""
    rows = directory / _ROWS
    if not rows.is_dir():
        model.client.restore(directory)
    elif load_server_model is _load_rows and (rows / _PERSISTED).is_file():
        restore_server_model(model, rows)
    else:
        load_server_model(model, str(rows))
