"""dynamicemb's own example, with the rows that its GPU cache misses on parameter servers.

    git clone https://github.com/NVIDIA/recsys-examples
    torchrun --standalone --nproc_per_node=1 examples/dynamicemb_example.py --servers localhost:7000 \\
        recsys-examples/corelib/dynamicemb/example/example.py --train --caching

The example stays as it is (revision 43465aeabf61); its table options get our storage. It needs a GPU and an
installed dynamicemb, which this repository's tests have not: they run it on a stand-in of the example.

<!-- needs: dynamicemb -->
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import oe_runtime
from oe_runtime.torch.storage import ServerStorage

SERVERS: list[str] = []


class Rows(ServerStorage):
    """The tables of the example."""

    name = "movielens"

    def connect(self) -> oe_runtime.Client:
        """Return a client of the servers of the command line."""
        return oe_runtime.Client(SERVERS)


def with_storage(options: Any) -> Any:
    """Return a class of table options in place of dynamicemb's, whose tables are on the servers."""

    def make(**fields: Any) -> Any:
        if not fields.get("caching"):
            raise SystemExit("error: only the misses of a cache are on servers: add --caching")
        return options(**{**fields, "external_storage": Rows})

    return make


def main() -> int:
    """Run the example with the words that follow its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", required=True, help="addresses, separated by commas")
    parser.add_argument("example", type=Path, help="the path of dynamicemb's example.py")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="words for the example, such as --train")
    asked = parser.parse_args()
    if not asked.example.is_file():
        parser.error(f"there is no {asked.example}: clone https://github.com/NVIDIA/recsys-examples")
    SERVERS[:] = asked.servers.split(",")
    sys.path.insert(0, str(asked.example.parent))
    example: Any = importlib.import_module(asked.example.stem)
    example.DynamicEmbTableOptions = with_storage(example.DynamicEmbTableOptions)
    sys.argv[:] = [str(asked.example), *asked.words]
    example.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
