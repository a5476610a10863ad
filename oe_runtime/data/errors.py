"""What is wrong with training data, for the person who named it."""

from __future__ import annotations

from oe_runtime.errors import OeError


class DataError(OeError):
    """A file that is absent, empty or broken; the message names the file and the line."""
