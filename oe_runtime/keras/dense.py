"""The dense weights and the optimizer's variables, as a file of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError
from oe_runtime.keras.table_variable import without_tables
from oe_runtime.support import dense_file
from oe_runtime.support.dense_file import FILE, write

_MODEL, _OPTIMIZER = "model/", "optimizer/"  # of which a variable is, before its name
_OF_ROWS = _OPTIMIZER + "accumulated/"  # gradients of rows since the last update (`accumulation`)

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
            yield _MODEL + re.sub(r"\bseed_generator_\d+\b", "seed_generator", _path(variable)), variable
        for variable in model.optimizer.variables:
            # It begins with the optimizer's name, which depends on how many optimizers were made before.
            path = _path(variable)
            yield f"{_OPTIMIZER}{path.partition('/')[2] or path}", variable

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
    """Whether the model has made its weights; a subclassed one does so with its first batch.

    A layer that a call of the model has left out has none.
    """
    served = getattr(model, "served", None)  # a stock model has none (oe_runtime.train --stock)
    return (served is not None and served.called) or all(layer.built for layer in model._flatten_layers())


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


def trainable(model: Any) -> list[Any]:
    """Return the trainable variables in the worker's memory, also of a stock model."""
    return without_tables(model.trainable_variables)


def _path(variable: Any) -> str:
    """Return the path of a Keras 3 variable, or the name of a TensorFlow variable of tf-keras."""
    path: str = getattr(variable, "path", None) or variable.name.partition(":")[0]
    return path


def values(model: Any) -> dict[str, NDArray[Any]]:
    """Return copies of all variables for `write`, which later steps do not change."""
    variables = {name: _copy(variable) for name, variable in named_variables(model).items()}
    served = getattr(model, "served", None)
    of_rows = {} if served is None else served.accumulated.arrays()
    return {**variables, **{_OF_ROWS + name: value for name, value in of_rows.items()}}


def weights(model: Any) -> dict[str, NDArray[Any]]:
    """Return copies of the model's own variables, as `values` names them."""
    return {name: _copy(variable) for name, variable in model_variables(model).items()}


def _copy(variable: Any) -> NDArray[Any]:
    """Return the variable's value in memory of its own. `numpy()` copies it, on most backends of Keras."""
    held = getattr(variable, "value", None)
    # TensorFlow's, itself or in one of Keras 3: its `numpy()` reads it by two operations, in twice the time.
    read = getattr(held, "value", held)
    value = np.asarray(read().numpy() if callable(read) else variable.numpy())
    return value if value.flags.owndata else value.copy()


def model_variables(model: Any) -> dict[str, Any]:
    """Return the variables of `named_variables` that are not the optimizer's."""
    named = named_variables(model)
    return {name: variable for name, variable in named.items() if name.startswith(_MODEL)}


def save(model: Any, directory: Path) -> Path:
    """Write `directory`/dense.npz (arrays by name, no pickle) and return its path."""
    return write(values(model), directory)


def load(model: Any, directory: Path, content: bytes | None = None) -> None:
    """Assign the variables in `directory`/dense.npz to the model and its optimizer; all or nothing.

    `content` is that of the file, where another process has read it. Raises CheckpointError naming the file
    and the first variable that is missing, unknown, or of another shape or dtype.
    """
    assign(model, check(model, directory, read_file(directory, content)))


def read(model: Any, directory: Path) -> dict[str, NDArray[Any]]:
    """Return checked arrays for `assign`. A file may lack all of the optimizer's variables."""
    return check(model, directory, read_file(directory))


def read_file(directory: Path, content: bytes | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file for `check`."""
    return dense_file.read(directory / FILE, content)


def check(model: Any, directory: Path, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `read_file` for `assign`. Raises CheckpointError where they do not fit."""
    path = directory / FILE
    variables = named_variables(model)
    of_rows = {name: value for name, value in arrays.items() if name.startswith(_OF_ROWS)}
    arrays = {name: value for name, value in arrays.items() if name not in of_rows}
    if not any(name.startswith(_OPTIMIZER) for name in arrays):
        variables = {name: v for name, v in variables.items() if not name.startswith(_OPTIMIZER)}
    if arrays.keys() != variables.keys():
        renamed = _as_numbered_here(model, variables, arrays)
        arrays = renamed if renamed.keys() == variables.keys() else arrays
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
    return {**arrays, **of_rows}


def _as_numbered_here(
    model: Any, variables: Iterable[str], arrays: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Rename the arrays of layers that Keras numbered otherwise when the file's model was made."""
    here, there = (
        [name.removeprefix(_MODEL).partition("#")[0] for name in names if name.startswith(_MODEL)]
        for names in (variables, arrays)
    )
    new = renumbered(
        model, *({part for name in names for part in name.split("/")} for names in (here, there))
    )
    paths = {path: "/".join(new.get(part, part) for part in path.split("/")) for path in there}
    longest = sorted(paths, key=len, reverse=True)

    def rename(name: str) -> str:
        name, number, copy = name.partition("#")
        if name.startswith(_MODEL):
            return _MODEL + paths[name.removeprefix(_MODEL)] + number + copy
        for path in longest:  # of Keras 3: dense_kernel_momentum; of tf-keras: m/dense/kernel
            flat = path.replace("/", "_")
            if name.startswith(f"{_OPTIMIZER}{flat}_"):
                rest = name.removeprefix(_OPTIMIZER + flat)
                return _OPTIMIZER + paths[path].replace("/", "_") + rest + number + copy
            if name.endswith(f"/{path}"):
                return name.removesuffix(path) + paths[path] + number + copy
        return name + number + copy

    return {rename(name): value for name, value in arrays.items()}


def renumbered(model: Any, names: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Return the names of the model's layers by those that they have in a file, where Keras numbers them.

    Keras names a layer by its class and by how many of that class the process has made before. The order of
    the numbers is that of their making, so the first one of a class in the file is the first one here.
    `names` are the candidates here, `saved` those in the file. A class of which there are not equally many is
    left out.
    """
    found: dict[str, str] = {}
    for kind in sorted(
        {_kind(layer) for layer in [model, *model._flatten_layers(include_self=False)]} - {""}
    ):
        here, there = (
            sorted(
                (match for name in many if (match := re.fullmatch(rf"{re.escape(kind)}(?:_(\d+))?", name))),
                key=lambda match: int(match[1] or 0),
            )
            for many in (names, saved)
        )
        if len(here) == len(there):
            found |= {old[0]: new[0] for old, new in zip(there, here, strict=True)}
    return found


def _kind(layer: Any) -> str:
    """Return the name that Keras gives to the first layer of the class; "" for a layer with another name."""
    name = re.sub(r"_\d+$", "", layer.name)
    return name if name.replace("_", "") == type(layer).__name__.replace("_", "").lower() else ""


def assign(model: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Assign the result of `read`."""
    variables = named_variables(model)
    of_rows = {}
    for name, value in arrays.items():
        if name.startswith(_OF_ROWS):
            of_rows[name.removeprefix(_OF_ROWS)] = value
        else:
            variables[name].assign(value)
    served = getattr(model, "served", None)
    if served is not None and any(name.startswith(_OPTIMIZER) for name in arrays):
        served.accumulated.restore(of_rows)
