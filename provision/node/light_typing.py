"""Stands in for ``typing`` while this package runs on a host that was only sent to look.

Importing ``typing`` and making our 50 named tuples with it takes a fifth of an observation's processor time.
``provision.hosts.payload`` installs this; nothing imports it. Python 3.14 evaluates annotations late, so it
keeps the real module.
"""

import sys
from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Hint:
    """Any hint; ``__args__`` are what it was subscripted with, as those of ``typing`` have it."""

    def __init__(self, arguments: "Any" = ()) -> None:
        self.__args__ = arguments

    def __getitem__(self, arguments: "Any") -> "_Hint":
        return _Hint(arguments if isinstance(arguments, tuple) else (arguments,))


class _Tuple(tuple):  # type: ignore[type-arg]
    """A tuple whose places have names, with the methods of ``collections.namedtuple``."""

    __slots__ = ()
    _fields = ()  # type: tuple[str, ...]
    _field_defaults = {}  # type: dict[str, Any]

    def __new__(cls, *values: "Any", **named: "Any") -> "Any":
        if named or len(values) != len(cls._fields):
            given = dict(cls._field_defaults)
            given.update(zip(cls._fields, values))  # noqa: B905 - Python 3.6
            double = [name for name in cls._fields[: len(values)] if name in named]
            given.update(named)
            absent = [name for name in cls._fields if name not in given]
            if double or absent or len(given) != len(cls._fields) or len(values) > len(cls._fields):
                raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
            values = tuple(given[name] for name in cls._fields)
        return tuple.__new__(cls, values)

    @classmethod
    def _make(cls, values: "Any") -> "Any":
        return cls(*values)

    def _replace(self, **changes: "Any") -> "Any":
        made = tuple(map(changes.pop, self._fields, self))
        if changes:
            raise ValueError(f"{type(self).__name__} has no field {', '.join(changes)}")
        return tuple.__new__(type(self), made)

    def _asdict(self) -> "Any":
        return dict(zip(self._fields, self))  # noqa: B905 - Python 3.6

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({shown})"


class _Maker(type):
    """Makes a subclass of ``NamedTuple`` a subclass of ``_Tuple``."""

    def __new__(mcs, name: str, bases: "Any", space: "Any") -> "Any":
        if not bases:  # NamedTuple itself
            return type.__new__(mcs, name, bases, space)
        fields = tuple(space.get("__annotations__", ()))
        defaults = {field: space[field] for field in fields if field in space}
        space.update({field: property(itemgetter(place)) for place, field in enumerate(fields)})
        space.update(__slots__=(), _fields=fields, _field_defaults=defaults)
        return type(name, (_Tuple,), space)


class NamedTuple(metaclass=_Maker):
    """Stands in for ``typing.NamedTuple`` in class statements."""


class _Typing(type(sys)):  # type: ignore[misc]
    """The module; other libraries get from the real one what this has not."""

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(__import__("typing"), name)


def install() -> None:
    """Become ``typing`` for the modules that are imported from now on."""
    if sys.version_info >= (3, 14) or "typing" in sys.modules:
        return
    module, hint = _Typing("typing"), _Hint()
    known = dict.fromkeys(("Any", "Callable", "IO", "Iterator", "Optional"), hint)  # type: dict[str, Any]
    if hasattr(list, "__class_getitem__"):  # since Python 3.9; these take no time
        known.update(Dict=dict, List=list, Set=set, Tuple=tuple, Type=type)
    else:
        known.update(dict.fromkeys(("Dict", "List", "Set", "Tuple", "Type"), hint))
    known.update(NamedTuple=NamedTuple, TypeVar=lambda name: hint, cast=lambda kind, value: value)
    module.__dict__.update(known)
    sys.modules["typing"] = module
