"""Values on servers as a tensor that reads them when it is used, for `state_dict` and `layer.weight`.

Which values these are is up to a `RowSource`; `oe_runtime.torch.state` has those of tables.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from oe_runtime.errors import SpecError


class RowSource:
    """Values that lie elsewhere."""

    trains = False  # whether gradients reach them

    def __init__(self, what: str, shape: tuple[int, ...], dtype: Any, advice: str = "") -> None:
        """`what` names the values for messages; `advice` says how else to get so many."""
        self.what = what
        self.shape = shape
        self.dtype = dtype
        self.advice = advice
        self.strides: tuple[int, ...] = torch.empty(shape, device="meta").stride()

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        """Return the values, or those of a part of the first dimension, in a tensor of their own."""
        raise NotImplementedError

    def write(self, values: Any, begin: int = 0) -> None:
        """Replace the values, or a part of the first dimension. Raises TypeError where they are read-only."""
        raise TypeError(f"{self.what} cannot be changed through this tensor; change a clone() of it")

    def train(self, trains: bool) -> None:
        """Let gradients reach the values, or not."""
        if trains:
            raise TypeError(f"{self.what} cannot be trained as a parameter; use a clone() of this tensor")

    def with_gradients(self) -> Any:
        """Return the values in a tensor whose gradients reach them."""
        raise NotImplementedError


class Rows(torch.Tensor):  # type: ignore[misc]
    """Rows on servers as a tensor, which reads them anew each time that it is used.

    It is like the tensor of a parameter: it has the values of the moment, changes in place change the rows,
    and gradients reach the rows of a layer that trains (except its padding). `clone()`, `copy.deepcopy` and
    `torch.save` keep the present values, as an ordinary tensor. A use reads all rows into memory; slices of
    the first dimension read only theirs. Raises SpecError where they do not fit.
    """

    source: RowSource
    attached: bool  # to the layer; detached rows have no gradients

    @staticmethod
    def __new__(cls, source: RowSource, *, attached: bool = False) -> Rows:
        """Make a tensor of the source's shape, without reading."""
        self: Rows = torch.Tensor._make_wrapper_subclass(  # there is no public name
            cls, source.shape, strides=source.strides, dtype=source.dtype, device="cpu"
        )
        self.source = source
        self.attached = attached
        return self

    def __init__(self, source: RowSource, *, attached: bool = False) -> None:
        pass  # torch.Tensor takes no arguments

    def read(self) -> Any:
        """Return the present values as an ordinary tensor."""
        _refuse_too_large(self)
        return self.source.read()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, with ordinary tensors if it needs values."""
        kwargs = kwargs or {}
        try:
            with torch._C.DisableTorchFunctionSubclass(), _looking():
                return func(*args, **kwargs)
        except _ReadsError:
            args, kwargs = pytree.tree_map_only(Rows, _values, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs)
        except _WritesError as error:
            if error.with_gradients and error.rows.requires_grad:
                raise RuntimeError(
                    f"{error.rows.source.what} require gradients, so they cannot be changed in place: use "
                    "torch.no_grad()"
                ) from None
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out one operation. A view reads nothing; a change in place is written back."""
        kwargs = kwargs or {}
        schema = func._schema
        if isinstance(args[0], Rows) and any(
            r.alias_info and not r.alias_info.is_write for r in schema.returns
        ):
            return _view(args[0], func, tuple(args[1:]), kwargs)
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        changed = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info and a.alias_info.is_write and isinstance(given.get(a.name), Rows)
        ]
        if _state.looking:
            raise _WritesError(changed[0]) if changed else _ReadsError
        values: dict[int, Any] = {}
        args, kwargs = pytree.tree_map_only(
            Rows, lambda rows: values.setdefault(id(rows), rows.read()), (tuple(args), dict(kwargs))
        )
        result = func(*args, **kwargs)
        for rows in changed:
            rows.source.write(values[id(rows)])
        back = {id(values[id(rows)]): rows for rows in changed}  # such functions return what they change
        return pytree.tree_map(lambda one: back.get(id(one), one), result) if changed else result

    # What PyTorch does not pass to these two functions.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = values = self.read()
        return values

    def __repr__(self, **_: Any) -> str:
        return f"Rows({self.source.what}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.read().__array__(dtype)

    def numpy(self, **options: Any) -> Any:
        """Return the present values as an array."""
        return self.read().numpy(**options)

    def tolist(self) -> Any:
        """Return the present values as lists."""
        return self.read().tolist()

    def detach(self) -> Rows:
        """Return the same rows without gradients."""
        return Rows(self.source)

    @property
    def data(self) -> Rows:
        """The same rows without gradients; setting it sets the rows."""
        return self.detach()

    @data.setter
    def data(self, values: Any) -> None:
        self.source.write(values)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients reach the rows."""
        return self.attached and self.source.trains

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Rows:
        """Train the rows of a layer, or do not. Raises TypeError for detached rows."""
        if self.attached:
            self.source.train(requires_grad)
        else:
            RowSource.train(self.source, requires_grad)
        return self

    @property
    def grad(self) -> Any:
        """Raise RuntimeError: there is no dense gradient."""
        raise RuntimeError(
            f"{self.source.what} have no dense gradient: that of the rows in use is the grad of the layer's "
            "parameter, next(layer.parameters()).grad"
        )

    def is_pinned(self, *_: Any) -> bool:
        """Return False: there is no memory."""
        return False

    def is_shared(self) -> bool:
        """Return False: there is no memory."""
        return False

    def untyped_storage(self) -> Any:
        """Return a storage of the size of all rows, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").untyped_storage()

    def data_ptr(self) -> int:
        """Raise TypeError: there is no memory."""
        raise TypeError(f"{self.source.what} have no memory in this process; use a clone() of this tensor")

    def share_memory_(self) -> Rows:
        """Raise TypeError: there is no memory."""
        raise TypeError(f"{self.source.what} have no memory in this process; use a clone() of this tensor")


