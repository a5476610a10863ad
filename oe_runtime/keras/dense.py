"""The dense weights and the optimizer's variables, as a file of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError
from oe_runtime.support import dense_file
from oe_runtime.support.dense_file import FILE, write

__all__ = ["FILE", "assign", "load", "named_variables", "read", "save", "values", "write"]


def named_variables(model: Any) -> dict[str, Any]:
    """Return every variable by a name that is the same in other processes: model/… and optimizer/…."""
    if not model.compiled:
        raise RuntimeError("compile the model first: its dense checkpoint has the optimizer's variables too")
    check_built(model)
    build_optimizer(model)

    def pairs() -> Iterator[tuple[str, Any]]:
        for variable in model.variables:
            # Keras numbers the random generators of all models in a process.
            yield "model/" + re.sub(r"\bseed_generator_\d+\b", "seed_generator", _path(variable)), variable
        for variable in model.optimizer.variables:
            # It begins with the optimizer's name, which depends on how many optimizers were made before.
            path = _path(variable)
            yield f"optimizer/{path.partition('/')[2] or path}", variable

    return by_unique_name(pairs())


def by_unique_name(variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Number equal names from the second on, `#2`: layers of models inside the model may have equal paths."""
    named: dict[str, Any] = {}
    for name, variable in variables:
        unique, n = name, 1
        while unique in named:
            n += 1
            unique = f"{name}#{n}"
        named[unique] = variable
    return named


def is_built(model: Any) -> bool:
    """Whether the model has made its weights; a subclassed one does so with its first batch."""
    return all(layer.built for layer in model._flatten_layers())


def check_built(model: Any) -> None:
    """Raise RuntimeError for a subclassed model that has not made its weights yet."""
    if not is_built(model):
        raise RuntimeError(
            f"the model '{model.name}' makes its weights with its first batch: call it once, model(batch), "
            "before its weights are loaded or saved"
        )


def build_optimizer(model: Any) -> None:
    """Make the optimizer's variables unless they exist. (tf-keras's optimizers do not say.)"""
    if not getattr(model.optimizer, "built", False):
        model.optimizer.build(model.trainable_variables)


def _path(variable: Any) -> str:
    """Return the path of a Keras 3 variable, or the name of a TensorFlow variable of tf-keras."""
    path: str = getattr(variable, "path", None) or variable.name.partition(":")[0]
    return path


def values(model: Any) -> dict[str, NDArray[Any]]:
    """Return copies of all variables for `write`, which later steps do not change."""
    return {name: np.array(variable.numpy()) for name, variable in named_variables(model).items()}


def save(model: Any, directory: Path) -> Path:
    """Write `directory`/dense.npz (arrays by name, no pickle) and return its path."""
    return write(values(model), directory)


def load(model: Any, directory: Path) -> None:
    """Assign the variables in `directory`/dense.npz to the model and its optimizer; all or nothing.

    Raises CheckpointError naming the file and the first variable that is missing, unknown, or of another
    shape or dtype.
    """
    assign(model, read(model, directory))


def read(model: Any, directory: Path) -> dict[str, NDArray[Any]]:
    """Return checked arrays for `assign`. A file may lack all of the optimizer's variables."""
    return check(model, directory, read_file(directory))


def read_file(directory: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file for `check`."""
    return dense_file.read(directory / FILE)


def check(model: Any, directory: Path, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `read_file` for `assign`. Raises CheckpointError where they do not fit."""
    path = directory / FILE
    variables = named_variables(model)
    if not any(name.startswith("optimizer/") for name in arrays):
        variables = {name: v for name, v in variables.items() if not name.startswith("optimizer/")}
    for name, variable in variables.items():
        if name not in arrays:
            raise CheckpointError(f"{path}: variable {name} of the model is missing")
        want, have = tuple(variable.shape), arrays[name].shape
        if want != have:
            raise CheckpointError(f"{path}: variable {name} has shape {have}, but the model's has {want}")
        dtype = np.asarray(variable.numpy()).dtype
        if dtype.kind in "iu" and arrays[name].dtype.kind in "iu":
            # Counters and random states are of another width on another backend of Keras.
            arrays[name] = arrays[name].astype(dtype)
        elif dtype != arrays[name].dtype:
            raise CheckpointError(
                f"{path}: variable {name} is {arrays[name].dtype}, but the model's is {dtype}"
            )
    for name in arrays:
        if name not in variables:
            raise CheckpointError(f"{path}: variable {name} is not in the model or its optimizer")
    return arrays


def assign(model: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Assign the result of `read`."""
    variables = named_variables(model)
    for name, value in arrays.items():
        variables[name].assign(value)
