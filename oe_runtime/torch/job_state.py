"""A PyTorch model, its optimizers and more as arrays of a checkpoint, without pickle."""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from oe_runtime.errors import CheckpointError
from oe_runtime.run.callback_state import CallbackStates
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.script_state import ScriptState
from oe_runtime.spec import TableSpec
from oe_runtime.support import dense_file
from oe_runtime.torch.in_backward import optimizer_of
from oe_runtime.torch.model import table_layers
from oe_runtime.torch.optimizer_state import WITHOUT_ROWS
from oe_runtime.torch.pipeline import PullAhead, is_trained_in_backward
from oe_runtime.torch.rows import Rows
from oe_runtime.torch.translate import table_optimizer

_GROUPS = "groups"  # JSON: the hyperparameters of an optimizer's groups
_OPTIMIZER_GROUPS = re.compile(r"optimizer(\.\d+)?/" + _GROUPS)  # an array of each optimizer
_IN_BACKWARD = "optimizer/in_backward"  # JSON: those of the optimizers in backward, by their layers
_PLAIN = [  # dataset, batch sampler and sampler that draw at an epoch's begin, except _draws_within
    (torch.utils.data.TensorDataset, torch.utils.data.BatchSampler, sampler)
    for sampler in (
        torch.utils.data.RandomSampler,
        torch.utils.data.SequentialSampler,
        torch.utils.data.DistributedSampler,
    )
]
_DEEPEST = 4  # parts of a DataLoader that may have a generator
_DICTS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}  # that JSON has as pairs
_MARKS = [{"pairs", "kind"}, {"tensor", "dtype"}]
_MOST_VALUES = 1000  # of a tensor in the state of a scheduler or callback
_steps = itertools.count(1)
_last_step = 0  # of any optimizer
_stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, since job.training


def _note_step(optimizer: Any, *_: Any) -> None:
    global _last_step
    _last_step = next(_steps)
    _stepped.add(optimizer)


register_optimizer_step_post_hook(_note_step)


