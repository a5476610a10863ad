"""A model with its rows in a directory, which appears complete or not at all.

`save_weights` writes dense.npz and, as `oe_runtime.keras.exb` says, the servers' table files or the number
of a checkpoint in their storage.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from oe_runtime import checkpoint
from oe_runtime.keras import backends, dense, exb
from oe_runtime.support.directories import published

_Path = str | os.PathLike[str]

# Lets keras.models.load_model explain such a directory; see `oe_runtime.keras.model.WeightsOnly`.
_CONFIG = {
    "class_name": "WeightsOnly",
    "config": {},
    "module": "oe_runtime.keras.model",
    "registered_name": "oe_runtime>WeightsOnly",
}
_PREFIX = Path("variables/variables")  # of the weights in a SavedModel, which OpenEmbedding's saves are


def save_weights(model: Any, filepath: _Path, overwrite: bool = True, include_optimizer: bool = True) -> None:
    """See `WithTables.save_weights`."""
    model.served.finish_loading()
    if Path(filepath).suffix == ".keras":
        # Keras opens it as a file, before it comes to config.json. No path here: Python then says it once.
        warnings.warn(
            "the name of the save ends in .keras, but a model with tables is a directory, which "
            "keras.models.load_model cannot open under such a name: read it with model.load_weights",
            stacklevel=3,
        )
    arrays = dense.values(model)
    if not include_optimizer:
        arrays = {name: value for name, value in arrays.items() if not name.startswith("optimizer/")}
    with published(Path(filepath), overwrite=overwrite, ours=dense.FILE) as directory:
        dense.write(arrays, directory)
        exb.save_rows(model, directory, include_optimizer)
        (directory / "config.json").write_text(json.dumps(_CONFIG))


def load_weights(model: Any, filepath: _Path) -> None:
    """See `WithTables.load_weights`."""
    path = _directory(Path(filepath))
    model.served.loaded = None
    later = model.compiled and not dense.is_built(model) and backends.NAME == "tensorflow"
    arrays = dense.read_file(path) if later else dense.read(model, path)
    if saved := checkpoint.find_tables(path):
        prefix = model.served.settings.name_prefix
        here, there = ({name.removeprefix(prefix) for name in names} for names in (model.tables, saved))
        if here != there and all(name.startswith(prefix) for name in saved):
            new = dense.renumbered(model, here, there)
            model._rename_tables({prefix + name: prefix + old for old, name in new.items() if name != old})
    exb.load_rows(model, path)
    if later:
        model.served.loaded = (path, arrays)
    else:
        dense.assign(model, arrays)


def _directory(path: Path) -> Path:
    """Return the directory of a save; OpenEmbedding's scripts name `variables/variables` in it."""
    if path.parts[-2:] == _PREFIX.parts and (path.parent.parent / dense.FILE).is_file():
        return path.parent.parent
    return path


def check_export(filepath: _Path, overwrite: bool = False) -> None:
    """Raise FileExistsError where `save_as_original_model` would: before training, not after it."""
    path = Path(filepath)
    if os.path.lexists(path) and not (overwrite and (path / "saved_model.pb").is_file()):
        what = "is not a SavedModel" if overwrite else "exists already"
        raise FileExistsError(
            f"{path} {what}: nothing was written; choose another path, or replace a SavedModel by "
            "overwrite=True (check_export(path) says so before training)"
        )


def save_as_original_model(
    model: Any, filepath: _Path, overwrite: bool = False, include_optimizer: bool = False
) -> None:
    """Call `model.save_as_original_model`, under OpenEmbedding's name."""
    model.save_as_original_model(filepath, overwrite=overwrite, include_optimizer=include_optimizer)
