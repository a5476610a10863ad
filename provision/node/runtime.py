"""The Python environment of training: observe it, and install what it lacks.

Hosts get oeprov as a wheel of their build (see ``build.py``). ``STAMP`` in the environment names it, so no
interpreter needs to be started on a host that is right.
"""

import json
import os
import re
import shutil
import sys
from typing import Any, Dict, List, NamedTuple

from . import environments, families, job, pipindex, platforms
from .build import CPU_LEVEL, WHEELS, build_of, key_of, minor, python_of, python_version, wheel_file
from .command import CommandError, System
from .directory import human
from .state import Runtime, State
from .step import Action, Applied, Desired, Step

STAMP = ".oeprov-wheel"
PYTHON_SINCE = (3, 10)  # requires-python of pyproject.toml
OTHERS = ("3.6", "3.7", "3.8", "3.9")  # versions that OpenEmbedding runs on, from openembedding.STACKS
# Runs in the environment's own interpreter. pip brings the library for requirements and markers, so nothing
# must be installed first.
_PROBE = r"""
import json, sys
out = {"python": "%d.%d.%d" % sys.version_info[:3], "distributions": {}, "missing": [], "oeprov": ""}
try:
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:  # Python 3.6 and 3.7, with frameworks as old
        from pkg_resources import DistributionNotFound as PackageNotFoundError, get_distribution
        version = lambda name: get_distribution(name).version
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
    """Parse the output of the probe; ValueError for anything else."""
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


def observe(system: System, venv: str, requirements: List[str], python: str = "") -> Runtime:
    """Observe the environment ``venv``, and which of ``requirements`` (PEP 508) it lacks.

    ``python`` is the interpreter that would make it; its version is observed too.
    """
    stamp = _read_stamp(system, venv)
    home = environments.home(system, venv) if venv else ""
    place = environments.target(system, home)
    found = Runtime(
        venv=venv,
        home=home,
        place=place,
        old=environments.old(system, home) if home else [],
        jobs=environments.jobs(system, home) if home and not place else [],
        base=_version(system, python) if python else "",
        wheel=stamp.wheel,
        made=stamp.made,
        unfinished=not stamp.finished,
    )
    if not venv or not system.exists(interpreter(venv)):
        foreign = venv and not stamp.made and system.list(venv)
        error = "the directory is not empty, and what is in it is no Python environment" if foreign else ""
        return found._replace(missing=requirements, error=error)
    found = found._replace(exists=True, writable=os.access(system.path(venv), os.W_OK))
    if stamp.made and not stamp.finished:
        return found._replace(missing=requirements)  # it will be made again anyway
    if stamp.made and stamp.finished and not requirements:
        # The usual case on servers, which needs no interpreter.
        return found._replace(**_installed(system, venv))
    probed = _probe(system, found, requirements)
    return found._replace(
        python=probed.python,
        oeprov=probed.oeprov,
        distributions=probed.distributions,
        missing=probed.missing,
        error=probed.error,
    )


def _probe(system: System, found: Runtime, requirements: List[str]) -> Runtime:
    """Ask the environment's own interpreter."""
    # -I: the current directory and PYTHON* variables must not change the result.
    argv = [system.path(interpreter(found.venv)), "-I", "-c", _PROBE, json.dumps(requirements)]
    result = system.run(argv)
    if not result.ok:
        return found._replace(error=result.err.strip()[-300:] or "it fails")
    return parse_probe(found.venv, result.out, found.writable)


class Stamp(NamedTuple):
    """oeprov's record in an environment; ``made``: oeprov made the environment, and may empty it."""

    wheel: str = ""
    made: bool = False
    finished: bool = True


def _read_stamp(system: System, venv: str) -> Stamp:
    try:
        return Stamp(**json.loads(system.read(os.path.join(venv, STAMP))))
    except (ValueError, TypeError):
        return Stamp()


def write_stamp(system: System, venv: str, stamp: Stamp) -> None:
    """Write oeprov's record into an environment."""
    system.write(os.path.join(venv, STAMP), json.dumps(stamp._asdict(), sort_keys=True) + "\n")


