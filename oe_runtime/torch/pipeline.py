"""Training steps whose rows are pulled while the batch before computes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from oe_runtime.client import Client, Pulled
from oe_runtime.torch.batch_parts import BatchParts, Path, part_at
from oe_runtime.torch.collections import Collection
from oe_runtime.torch.embedding import TableLayer, plan, requests, supply
from oe_runtime.torch.in_backward import optimizer_of

_MOST_ITERATORS = 8  # that a program takes batches from in turns


@dataclass
class _Request:
    """A request for rows of a batch."""

    client: Client
    pulled: Pulled
    layers: list[Any]


@dataclass
class _ReadBatch:
    """A batch that was read, and the requests for its rows."""

    data: Any
    step: int  # during which it was read
    error: Exception | None = None  # of reading it, also StopIteration
    requests: list[_Request] = field(default_factory=list)
    supplies: list[Callable[[], None]] = field(default_factory=list)  # let layers answer from these rows


class TrainPipeline:
    """Runs training steps, and pulls the rows of the next batch while a batch computes.

        pipeline = embed.TrainPipeline(model, optimizer)
        with contextlib.suppress(StopIteration):
            batches = iter(loader)
            while True:
                output = pipeline.progress(batches)

    `model(batch)` returns a loss, or a loss and something else, as for TorchRec's pipelines; `optimizer` is
    one of `distributed_optimizer`. A second thread reads the next batch and pulls its rows; rows that the
    step changes are pulled again after it, so results are, bit for bit, those of steps one after the other.
    With `staleness` 1 they are not pulled again: rows then lack the step before, and no other.

    What the layers are called with is learned from each step: a tensor or KeyedJaggedTensor somewhere in the
    batch (in lists, tuples, dicts and attributes). A layer whose ids are not there, but computed from it,
    pulls its rows when it is called; a warning names it. Batches are in this process's memory (`device`).
    """

    def __init__(self, model: Any, optimizer: Any, device: Any = None, *, staleness: int = 0) -> None:
        """Raises ValueError for a model without tables, and for another staleness."""
        if staleness not in (0, 1):
            raise ValueError(f"staleness must be 0 or 1, not {staleness!r}")
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"TrainPipeline is for batches in memory, not on {device}: train in a plain loop"
            )
        if staleness and any(optimizer_of(one) for one in model.modules() if isinstance(one, TableLayer)):
            raise ValueError(
                "staleness=1 has rows without the last step, but an optimizer in backward updates them "
                "before that: give distributed_optimizer the rule, or leave staleness out"
            )
        self._model, self._optimizer, self._staleness = model, optimizer, staleness
        self._modules = _modules(model)
        if not self._modules:
            raise ValueError("the model has no tables: give it to distributed_model first")
        self._note = _Note()
        for module in self._modules:
            weakref.finalize(self, module.register_forward_pre_hook(self._note, with_kwargs=True).remove)
        self._paths: dict[Any, list[Path]] | None = None
        self._thread: ThreadPoolExecutor | None = None  # while there is a next batch
        self._waiting: dict[int, tuple[Any, Future[_ReadBatch]]] = {}  # iterators, and their next batches
        self._step = 0
        self._warned: set[str] = set()

    def progress(self, batches: Iterator[Any]) -> Any:
        """Train on the next batch; return what `model(batch)` returned beside the loss, or the loss.

        Raises StopIteration at the end, and an error of `batches` at the batch that it is of.
        """
        waiting = self._waiting.pop(id(batches), None)
        batch = _read(batches, self._step, [], None) if waiting is None else waiting[1].result()
        if batch.error is not None:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            raise batch.error
        for request in batch.requests:
            if not self._staleness or batch.step != self._step:
                request.client.refresh(request.pulled)
        for supply_layers in batch.supplies:
            supply_layers()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "oe-pull-ahead")
        self._step += 1
        pushed_next = [] if self._staleness else batch.requests
        following = self._thread.submit(_read, batches, self._step, pushed_next, self._paths)
        self._keep(batches, following)
        self._optimizer.zero_grad()
        called: list[tuple[Any, Any]] = []
        self._note.called = called
        try:
            result = self._model(batch.data)
        finally:
            self._note.called = None
            unused = [module for module in self._modules if module.ahead]
            for module in unused:
                module.ahead.clear()
        if self._paths is None or unused:
            self._learn(batch.data, called)
        losses, output = result if isinstance(result, tuple) else (result, result)
        losses.sum().backward()
        if self._staleness:
            following.result()  # the next rows lack this step, however fast it was
        self._optimizer.step()
        return output

    def _keep(self, batches: Iterator[Any], following: Future[_ReadBatch]) -> None:
        """Keep what is read ahead of an iterator until it is asked for, also if others are meanwhile."""
        self._waiting[id(batches)] = (batches, following)
        if len(self._waiting) > _MOST_ITERATORS:
            self._waiting.pop(next(iter(self._waiting)))
            warnings.warn(
                f"TrainPipeline: more than {_MOST_ITERATORS} iterators were left before their ends; the "
                "batch that was read ahead of the first one is dropped",
                stacklevel=4,
            )

    def _learn(self, data: Any, called: Sequence[tuple[Any, Any]]) -> None:
        """Find out where in a batch the arguments of this step's calls are."""
        parts = BatchParts(data)
        self._paths = {}
        unknown = set()
        for module, argument in called:
            if (path := parts.find(argument)) is not None:
                self._paths.setdefault(module, []).append(path)
            else:
                unknown.add(module)
        for module in unknown:
            self._paths.pop(module, None)
            name = next(name for name, one in self._model.named_modules() if one is module)
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"layer '{name}': its rows are pulled when it is called, not ahead, because what it is "
                    "called with is not in the batch; let the batch have its ids as the layer takes them",
                    stacklevel=4,
                )


