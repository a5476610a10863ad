"""The Python environment that training runs in: what it has, what it lacks, and installing the rest."""

import json
import os
import re
from typing import Any, Dict, List, Tuple

from .command import CommandError, System
from .state import Runtime, State
from .step import Action, Applied, Desired, Step

# Runs in the environment's own interpreter. pip carries the library that understands requirements and
# markers, so that nothing must be installed there first.
_PROBE = r"""
import json, sys
out = {"python": "%d.%d.%d" % sys.version_info[:3], "distributions": {}, "missing": [], "oeprov": ""}
try:
    from importlib.metadata import PackageNotFoundError, version
    from pip._vendor.packaging.requirements import Requirement
except ImportError as error:
    out["error"] = str(error)
else:
    try:
        out["oeprov"] = version("oeprov")
    except PackageNotFoundError:
        pass
    for text in json.loads(sys.argv[1]):
        need = Requirement(text)
        if need.marker and not need.marker.evaluate():
            continue
        try:
            found = version(need.name)
        except PackageNotFoundError:
            found = ""
        out["distributions"][need.name] = found
        if not found or not need.specifier.contains(found, prereleases=True):
            out["missing"].append(text)
print(json.dumps(out))
"""


def interpreter(venv: str) -> str:
    """Path of the environment's Python."""
    return os.path.join(venv, "bin", "python")


def parse_probe(venv: str, text: str, writable: bool) -> Runtime:
    """What the probe printed; ValueError when it is not its JSON."""
    found: Dict[str, Any] = json.loads(text)
    return Runtime(
        venv=venv,
        exists=True,
        writable=writable,
        python=found["python"],
        oeprov=found["oeprov"],
        distributions=found["distributions"],
        missing=found["missing"],
        error=found.get("error", ""),
    )


def observe(system: System, venv: str, requirements: List[str]) -> Runtime:
    """The environment ``venv`` and which of ``requirements`` (PEP 508) it does not satisfy."""
    python = interpreter(venv)
    if not venv or not system.exists(python):
        return Runtime(venv=venv, missing=requirements)
    # -I: neither the current directory nor PYTHON* variables decide what is found.
    result = system.run([system.path(python), "-I", "-c", _PROBE, json.dumps(requirements)])
    writable = os.access(system.path(venv), os.W_OK)
    if not result.ok:
        return Runtime(
            venv=venv, exists=True, writable=writable, error=result.err.strip()[-300:] or "it fails"
        )
    return parse_probe(venv, result.out, writable)


def python_of(state: State, desired: Desired) -> str:
    """The interpreter that makes the environment; EL's own python3 is older than what oeprov needs."""
    if state.os.family == "rhel" and desired.runtime_python == "python3":
        return "python3.11"
    return desired.runtime_python


def _install(venv: str, names: List[str]) -> List[str]:
    return [interpreter(venv), "-m", "pip", "install", "--disable-pip-version-check"] + names


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that makes the environment when it is not there and installs what it lacks; none else."""
    runtime = state.runtime
    commands: List[List[str]] = []
    if not runtime.exists:
        commands.append([python_of(state, desired), "-m", "venv", desired.runtime_venv])
    names = [item for item in runtime.missing if _applies(item, state.os.architecture)]
    if desired.kind != "local" and not runtime.oeprov:
        names.insert(0, desired.runtime_wheel or "<wheel of oeprov>")
    if names:
        commands.append(_install(desired.runtime_venv, names))
    if not commands:
        return []
    if not runtime.exists:
        why = "there is no Python environment at {}".format(desired.runtime_venv)
    else:
        why = "{} does not have what training needs".format(desired.runtime_venv)
    return [
        Step(
            id="runtime",
            what="install {} in {}".format(
                ", ".join(_bare(name) for name in names) or "Python", desired.runtime_venv
            ),
            why=why,
            commands=commands,
            action="install_runtime",
            args={
                "venv": desired.runtime_venv,
                "python": python_of(state, desired),
                "create": not runtime.exists,
                "requirements": names,
            },
        )
    ]


def _applies(requirement: str, architecture: str) -> bool:
    """Whether a requirement is for this architecture; only plans for environments yet to be made need to ask.

    Other markers are left to pip.
    """
    match = re.search(r"platform_machine\s*(==|!=)\s*['\"](\w+)['\"]", requirement)
    return match is None or not architecture or (match.group(1) == "==") == (match.group(2) == architecture)


def _bare(requirement: str) -> str:
    """The requirement without its marker."""
    return requirement.split(";")[0].strip()


def problems(state: State, desired: Desired) -> List[str]:
    """Why the environment cannot be brought to what is wanted."""
    runtime = state.runtime
    if runtime.error:
        return ["runtime_venv {}: its Python cannot be used: {}".format(runtime.venv, runtime.error)]
    if desired.kind == "local" and not runtime.exists:
        return [
            "runtime_venv {}: is not a Python environment; leave runtime_venv out to use the one that oeprov "
            "runs in".format(desired.runtime_venv)
        ]
    if desired.kind == "local" and not runtime.oeprov:
        return [
            "runtime_venv {}: oeprov is not installed there; leave runtime_venv out to use the environment "
            "that oeprov runs in, or install it there with pip".format(desired.runtime_venv)
        ]
    if runtime.exists and runtime.missing and not runtime.writable:
        return [
            "runtime_venv {}: may not be written by this user, and it lacks {}".format(
                runtime.venv, ", ".join(_bare(name) for name in runtime.missing)
            )
        ]
    return []


def apply(
    system: System, venv: str, python: str, create: bool, requirements: List[str]
) -> Tuple[List[str], List[str]]:
    """Makes the environment if asked and installs; (installed names, names still missing).

    CommandError when venv or pip fails.
    """
    if create and not system.exists(interpreter(venv)):
        system.check([python, "-m", "venv", venv], timeout=300)
    if requirements:
        result = system.run(_install(venv, requirements), timeout=3600)
        if not result.ok:
            raise CommandError(result.explain())
    return requirements, observe(system, venv, requirements).missing


def _install_runtime(system: System, args: Dict[str, Any]) -> Applied:
    before = observe(system, args["venv"], args["requirements"])
    if before.exists and not before.missing and not before.error:
        return Applied(False, "{} has all that is needed".format(args["venv"]))
    installed, missing = apply(system, args["venv"], args["python"], args["create"], args["requirements"])
    if missing:
        raise CommandError("pip ended well, but {} still lacks {}".format(args["venv"], ", ".join(missing)))
    return Applied(True, "installed {} in {}".format(", ".join(installed) or "Python", args["venv"]))


ACTIONS: Dict[str, Action] = {"install_runtime": _install_runtime}
