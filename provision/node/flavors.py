"""Flavors of the runtime on a host: each observes, plans, and reports problems."""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from . import build, deeprec, openembedding, platforms, runtime
from .command import CommandError, System
from .flavor_needs import DEFAULT
from .state import OsInfo, Runtime, State, decode
from .step import Desired, Step


def _observe_ours(system: System, os: OsInfo, desired: Desired) -> Runtime:
    python = build.python_of(os, desired) if platforms.get(desired.kind).managed else ""
    return runtime.observe(system, desired.runtime_venv, desired.runtime_requirements, python)


def _make_ours(system: System, os: OsInfo, args: Dict[str, Any]) -> str:
    desired = decode(Desired, args["desired"])
    python = build.python_of(os, desired)
    return build.make(system, os, python, args["packed"], args["into"], desired.runtime_repositories)


def _make_none(_system: System, _os: OsInfo, args: Dict[str, Any]) -> str:
    raise CommandError(f"flavor {args['desired']['runtime_flavor']} has no wheel of its own")


class HostFlavor(NamedTuple):
    """The functions of one flavor."""

    observe: Callable[[System, OsInfo, Desired], Runtime]
    plan: Callable[[State, Desired], List[Step]]
    problems: Callable[[State, Desired], List[str]]
    notes: Callable[[State, Desired], List[str]] = lambda state, desired: []
    # Build its wheel on this host; returns its path.
    make: Callable[[System, OsInfo, Dict[str, Any]], str] = _make_none
    # Its framework (PEP 508) and version of Python, for GPU hosts; empty: unknown.
    framework: Callable[[State, Desired], Tuple[List[str], str]] = lambda state, desired: ([], "")


_FLAVORS: Dict[str, HostFlavor] = {
    DEFAULT: HostFlavor(
        _observe_ours,
        runtime.plan,
        runtime.problems,
        make=_make_ours,
        framework=lambda state, desired: (desired.runtime_requirements, build.python_version(state, desired)),
    ),
    "openembedding": HostFlavor(
        openembedding.observe,
        openembedding.plan,
        openembedding.problems,
        openembedding.notes,
        framework=openembedding.framework,
    ),
    # Its default developer image has no CUDA, so its framework does not count on GPU hosts.
    "deeprec": HostFlavor(deeprec.observe, deeprec.plan, deeprec.problems, deeprec.notes, deeprec.make),
}


def get(desired: Desired) -> HostFlavor:
    """The inventory's flavor."""
    return _FLAVORS[desired.runtime_flavor]