def _version(system: System, python: str) -> str:
    """Version of an interpreter; empty if it is not installed."""
    path = system.which(python)
    if path and os.path.realpath(path) == os.path.realpath(sys.executable):
        return sys.version.split()[0]
    return system.run([python, "-c", "import platform; print(platform.python_version())"]).out.strip()


def _installed(system: System, venv: str) -> Dict[str, Any]:
    """Versions of Python and of oeprov in an environment, from its files."""
    match = re.search(r"^version = (\S+)", system.read(os.path.join(venv, "pyvenv.cfg")), re.MULTILINE)
    version = match.group(1) if match else ""
    names = system.list(os.path.join(venv, "lib", "python" + minor(version), "site-packages"))
    found = [re.match(r"oeprov-(.+)\.dist-info$", name) for name in names]
    return {"python": version, "oeprov": next((item.group(1) for item in found if item), "")}


def remake_reason(runtime: Runtime) -> str:
    """Why an environment of oeprov's must be made again; empty if it need not."""
    if not runtime.exists or not runtime.made:
        return ""
    if runtime.unfinished:
        return f"an earlier installation in {runtime.venv} was interrupted"
    if runtime.error:
        return f"the Python in {runtime.venv} cannot be used: {runtime.error}"
    if runtime.base and minor(runtime.base) != minor(runtime.python):
        return (
            f"{runtime.venv} was made by Python {minor(runtime.python)}, and the system's is now "
            f"{minor(runtime.base)}"
        )
    return ""


def _why(runtime: Runtime, build: str, needs_oeprov: bool) -> str:
    """Why the environment must change; empty if it is right."""
    if not runtime.exists:
        return f"there is no Python environment at {runtime.venv}"
    if remake_reason(runtime):
        return remake_reason(runtime)
    if needs_oeprov and runtime.oeprov and _lacks_wheel(runtime, build):
        if runtime.wheel and key_of(runtime.wheel) != key_of(build):
            return f"the runtime in {runtime.venv} was built for {key_of(runtime.wheel)}"
        return f"the runtime in {runtime.venv} is another build than the one here"
    if runtime.missing or (needs_oeprov and not runtime.oeprov):
        return f"{runtime.venv} does not have what training needs"
    return ""


def _lacks_wheel(runtime: Runtime, build: str) -> bool:
    """oeprov of ``build`` is not installed; an empty build accepts any."""
    return not runtime.oeprov or bool(build and runtime.wheel != build)


def _make(python: str, venv: str, offline: bool) -> List[str]:
    return [python, "-m", "venv"] + (["--system-site-packages", "--without-pip"] if offline else []) + [venv]


