"""The dense weights of a model in training, by step, on the first server: for processes that serve the model.

A publication is a shared value under a name that is served: a line of JSON, {"step", "taken", "arrays":
[name, dtype, shape] of each}, "taken" being when the step ended (`time.time()`), and the arrays' bytes one
after the other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import _core
from oe_runtime.errors import OeError, ServerLost, ServingError, SpecError
from oe_runtime.shared_values import read_pieces, write_pieces
from oe_runtime.support.background import Background

NAME = "served/weights"
_COST = 0.01  # of the training's time, which publications may take
_AFTER_ERROR = 5.0  # seconds until the next attempt
_PATIENCE = 5.0  # seconds for the last publication of a part
_MOST_BYTES = 512 << 20  # half of the shared values that a job may have; its workers need names too


class WeightsPublisher:
    """Publishes weights in a thread, so that no step waits for a server."""

    def __init__(
        self, connect: Callable[[], _core.Client], seconds: float, say: Callable[[str], None]
    ) -> None:
        """`seconds` are the least between two publications."""
        self._connect = connect
        self._seconds = seconds
        self._say = say
        self._core: _core.Client | None = None
        self._versions: dict[str, int] = {}
        self._work = Background("publish-weights")
        self._publication: Future[None] | None = None
        self._due = 0.0
        self._said = ""

    def offer(self, step: int, weights: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
        """After a step: publish copies of its weights if that is due and the one before is done."""
        began = time.monotonic()
        if began < self._due or (self._publication is not None and not self._publication.done()):
            return
        copies = weights()
        copied = time.monotonic() - began
        self._due = began + max(self._seconds, copied / _COST)
        self._publication = self._work.submit(self._publish, step, copies, began, copied)

    def finish(self, step: int, weights: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
        """After the last step: publish its weights, and end the connection."""
        self._wait()
        self._due = 0.0
        self.offer(step, weights)
        self._wait()
        self._work.submit(self._disconnect)

    def _wait(self) -> None:
        if self._publication is not None:
            wait([self._publication], _PATIENCE)

    def _publish(self, step: int, arrays: Mapping[str, NDArray[Any]], began: float, copied: float) -> None:
        size = sum(array.nbytes for array in arrays.values())
        if size > _MOST_BYTES:
            self._due = math.inf  # copies of these would take long, for nothing
            self._warn(step, f"they have {size} bytes, of which the servers take {_MOST_BYTES}")
            return
        try:
            if self._core is None:
                self._core, self._versions = self._connect(), {}
            before = time.thread_time()  # without the connection, which is made once
            taken = round(time.time() - (time.monotonic() - began), 3)
            write_pieces(self._exchange, NAME, encode(step, arrays, taken), self._versions)
            self._due = max(self._due, began + (copied + time.thread_time() - before) / _COST)
        except OeError as error:
            self._disconnect()
            self._due = time.monotonic() + _AFTER_ERROR
            if not isinstance(error, ServerLost):  # which training says too
                self._warn(step, str(error))

    def _warn(self, step: int, problem: str) -> None:
        """Say a problem once."""
        if problem != self._said:
            self._said = problem
            self._say(f"warning: the dense weights of step {step} are not published: {problem}")

    def _exchange(self, name: str, replaces: int | None, value: bytes) -> tuple[int, bool, bytes]:
        assert self._core is not None  # noqa: S101 - _publish
        return exchange(self._core, name, replaces, value)

    def _disconnect(self) -> None:
        if self._core is not None:
            self._core.close()
        self._core = None


def read(core: _core.Client, known: int) -> tuple[int, int, dict[str, NDArray[Any]], float | None] | None:
    """Return version and content of the newest publication; None if it is not newer than `known`.

    The content is that of `decode`. Raises ServingError for one that cannot be read, and ServerLost.
    """
    try:
        found = read_pieces(lambda *arguments: exchange(core, *arguments), NAME, known)
    except SpecError:  # servers of an earlier version
        return None
    if found is None or not found[1]:
        return None
    try:
        return found[0], *decode(found[1])
    except (KeyError, TypeError, ValueError) as error:
        raise ServingError(f"the dense weights at the servers cannot be read: {error}") from error


def exchange(core: _core.Client, name: str, replaces: int | None, value: bytes) -> tuple[int, bool, bytes]:
    """See oe_runtime.shared_values.Exchange."""
    version, written, _, _, found = core.exchange_shared(name, replaces, value)
    return version, written, found or b""


def encode(step: int, arrays: Mapping[str, NDArray[Any]], taken: float | None = None) -> bytes:
    """Return the bytes of a publication. `taken` is when the step ended."""
    described = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
    head = json.dumps({"step": step, "taken": taken, "arrays": described}).encode()
    return b"\n".join([head, b"".join(array.tobytes() for array in arrays.values())])


def decode(content: bytes) -> tuple[int, dict[str, NDArray[Any]], float | None]:
    """Return step, arrays and `taken` of a publication. Raises KeyError, TypeError, ValueError."""
    head, _, values = content.partition(b"\n")
    described = json.loads(head)
    arrays, at = {}, 0
    for name, dtype, shape in described["arrays"]:
        if np.dtype(dtype).hasobject:
            raise ValueError(f"{name} has objects")
        arrays[name] = np.ndarray(shape, dtype, values, at).copy()
        at += arrays[name].nbytes
    taken = described.get("taken")  # earlier versions do not say it
    return int(described["step"]), arrays, None if taken is None else float(taken)
