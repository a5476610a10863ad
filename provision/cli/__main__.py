"""``python -m provision.cli``: the program ``oeprov``."""

import sys

from provision.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
