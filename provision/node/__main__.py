"""``python -m …node '{"host": …}'``: prints this machine's state as one line of JSON."""

import json
import sys
from typing import Any, Dict

from . import answer
from .observe import observe_node


def main(wanted: Dict[str, Any]) -> None:
    """Print the state, or the error with its type, as one line of JSON."""
    answer.give(lambda: {"state": observe_node(wanted)})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
