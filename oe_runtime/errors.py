"""What the runtime raises. The messages are for the person at the terminal."""

from __future__ import annotations


class OeError(RuntimeError):
    """Base of all errors of the runtime."""


class SpecError(OeError):
    """A table, storage or call that cannot be: the message names the field and the value."""


class SpecMismatch(SpecError):
    """A table of that name exists with another spec: the message names the field and both values."""


class KeyRangeError(OeError):
    """A key outside an array table's [0, input_dim)."""


class GradientError(OeError):
    """A gradient with NaN or infinity for a table that refuses them; names the table and the key."""


class StorageError(OeError):
    """Storage that is full, not writable, or held by another server."""


class StorageFull(StorageError):
    """No room for new rows, or none at all; the message says what is full and what makes room."""


class CheckpointError(OeError):
    """A checkpoint that is damaged, of another table, or cannot be written."""


class AuthError(OeError):
    """A server refused the token."""


class ProtocolError(OeError):
    """A peer that does not speak this protocol or this version of it."""


class TooManyConnections(OeError):
    """A server has as many connections as it takes; the message names it."""


class WorkerLost(OeError):
    """Another worker of the job is lost, or was waited for too long; the message names the ranks."""


class TornError(OeError):
    """A push may be in some tables or servers only: go back by recover or restore before anything else."""


class ServerLost(OeError):
    """A server that does not answer any more; `endpoint` is its host:port, or "" in one process."""

    def __init__(self, endpoint: str, message: str) -> None:
        """The message names the endpoint and says what to do."""
        super().__init__(message)
        self.endpoint = endpoint
