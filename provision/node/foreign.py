"""Environments and sources of other runtimes (OpenEmbedding, DeepRec), whose scripts run the training.

Each flavor says what it needs (``Wanted``); this module observes, plans and installs it.
"""

import os
import re
import shutil
from typing import Any, Dict, List, NamedTuple

from . import environments, families, pipindex
from .build import minor, wheel_file
from .command import CommandError, System
from .runtime import (
    Stamp,
    bare,
    directory_in_use,
    interpreter,
    observe,
    remake_reason,
    replace,
    write_stamp,
)
from .state import OsInfo, Runtime, State
from .step import Action, Applied, Desired, Step

REVISION = ".oeprov-revision"
WHEEL = "{package}"  # among pip's words: the package, or the wheel that is brought
COMPILE = "{compile}"  # instead of pip's words: run ``compile`` before the next calls
_HOURS = 6 * 3600


class Wanted(NamedTuple):
    """The environment of a flavor on one host."""

    title: str
    requirements: List[str]  # that it must satisfy
    package: str  # for the stamp: another package means another environment
    pip: List[List[str]]  # pip's words, one list per call; {venv} is the environment
    check: List[str]  # words for its interpreter; the command must succeed
    repository: str
    revision: str
    folders: List[str]  # of the sources; []: all
    script: str  # a file in the sources
    build: str = ""  # of a wheel that the controller brings; see build.py
    compile: str = ""  # bash's script for COMPILE, which needs the sources first


def sources_of(desired: Desired) -> str:
    """Where the flavor's sources are on the host."""
    return desired.runtime_sources or desired.runtime_venv + "-sources"


def look(system: System, os_info: OsInfo, desired: Desired, wanted: Wanted) -> Runtime:
    """Observe the environment and its sources."""
    found = observe(system, desired.runtime_venv, wanted.requirements, desired.runtime_python)
    there = sources_of(desired)
    has = system.exists(os.path.join(there, wanted.script))
    revision = system.read(os.path.join(there, REVISION)).strip() or "given"
    return found._replace(sources=revision if has else "")


def version_of(state: State, desired: Desired) -> str:
    """``3.8`` of the environment's present or future Python; empty: unknown."""
    runtime = state.runtime
    if runtime.exists and runtime.python and not remake_reason(runtime):
        return minor(runtime.python)
    if runtime.base:
        return minor(runtime.base)
    found = re.search(r"(\d+\.\d+)$", desired.runtime_python)
    if found:
        return found.group(1)
    return minor(state.os.python) if desired.runtime_python == "python3" else ""


def plan(state: State, desired: Desired, wanted: Wanted) -> List[Step]:
    """A step for the environment and one for the sources, if they are missing."""
    steps, runtime, venv = [], state.runtime, desired.runtime_venv
    family = families.find(state.os)
    why = _why(runtime, venv, wanted)
    if why:
        create = _again(runtime, wanted.package)
        args = dict(
            wanted._asdict(),
            venv=venv,
            python=desired.runtime_python,
            create=create,
            index=desired.runtime_index,
            programs=[item for item in (family.toolchain, family.mpi) if item] if family else [],
        )
        place = f"{environments.folder(venv)}/{_name(args)}"
        steps.append(
            Step(
                id="runtime",
                what=f"install {wanted.title} in {venv}",
                why=why,
                commands=([] if create else [["cp", "-al", venv, place]])
                + _commands(dict(args, venv=place))
                + [["ln", "-sfn", place, venv]],
                action="install_foreign",
                role="runtime",
                preparing=True,
                scope="training",
                args=args,
            )
        )
    if not desired.runtime_sources and runtime.sources != wanted.revision:
        args = {
            "into": sources_of(desired),
            "repository": wanted.repository,
            "revision": wanted.revision,
            "folders": wanted.folders,
        }
        steps.append(
            Step(
                id="sources",
                what=f"get {wanted.revision} of {wanted.repository}",
                why="its scripts are what training runs"
                if not runtime.sources
                else f"{runtime.sources} is there",
                commands=_clone(args),
                action="get_sources",
                role="runtime",
                preparing=True,
                scope="training",
                args=args,
            )
        )
    return steps[::-1] if wanted.compile else steps


def problems(state: State, desired: Desired, wanted: Wanted) -> List[str]:
    """Why the environment or the sources cannot be installed."""
    runtime = state.runtime
    found = directory_in_use(runtime) if _why(runtime, desired.runtime_venv, wanted) else []
    if runtime.error and not runtime.made:
        found.append(f"runtime_venv {desired.runtime_venv}: cannot be used: {runtime.error}")
    elif not runtime.exists and not runtime.base and not state.assumed and not _comes(state, desired):
        found.append(f"runtime_python {desired.runtime_python}: is not on the host, or does not start")
    elif runtime.exists and not runtime.made and _why(runtime, desired.runtime_venv, wanted):
        found.append(
            f"runtime_venv {desired.runtime_venv}: oeprov did not make it, and it lacks "
            f"{', '.join(map(bare, runtime.missing))}; install that there, or name a directory that is "
            "not there yet"
        )
    if state.os.architecture not in ("", "x86_64"):
        found.append(
            f"{families.title(state.os)} is {state.os.architecture}: {wanted.title} is built for x86-64 "
            "only; flavor oe_runtime builds here"
        )
    if desired.runtime_sources and not runtime.sources and not state.assumed:
        found.append(
            f"runtime_sources {desired.runtime_sources}: has no {wanted.script}; name a checkout of "
            f"{wanted.repository}, or leave it out"
        )
    return found


