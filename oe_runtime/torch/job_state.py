"""A PyTorch model, its optimizer and more as arrays of a checkpoint, without pickle."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.errors import CheckpointError
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.script_state import ScriptState
from oe_runtime.spec import TableSpec
from oe_runtime.support import dense_file
from oe_runtime.torch.model import table_layers
from oe_runtime.torch.optimizer_state import WITHOUT_ROWS
from oe_runtime.torch.pipeline import PullAhead, is_trained_in_backward
from oe_runtime.torch.rows import Rows
from oe_runtime.torch.translate import table_optimizer

_GROUPS = "optimizer/groups"  # JSON: the hyperparameters of the optimizer's groups


class TorchDense:
    """See oe_runtime.run.dense_state.DenseState."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Raises ValueError for a model that is not made by distributed_model and distributed_optimizer."""
        self._model = model
        self._optimizer = optimizer
        self._wrappers = [f"{path}.".lstrip(".") for path, one in model.named_modules() if _is_wrapper(one)]
        layers = table_layers(model)
        if unbound := [
            name for name, layer in layers.items() if layer.table is None or layer.is_table_private
        ]:
            raise ValueError(
                f"layer '{unbound[0]}' has no table yet: give the model to distributed_model, and its "
                "optimizer to distributed_optimizer, before job.training"
            )
        anchors = {id(layer.anchor) for layer in layers.values()}
        parameters = {self._plain(name): p for name, p in model.named_parameters()}
        self._parameters = {name: p for name, p in parameters.items() if id(p) not in anchors}
        self._names = {id(p): name for name, p in self._parameters.items()}

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """See DenseState."""
        return {layer.bound().spec.name: layer.bound().spec for layer in table_layers(self._model).values()}

    def trained(self) -> dict[str, NDArray[Any]]:
        """Return the weights that the optimizer trains."""
        return {name: _array(p) for name, p in self._parameters.items() if p.requires_grad}

    def bind(self, workers: Any) -> None:
        """Let these weights be those of asynchronous workers. Raises RunError where they cannot be."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise RunError(
                "--workqueue: asynchronous workers of PyTorch share weights by the servers: leave out "
                "init_process_group and DistributedDataParallel"
            )
        dense = {id(p): p for p in self._parameters.values() if p.requires_grad}
        groups = [
            i
            for i, group in enumerate(self._optimizer.param_groups)
            if any(id(p) in dense for p in group["params"])
        ]
        of_dense = [self._optimizer.param_groups[i] for i in groups]
        settings = [(table_optimizer(self._optimizer, group), group["lr"]) for group in of_dense]
        if not settings or any(one != settings[0] for one in settings):
            raise RunError(
                "--workqueue: asynchronous workers train all dense weights alike: give the optimizer one "
                "group of them, or groups of equal settings"
            )

        def keep(*_: Any) -> None:
            given = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense.values()]
            workers.keep(list(map(_array, given)))

        variables = [_Assigned(p) for p in dense.values()]
        workers.bind(variables, settings[0][0], lambda: float(self._optimizer.param_groups[groups[0]]["lr"]))
        self._optimizer.register_step_pre_hook(keep)

    def _state(self) -> dict[str, Any]:
        """Return the model's state without tables, by its names outside of DistributedDataParallel."""
        found = {self._plain(name): value for name, value in self._model.state_dict().items()}
        return {name: value for name, value in found.items() if not isinstance(value, Rows)}

    def _plain(self, name: str) -> str:
        for wrapper in sorted(self._wrappers, key=len, reverse=True):
            if name.startswith(f"{wrapper}module."):
                name = wrapper + name.removeprefix(f"{wrapper}module.")
        return name

    def values(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        arrays = {f"model/{name}": _array(value) for name, value in self._state().items()}
        groups = []
        for group in self._optimizer.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if name is not None and value is not None:
                        arrays[f"optimizer/{name}/{key}"] = _array(value)
        arrays[_GROUPS] = to_json(groups, "the optimizer's groups")
        return arrays

    def write(self, arrays: Mapping[str, NDArray[Any]], directory: Path) -> None:
        """See DenseState."""
        dense_file.write(arrays, directory)

    def load(self, directory: Path, content: bytes | None = None) -> None:
        """See DenseState."""
        path = directory / dense_file.FILE
        arrays = dense_file.read(path, content)
        wanted = self._state()
        found = {n.removeprefix("model/"): v for n, v in arrays.items() if n.startswith("model/")}
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                raise CheckpointError(f"{path}: {name} of the model is missing")
            if name not in wanted:
                raise CheckpointError(f"{path}: {name} is not in the model")
            if tuple(wanted[name].shape) != found[name].shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {found[name].shape}, but the model's has "
                    f"{tuple(wanted[name].shape)}"
                )
        groups = from_json(arrays[_GROUPS]) if _GROUPS in arrays else []
        if len(groups) != len(self._optimizer.param_groups):
            raise CheckpointError(
                f"{path}: the optimizer had {len(groups)} groups of parameters, this one has "
                f"{len(self._optimizer.param_groups)}"
            )
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(torch.from_numpy(found[name]))
        self._load_optimizer(arrays, groups)

    def _load_optimizer(self, arrays: Mapping[str, NDArray[Any]], groups: list[dict[str, Any]]) -> None:
        state: dict[int, dict[str, Any]] = {}
        plain = self._optimizer.state_dict()
        for group, saved in zip(plain["param_groups"], groups, strict=True):
            group.update(saved)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            prefix = f"optimizer/{self._names.get(id(parameter))}/"
            values = {
                key.removeprefix(prefix): torch.from_numpy(value.copy())
                for key, value in arrays.items()
                if key.startswith(prefix) and "/" not in key.removeprefix(prefix)
            }
            if values:
                state[number] = values
        whole = {"state": state, "param_groups": plain["param_groups"], WITHOUT_ROWS: True}
        self._optimizer.load_state_dict(whole)


