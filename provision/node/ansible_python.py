"""The Python of a host that Ansible uses, where the distribution's own is too old for it, or is missing.

It is installed beside the system's Python, which stays as it is. ``PROGRAM`` starts it.
"""

import re
from typing import Any, Dict, List, Tuple

from . import families, packages, repositories
from .command import CommandError, System
from .state import OsInfo, State
from .step import Action, Applied, Desired, Step

PROGRAM = "/usr/local/bin/oeprov-python3"
CARRIED = "carrier"  # the role of steps that the payload carries out; Ansible cannot yet, or not any more
OLDEST = (3, 6)  # of the node package
# Interpreters that run the payload, in this order; EL 8 may have only the second one.
CARRIERS = ("python3", "/usr/libexec/platform-python", PROGRAM)
# Needs of Ansible on hosts by version of ansible-core:
# https://docs.ansible.com/ansible/latest/reference_appendices/release_and_maintenance.html, "Target Python"
_SINCE = {(2, 16): (3, 6), (2, 17): (3, 7), (2, 18): (3, 8), (2, 19): (3, 8), (2, 20): (3, 9)}
_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def oldest(core: str) -> Tuple[int, int]:
    """The oldest Python that a version of ansible-core can use on hosts."""
    return _SINCE.get(_pair(core), max(_SINCE.values()))


def _pair(version: str) -> Tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_old(version: str, desired: Desired) -> bool:
    """Ansible cannot use a Python of this version; empty: it is missing."""
    return not version or _pair(version) < oldest(desired.ansible_core)


def is_wanted(os: OsInfo, desired: Desired) -> bool:
    """Ansible has no Python on the host yet, and the inventory leaves the choice to oeprov."""
    if not desired.ansible_core or desired.ansible_interpreter or not os.python:
        return False
    return is_old(os.python, desired) and is_old(os.own_python, desired)


def program(os: OsInfo, desired: Desired) -> str:
    """The interpreter for Ansible; empty: the one that observed the host."""
    own = not desired.ansible_interpreter and is_old(os.python, desired) if desired.ansible_core else False
    return PROGRAM if own and os.own_python else ""


def observe(system: System) -> str:
    """The version of ``PROGRAM``; empty if it is missing or does not start."""
    if not system.exists(PROGRAM):
        return ""
    found = system.run([PROGRAM, "-I", "-S", "-c", _VERSION])
    return found.out.strip() if found.ok else ""


def names(os: OsInfo, desired: Desired) -> List[str]:
    """Packages of a Python that is new enough; empty if there are none, or none is wanted."""
    family = families.find(os)
    if family is None or not is_wanted(os, desired) or is_old(family.ansible_python.version, desired):
        return []
    return family.ansible_python.packages.split()


