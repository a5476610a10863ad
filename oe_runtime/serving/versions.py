"""The versions of a model that are served side by side, and the labels by which requests may ask for them.

Each is a `Model` with rows and weights of its own. One, `main`, may follow training; the others are kept
steps beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from oe_runtime.errors import InputError, OeError
from oe_runtime.model_description import SIGNATURE
from oe_runtime.serving.model import Model, NotServed, Unloaded

Result = TypeVar("Result")
ENDING = "the server is ending"


class NotFound(OeError):
    """A request for another model or version."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Servable not found for request: {what}")


@dataclass(frozen=True)
class Asked:
    """The version that a request asks for: by its number, by a label, or the newest that is served."""

    number: int | None = None
    label: str | None = None


class Versions:
    """Finds the version that answers a request. Thread-safe."""

    def __init__(self, main: Model, name: str = "model") -> None:
        """`name` is the model's in requests."""
        self.name = name
        self.main = main
        self._beside: Mapping[int, Model] = {}
        self.labels: Mapping[str, int | None] = {}  # each for a version; None: for the newest
        self.loading: Collection[int] = ()  # versions that are not served yet
        self.is_ending = False  # whether the server of its requests only answers the last ones
        self.source = ""  # the directory or URL that it was loaded from
        self.steps_from = ""  # what alone chooses the steps, if requests may not
        self.on_change: Callable[[], None] = lambda: None  # called after other versions or labels are served
        self._changing = threading.Lock()
        main.on_change = lambda: self.on_change()

    @property
    def models(self) -> dict[int, Model]:
        """What is served by its version, the newest last."""
        served = {**self._beside}
        served.setdefault(self.main.version, self.main)
        return dict(sorted(served.items()))

    @property
    def newest(self) -> Model:
        """What answers requests that ask for no version."""
        beside, main = self._beside, self.main
        if not beside or max(beside) <= main.version:
            return main
        return beside[max(beside)]

    @property
    def unavailable(self) -> str:
        """Why no requests should be sent now; "" if they may."""
        return ENDING if self.is_ending else self.main.unavailable

    @property
    def steps(self) -> list[int | None]:
        """What `serve` was told; None: the newest."""
        return [self.main.step, *self._beside]

    @property
    def pinned(self) -> list[Model]:
        """Those that follow nothing."""
        return [*([] if self.main.step is None else [self.main]), *self._beside.values()]

    def find(self, asked: Asked) -> tuple[Model, int]:
        """Return what answers, and its version now. Raises NotFound; InputError for an unknown label."""
        for is_settled in (False, True):
            if is_settled:  # else a version and its label may be between two changes
                self.main.settle()
            number = asked.number if asked.label is None else self._find_label(asked.label)
            if number is None:
                newest = self.newest
                return newest, newest.version
            if number == self.main.version:
                return self.main, number
            if found := self._beside.get(number):
                return found, number
        raise self.not_found(f"version {number} of {self.name}")

    def not_found(self, what: str) -> NotFound:
        """Return the error of a request for what is not served."""
        return NotFound(f"{what}; it is {' or '.join(map(str, self.models))}")

    def answer(self, asked: Asked, work: Callable[[Model], tuple[Result, int]]) -> tuple[Result, int]:
        """Return what `work` does with the asked version, and the version that answered.

        Another one may take its place meanwhile, or its label move; then the one after is asked.
        """
        while True:
            model, _ = self.find(asked)
            try:
                result, version = work(model)
            except Unloaded:
                if model is self.main or model in self._beside.values():
                    raise
                continue
            if self._is(asked, version):
                return result, version

    def predict(self, asked: Asked, inputs: Any, signature: str = SIGNATURE) -> tuple[dict[str, Any], int]:
        """Return the outputs of the asked version by name, and the version that answered."""
        return self.answer(asked, lambda model: model.predict_versioned(inputs, signature))

    def _is(self, asked: Asked, version: int) -> bool:
        number = asked.number if asked.label is None else self.labels.get(asked.label, -1)
        return number in (None, version)

    def _find_label(self, label: str) -> int | None:
        labels = self.labels
        if label in labels:
            return labels[label]
        versions = list(self.models)
        known = sorted(one for one, version in labels.items() if version in (None, *versions))
        what = f"version, {versions[0]}, has" if len(versions) == 1 else f"versions, {_join(versions)}, have"
        has = f"the labels {', '.join(known)}" if known else "no labels (--version-label)"
        raise InputError(
            f"version label {label!r}: the served {what} {has}; ask for it by its number, or for any"
        )

    def serve(self, steps: Collection[int | None], labels: Mapping[str, int | None] | None = None) -> None:
        """Serve the kept checkpoints of these steps; None: the newest, which follows training.

        `labels` replace the present ones at the same moment. Returns when all are loaded, and those that are
        not named have answered their requests. After an error all is as before. Raises NotServed for a label
        of another version, and for several steps of rows that do not come from checkpoints; what
        `Model.load` and `Model.pin` raise.
        """
        with self._changing:
            numbers = {step for step in steps if step is not None}
            chosen = None
            if None not in steps:
                chosen = self.main.version if self.main.version in numbers else max(numbers, default=None)
            beside = {step for step in numbers if step != chosen}
            self._check_steps([*beside, chosen])
            kept = {step: model for step, model in self._beside.items() if step in beside}
            self.loading = sorted(beside - kept.keys())
            loaded: dict[int, Model] = {}
            try:
                for step in self.loading:
                    loaded[step] = self.main.load_beside(step)
                before = self._change(chosen, {**kept, **loaded}, labels)
            except BaseException:
                for model in loaded.values():
                    model.close()
                raise
            finally:
                self.loading = ()
            self.on_change()
            for step, model in before.items():
                if step not in kept:
                    model.close()

    def _check_steps(self, steps: Collection[int | None]) -> None:
        """Raise NotServed for steps where none can be chosen."""
        if self.main.has_steps:
            return
        only = {None} if self.main.sources else {None, self.main.version}
        for step in steps:
            if step not in only:
                raise NotServed(f"version {step}: only the rows of checkpoints have versions to choose from")

    def _change(
        self, chosen: int | None, beside: Mapping[int, Model], labels: Mapping[str, int | None] | None
    ) -> Mapping[int, Model]:
        """Let `main` serve a step, and these others be there at the same moment; return those before."""
        before = self._beside

        def prepare(version: int) -> Callable[[], None]:
            for label, of in (labels or {}).items():
                if of not in (None, version, *beside):
                    would = _join(sorted({version, *beside}))
                    raise NotServed(
                        f"label {label!r} is for version {of}, which is not served; {would} would be"
                    )

            def commit() -> None:
                self._beside = beside
                if labels is not None:
                    self.labels = dict(labels)

            return commit

        if self.main.has_steps:
            self.main.pin(chosen, prepare)
        else:
            self.main.refresh(prepare)
        return before

    def close(self) -> None:
        """Free the memory of all but `main`."""
        for model in self._beside.values():
            model.close()


def wrap(name: str, model: Model | Versions) -> Versions:
    """Return the versions of a model, which may be its only one."""
    return model if isinstance(model, Versions) else Versions(model, name)


def _join(versions: Collection[int]) -> str:
    *others, last = map(str, versions)
    return f"{', '.join(others)} and {last}" if others else last
