"""Training steps whose rows are pulled while the batch before computes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from oe_runtime.client import Client, Pulled
from oe_runtime.run.loops import StepBatches
from oe_runtime.support.background import Background
from oe_runtime.torch.batch_parts import BatchParts, Path, part_at
from oe_runtime.torch.collections import Collection
from oe_runtime.torch.embedding import Forward, forwards
from oe_runtime.torch.forward_pull import KnownCall, KnownCalls, PlannedCalls, plan_calls
from oe_runtime.torch.in_backward import optimizer_of
from oe_runtime.torch.model import table_layers

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
    collections: list[tuple[Collection, Any]] = field(default_factory=list)  # with what they answer from
    calls: PlannedCalls | None = None  # of other layers


class PullAhead:
    """Pulls the rows of the next batch in a second thread while the present one computes.

    A step begins by `begin`. `end_forward` comes after the model's calls, once or several times.
    """

    def __init__(self, model: Any, staleness: int = 0) -> None:
        """Raises ValueError for a model without tables, and for another staleness than 0 and 1."""
        if staleness not in (0, 1):
            raise ValueError(f"staleness must be 0 or 1, not {staleness!r}")
        self._model, self._staleness = model, staleness
        if not table_layers(model):
            raise ValueError("the model has no tables: give it to distributed_model first")
        if staleness and is_trained_in_backward(model):
            raise ValueError(
                "staleness=1 has rows without the last step, but an optimizer in backward updates them "
                "before that: give distributed_optimizer the rule, or leave staleness out"
            )
        self._collections = [one for one in model.modules() if isinstance(one, Collection)]
        self._note = _Note()
        for module in self._collections:
            weakref.finalize(self, module.register_forward_pre_hook(self._note, with_kwargs=True).remove)
        self._paths: dict[Any, list[Path]] | None = None  # of the collections' arguments
        self._calls = KnownCalls()  # of other layers
        self._thread = Background("oe-pull-ahead")
        self._step = 0
        self._data: Any = None  # of the present step
        self._forward: Forward | None = None  # what layers answer from in it
        self._following: Future[_ReadBatch] | None = None  # what is read during it
        self._warned: set[str] = set()

    def read(self, draw: Callable[[], Any]) -> _ReadBatch:
        """Read a batch that was not read ahead; its layers pull their rows when they are called."""
        return _read(draw, self._step)

    def begin(self, batch: _ReadBatch, draw: Callable[[], Any] | None) -> Future[_ReadBatch] | None:
        """Begin the step of a batch: let the layers answer from its rows, and read the next by `draw`."""
        for request in batch.requests:
            if not self._staleness or batch.step != self._step:
                request.client.refresh(request.pulled)
        for collection, planned in batch.collections:
            collection.ahead.append(planned)
        self._forward = Forward(self, [] if batch.calls is None else batch.calls.answers(), [])
        forwards().append(self._forward)
        self._step += 1
        self._data, self._note.called, self._following = batch.data, [], None
        if draw is not None:
            pushed_next = [] if self._staleness else batch.requests
            plan = partial(_plan, self._paths or {}, self._calls.known(training=self._model.training))
            self._following = self._thread.submit(_read, draw, self._step, plan, pushed_next)
        return self._following

    def end_forward(self, *, learn: bool = True) -> None:
        """Drop rows that no layer has asked for, and `learn` where in a batch the layers' arguments are."""
        if self._forward is None:
            return
        called, self._note.called = self._note.called, None
        unused = [one for one in self._collections if one.ahead]
        for collection in unused:
            collection.ahead.clear()
        forward, self._forward = self._forward, None
        stack = forwards()
        stack[:] = [one for one in stack if one is not forward]
        if learn:
            lost: list[Any] = list(self._calls.learn(forward, self._data, training=self._model.training))
            if called and (self._paths is None or unused):
                lost += self._learn(called)
            self._warn_of(lost)
        self._data = None

    def wait(self) -> None:
        """Before a push: with a staleness of 1 the next rows lack it, however fast this step was."""
        if self._staleness and self._following is not None:
            self._following.result()

    def _learn(self, called: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Find out where in a batch the collections' arguments are; return those whose are not there."""
        parts = BatchParts(self._data)
        self._paths = {}
        unknown = []
        for module, argument in called:
            if (path := parts.find(argument)) is not None:
                self._paths.setdefault(module, []).append(path)
            else:
                unknown.append(module)
        for module in unknown:
            self._paths.pop(module, None)
        return unknown

    def _warn_of(self, modules: Sequence[Any]) -> None:
        for module in modules:
            name = next(name for name, one in self._model.named_modules() if one is module)
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"layer '{name}': its rows are pulled when it is called, not ahead, because what it is "
                    "called with is not in the batch; let the batch have its ids as the layer takes them",
                    stacklevel=4,
                )


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

    What the layers are called with is learned from each step: a tensor, array or KeyedJaggedTensor in the
    batch (in lists, tuples, dicts and attributes). A layer whose ids are not there, but computed from it,
    pulls its rows when it is called; a warning names it. Batches are in this process's memory (`device`).

    In a job give it `loop.batches(loader)`, and call job.step after each `progress`. Then the job pulls ahead
    where it knows the next batch, and its `staleness` holds.
    """

    def __init__(self, model: Any, optimizer: Any, device: Any = None, *, staleness: int = 0) -> None:
        """Raises ValueError for a model without tables, and for another staleness."""
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(
                f"TrainPipeline is for batches in memory, not on {device}: train in a plain loop"
            )
        self._model, self._optimizer = model, optimizer
        self._ahead = PullAhead(model, staleness)
        self._waiting: dict[int, tuple[Any, Future[_ReadBatch]]] = {}  # iterators, and their next batches

    def progress(self, batches: Iterator[Any]) -> Any:
        """Train on the next batch; return what `model(batch)` returned beside the loss, or the loss.

        Raises StopIteration at the end, and an error of `batches` at the batch that it is of.
        """
        if isinstance(batches, StepBatches):  # of a job, which pulls ahead itself
            return self._train(next(batches))
        waiting = self._waiting.pop(id(batches), None)
        draw = partial(next, batches)
        batch = self._ahead.read(draw) if waiting is None else waiting[1].result()
        if batch.error is not None:
            raise batch.error
        following = self._ahead.begin(batch, draw)
        assert following is not None  # noqa: S101 - `draw` is given
        self._keep(batches, following)
        return self._train(batch.data)

    def _train(self, batch: Any) -> Any:
        self._optimizer.zero_grad()
        try:
            result = self._model(batch)
        except BaseException:
            self._ahead.end_forward(learn=False)
            raise
        self._ahead.end_forward()
        losses, output = result if isinstance(result, tuple) else (result, result)
        losses.sum().backward()
        self._ahead.wait()
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


@dataclass
class _Note:
    """Called before a layer; notes it and what it is called with. It does not keep the pipeline alive."""

    called: list[tuple[Any, Any]] | None = None  # in this step; None outside of steps

    def __call__(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.called is not None:
            self.called.append((module, arguments[0] if arguments else next(iter(named.values()), None)))


def is_trained_in_backward(model: Any) -> bool:
    """Whether a backward pass updates rows of the model, before its optimizer's step."""
    return any(optimizer_of(layer) for layer in table_layers(model).values())