def needed(os: OsInfo, desired: Desired) -> List[str]:
    """Packages that a freshly installed host needs for Ansible, for bundles."""
    family = families.find(os)
    fresh = None if family is None else family.fresh.get(families.release_of(os))
    found = [] if fresh is None else names(os._replace(python=fresh.python), desired)
    return [family.first_python] + found if family is not None and found else []


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that installs a Python for Ansible; none if it has one, or none can be installed."""
    missing, family = names(state.os, desired), families.find(state.os)
    if not missing or family is None or not state.os.package_manager:
        return []
    found = family.ansible_python
    use = repositories.use(state.os, packages.given(desired, state.os), repositories_of(state.os))
    text = script(found.program, found.libraries)
    least = ".".join(map(str, oldest(desired.ansible_core)))
    return [
        Step(
            id="python",
            what=f"install {', '.join(missing)} for Ansible; python3 stays {state.os.python}",
            why=f"ansible-core {desired.ansible_core} here needs Python {least} or later on hosts",
            commands=use.commands
            + [packages.install_command(state.os, missing, use.options), ["write", PROGRAM, text]],
            action="install_ansible_python",
            role=CARRIED,
            preparing=True,
            args=dict(
                {"manager": state.os.package_manager, "names": missing, "text": text, "oldest": least},
                **({} if use == repositories.ENABLED else {"repositories": use._asdict()}),
            ),
        )
    ]


def repositories_of(os: OsInfo) -> List[str]:
    """Repositories of the family to enable for these packages."""
    family = families.find(os)
    return [] if family is None else family.ansible_python.repositories


def script(interpreter: str, libraries: str) -> str:
    """The text of ``PROGRAM``; ``libraries``: the directory of shared libraries that it needs, or empty."""
    text = "#!/bin/sh\n# Written by oeprov: the Python that Ansible uses here.\n"
    if libraries:
        text += f'export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
    return text + f'exec {interpreter} "$@"\n'


def problems(state: State, desired: Desired) -> List[str]:
    """Why Ansible cannot change the host, and what to do."""
    os = state.os
    if not desired.ansible_core or not os.python or not is_old(os.python, desired):
        return []
    if not desired.ansible_interpreter and (not is_old(os.own_python, desired) or plan(state, desired)):
        return []
    least = ".".join(map(str, oldest(desired.ansible_core)))
    found = f"ansible-core {desired.ansible_core} here needs Python {least} on hosts, and "
    old = "or run oeprov with ansible-core 2.16, the last that can: pip install 'ansible-core<2.17'"
    if desired.ansible_interpreter:
        found += f"ansible_python_interpreter {desired.ansible_interpreter} there is {os.python}: "
        if names(os, desired._replace(ansible_interpreter="")):
            return [found + "remove that line, and oeprov installs a newer one beside it, " + old]
        return [found + "name a newer one there, " + old]
    where = families.title(os)
    return [
        found + f"python3 there is {os.python}; {where} has no package of a newer one: install one there and "
        "set ansible_python_interpreter to its path, " + old
    ]


def plan_first(state: State, desired: Desired) -> List[Step]:
    """One step that installs the distribution's Python 3 on a host without one; ``state.bare`` says so."""
    family = families.find(state.os)
    if family is None or not state.os.package_manager:
        return []
    use = repositories.use(state.os, packages.given(desired, state.os), [])
    command = packages.install_command(state.os, [family.first_python], use.options)
    refresh = [packages.refresh_command(use.options)] if state.os.package_manager == "apt" else []
    return [
        Step(
            id="first-python",
            what=f"install {family.first_python}",
            why=f"what oeprov runs on hosts is Python, and {state.bare}",
            commands=use.commands + refresh + [command],
            action="install_first_python",
            role=CARRIED,
            preparing=True,
            args={"commands": use.commands + refresh + [command]},
        )
    ]


def problems_first(state: State) -> List[str]:
    """Why no Python can be installed on a host without one."""
    family, title = families.find(state.os), families.title(state.os)
    if family is None:
        return [
            f"{state.bare}, and {title} is not one of the systems that oeprov knows "
            f"({families.known_names()}): install Python 3 there"
        ]
    if not state.os.package_manager:
        return [f"{state.bare}, and none of {', '.join(family.managers)} is there to install one"]
    if not state.os.is_root:
        return [f"{state.bare}, and this user cannot install one: set ansible_become: true"]
    return []


def plan_removal(state: State) -> List[Step]:
    """One step that removes ``PROGRAM``, last of all, since Ansible may use it until then."""
    if PROGRAM not in state.remains.files:
        return []
    return [
        Step(
            id="python-forget",
            what="remove " + PROGRAM,
            why="oeprov made it",
            commands=[["rm", PROGRAM]],
            action="remove_ansible_python",
            role=CARRIED,
        )
    ]


def _install(system: System, args: Dict[str, Any]) -> Applied:
    packages.apply(system, args["manager"], args["names"], repositories.Use(**args.get("repositories", {})))
    system.write(PROGRAM, args["text"], 0o755)
    found = system.run([PROGRAM, "-I", "-S", "-c", _VERSION])
    if not found.ok:
        raise CommandError(f"{', '.join(args['names'])} is installed but does not start: {found.explain()}")
    version = found.out.strip()
    if not re.match(r"\d+\.\d+", version) or _pair(version) < _pair(args["oldest"]):
        raise CommandError(
            f"{', '.join(args['names'])} is Python {version}, and Ansible needs {args['oldest']}"
        )
    return Applied(True, f"Ansible uses Python {version} by {PROGRAM}")


def _remove(system: System, args: Dict[str, Any]) -> Applied:
    changed = system.remove(PROGRAM)
    return Applied(changed, f"removed {PROGRAM}" if changed else "nothing was there")


ACTIONS: Dict[str, Action] = {"install_ansible_python": _install, "remove_ansible_python": _remove}
