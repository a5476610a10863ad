"""The Python that Ansible's modules need on a host, which is newer than observing needs."""

from __future__ import annotations

import re

from provision.node import families
from provision.node.state import OsInfo, State

# https://docs.ansible.com/ansible/latest/reference_appendices/release_and_maintenance.html, "Target Python"
_SINCE = {(2, 16): (3, 6), (2, 17): (3, 7), (2, 18): (3, 8), (2, 19): (3, 8), (2, 20): (3, 9)}


def problem(state: State, python: str, core: str = "") -> str:
    """Why the installed Ansible cannot change a host, and what to do; empty when it can.

    ``python``: the interpreter that observed the host; ``core``: ansible-core's version (default: installed).
    """
    if not core:
        from ansible import release

        core = release.__version__
    least = _SINCE.get(_pair(core), max(_SINCE.values()))
    if not state.os.python or _pair(state.os.python) >= least:
        return ""
    how = _package(state.os)
    return (
        f"ansible-core {core} here needs Python {least[0]}.{least[1]} on hosts, and {python} there is "
        f"{state.os.python}: install a newer one there{how} and set ansible_python_interpreter to its "
        "path, or run oeprov with ansible-core 2.16, the last that can: pip install 'ansible-core<2.17'"
    )


def _package(os: OsInfo) -> str:
    """How the distribution's own package of a newer Python is installed, in brackets."""
    named = [name for name in families.names(os, "venv") if re.fullmatch(r"python3[.]\d+", name)]
    if named:
        return f" ({os.package_manager} install {named[0]})"
    return f" ({families.treated_as(os)} has no package of one)" if families.lacks(os, "venv") else ""


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
