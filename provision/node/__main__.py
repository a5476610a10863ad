"""``python -m …node '{"host": …}'``: prints this machine's state as one line of JSON."""

import json
import sys
from typing import Any, Dict

from .observe import observe_node

# Login shells may print a banner first: the answer is the line that begins with this.
MARKER = "OEPROV-STATE "


def main(wanted: Dict[str, Any]) -> None:
    """Print the state; an error of any kind becomes an answer too, with its type and text."""
    try:
        answer: Dict[str, Any] = {"state": observe_node(wanted)}
    except Exception as error:
        answer = {"error": "{}: {}".format(type(error).__name__, error)}
    sys.stdout.write("\n" + MARKER + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
