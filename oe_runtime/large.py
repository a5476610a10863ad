"""Which weights belong on parameter servers by their size, for every library that we convert models of."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BYTES = 64 << 20
_ROWS = 100_000


def is_large(shape: Sequence[int | None], item_bytes: int) -> bool:
    """Whether a weight of this shape is a matrix of many rows, or has many bytes."""
    known = [n or 0 for n in shape]
    return (len(known) > 1 and known[0] >= _ROWS) or math.prod(known) * item_bytes >= _BYTES
