"""The state of fit's callbacks in checkpoints: their attributes that training changes, where they are plain.

EarlyStopping and ReduceLROnPlateau keep what they know so, as most callbacks do. A callback that also keeps
arrays or lists begins anew after a resume, with a warning. So do a PyTorch library's, and the counts that its
models keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_OF_KERAS = {"model", "_model", "params", "validation_data"}


class CallbackStates:
    """The callbacks of one fit. Make it when all of them have begun the training.

    Of `models`, which keep much else, and of the arguments of constructors, which are the script's, only the
    plain attributes count.
    """

    def __init__(self, callbacks: Sequence[Any], models: Sequence[Any] = ()) -> None:
        every = [*callbacks, *models]
        self._callbacks = {f"{type(one).__name__}/{i}": one for i, one in enumerate(every)}
        self._models = {f"{type(one).__name__}/{i}" for i, one in enumerate(every) if i >= len(callbacks)}
        self._begun = {name: _attributes(one) for name, one in self._callbacks.items()}

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that are not as at the begin, of those callbacks whose all are plain."""
        found = {name: self._changes(name) for name in self._callbacks}
        return {name: values for name, values in found.items() if values and not self._complex(values)}

    def unsaved(self) -> list[str]:
        """Return `Class.attribute` of what keeps callbacks out of checkpoints."""
        return [
            f"{name.partition('/')[0]}.{attribute}"
            for name in self._callbacks
            for attribute in self._complex(self._changes(name))
        ]

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what `changed` returned, in callbacks of the same class at the same place."""
        for name, values in states.items():
            if name in self._callbacks:
                for attribute, value in values.items():
                    setattr(self._callbacks[name], attribute, value)

    def _changes(self, name: str) -> dict[str, Any]:
        one = self._callbacks[name]
        begun, now = self._begun[name], _attributes(one)
        given = inspect.signature(type(one).__init__).parameters.keys()
        return {
            key: value
            for key, value in now.items()
            if (key not in begun or (begun[key] is not value and not _same(begun[key], value)))
            and (_is_plain(value) or (name not in self._models and key not in given))
        }

    @staticmethod
    def _complex(values: Mapping[str, Any]) -> list[str]:
        return [key for key, value in values.items() if not _is_plain(value)]


def _attributes(callback: Any) -> dict[str, Any]:
    """Return what a callback keeps by itself, or was given.

    Keras's callbacks change what they were given at their first figures, in each run: `min_delta *= -1`.
    """
    left_out = set(_OF_KERAS)
    one: Any
    for one in type(callback).__mro__:
        if "keras" in one.__module__.split("."):
            left_out |= inspect.signature(one.__init__).parameters.keys()
    every = vars(callback).items()
    return {key: _plain(value) for key, value in every if key not in left_out and not callable(value)}


def _plain(value: Any) -> Any:
    """Return a NumPy number as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _same(one: Any, other: Any) -> bool:
    return _is_plain(one) and _is_plain(other) and bool(one == other)
