"""The former name of `oe_runtime.checkpoint`: `python -m oe_runtime.checkpoint_tools` still works."""

import sys

from oe_runtime.checkpoint.cli import main
from oe_runtime.support import interrupt

if __name__ == "__main__":
    print("note: oe_runtime.checkpoint_tools is now oe_runtime.checkpoint", file=sys.stderr)
    sys.exit(interrupt.run(main))
