"""What trains on a host: each flavor says what it needs there, looks, plans, and says what is in the way."""

from typing import Callable, Dict, List, NamedTuple

from . import openembedding, runtime
from .build import python_of
from .command import System
from .flavor_needs import DEFAULT
from .state import OsInfo, Runtime, State
from .step import Desired, Step


class Flavor(NamedTuple):
    """One flavor, as observing and planning see it."""

    observe: Callable[[System, OsInfo, Desired], Runtime]
    plan: Callable[[State, Desired], List[Step]]
    problems: Callable[[State, Desired], List[str]]
    notes: Callable[[State, Desired], List[str]]


def _ours(system: System, os: OsInfo, desired: Desired) -> Runtime:
    python = "" if desired.kind == "local" else python_of(os, desired)
    return runtime.observe(system, desired.runtime_venv, desired.runtime_requirements, python)


def _nothing(_state: State, _desired: Desired) -> List[str]:
    return []


_FLAVORS: Dict[str, Flavor] = {
    DEFAULT: Flavor(_ours, runtime.plan, runtime.problems, _nothing),
    "openembedding": Flavor(
        openembedding.observe, openembedding.plan, openembedding.problems, openembedding.notes
    ),
}


def of(desired: Desired) -> Flavor:
    """The flavor that the inventory asks for."""
    return _FLAVORS[desired.runtime_flavor]
