"""The stand-in for ``typing`` on hosts does what the real module does for this package."""

import importlib.util
import json
import sys
import types
import typing
from pathlib import Path

import pytest

from provision.node import light_typing, state, step

NAMES = ("Any", "Callable", "Dict", "List", "NamedTuple", "Optional", "Tuple", "Type", "TypeVar", "cast")


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    if sys.version_info >= (3, 14):
        pytest.skip("Python 3.14 keeps typing")
    monkeypatch.delitem(sys.modules, "typing")
    light_typing.install()
    module = sys.modules["typing"]
    monkeypatch.setitem(sys.modules, "typing", typing)
    return module


def loaded(path: str, light: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the node package that was imported with the stand-in."""
    package = Path(state.__file__).parent
    spec = importlib.util.spec_from_file_location(f"provision.node.light_{path}", package / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "typing", light)
        spec.loader.exec_module(module)
    return module


def test_states_and_plans_are_the_same_with_it(
    light: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = sorted((Path(__file__).parent / "cases").glob("*.json"))
    other = loaded("state", light, monkeypatch)
    assert other.State is not state.State
    for name, kind in vars(state).items():
        if isinstance(kind, type) and hasattr(kind, "_fields"):
            assert getattr(other, name)._fields == kind._fields
            assert getattr(other, name)._field_defaults == kind._field_defaults
    whole = state.State(
        os=state.OsInfo(id="debian"), numa=[state.NumaNode(id=1, cpus=[], size=5, free=3)], jobs=["a"]
    )
    for data in [whole.to_dict(), *(json.loads(path.read_text()).get("state", {}) for path in cases)]:
        real, made = state.State.from_dict(data), other.State.from_dict(data)
        assert made.to_dict() == real.to_dict()
        assert made.digest() == real.digest()
        assert repr(made) == repr(real)
        assert made == real  # both are tuples
    with pytest.raises(ValueError, match="State has no field no"):
        other.State.from_dict({"no": 1})


def test_fields_are_given_in_every_way(light: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = loaded("step", light, monkeypatch).Step
    made = kind("a", "b", why="c", reboots=True)
    assert made == step.Step("a", "b", why="c", reboots=True)
    assert made._replace(what="d") == step.Step("a", "d", why="c", reboots=True)
    assert made._asdict() == step.Step("a", "b", why="c", reboots=True)._asdict()
    assert kind._make(made) == made
    for wrong in (lambda: kind("a"), lambda: kind("a", "b", "c", id="d"), lambda: kind("a", "b", "c", no=1)):
        with pytest.raises(TypeError, match="Step"):
            wrong()
    with pytest.raises(TypeError):
        kind(*range(len(kind._fields) + 1))
    with pytest.raises(ValueError, match="no"):
        made._replace(no=1)


def test_it_has_what_the_package_imports(light: types.ModuleType) -> None:
    for path in Path(state.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("from typing import "):
                for name in line.removeprefix("from typing import ").split(", "):
                    assert name in vars(light), f"{path.name} imports {name}, which light_typing.py lacks"


def test_other_libraries_get_the_real_module(
    light: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typing", light)
    assert light.Protocol.__module__ == "typing"
    assert sys.modules["typing"] is not light
