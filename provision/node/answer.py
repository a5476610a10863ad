"""The line with which a module that was sent to a host answers; see ``provision/hosts/payload.py``."""

import json
import sys
from typing import Any, Callable, Dict

from .command import CommandError

MARKER = "OEPROV-ANSWER "  # marks the line, since login shells may print a banner first


def give(work: Callable[[], Dict[str, Any]]) -> None:
    """Print what ``work`` returns, or ``error`` with its reason, as one line of JSON."""
    try:
        answer = work()
    except CommandError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + MARKER + json.dumps(answer) + "\n")
