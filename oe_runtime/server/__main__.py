"""`python -m oe_runtime.server`: see `oe_runtime.server.cli`."""

import sys

from oe_runtime.server.cli import main
from oe_runtime.support import interrupt

if __name__ == "__main__":
    sys.exit(interrupt.run(main))