def _comes(state: State, desired: Desired) -> bool:
    """A package brings the system's own Python."""
    return desired.runtime_python == "python3" and bool(families.names(state.os, "own-python"))


def _why(runtime: Runtime, venv: str, wanted: Wanted) -> str:
    if not runtime.exists:
        return f"there is no Python environment at {venv}"
    if runtime.made and remake_reason(runtime):
        return remake_reason(runtime)
    if runtime.made and runtime.wheel != wanted.package:
        return "{} has {} instead".format(venv, runtime.wheel or "something else")
    if runtime.missing:
        return f"{venv} lacks {', '.join(map(bare, runtime.missing))}"
    return ""


def _again(runtime: Runtime, package: str) -> bool:
    """The environment must be made again; otherwise pip adds what is missing."""
    return not runtime.exists or bool(remake_reason(runtime)) or (runtime.made and runtime.wheel != package)


def _commands(args: Dict[str, Any]) -> List[List[str]]:
    venv = args["venv"]
    pip = [interpreter(venv), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += pipindex.words(args["index"])
    commands = [[args["python"], "-m", "venv", venv]] if args["create"] else []
    for words in args["pip"]:
        if words == [COMPILE]:
            commands.append(["/bin/bash", "-ec", args["compile"]])
            continue
        given = [word for word in words if "=" in word and word.split("=")[0].isupper()]
        package = args.get("wheel") or (f"<wheel of {args['title']}>" if args["build"] else args["package"])
        rest = [package if word == WHEEL else word for word in words if word not in given]
        commands.append((["env"] + given if given else []) + pip + rest)
    return commands


def _clone(args: Dict[str, Any]) -> List[List[str]]:
    into, folders = args["into"], args["folders"]
    sparse = ["--filter=blob:none", "--sparse"] if folders else []
    commands = [["git", "clone", "--no-checkout"] + sparse + [args["repository"], into]]
    commands += [["git", "-C", into, "sparse-checkout", "set"] + folders] if folders else []
    # CentOS 7's git, 1.8.3, does not know -C.
    there = ["--git-dir", os.path.join(into, ".git"), "--work-tree", into]
    # No --detach: a branch of the repository has no local commit of its name.
    return commands + [["git"] + there + ["checkout", args["revision"]]]


def _name(args: Dict[str, Any]) -> str:
    return environments.digest(args["python"], args["package"], args["pip"])


def _install(system: System, args: Dict[str, Any]) -> Applied:
    venv = args["venv"]
    before = observe(system, venv, args["requirements"], args["python"])
    if (before.exists or before.error) and not before.made:
        raise CommandError(f"{venv}: oeprov did not make it")
    if not _why(before, venv, Wanted(**{name: args[name] for name in Wanted._fields})):
        return Applied(False, f"{venv} has all that is needed")
    wheel = wheel_file(system, args["build"]) if args["build"] else ""
    for problem in directory_in_use(before):
        raise CommandError(problem)
    create, home = _again(before, args["package"]), environments.home(system, venv)
    place = environments.begin(system, home, _name(args))
    if not create:
        environments.copy(system, home, place)
    # Until the stamp says that all is done, and all is on the disk, the next run makes it again.
    write_stamp(system, place, Stamp("", True, False))
    script = args["compile"].replace(interpreter(venv), interpreter(place))
    args = dict(args, venv=place, create=create, wheel=wheel, compile=script)
    # Builds need compilers, which may be in a directory of their own, and pip.
    first = [system.path(os.path.join(place, "bin"))] + args["programs"]
    environment = dict(
        pipindex.environment(args["index"]), PATH=":".join(first + [os.environ.get("PATH", "")])
    )
    for argv in _commands(args):
        system.check(argv, timeout=_HOURS, environment=environment)
    system.check([system.path(interpreter(place))] + args["check"], timeout=600)
    os.sync()
    write_stamp(system, place, Stamp(args["package"], True, True))
    if wheel:
        shutil.rmtree(system.path(os.path.dirname(wheel)), ignore_errors=True)
    return Applied(True, f"installed {args['title']} in {venv}" + replace(system, home, place))


def _get_sources(system: System, args: Dict[str, Any]) -> Applied:
    into = args["into"]
    mark = os.path.join(into, REVISION)
    if system.read(mark).strip() == args["revision"]:
        return Applied(False, "the sources are there")
    if system.exists(into) and not system.exists(mark):
        raise CommandError(f"{into}: is there, and oeprov did not make it; move it away")
    fresh = into + ".oeprov-new"  # leftovers of an interrupted run are useless
    system.check(["rm", "-rf", fresh])
    for argv in _clone(dict(args, into=fresh)):
        system.check(argv, timeout=_HOURS)
    system.write(os.path.join(fresh, REVISION), args["revision"] + "\n")
    system.check(["rm", "-rf", into])
    system.check(["mv", fresh, into])
    return Applied(True, f"got {args['revision']}")


ACTIONS: Dict[str, Action] = {"install_foreign": _install, "get_sources": _get_sources}
