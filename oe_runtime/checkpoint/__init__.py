"""Checkpoints on disk, without a server and without TensorFlow.

`store` publishes and reads them, `saved` opens one with its tables, `verification` finds damage, and `cli` is
`python -m oe_runtime.checkpoint`: inspect, verify, diff, reshard.
"""

from oe_runtime.checkpoint.store import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    chain,
    latest,
    problems,
    publish,
    published,
    read,
    remove_from,
    verify,
)

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Checkpoint",
    "chain",
    "latest",
    "problems",
    "publish",
    "published",
    "read",
    "remove_from",
    "verify",
]