@dataclass
class _Note:
    """Called before a layer; notes it and what it is called with. It does not keep the pipeline alive."""

    called: list[tuple[Any, Any]] | None = None  # in this step; None outside of steps

    def __call__(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.called is not None:
            self.called.append((module, arguments[0] if arguments else next(iter(named.values()), None)))


def _modules(model: Any) -> list[Any]:
    """Return the collections of a model, and the layers with tables outside of them."""
    collections = [one for one in model.modules() if isinstance(one, Collection)]
    inner = {id(layer) for one in collections for layer in one.layers}
    return collections + [
        one for one in model.modules() if isinstance(one, TableLayer) and id(one) not in inner
    ]


def _read(
    batches: Iterator[Any],
    step: int,
    pushed_next: Sequence[_Request],
    paths: Mapping[Any, Sequence[Path]] | None,
) -> _ReadBatch:
    """Read a batch and pull its rows; `pushed_next` are requests whose push changes some of them."""
    try:
        batch = _ReadBatch(next(batches), step)
    except Exception as error:  # it is raised in its turn
        return _ReadBatch(None, step, error)
    if not paths:
        return batch
    with suppress(Exception):  # the batch's own step tries again, and raises it
        calls = {module: [part_at(batch.data, path) for path in of_one] for module, of_one in paths.items()}
        planned, supplies = _planned(calls)
        for request in planned:
            if (pushed := _same(request, pushed_next)) is not None:
                request.client.follow(request.pulled, pushed)
            request.client.refresh(request.pulled)
        batch.requests, batch.supplies = planned, supplies
    return batch


def _planned(
    calls: Mapping[Any, Sequence[Any]],
) -> tuple[list[_Request], list[Callable[[], None]]]:
    """Plan the requests for the rows of calls: of each layer and collection, what it will be called with.

    Returns them, and what lets the layers answer from them.
    """
    found: list[_Request] = []
    supplies: list[Callable[[], None]] = []
    for module, arguments in calls.items():
        for argument in arguments if isinstance(module, Collection) else ():
            planned = module.plan(argument)
            for one in planned.requests:
                found.append(_Request(one.client, one.pulled, [feature.layer for feature in one.features]))
            supplies.append(partial(module.ahead.append, planned))
    plain = {module: arguments for module, arguments in calls.items() if isinstance(module, TableLayer)}
    for asked in requests("TrainPipeline", plain):
        pulled, layers = plan(asked), [layer for layer, _ in asked]
        found.append(_Request(layers[0].bound().client, pulled, layers))
        supplies.append(partial(supply, asked, pulled))
    return found, supplies


def _same(request: _Request, before: Sequence[_Request]) -> Pulled | None:
    """Return the rows of the request of the batch before for the same layers, which will be pushed."""
    found = [one for one in before if one.client is request.client and one.layers == request.layers]
    return found[0].pulled if found else None
