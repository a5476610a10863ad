"""The embedding runtime: tables of rows in DRAM or persistent memory, trained through parameter servers.

Nothing here imports TensorFlow; ``oe_runtime.keras`` does.
"""

from oe_runtime.support import interrupt as interrupt  # first: what follows takes time, and Ctrl-C may come

# isort: split
from oe_runtime.client import Client, Group, Pulled
from oe_runtime.errors import (
    AuthError,
    CheckpointError,
    GradientError,
    KeyRangeError,
    OeError,
    ProtocolError,
    ServerLost,
    SpecError,
    SpecMismatch,
    StorageError,
    StorageFull,
    TooManyConnections,
    TornError,
    WorkerLost,
)
from oe_runtime.spec import StorageSpec, TableSpec, Worker

__all__ = [
    "AuthError",
    "CheckpointError",
    "Client",
    "GradientError",
    "Group",
    "KeyRangeError",
    "OeError",
    "ProtocolError",
    "Pulled",
    "ServerLost",
    "SpecError",
    "SpecMismatch",
    "StorageError",
    "StorageFull",
    "StorageSpec",
    "TableSpec",
    "TooManyConnections",
    "TornError",
    "Worker",
    "WorkerLost",
]
