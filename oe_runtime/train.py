"""`python -m oe_runtime.train`: train a click model, or a script's, with embeddings on parameter servers."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

from oe_runtime.run.options import Options, parse
from oe_runtime.support import interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; return its exit status (see --help)."""
    options = parse(argv)
    if isinstance(options, Options):
        from oe_runtime.programs.click import run

        return run(options)
    from oe_runtime.run.script import run_script

    return run_script(options)


if __name__ == "__main__":
    # TensorFlow makes 270,000 objects that stay: going over them while it is imported, and once more at the
    # end, when all memory goes back anyway, takes a fifth of a short program's time.
    gc.set_threshold(100_000, 10, 10)
    atexit.register(gc.freeze)
    sys.exit(interrupt.run(main))