def _plan(
    paths: Mapping[Any, Sequence[Path]], known: Sequence[KnownCall], data: Any, batch: _ReadBatch
) -> None:
    """Plan the requests for the rows of a batch: of collections by the `paths`, and of `known` calls."""
    for collection, of_one in paths.items():
        for path in of_one:
            planned = collection.plan(part_at(data, path))
            batch.collections.append((collection, planned))
            for one in planned.requests:
                layers = [feature.layer for feature in one.features]
                batch.requests.append(_Request(one.client, one.pulled, layers))
    batch.calls = plan_calls(known, data)
    batch.requests += [_Request(*one) for one in batch.calls.requests]


def _read(
    draw: Callable[[], Any],
    step: int,
    plan: Callable[[Any, _ReadBatch], None] | None = None,
    pushed_next: Sequence[_Request] = (),
) -> _ReadBatch:
    """Read a batch and pull the rows that `plan` says; the push of `pushed_next` changes some of them."""
    try:
        batch = _ReadBatch(draw(), step)
    except Exception as error:  # it is raised in its turn
        return _ReadBatch(None, step, error)
    if plan is None:
        return batch
    planned = _ReadBatch(batch.data, step)
    with suppress(Exception):  # the batch's own step tries again, and raises it
        plan(batch.data, planned)
        for request in planned.requests:
            if (pushed := _same(request, pushed_next)) is not None:
                request.client.follow(request.pulled, pushed)
            request.client.refresh(request.pulled)
        return planned
    return batch


def _same(request: _Request, before: Sequence[_Request]) -> Pulled | None:
    """Return the rows of the request of the batch before for the same layers, which will be pushed."""
    found = [one for one in before if one.client is request.client and one.layers == request.layers]
    return found[0].pulled if found else None