class TorchDense:
    """See oe_runtime.run.dense_state.DenseState."""

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Raises ValueError for a model that is not made by distributed_model and distributed_optimizer."""
        self._model = model
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
        names = {id(p): name for name, p in self._parameters.items()}
        self._optimizers = [
            _OptimizerState(one, names, f"optimizer.{number}/" if number else "optimizer/")
            for number, one in enumerate(optimizers)
        ]

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
            (one.optimizer, i)
            for one in self._optimizers
            for i, group in enumerate(one.optimizer.param_groups)
            if any(id(p) in dense for p in group["params"])
        ]
        settings = [
            (table_optimizer(one, one.param_groups[i]), one.param_groups[i]["lr"]) for one, i in groups
        ]
        if len({id(one) for one, _ in groups}) != 1 or any(one != settings[0] for one in settings):
            raise RunError(
                "--workqueue: asynchronous workers train all dense weights alike: give one optimizer all of "
                "them, in one group or in groups of equal settings"
            )
        optimizer, first = groups[0]

        def keep(*_: Any) -> None:
            given = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense.values()]
            workers.keep(list(map(_array, given)))

        variables = [_Assigned(p) for p in dense.values()]
        workers.bind(variables, settings[0][0], lambda: float(optimizer.param_groups[first]["lr"]))
        optimizer.register_step_pre_hook(keep)

    def _state(self) -> dict[str, Any]:
        """Return the model's state without tables, by its names outside of DistributedDataParallel."""
        found = {self._plain(name): value for name, value in self._model.state_dict().items()}
        return {name: value for name, value in found.items() if not isinstance(value, Rows)}

    def _plain(self, name: str) -> str:
        for wrapper in sorted(self._wrappers, key=len, reverse=True):
            if name.startswith(f"{wrapper}module."):
                name = wrapper + name.removeprefix(f"{wrapper}module.")
        return name

    def weights(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        return {f"model/{name}": _array(value) for name, value in self._state().items()}

    def values(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        arrays = self.weights()
        for one in self._optimizers:
            arrays |= one.values()
        if groups := {name: _settings(one)[0] for name, one in self._in_backward().items()}:
            arrays[_IN_BACKWARD] = to_json(groups, "the groups of optimizers in backward")
        return arrays

    def _in_backward(self) -> dict[str, Any]:
        layers = table_layers(self._model).items()
        return {name: one for name, layer in layers if (one := optimizer_of(layer)) is not None}

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
        saved_optimizers = sum(bool(_OPTIMIZER_GROUPS.fullmatch(name)) for name in arrays)
        if saved_optimizers != len(self._optimizers):
            raise CheckpointError(
                f"{path}: the training had {saved_optimizers} optimizers, this one has "
                f"{len(self._optimizers)}: give job.training as many, in their order"
            )
        for one in self._optimizers:
            one.check(arrays, path)
        with torch.no_grad():
            for name, value in wanted.items():
                value.copy_(torch.from_numpy(found[name]))
        for one in self._optimizers:
            one.load(arrays)
        saved = from_json(arrays[_IN_BACKWARD]) if _IN_BACKWARD in arrays else {}
        for name, one in self._in_backward().items():
            one.param_groups[0].update(saved.get(name, {}))

    def load_groups(self) -> None:
        """Set the settings of the optimizers' groups to those of the checkpoint that was loaded."""
        for one in self._optimizers:
            one.load_groups()


class _OptimizerState:
    """The state and the groups of an optimizer as arrays, whose names begin with `prefix`."""

    def __init__(self, optimizer: Any, names: Mapping[int, str], prefix: str) -> None:
        """Of parameters the `names`, by their identities; of others, which are tables, there is no state."""
        self.optimizer = optimizer
        self._names = names
        self._prefix = prefix
        self._groups: list[dict[str, Any]] = []  # their settings in the checkpoint that was loaded

    def values(self) -> dict[str, NDArray[Any]]:
        """Return the arrays."""
        arrays = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if name is not None and value is not None:
                        arrays[f"{self._prefix}{name}/{key}"] = _array(value)
        arrays[self._prefix + _GROUPS] = to_json(_settings(self.optimizer), "the optimizer's groups")
        return arrays

    def check(self, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
        """Read the groups. Raises CheckpointError for another number of them than the optimizer has."""
        saved = arrays.get(self._prefix + _GROUPS)
        self._groups = [] if saved is None else from_json(saved)
        if len(self._groups) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"{path}: the {type(self.optimizer).__name__} had {len(self._groups)} groups of parameters, "
                f"this one has {len(self.optimizer.param_groups)}"
            )

    def load_groups(self) -> None:
        """Set the groups' settings to those of the arrays that were checked."""
        for group, saved in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(saved)

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the arrays, which were checked."""
        state: dict[int, dict[str, Any]] = {}
        plain = self.optimizer.state_dict()
        for group, saved in zip(plain["param_groups"], self._groups, strict=True):
            group.update(saved)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            prefix = f"{self._prefix}{self._names.get(id(parameter))}/"
            values = {
                key.removeprefix(prefix): torch.from_numpy(value.copy())
                for key, value in arrays.items()
                if key.startswith(prefix) and "/" not in key.removeprefix(prefix)
            }
            if values:
                state[number] = values
        whole = {"state": state, "param_groups": plain["param_groups"], WITHOUT_ROWS: True}
        # Wrappers and schedulers may hold the present objects.
        kept_groups, kept_state = self.optimizer.param_groups, self.optimizer.state
        self.optimizer.load_state_dict(whole)
        for group, loaded in zip(kept_groups, self.optimizer.param_groups, strict=True):
            group.update(loaded)
        kept_state.clear()
        kept_state.update(self.optimizer.state)
        self.optimizer.param_groups, self.optimizer.state = kept_groups, kept_state


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
    """The same with the states of random generators, schedulers, callbacks and other objects.

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
        """Of the `optimizer`, or a list of them. Raises ValueError as TorchDense, and for an odd list."""
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._optimizers = [_inner(one) for one in given]
        if not given or len({id(one) for one in self._optimizers}) < len(given):
            raise ValueError(f"job.training was given {'an optimizer twice' if given else 'no optimizer'}")
        self._trained = TorchDense(model, self._optimizers)
        _stepped.clear()
        super().__init__(model, self._trained)
        self._others = {name: one for name, one in others.items() if hasattr(one, "state_dict")}
        self._others |= self._other_schedulers()
        self._callbacks = {name: one for name, one in others.items() if name not in self._others}
        self._attributes: CallbackStates | None = None  # in a library's loop
        self._known_step = _last_step
        self._data: list[Any] = []  # the present epoch's generators, besides the global ones
        self._draws_within = False  # whether its sampler draws from one of them between its batches
        self._ahead: PullAhead | None = None
        self._next: tuple[Any, Future[Any]] | None = None  # the batch that is prefetched
        self._draws = False  # whether a layout draws random numbers
        # Otherwise rows that were not asked for would lack an update that no step tells of.
        if pipeline and self._trained.tables and (staleness or not is_trained_in_backward(model)):
            self._ahead = PullAhead(model, staleness)
            for one in self._optimizers:
                _follow_steps(one, self._ahead)
        self._epoch = self._random("random/epoch")  # at its begin

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
        """See ScriptState: of a DataLoader whose batches draw no random numbers here.

        They are read by other processes, or made of tensors. Subclasses may note what they have read, as
        Accelerate's note the last batch.
        """
        loader = torch.utils.data.DataLoader
        if self._ahead is None or not isinstance(data, loader) or type(data).__iter__ is not loader.__iter__:
            return False
        parts = type(data.dataset), type(data.batch_sampler), type(data.sampler)
        is_plain = parts in _PLAIN and data.collate_fn is torch.utils.data.default_collate
        if _draws_within(data):
            return False
        return is_plain or data.num_workers > 0

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        found = {
            f"other/{name}": to_json(one.state_dict(), f"job.training({name}=…)")
            for name, one in self._others.items()
        }
        if self._attributes is not None:
            found["attributes"] = to_json(self._attributes.changed(), "the model")
            found["modes"] = np.array([one.training for one in self.model.modules()])
        return found

    def own(self) -> dict[str, NDArray[Any]]:
        """See ScriptState."""
        return self._epoch | self._random("random/now")

    def has_stepped(self) -> bool:
        """See ScriptState."""
        before, self._known_step = self._known_step, _last_step
        self._refuse_other_optimizers()
        return before != _last_step or is_trained_in_backward(self.model)

    def fit(self, loop: Any, course: Any, fit: Callable[[int], Any], epochs: int) -> Any:
        """See ScriptState."""
        from oe_runtime.torch.library_fit import LibraryFit

        try:
            return LibraryFit(loop, course, self, epochs).run(fit)
        finally:
            self._attributes = None

    def begin_library_epoch(self, *, resumed: bool) -> None:
        """Before the first batch of an epoch of a library's loop: from the first on, keep attributes.

        In a resumed run they get the values of the checkpoint.
        """
        if self._attributes is not None:
            return
        self._attributes = CallbackStates(list(self._callbacks.values()), _own_parts(self.model))
        self._take_schedulers(resumed=resumed)
        if (saved := self.loaded.get("attributes")) is not None:
            self._attributes.restore(from_json(saved))
        modes, modules = self.loaded.get("modes", ()), list(self.model.modules())
        if len(modes) == len(modules):
            for module, mode in zip(modules, modes, strict=True):
                module.training = bool(mode)

    def _take_schedulers(self, *, resumed: bool) -> None:
        """Let checkpoints have the schedulers that a library has made; go to the states of the one before."""
        found = self._other_schedulers()
        self._others |= found
        for name, one in found.items() if resumed else ():
            if (state := self.loaded.get(f"other/{name}")) is not None:
                one.load_state_dict(from_json(state))
            else:
                warnings.warn(f"{name} begins anew: the checkpoint has no state of it", stacklevel=2)
        if found and resumed:  # they have set the rates of a run that begins
            self._trained.load_groups()

    def _other_schedulers(self) -> dict[str, Any]:
        """Return the schedulers of the optimizer that the program has not named, by their classes' names.

        Raises RunError for two of a class, which no checkpoint could tell apart.
        """
        every = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
        named = [*self._others.values()]
        within = {id(part) for one in every for part in getattr(one, "_schedulers", ())}
        found: dict[str, Any] = {}
        for one in every:
            of = _innermost(getattr(one, "optimizer", None))
            number = next((n for n, ours in enumerate(self._optimizers) if ours is of), None)
            if number is None or id(one) in within or any(one is known for known in named):
                continue
            name = f"{type(one).__name__}.{number}" if number else type(one).__name__
            if name in found:
                raise RunError(
                    f"the optimizer has two schedulers {name}: name each, as in "
                    "job.training(model, optimizer, scheduler=scheduler)"
                )
            found[name] = one
        return found

    def _refuse_other_optimizers(self) -> None:
        """Raise RunError if another optimizer has trained weights of the model: checkpoints would lack it."""
        if len(_stepped) <= sum(one in _stepped for one in self._optimizers):
            return
        weights = {id(p) for p in self.model.parameters()}
        others = [one for one in self._others.values() if isinstance(one, torch.optim.Optimizer)]
        known = [*self._optimizers, *map(_innermost, others)]
        for one in _stepped:
            if all(one is not other for other in known) and any(
                id(p) in weights for g in one.param_groups for p in g["params"]
            ):
                raise RunError(
                    f"the model is trained by another {type(one).__name__} than job.training was given, and "
                    "checkpoints would lack its state: give it every optimizer, as in job.training(model, "
                    "[first, second]); let a library take that one, as configure_optimizers returns it"
                )

    def unsaved_attributes(self) -> list[str]:
        """Return `Class.attribute` of what keeps callbacks out of checkpoints."""
        return [] if self._attributes is None else self._attributes.unsaved()

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

    def begin_epoch(self, data: Any, done: int | None) -> None:
        """Before the data of an epoch, which may shuffle: go to the generators' states of then."""
        self._data = list(_generators(data))
        self._draws_within = _draws_within(data)
        if done is not None:
            self._go_to("random/epoch" if done else "random/now")
        self._epoch = self._random("random/epoch")

    def skipped(self) -> None:
        """After the batches that were trained before the checkpoint: go to the generators' states of then."""
        self._go_to("random/now", with_data=not self._draws_within)

    def _random(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the states of all generators: PyTorch's, those of the data, Python's and NumPy's."""
        found = {name: torch.get_rng_state().numpy().copy()}
        for number, one in enumerate(self._data):
            found[f"{name}/data/{number}"] = one.get_state().numpy().copy()
        numpy_state: Any = np.random.get_state()
        kind, keys, *rest = numpy_state
        found[f"{name}/numpy"] = to_json([kind, keys.tolist(), *rest], "NumPy's generator")
        found[f"{name}/python"] = to_json(random.getstate(), "Python's generator")
        return found

    def _go_to(self, name: str, *, with_data: bool = True) -> None:
        """Set the generators' states, those of the data only `with_data`."""
        if (state := self.loaded_own(name)) is not None:
            torch.set_rng_state(torch.from_numpy(state.copy()))
        for number, one in enumerate(self._data if with_data else ()):
            if (state := self.loaded_own(f"{name}/data/{number}")) is not None:
                one.set_state(torch.from_numpy(state.copy()))
        if (state := self.loaded_own(f"{name}/numpy")) is not None:
            np.random.set_state(tuple(from_json(state)))
        if (state := self.loaded_own(f"{name}/python")) is not None:
            version, values, gauss = from_json(state)
            random.setstate((version, tuple(values), gauss))


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


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside of what Lightning, Accelerate and TorchRec's KeyedOptimizers make of it.

    Raises ValueError for one that checkpoints would not hold as a whole.
    """
    if (inner := _wrapped(optimizer)) is None:
        if not hasattr(optimizer, "post_load_state_dict"):
            return optimizer
    else:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # TorchRec's warm-up counts steps in a parameter of its own.
        if all(id(p) in known for p in getattr(optimizer, "params", {}).values()):
            return _inner(inner)
    raise ValueError(
        "job.training takes an optimizer of PyTorch, TorchRec's KeyedOptimizerWrapper of one, or a list of "
        f"them, not a {type(optimizer).__name__}, which has more state than checkpoints hold; for warm-up "
        "use a scheduler"
    )


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside of any wrappers."""
    while (inner := _wrapped(optimizer)) is not None:
        optimizer = inner
    return optimizer


def _wrapped(optimizer: Any) -> Any:
    """Return the optimizer that this one wraps; None if it is none's wrapper."""
    for name in ("optimizer", "_optimizer"):
        if isinstance(inner := getattr(optimizer, name, None), torch.optim.Optimizer):
            return inner
    return None


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups."""
    return [{key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups]


def _own_parts(model: Any) -> list[Any]:
    """Return the model and those of its parts whose attributes are the program's, not ours."""
    whole = model.module if _is_wrapper(model) else model
    return [one for one in whole.modules() if one is whole or not _is_ours(one)]


def _is_ours(module: Any) -> bool:
    return type(module).__module__.startswith("oe_runtime.")


def _generators(data: Any) -> Iterator[Any]:
    """Yield the generators that a DataLoader and its samplers have of their own, once each."""
    seen: set[int] = set()

    def walk(one: Any, depth: int) -> Iterator[Any]:
        if id(one) in seen or depth > _DEEPEST:
            return
        seen.add(id(one))
        if isinstance(one, torch.Generator):
            yield one
        elif isinstance(one, (torch.utils.data.DataLoader, torch.utils.data.Sampler)):
            for name, part in vars(one).items():
                if name != "dataset":
                    yield from walk(part, depth + 1)

    yield from walk(data, 0)


def _draws_within(data: Any) -> bool:
    """Return whether a DataLoader's sampler draws within an epoch from a generator that it was given.

    Then the generator's state is ahead of the batches that are trained. Leaving out batches draws the same.
    """
    sampler = getattr(data, "sampler", None)
    return (
        isinstance(sampler, torch.utils.data.RandomSampler)
        and sampler.generator is not None
        and (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    )


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def to_json(value: Any, what: str) -> NDArray[Any]:
    """Return a value as JSON in an array. Raises CheckpointError for one that JSON cannot hold."""
    try:
        return np.frombuffer(json.dumps(_with_pairs(value), default=_tensor_to_json).encode(), np.uint8)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} has a state that a checkpoint cannot hold: {error}") from error


def from_json(array: NDArray[Any]) -> Any:
    """Return what `to_json` was given."""
    return json.loads(array.tobytes(), object_hook=_marked_from_json)


def _with_pairs(value: Any) -> Any:
    """Return a value with pairs in place of dicts that JSON would change, as it makes texts of all keys."""
    if isinstance(value, (list, tuple)):
        return [_with_pairs(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = next((name for name, one in _DICTS.items() if type(value) is one), "dict")
    if kind == "dict" and all(isinstance(key, str) for key in value) and set(value) not in _MARKS:
        return {key: _with_pairs(one) for key, one in value.items()}
    if odd := [key for key in value if key is not None and not isinstance(key, (str, int, float))]:
        raise TypeError(f"a {type(odd[0]).__name__} is no key of number or text")
    return {"pairs": [[key, _with_pairs(one)] for key, one in value.items()], "kind": kind}


def _tensor_to_json(value: Any) -> dict[str, Any]:
    """Return a tensor, such as the best score that Lightning's callbacks keep, as JSON has it."""
    if not isinstance(value, torch.Tensor) or value.numel() > _MOST_VALUES:
        raise TypeError(f"a {type(value).__name__} is no number, text, list, dict or small tensor")
    return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}


def _marked_from_json(found: dict[str, Any]) -> Any:
    if found.keys() == {"tensor", "dtype"}:
        return torch.tensor(found["tensor"], dtype=getattr(torch, found["dtype"]))
    if found.keys() == {"pairs", "kind"}:
        return _DICTS[found["kind"]](dict(found["pairs"]))
    return found


def _array(value: Any) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().to("cpu")
    if value.dtype == torch.bfloat16:  # unknown to NumPy; float32 holds it exactly
        value = value.float()
    array: NDArray[Any] = value.numpy().copy()
    return array
