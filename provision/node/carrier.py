"""Carries out steps that Ansible cannot: before a host has a Python for it, and after that one is removed."""

from typing import Any, Dict, List

from . import ansible_python, answer, lease
from .command import CommandError, System
from .step import Step


def apply(system: System, steps: List[Step], run: Dict[str, Any]) -> List[str]:
    """Carry out the steps alone on this host, for the run that holds its lease; returns their messages."""
    try:
        with lease.lock(system):
            lease.acquire(system, run)
            found = [ansible_python.ACTIONS[step.action](system, step.args).message for step in steps]
            lease.release(system, run)
    except OSError as error:
        raise CommandError(f"{error.filename or 'a file'}: {error.strerror}")
    return found


def main(wanted: Dict[str, Any]) -> None:
    """Print the steps' messages, or the first error, as one line of JSON."""
    steps = [Step(**item) for item in wanted["steps"]]
    answer.give(lambda: {"ok": apply(System(), steps, wanted["run"])})
