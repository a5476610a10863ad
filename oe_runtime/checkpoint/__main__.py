"""`python -m oe_runtime.checkpoint`: see `oe_runtime.checkpoint.cli`."""

import sys

from oe_runtime.checkpoint.cli import main
from oe_runtime.support import interrupt

if __name__ == "__main__":
    sys.exit(interrupt.run(main))
