"""`python -m oe_runtime.train`: train a click model with its embeddings on parameter servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from oe_runtime.support import interrupt
from oe_runtime.training.options import parse
from oe_runtime.training.run import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; return its exit status (see --help)."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
