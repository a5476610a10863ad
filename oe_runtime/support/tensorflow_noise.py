"""Messages that TensorFlow prints while it is imported."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

# Lines of TensorFlow's C++ code from before its log level applies.
_NOISE = (b"I0000 ", b"W0000 ", b"WARNING: All log messages before absl::InitializeLog()")


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what is written to file descriptor 2, then write all of it except the noise."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not line.startswith(_NOISE):
                    os.write(2, line)
