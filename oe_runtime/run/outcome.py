"""How a run ends: exit statuses, and the errors as sentences."""

from __future__ import annotations

import errno
import os
import re
import sys

from oe_runtime.errors import GradientError, OeError, ServerLost, TornError, WorkerLost
from oe_runtime.run.checkpoints import newest
from oe_runtime.run.followers import FollowingDirectory
from oe_runtime.run.options import RunOptions
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.run.stopping import StopRequest

WORKER_LOST, INTERRUPTED = 3, 130
# Seconds that a worker waits for the others after a stop request. Its own work, a compilation and a
# checkpoint may take longer. A frozen worker would else keep the others waiting for --worker-wait.
STOP_SECONDS = 20.0
_OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EROFS, errno.EIO)
_ROOM = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free space there")
_MEMORY = re.compile(r"\b(OOM|memory|allocat\w*)\b", re.IGNORECASE)


def explain(error: Exception, options: RunOptions) -> str:
    """Describe an error to the user, with what to do next; empty for a bug."""
    if not isinstance(error, OeError):
        return memory_error(error) or disk_error(error)
    if isinstance(error, GradientError):
        return f"{str(error).partition(';')[0]}; try a smaller --learning-rate"
    if not isinstance(error, (ServerLost, TornError, WorkerLost)):
        return str(error)
    whom = "the servers and run" if isinstance(error, ServerLost) else "all workers"
    if options.size == 1 and isinstance(error, TornError):
        whom = "the run"
    if options.rank:
        return f"{error} (start all workers again with --resume)"
    last = newest(options.run_dir)
    if last is None:
        return f"{error} (no checkpoint was written yet: start {whom} again)"
    return f"{error} (the last checkpoint is {last.path.name}: start {whom} again with --resume)"


def disk_error(error: Exception) -> str:
    """Describe an unreadable or unwritable file; empty for another error.

    TensorFlow and HDF5 have errors of their own, which say in text what the system said.
    """
    if isinstance(error, ConnectionError):
        return ""
    if isinstance(error, OSError) and error.strerror is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}{_ROOM.get(error.errno or 0, '')}"
    if not isinstance(error, OSError) and not _is_exhausted(error):
        return ""
    number = next((number for number in _OF_FILES if os.strerror(number) in str(error)), 0)
    if not number:
        return ""
    before = str(getattr(error, "message", error)).partition(f"; {os.strerror(number)}")
    path = before[0].split()[-1] if before[1] and before[0].strip() else ""
    where = f"{path}: " if "/" in path else ""
    return f"{where}{os.strerror(number)}{_ROOM.get(number, '')}"


def memory_error(error: Exception) -> str:
    """Describe a model that does not fit into memory; empty for another error."""
    lines = str(getattr(error, "message", error)).strip().splitlines()
    # TensorFlow's is also that of a full disk, of too many open files and of a message over gRPC's limit.
    of_memory = _is_exhausted(error) and not disk_error(error) and _MEMORY.search("".join(lines))
    if not isinstance(error, MemoryError) and not of_memory:
        return ""
    return (
        "not enough memory for the model on this host"
        + (f" ({lines[0]})" if lines else "")
        + "; try a smaller --batch-size (or --micro-batch), --dim or --max-cardinality"
    )


def _is_exhausted(error: Exception) -> bool:
    """Whether TensorFlow, PyTorch or JAX (of which none need be there) says that a resource is used up."""
    return type(error).__name__ in ("ResourceExhaustedError", "OutOfMemoryError") or str(error).startswith(
        "RESOURCE_EXHAUSTED"
    )


def end_at_limit(
    options: RunOptions, directory: RunDirectory | FollowingDirectory, stop: StopRequest
) -> None:
    """End this process, whose main thread still waits for other workers."""
    error = WorkerLost(
        f"asked to stop ({stop.reason}), but the other workers did not agree within "
        f"{stop.seconds:.0f} s: ended without a new checkpoint"
    )
    message = explain(error, options)
    directory.event("error", message=message)
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(WORKER_LOST)
