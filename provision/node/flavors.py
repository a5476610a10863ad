"""Flavors of the runtime on a host: each observes, plans, and reports problems."""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from . import build, deeprec, openembedding, platforms, runtime
from .command import CommandError, System
from .flavor_needs import DEFAULT
from .state import OsInfo, Runtime, State, decode
from .step import Desired, Step


class HostFlavor(NamedTuple):
    """The functions of one flavor."""

    observe: Callable[[System, OsInfo, Desired], Runtime]
    plan: Callable[[State, Desired], List[Step]]
    problems: Callable[[State, Desired], List[str]]
    notes: Callable[[State, Desired], List[str]]
    make: Callable[[System, OsInfo, Dict[str, Any]], str]  # build its wheel on this host; returns its path
    # Its framework (PEP 508) and version of Python, for GPU hosts; empty: unknown.
    framework: Callable[[State, Desired], Tuple[List[str], str]]


def _ours(system: System, os: OsInfo, desired: Desired) -> Runtime:
    python = build.python_of(os, desired) if platforms.get(desired.kind).managed else ""
    return runtime.observe(system, desired.runtime_venv, desired.runtime_requirements, python)


def _make(system: System, os: OsInfo, args: Dict[str, Any]) -> str:
    desired = decode(Desired, args["desired"])
    python = build.python_of(os, desired)
    return build.make(system, os, python, args["packed"], args["into"], desired.runtime_repositories)


def _makes_none(_system: System, _os: OsInfo, args: Dict[str, Any]) -> str:
    raise CommandError(f"flavor {args['desired']['runtime_flavor']} has no wheel of its own")


def _our_framework(state: State, desired: Desired) -> Tuple[List[str], str]:
    return desired.runtime_requirements, build.python_version(state, desired)


def _no_framework(_state: State, _desired: Desired) -> Tuple[List[str], str]:
    return [], ""


def _nothing(_state: State, _desired: Desired) -> List[str]:
    return []


_FLAVORS: Dict[str, HostFlavor] = {
    DEFAULT: HostFlavor(_ours, runtime.plan, runtime.problems, _nothing, _make, _our_framework),
    "openembedding": HostFlavor(
        openembedding.observe,
        openembedding.plan,
        openembedding.problems,
        openembedding.notes,
        _makes_none,
        openembedding.framework,
    ),
    # Its default developer image has no CUDA.
    "deeprec": HostFlavor(
        deeprec.observe, deeprec.plan, deeprec.problems, deeprec.notes, deeprec.make, _no_framework
    ),
}


def get(desired: Desired) -> HostFlavor:
    """The inventory's flavor."""
    return _FLAVORS[desired.runtime_flavor]
