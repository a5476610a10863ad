"""A GPU of the imagination: tensors on "cuda:0" whose copies from pinned memory come as late as CUDA allows.

Only what `oe_runtime.torch.storage` asks of CUDA is there. A copy from memory that was registered is done
when an event after it is waited for, or when somebody looks at the tensor: whoever writes over that memory
before has the wrong numbers. Real copies, streams and kernels are not tested by it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
_aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor on the device: its numbers are computed when they are asked for, and once."""

    compute: Callable[[], torch.Tensor]

    @staticmethod
    def of(compute: Callable[[], torch.Tensor], like: torch.Tensor, dtype: torch.dtype) -> OnDevice:
        """Make one of the shape of `like`."""
        made = torch.Tensor._make_wrapper_subclass(OnDevice, like.shape, dtype=dtype, device=DEVICE)
        made.compute, made.found = compute, None
        return made

    def numbers(self) -> torch.Tensor:
        """Return its numbers, in a tensor on the CPU."""
        if self.found is None:
            self.found = self.compute()
        return self.found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what needs the mode."""
        raise NotImplementedError(f"{func} on a fake device outside FakeCuda")


class FakeCuda(TorchDispatchMode):
    """Inside, "cuda:0" is a device, and `torch.cuda` answers for it."""

    def __init__(self, registers: bool = True) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}  # bytes of pinned memory, by address
        self.waits = 0  # of events
        self._on_its_way: list[OnDevice] = []  # copies from pinned memory
        self._registers = registers

    def put(self, tensor: torch.Tensor) -> OnDevice:
        """Return a tensor of the device with these numbers."""
        return OnDevice.of(tensor.clone, tensor, tensor.dtype)

    def answer(self, patch: pytest.MonkeyPatch) -> None:
        """Let torch.cuda say what a GPU's would."""
        success = object()
        fake = self

        class Event:
            def record(self) -> None:
                self.before = list(fake._on_its_way)

            def synchronize(self) -> None:
                fake.waits += 1
                for tensor in self.before:
                    tensor.numbers()
                fake._on_its_way = [one for one in fake._on_its_way if one.found is None]

        def register(address: int, size: int, _: int) -> object:
            if not self._registers:
                return object()
            assert address not in self.registered
            self.registered[address] = size
            return success

        def unregister(address: int) -> object:
            late = [one for one in self._on_its_way if one.found is None]
            assert not late, "a copy from this memory may still be on its way"
            del self.registered[address]
            return success

        def synchronize() -> None:
            for tensor in self._on_its_way:
                tensor.numbers()

        cudart = SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaError=SimpleNamespace(success=success),
        )
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", synchronize)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what tensors of the device are for; all else is the CPU's."""
        kwargs = kwargs or {}
        (first, *others) = args or (None,)
        if func is _aten._to_copy.default:
            return self._copied(first, **kwargs)
        if func is _aten.copy_.default and isinstance(others[0], OnDevice):
            return first.copy_(others[0].numbers())
        if isinstance(first, OnDevice):
            if func not in (_aten.detach.default, _aten.alias.default):
                raise NotImplementedError(f"{func} on a fake device")
            return OnDevice.of(first.numbers, first, first.dtype)
        return func(*args, **kwargs)

    def _copied(
        self, tensor: Any, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
    ) -> Any:
        dtype = dtype or tensor.dtype
        device = torch.device(device or tensor.device)
        if not isinstance(tensor, OnDevice) and device.type == "cpu":
            return _aten._to_copy.default(tensor, dtype=dtype)
        numbers = tensor.numbers if isinstance(tensor, OnDevice) else lambda: tensor.clone()
        if device.type == "cpu":
            return numbers().to(dtype)
        made = OnDevice.of(lambda: numbers().to(dtype), tensor, dtype)
        if isinstance(tensor, OnDevice):
            return made
        if non_blocking and self._is_pinned(tensor):
            self._on_its_way.append(made)
        else:
            made.numbers()
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        begin = tensor.data_ptr()
        return any(at <= begin < at + size for at, size in self.registered.items())
