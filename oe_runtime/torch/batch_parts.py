"""Where in a batch the arguments of layers are, so that those of the next are known before the calls."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

_DEEPEST = 6  # parts of parts of a batch, which may refer back to it
_MOST_COLUMNS = 4096  # of a matrix, that are compared with an argument
Path: TypeAlias = tuple[tuple[str, Any], ...]  # how to get from a batch to a part of it


class BatchParts:
    """The tensors, arrays and jagged tensors in a batch: in lists, tuples, dicts and attributes."""

    def __init__(self, batch: Any) -> None:
        self._parts = list(_parts(batch, ()))

    def find(self, argument: Any) -> Path | None:
        """Return where an argument is, or None.

        It is a part, a view of one, such as a column, or has the values of one or of columns, of another
        type. A guess by values may be wrong for the next batch.
        """
        for path, part in self._parts:
            if part is argument:
                return path
        if not isinstance(argument, torch.Tensor) or not argument.numel():
            return None
        tensors = [(path, part) for path, part in self._parts if isinstance(part, torch.Tensor)]
        for how in (_view, _values):
            for path, part in tensors:
                if (more := how(part, argument)) is not None:
                    return (*path, *more)
        return None


def part_at(batch: Any, path: Path) -> Any:
    """Return the part of a batch at a path. Raises what the batch does, if it is of another form."""
    for kind, name in path:
        if kind == "attribute":
            batch = getattr(batch, name)
        elif kind == "array":
            batch = _tensor(batch)
        elif kind == "reshape":
            batch = batch.reshape(name)
        elif kind == "type":
            batch = batch.to(name)
        elif isinstance(batch, dict) and name not in batch:
            raise KeyError(name)  # a defaultdict would add it
        else:
            batch = batch[name]
    return batch


def _parts(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of a batch that a layer may be called with, and how to get there."""
    if len(path) > _DEEPEST or isinstance(data, (type, Enum, ModuleType, torch.nn.Module)):
        return
    if isinstance(data, torch.Tensor) or hasattr(data, "offsets"):
        yield path, data
    elif isinstance(data, np.ndarray):
        if data.dtype.kind in "iufb" and data.dtype.isnative:
            yield (*path, ("array", None)), _tensor(data)
    elif isinstance(data, dict):
        for key, part in data.items():
            yield from _parts(part, (*path, ("item", key)))
    elif isinstance(data, (list, tuple)):
        for number, part in enumerate(data):
            yield from _parts(part, (*path, ("item", number)))
    else:
        for name, part in getattr(data, "__dict__", {}).items():
            yield from _parts(part, (*path, ("attribute", name)))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor, in its memory if that can be: a program's own `from_numpy` is a view."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _view(part: Any, argument: Any) -> Path | None:
    """Return how an argument in the memory of a part comes from it, whatever the batch's size."""
    if part.dtype != argument.dtype or not _share_memory(part, argument):
        return None
    offset = argument.storage_offset() - part.storage_offset()
    if offset == 0 and argument.shape == (part.numel(),):
        return (("reshape", -1),)
    index: list[Any] = [0] * part.dim()
    kept = iter(zip(argument.shape, argument.stride(), strict=True))
    size, stride = next(kept, (0, 0))
    for dim, own in enumerate(part.stride()):
        begin, offset = divmod(offset, own) if own else (0, offset)
        if size and stride == own and begin + size <= part.shape[dim]:
            whole = begin == 0 and size == part.shape[dim]
            index[dim] = slice(None) if whole else slice(begin, begin + size)
            size, stride = next(kept, (0, 0))
        else:
            index[dim] = begin
    try:
        found = part[tuple(index)]
    except IndexError:
        return None
    same = found.shape == argument.shape and found.stride() == argument.stride()
    return (("item", tuple(index)),) if same and found.data_ptr() == argument.data_ptr() else None


def _share_memory(a: Any, b: Any) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


def _values(part: Any, argument: Any) -> Path | None:
    """Return how a copy of a part, or of some of its columns, in another type comes from it."""
    kind = ("type", argument.dtype)
    if part.layout != torch.strided or part.device != argument.device or part.dtype.is_complex:
        return None
    if part.shape == argument.shape:
        return (kind,) if torch.equal(part.to(argument.dtype), argument) else None
    if part.dim() != 2 or argument.dim() not in (1, 2) or len(part) != len(argument):
        return None
    width = argument.shape[1] if argument.dim() == 2 else 1
    columns = part.shape[1]
    if width > columns or columns > _MOST_COLUMNS:
        return None
    values = part.to(argument.dtype)
    for begin in range(columns - width + 1):
        column = begin if argument.dim() == 1 else slice(begin, begin + width)
        if torch.equal(values[:, column], argument):
            return (("item", (slice(None), column)), kind)
    return None