def _install(
    venv: str, python: str, wheel: str, requirements: List[str], create: bool, offline: bool, index: str
) -> List[List[str]]:
    """Command lines; ``offline``: only the wheel, ``create``: into an empty environment.

    With both, the wheel is just unpacked: it has no scripts, its dependencies are the distribution's, and pip
    would take most of the time.
    """
    if offline and create:
        place = os.path.join(venv, "lib", "python" + minor(python), "site-packages")
        return [[interpreter(venv), "-m", "zipfile", "-e", wheel, place]] if wheel else []
    install = [interpreter(venv), "-m", "pip", "install", "--disable-pip-version-check"]
    commands = []
    if wheel and not create:
        # pip does not replace a build of the same version.
        commands.append(install + ["--no-deps", "--no-index", "--force-reinstall", wheel])
    if not offline and (wheel or requirements):
        commands.append(install + pipindex.words(index) + ([wheel] if wheel else []) + requirements)
    return commands


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that makes the environment and installs what it lacks; none if it is right."""
    runtime, venv = state.runtime._replace(venv=desired.runtime_venv), desired.runtime_venv
    build, local = build_of(state, desired), not platforms.get(desired.kind).managed
    why = _why(runtime, build, not local)
    if not why:
        return []
    offline = not local and not desired.runtime_requirements  # nothing comes from PyPI
    create = not runtime.exists or bool(remake_reason(runtime)) or (offline and runtime.made)
    missing = desired.runtime_requirements if create else runtime.missing
    names = [item for item in missing if _applies(item, state.os.architecture)]
    wheel = "" if local or not (create or _lacks_wheel(runtime, build)) else "<wheel of oeprov>"
    beside = create or runtime.made  # a user's own environment is changed in place
    name = environments.digest(python_of(state.os, desired), minor(runtime.base), build, names)
    place = f"{environments.folder(venv)}/{name}" if beside else venv
    commands = [_make(python_of(state.os, desired), place, offline)] if create else []
    commands += [["cp", "-al", venv, place]] if beside and not create else []
    base = runtime.base or state.os.python
    commands += _install(place, base, wheel, names, create, offline, desired.runtime_index)
    commands += [["ln", "-sfn", place, venv]] if beside else []
    if wheel and build and key_of(build) != desired.runtime_wheel_key:
        why += f"; if it was not built before, one host of {key_of(build)} builds it and gets compilers"
    return [
        Step(
            id="runtime",
            what="install {} in {}".format(
                ", ".join((["oeprov"] if wheel else []) + [bare(name) for name in names]) or "Python", venv
            ),
            why=why,
            commands=commands,
            action="install_runtime",
            role="runtime",
            preparing=True,
            scope="training",
            args=dict(
                {
                    "venv": venv,
                    "python": python_of(state.os, desired),
                    "create": create,
                    "offline": offline,
                    "build": build,
                    "requirements": names,
                    "name": name,
                },
                **({"index": desired.runtime_index} if desired.runtime_index else {}),
            ),
        )
    ]


def _applies(requirement: str, architecture: str) -> bool:
    """The requirement is for this architecture; asked for new environments only. pip checks other markers."""
    match = re.search(r"platform_machine\s*(==|!=)\s*['\"](\w+)['\"]", requirement)
    return match is None or not architecture or (match.group(1) == "==") == (match.group(2) == architecture)


def bare(requirement: str) -> str:
    """The requirement without its marker."""
    return requirement.split(";")[0].strip()


def problems(state: State, desired: Desired) -> List[str]:
    """Why the environment cannot be made right."""
    runtime, found = state.runtime, []
    if 0 < state.os.cpu_level < CPU_LEVEL:
        found.append(
            f"its processor is x86-64-v{state.os.cpu_level}, and the runtime needs x86-64-v{CPU_LEVEL} (AVX2 "
            "and FMA): choose another type of machine, or give the virtual machine its host's processor"
        )
    found += directory_in_use(runtime) if plan(state, desired) else []
    managed = platforms.get(desired.kind).managed
    if managed and (not runtime.exists or remake_reason(runtime)):
        found += _python_problems(state, desired)
    if runtime.error and not runtime.made:
        found.append(f"runtime_venv {runtime.venv}: cannot be used: {runtime.error}")
    elif not managed and not runtime.exists:
        found.append(
            f"runtime_venv {desired.runtime_venv}: is not a Python environment; leave runtime_venv out to "
            "use the one that oeprov runs in"
        )
    elif not managed and not runtime.oeprov:
        found.append(
            f"runtime_venv {desired.runtime_venv}: oeprov is not installed there; leave runtime_venv out to "
            "use the environment that oeprov runs in, or install it there with pip"
        )
    elif runtime.exists and runtime.missing and not runtime.writable:
        found.append(
            "runtime_venv {}: this user may not write it, and it lacks {}".format(
                runtime.venv, ", ".join(bare(name) for name in runtime.missing)
            )
        )
    return found


def directory_in_use(runtime: Runtime) -> List[str]:
    """Why a change of an environment that is no link by digest must wait; see ``environments``."""
    if not runtime.jobs:
        return []
    names = [item.rpartition(" ")[2] for item in runtime.jobs]
    made = "oeprov 0.2 or earlier made it" if runtime.made else "it is yours, and changed in place"
    return [
        f"{', '.join(runtime.jobs)} runs from {runtime.venv} ({made}): stop it first: oeprov stop {names[0]}"
    ]


def _python_problems(state: State, desired: Desired) -> List[str]:
    """Why the chosen interpreter cannot make the environment."""
    python, version = python_of(state.os, desired), python_version(state, desired)
    cure = (
        "install a newer one beside it (of your site, conda, pyenv) and set runtime_python to its path; "
        "numpy then comes from PyPI"
    )
    if minor(version) in OTHERS:
        cure += f"; runtime_flavor: openembedding runs on Python {minor(version)}"
    if version and tuple(int(item) for item in minor(version).split(".")) < PYTHON_SINCE:
        return [
            f"{python} is Python {minor(version)} on {families.title(state.os)}, and the runtime needs "
            f"{PYTHON_SINCE[0]}.{PYTHON_SINCE[1]}: {cure}"
        ]
    if not version and desired.runtime_python != "python3" and not state.assumed:
        return [f"runtime_python {desired.runtime_python}: is not on the host, or does not start"]
    return []


def empty(system: System, venv: str) -> None:
    """Empty an environment, except for its stamp, which allows that."""
    for name in system.list(venv):
        path = system.path(os.path.join(venv, name))
        if name == STAMP:
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _install_runtime(system: System, args: Dict[str, Any]) -> Applied:
    venv, python, build, requirements = args["venv"], args["python"], args["build"], args["requirements"]
    before = observe(system, venv, requirements, python if build else "")
    if not _why(before, build, bool(build)):
        return Applied(False, f"{venv} has all that is needed")
    if before.error and not before.made:
        raise CommandError(f"{venv}: cannot be used: {before.error}")
    for problem in directory_in_use(before):
        raise CommandError(problem)
    offline = args["offline"]
    create = not before.exists or bool(remake_reason(before)) or (offline and before.made)
    wheel = wheel_file(system, build) if build and (create or _lacks_wheel(before, build)) else ""
    made, home = before.made or create, environments.home(system, venv)
    place = environments.begin(system, home, args["name"]) if made else venv
    # Until the stamp says that it is finished, the next run makes it again.
    if made and not create:
        environments.copy(system, home, place)
    if build:
        write_stamp(system, place, Stamp(before.wheel, made, False))
    if create:
        system.check(_make(python, place, offline), timeout=600)
    index = args.get("index", "")
    for argv in _install(place, before.base, wheel, requirements, create, offline, index):
        system.check(argv, timeout=3600, environment=pipindex.environment(index))
    after = Runtime(venv=place) if offline and create else _probe(system, Runtime(venv=place), requirements)
    if after.error or after.missing:
        raise CommandError(
            "pip succeeded, but {} {}".format(venv, after.error or "still lacks " + ", ".join(after.missing))
        )
    if build:
        _check(system, place)
        os.sync()
        write_stamp(system, place, Stamp(build, made, True))
        shutil.rmtree(system.path(WHEELS), ignore_errors=True)
    names = (["oeprov"] if wheel else []) + requirements
    said = "installed {} in {}".format(", ".join(names) or "Python", venv)
    return Applied(True, said + (replace(system, home, place) if made else ""))


def replace(system: System, home: str, place: str) -> str:
    """Use the environment ``place`` from now on; says how much disk it and earlier ones take."""
    with job.alone(system):
        environments.switch(system, home, place)
        freed = environments.clean(system, home, unfinished=True)
    kept = [f"{item.path} stays for {', '.join(item.users)}" for item in environments.old(system, home)]
    words = [f"{human(environments.own_bytes(system, place))} of disk"]
    words += [f"earlier ones freed {human(freed)}"] if freed else []
    return " ({})".format("; ".join(words + kept))


def _check(system: System, venv: str) -> None:
    """Start the server's help in the environment; CommandError if that fails."""
    result = system.run([interpreter(venv), "-I", "-m", "oe_runtime.server", "--help"], timeout=300)
    if result.code == -4:
        raise CommandError(f"{venv}: this processor cannot run the runtime's instructions")
    if not result.ok:
        raise CommandError("the runtime was installed but does not start: " + result.explain())


ACTIONS: Dict[str, Action] = {"install_runtime": _install_runtime}
