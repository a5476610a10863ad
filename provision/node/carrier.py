"""Carries out steps that Ansible cannot: before a host has a Python for it, and after that one is removed."""

import json
import sys
from typing import Any, Dict, List

from . import ansible_python, lease
from .command import CommandError, System
from .step import Step

# Marks the answer's line, since login shells may print a banner first.
MARKER = "OEPROV-STEP "


def apply(system: System, steps: List[Step], run: Dict[str, Any]) -> List[str]:
    """Carry out the steps alone on this host, for the run that holds its lease; returns their messages."""
    with lease.lock(system):
        lease.acquire(system, run)
        found = [ansible_python.ACTIONS[step.action](system, step.args).message for step in steps]
        lease.release(system, run)
    return found


def main(wanted: Dict[str, Any]) -> None:
    """Print the steps' messages, or the first error, as one line of JSON."""
    try:
        steps = [Step(**item) for item in wanted["steps"]]
        answer: Dict[str, Any] = {"ok": apply(System(), steps, wanted["run"])}
    except CommandError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"{error.filename or 'a file'}: {error.strerror}"}
    sys.stdout.write("\n" + MARKER + json.dumps(answer) + "\n")
