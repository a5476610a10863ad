"""The exceptions of the runtime. Their messages are for the person at the terminal."""

from __future__ import annotations


class OeError(RuntimeError):
    """Base class of all errors of the runtime."""


class SpecError(OeError):
    """An invalid table, storage or call; the message names the field and the value."""


class SpecMismatch(SpecError):
    """A table of this name exists with another specification; the message names the field and both values."""


class KeyRangeError(OeError):
    """A key outside an array table's [0, input_dim)."""


class GradientError(OeError):
    """A gradient with NaN or infinity for a table that refuses them; names the table and the key."""


class StorageError(OeError):
    """Storage that is full, not writable, or held by another server."""


class StorageFull(StorageError):
    """No room for new rows, or none at all; the message says what is full and how to make room."""


class DataError(OeError):
    """Training data that is absent, empty or broken; the message names the file and the line."""


class CheckpointError(OeError):
    """A checkpoint that is damaged, belongs to another table, or cannot be written."""


class ServingError(OeError):
    """A model that cannot be served, or not with these rows; the message names the file and the field."""


class InputError(ServingError):
    """A request that the model cannot answer; the message names the input and the problem."""


class AuthError(OeError):
    """A server refused the token."""


class ProtocolError(OeError):
    """A peer that does not speak this protocol, or another version of it."""


class TooManyConnections(OeError):
    """A server has reached its limit of connections; the message names it."""


class WorkerLost(OeError):
    """Another worker of the job is lost or kept this one waiting too long; the message names the ranks."""


class TornError(OeError):
    """Only some tables or servers may have a push: go back by recover or restore before anything else."""


class ServerLost(OeError):
    """A server that no longer answers; `endpoint` is its host:port, or "" in one process."""

    def __init__(self, endpoint: str, message: str) -> None:
        """The message names the endpoint and says what to do."""
        super().__init__(message)
        self.endpoint = endpoint
