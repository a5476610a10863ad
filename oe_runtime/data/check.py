"""Check before a run whether a trainer can read its data: every file's format, columns, first rows.

    python -m oe_runtime.data.check [--schema FILE|NAME …] [--max-bad-rows N] [--without-tensorflow] PATH

PATH is the trainer's --data. Exit status 0 without output when it can; 1 and one line ``error: FILE …`` when
it cannot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from oe_runtime.data import open_source, row_schema
from oe_runtime.errors import OeError


def main(argv: Sequence[str] | None = None) -> int:
    """Check the data; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m oe_runtime.data.check", description=__doc__)
    parser.add_argument("--max-bad-rows", type=int, default=0, metavar="N", help="as for the trainer")
    parser.add_argument(
        "--without-tensorflow",
        action="store_true",
        help="only open TFRecord files, where TensorFlow, which reads them, is not installed",
    )
    parser.add_argument("--follow", action="store_true", help="as for the trainer")
    for name in ("eval-data", "schema", "label", "categories", "numbers"):
        parser.add_argument(f"--{name}", metavar="TEXT", help="as for the trainer")
    parser.add_argument("data", metavar="PATH")
    given = parser.parse_args(argv)
    try:
        schema = row_schema.chosen(given.schema, given.label, given.categories, given.numbers)
        apart = given.eval_data or ""
        source = open_source(given.data, 0, given.max_bad_rows, schema, apart, follow=given.follow)
        source.check(tensorflow=not given.without_tensorflow)
    except OeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
