"""Files of tables as those of tables with other dtypes, for as long as they are restored."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import oe_runtime._core as _core
from oe_runtime.errors import CheckpointError
from oe_runtime.spec import TableSpec


@contextmanager
def converted(directories: Sequence[str], specs: Iterable[TableSpec], servers: int) -> Iterator[list[str]]:
    """Yield a directory with the rows of the tables in the last of `directories`, in the dtypes of `specs`.

    It lies beside that one, for servers that see both, and is removed afterwards. Raises ``CheckpointError``
    naming the table and the key of a number that the new dtype does not have.
    """
    if not directories:
        raise CheckpointError("no directory is given to restore from")
    target = Path(directories[-1]).parent / f".converted-{uuid.uuid4().hex}"
    try:
        target.mkdir()  # not by tempfile, whose directories servers of other users cannot read
    except OSError as error:
        raise CheckpointError(f"cannot write the converted copy {target}: {error.strerror}") from None
    try:
        for spec in specs:
            chains = _core.table_chains(list(directories), spec.name)
            state = spec.state_dtype or ("" if spec.dtype == "float64" else "float32")
            _core.reshard_table(chains, spec.name, str(target), servers, spec.dtype, state)
        yield [str(target)]
    finally:
        shutil.rmtree(target, ignore_errors=True)
