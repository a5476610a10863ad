"""`python -m oe_runtime.report RUN_DIR`: a run as one HTML page, during the run or afterwards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from oe_runtime.run.report import FILE, ReportError, render, write
from oe_runtime.support import interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path; the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m oe_runtime.report",
        description=f"Write RUN_DIR/{FILE}: settings, results and curves of a training run, in one "
        "self-contained file. The trainer writes it at the end of a run.",
    )
    p.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory of oe_runtime.train")
    p.add_argument("--stdout", action="store_true", help="print the page and write no file")
    args = p.parse_args(argv)
    try:
        print(render(args.run_dir) if args.stdout else write(args.run_dir))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {args.run_dir / FILE}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
