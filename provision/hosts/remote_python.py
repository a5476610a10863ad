"""Which Python Ansible's modules need on a host: a newer one than looking at it needs."""

from __future__ import annotations

from provision.node.state import State

# https://docs.ansible.com/ansible/latest/reference_appendices/release_and_maintenance.html, "Target Python"
_SINCE = {(2, 16): (3, 6), (2, 17): (3, 7), (2, 18): (3, 8), (2, 19): (3, 8), (2, 20): (3, 9)}


def problem(state: State, python: str, core: str = "") -> str:
    """Why Ansible here cannot change a host, and what would work; empty when it can.

    ``python`` is what looked there; ``core`` is a version of ansible-core; default: the installed one's.
    """
    if not core:
        from ansible import release

        core = release.__version__
    least = _SINCE.get(_pair(core), max(_SINCE.values()))
    if not state.os.python or _pair(state.os.python) >= least:
        return ""
    hints = {
        "dnf": " (EL 8 and its like: dnf install python3.11)",
        "yum": " (CentOS 7 has no package of one)",
    }
    how = hints.get(state.os.package_manager, "")
    return (
        f"ansible-core {core} here needs Python {least[0]}.{least[1]} on hosts, and {python} there is "
        f"{state.os.python}: install a newer one there{how} and set ansible_python_interpreter to its "
        "path, or run oeprov with ansible-core 2.16, the last that can: pip install 'ansible-core<2.17'"
    )


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
