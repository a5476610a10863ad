"""Checkpoints on disk, without a server and without TensorFlow.

`store` publishes and reads them, `saved` opens one with its tables, `verification` finds damage, and `cli` is
`python -m oe_runtime.checkpoint`: inspect, verify, diff, reshard.
"""

from oe_runtime.checkpoint.store import (
    MANIFEST,
    WITH_ROWS,
    Checkpoint,
    begin,
    chain,
    find_tables,
    latest,
    links,
    order,
    pin,
    publish,
    published,
    published_names,
    read,
    read_once,
    remove_from,
    stamp,
    verify,
)

__all__ = [
    "MANIFEST",
    "WITH_ROWS",
    "Checkpoint",
    "begin",
    "chain",
    "find_tables",
    "latest",
    "links",
    "order",
    "pin",
    "publish",
    "published",
    "published_names",
    "read",
    "read_once",
    "remove_from",
    "stamp",
    "verify",
]
