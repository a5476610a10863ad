"""``python -m …node '{"host": …}'``: prints this machine's state as one line of JSON."""

import json
import sys
from typing import Any, Dict

from .observe import observe_node

# Marks the answer's line, since login shells may print a banner first.
MARKER = "OEPROV-STATE "


def main(wanted: Dict[str, Any]) -> None:
    """Print the state, or the error with its type, as one line of JSON."""
    try:
        answer: Dict[str, Any] = {"state": observe_node(wanted)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + MARKER + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