class _Assigned:
    """A parameter as ServerWorkers use it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.shape = tuple(parameter.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(_array(self._parameter), dtype)

    def assign(self, values: NDArray[Any]) -> None:
        """Set the parameter."""
        with torch.no_grad():
            self._parameter.copy_(torch.from_numpy(values))


class TorchScriptState(ScriptState):
    """The same with the states of random generators, schedulers and other objects.

    With `pipeline`, the rows of a batch that is known ahead are pulled while the one before computes.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        others: Mapping[str, Any],
        *,
        pipeline: bool = False,
        staleness: int = 0,
    ) -> None:
        self._trained = TorchDense(model, optimizer)
        super().__init__(model, self._trained)
        self._others = others
        self._ahead: PullAhead | None = None
        self._next: tuple[Any, Future[Any]] | None = None  # the batch that is prefetched
        self._draws = False  # whether a layout draws random numbers
        # Otherwise rows that were not asked for would lack an update that no step tells of.
        if pipeline and self._trained.tables and (staleness or not is_trained_in_backward(model)):
            self._ahead = PullAhead(model, staleness)
            _follow_steps(optimizer, self._ahead)
        self._epoch: NDArray[Any] = torch.get_rng_state().numpy().copy()  # of the generator, at its begin

    @property
    def batches_ahead(self) -> int:
        """See ScriptState."""
        return int(self._ahead is not None and not self._draws)

    def announce(self, batch: Any, following: Sequence[Any]) -> None:
        """See ScriptState."""
        if self._ahead is None:
            return
        self._ahead.end_forward()
        waiting, self._next = self._next, None
        if waiting is not None and waiting[0] is batch:
            read = waiting[1].result()
        else:
            read = self._ahead.read(lambda: batch)
        ahead = self._ahead.begin(read, (lambda: following[0]) if following else None)
        if ahead is not None:
            self._next = following[0], ahead

    def lay_out_ahead(self, lay_out: Callable[[], list[Any]]) -> list[Any]:
        """See ScriptState: a layout that draws random numbers must do so in its turn."""
        if self._draws:
            return []
        before = torch.get_rng_state()
        found = lay_out()
        if torch.equal(before, torch.get_rng_state()):
            return found
        torch.set_rng_state(before)
        self._draws = True
        return []

    def reads_ahead(self, data: Any) -> bool:
        """See ScriptState: of a DataLoader with processes, whose batches draw no random numbers here."""
        is_read_elsewhere = isinstance(data, torch.utils.data.DataLoader) and data.num_workers > 0
        return self._ahead is not None and is_read_elsewhere

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        return {
            f"other/{name}": to_json(one.state_dict(), f"job.training({name}=…)")
            for name, one in self._others.items()
        }

    def own(self) -> dict[str, NDArray[Any]]:
        """See ScriptState."""
        return {"random/epoch": self._epoch, "random/now": torch.get_rng_state().numpy().copy()}

    def equal_values(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        return self._trained.trained()

    def bind(self, workers: Any) -> None:
        """See ScriptState."""
        self._trained.bind(workers)

    def load_extra(self, arrays: dict[str, NDArray[Any]]) -> None:
        """See ScriptState."""
        super().load_extra(arrays)
        for name, one in self._others.items():
            if (state := self.loaded.get(f"other/{name}")) is not None:
                one.load_state_dict(from_json(state))

    def begin_epoch(self, *, resumed: bool) -> None:
        """Before the data of an epoch, which may shuffle: go to the generator's state of then."""
        if resumed:
            self._go_to("random/epoch")
        self._epoch = torch.get_rng_state().numpy().copy()

    def skipped(self) -> None:
        """After the batches that were trained before the checkpoint: go to the generator's state of then."""
        self._go_to("random/now")

    def _go_to(self, name: str) -> None:
        """Set the generator's state."""
        if (state := self.loaded_own(name)) is not None:
            torch.set_rng_state(torch.from_numpy(state.copy()))


def _follow_steps(optimizer: Any, ahead: PullAhead) -> None:
    """Tell `ahead` of the optimizer's steps, while it is there."""
    known = weakref.ref(ahead)

    def wait(*_: Any) -> None:
        if (one := known()) is not None:
            one.wait()

    def end(*_: Any) -> None:  # rows that were not asked for lack this step
        if (one := known()) is not None:
            one.end_forward()

    hooks = optimizer.register_step_pre_hook(wait), optimizer.register_step_post_hook(end)
    for hook in hooks:
        weakref.finalize(ahead, hook.remove)


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def to_json(value: Any, what: str) -> NDArray[Any]:
    """Return a value as JSON in an array. Raises CheckpointError for one that JSON cannot hold."""
    try:
        return np.frombuffer(json.dumps(value).encode(), np.uint8)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} has a state that a checkpoint cannot hold: {error}") from error


def from_json(array: NDArray[Any]) -> Any:
    """Return what `to_json` was given."""
    return json.loads(array.tobytes())


def _array(value: Any) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().to("cpu")
    if value.dtype == torch.bfloat16:  # unknown to NumPy; float32 holds it exactly
        value = value.float()
    array: NDArray[Any] = value.numpy().copy()
    return array
