"""Builds of oeprov's wheel: names, compatibility, and building one on this host.

The name of a *build* has the wheel's target and sources: ``debian-12-x86_64-py3.11-`` and a digest. The
controller puts the wheel of a build into ``WHEELS/BUILD/`` on a host.
"""

import os
import re
import shutil
import zipfile
from typing import Dict, List

from . import families, platforms, repositories
from .command import CommandError, System
from .packages import apply as install_packages
from .state import OsInfo, State
from .step import Desired

WHEELS = "/var/lib/oeprov/wheels"  # wheels that were built or brought, by kind of system
# How the message begins that asks for a build; provision/artifacts/delivery.py brings the wheel then.
WHEEL_WANTED = "the wheel is not on the host: "
CPU_LEVEL = 3  # x86-64-v3, as OE_MARCH in CMakeLists.txt
_LEVELS = (
    (2, "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    (3, "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    (4, "avx512f avx512bw avx512cd avx512dq avx512vl"),
)


def cpu_level(cpuinfo: str) -> int:
    """The x86-64 level (1 to 4) of the processor that ``/proc/cpuinfo`` shows; 0 for others."""
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    if "lm" not in flags:
        return 0
    level = 1
    for number, needed in _LEVELS:
        if not flags.issuperset(needed.split()):
            break
        level = number
    return level


def minor(version: str) -> str:
    """``3.11`` of ``3.11.2``."""
    return ".".join(version.split(".")[:2])


def wheel_key(system: OsInfo, python: str) -> str:
    """The target of a compiled wheel: distribution and release, architecture, Python."""
    # EL's minor releases are compatible.
    family = families.find(system)
    release = system.version if family is None else families.release(family, system)
    words = [system.id or "linux", release or "rolling", system.architecture, "py" + minor(python)]
    return "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)


def build_of(state: State, desired: Desired) -> str:
    """The build for the host; empty if it gets no wheel."""
    if not platforms.get(desired.kind).managed or not desired.runtime_wheel_digest:
        return ""
    version = state.runtime.base or _in_name(python_of(state.os, desired)) or state.os.python
    return f"{wheel_key(state.os, version)}-{desired.runtime_wheel_digest[:16]}"


def key_of(build: str) -> str:
    """The key in the name of a build."""
    return build.rpartition("-")[0]


def _in_name(python: str) -> str:
    """The version in ``python3.11``; empty when the name has none."""
    match = re.search(r"(\d+\.\d+)$", python)
    return match.group(1) if match else ""


def python_of(system: OsInfo, desired: Desired) -> str:
    """The interpreter that makes the environment; EL 8's own python3 is too old."""
    family = families.find(system)
    if family is not None and desired.runtime_python == "python3":
        return family.python
    return desired.runtime_python


def python_version(state: State, desired: Desired) -> str:
    """Version of that interpreter, observed or from the family's tables; empty: unknown."""
    python, family = python_of(state.os, desired), families.find(state.os)
    if state.runtime.base or family is None:
        return state.runtime.base
    return family.pythons.get(families.release_of(state.os), "") if python == family.python else ""


def wheel_file(system: System, build: str) -> str:
    """Path of the wheel of a build on this host; CommandError asks the controller for a missing one."""
    directory = os.path.join(WHEELS, build)
    for name in system.list(directory):
        path = os.path.join(directory, name)
        try:
            with zipfile.ZipFile(system.path(path)) as archive:
                if name.endswith(".whl") and archive.testzip() is None:
                    return path
        except (OSError, zipfile.BadZipFile):
            pass  # truncated by a power cut or a lost connection: it is sent again
    raise CommandError(WHEEL_WANTED + build)


def run_logged(
    system: System, commands: List[List[str]], into: str, timeout: float, environment: Dict[str, str]
) -> None:
    """Run a build's commands; ``into`` is made anew and has their log. CommandError if one fails."""
    shutil.rmtree(system.path(into), ignore_errors=True)
    os.makedirs(system.path(into))
    for argv in commands:
        result = system.run(argv, timeout=timeout, environment=environment)
        with open(system.path(os.path.join(into, "log")), "a") as log:
            log.write(f"$ {' '.join(argv)}\n{result.out}{result.err}\n")
        if not result.ok:
            raise CommandError(result.explain())


def make(system: System, os_info: OsInfo, python: str, packed: str, into: str, given: Dict[str, str]) -> str:
    """Build a wheel on this host below ``into`` and return its path; ``given``: see repositories.py.

    ``packed`` is a tar archive with ``source/`` and the wheels of Python's build tools in ``tools/``, so PyPI
    is not used. Compilers and libraries come from the distribution and stay installed. CommandError has the
    last lines of a failure; all output is in ``into``/log.
    """
    family, names = families.find(os_info), families.names(os_info, "build")
    if family is None or not names or not os_info.package_manager:
        raise CommandError(f"the runtime cannot be built on {families.title(os_info)}")
    # Without it, and on EL, whose liburing is no archive, the core reads NVMe by preads.
    names = names + families.names(os_info, "build-io_uring")
    use = repositories.use(os_info, given, family.comes_from.get("build", []))
    install_packages(system, os_info.package_manager, names, use)
    environment = {"PATH": family.compilers + ":" + os.environ.get("PATH", "")} if family.compilers else {}
    source, tools, venv = (os.path.join(into, name) for name in ("source", "tools", "venv"))
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        ["tar", "-xf", packed, "-C", into],
        [python, "-m", "venv", venv],
        pip + ["install", "--no-index", "--find-links", tools, "scikit-build-core", "pybind11"],
        pip + ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", into, source],
    ]
    run_logged(system, commands, into, 7200, environment)
    made = [name for name in system.list(into) if name.endswith(".whl")]
    if len(made) != 1:
        raise CommandError(f"pip built {len(made)} wheels where one was expected")
    return os.path.join(into, made[0])