class _View(RowSource):
    """A view of rows, such as a slice or the transposed matrix: `output` of the outputs of `func`, or all."""

    def __init__(
        self, base: RowSource, func: Any, output: int | None, example: Any, part: slice | None
    ) -> None:
        super().__init__(base.what, tuple(example.shape), example.dtype, base.advice)
        self.strides = example.stride()
        self._base, self._func, self._output = base, func, output
        self._part = part  # of the base's first dimension: all that is needed of it

    @property
    def trains(self) -> bool:  # type: ignore[override]
        return self._base.trains

    def train(self, trains: bool) -> None:
        raise RuntimeError(f"a view of {self.what} is not a leaf: use layer.weight.requires_grad_()")

    def _take_view(self, values: Any) -> Any:
        result = self._func(values)
        return result if self._output is None else result[self._output]

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        if self._part is not None:
            values = self._base.read(self._part.start, self._part.stop).reshape(self.shape)
        else:
            values = self._take_view(self._base.read()).clone()
        return values if begin == 0 and end is None else values[begin:end].clone()

    def write(self, values: Any, begin: int = 0) -> None:
        if self._part is not None and begin == 0:
            rows = torch.empty(self._part.stop - self._part.start, *self._base.shape[1:], dtype=self.dtype)
            self._base.write(rows.copy_(values.reshape(rows.shape)), self._part.start)
            return
        base = self._base.read()
        self._take_view(base)[begin : begin + len(values) if values.dim() else None].copy_(values)
        self._base.write(base)

    def with_gradients(self) -> Any:
        return self._take_view(self._base.with_gradients())


def _view(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the view that an operation makes of rows, or a list of such views."""
    base = rows.source
    if func is torch.ops.aten.detach.default:
        return Rows(base)

    def apply(values: Any) -> Any:
        return func(values, *args, **kwargs)

    examples = apply(torch.empty_strided(base.shape, base.strides, dtype=base.dtype, device="meta"))
    if not isinstance(examples, torch.Tensor):
        return [
            Rows(_View(base, apply, number, example, None), attached=rows.attached)
            for number, example in enumerate(examples)
        ]
    part = _part(base.shape[0], func, args, kwargs) if base.shape else None
    return Rows(_View(base, apply, None, examples, part), attached=rows.attached)


def _part(size: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> slice | None:
    """Return the part of the first dimension that a view has; None for other views."""
    if kwargs or not args or args[0] != 0:
        return None
    if func is torch.ops.aten.select.int:
        return slice(args[1] % size, args[1] % size + 1)
    if func is torch.ops.aten.slice.Tensor:
        begin, end, step = slice(*args[1:]).indices(size)
        return slice(begin, max(begin, end)) if step == 1 else None
    return None


class _ReadsError(Exception):
    """A function needs values."""


class _WritesError(Exception):
    """A function changes rows in place."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.with_gradients = torch.is_grad_enabled()  # there: functions may disable them


class _State(threading.local):
    looking = False  # whether operations on values are not carried out, but raise one of these errors


_state = _State()


@contextmanager
def _looking() -> Iterator[None]:
    before, _state.looking = _state.looking, True
    try:
        yield
    finally:
        _state.looking = before


def _values(rows: Rows) -> Any:
    if torch.is_grad_enabled() and rows.requires_grad:
        _refuse_too_large(rows)
        return rows.source.with_gradients()
    return rows.read()


def _refuse_too_large(rows: Rows) -> None:
    size = math.prod(rows.shape) * rows.dtype.itemsize
    free = available_memory()
    if size > free:
        raise SpecError(
            f"{rows.source.what} do not fit this process's memory: they take {size / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB are available{rows.source.advice}"
        )


def available_memory() -> int:
    """Return the bytes of memory that this process can still take, by the host and by its control group."""
    free = 1 << 62
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("ascii").splitlines()
    except OSError:
        return []
