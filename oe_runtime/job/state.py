"""What the checkpoints of a script's run hold besides rows: a model's variables, and where its loop is."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from oe_runtime.spec import TableSpec
from oe_runtime.support import dense_file
from oe_runtime.training.dense_state import DenseState
from oe_runtime.training.ranks import Ranks

FILE = "script.npz"  # what the loop needs to go on, beside dense.npz
_PREFIX = "script/"


class ScriptState:
    """A model's DenseState, with `extra` arrays of its loop."""

    def __init__(self, model: Any, dense: DenseState) -> None:
        self.model = model
        self._dense = dense
        self.loaded: dict[str, NDArray[Any]] = {}  # the extra arrays of the checkpoint that was loaded

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the loop's arrays; for subclasses."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return what the model and its optimizer are told, as JSON has it, by name; for subclasses."""
        return {}

    def equal_values(self) -> Mapping[str, NDArray[Any]]:
        """Return arrays that every step leaves the same in all workers; for subclasses."""
        return {}

    def gather(self, ranks: Ranks) -> None:
        """Before a checkpoint: let worker 0 have what the others add to it; for subclasses."""

    def begin_epoch(self, *, resumed: bool) -> None:
        """Before the data of an epoch; for subclasses."""

    def skipped(self) -> None:
        """After the batches that were trained before the checkpoint; for subclasses."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """See DenseState."""
        return self._dense.tables

    def values(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        return self._dense.values() | {_PREFIX + name: value for name, value in self.extra().items()}

    def write(self, arrays: Mapping[str, NDArray[Any]], directory: Path) -> None:
        """See DenseState."""
        extra = {name: value for name, value in arrays.items() if name.startswith(_PREFIX)}
        self._dense.write({name: v for name, v in arrays.items() if name not in extra}, directory)
        if extra:
            plain = {name.removeprefix(_PREFIX): value for name, value in extra.items()}
            dense_file.write(plain, directory, FILE)

    def load(self, directory: Path) -> None:
        """See DenseState. Workers other than worker 0 get the loop's arrays by `share_extra`."""
        self._dense.load(directory)
        self.load_extra(directory)

    def load_extra(self, directory: Path) -> None:
        """Read the loop's arrays."""
        path = directory / FILE
        self.loaded = dense_file.read(path) if path.exists() else {}

    def share_extra(self, ranks: Ranks, directory: Path) -> None:
        """Give the other workers the loop's arrays of the checkpoint that worker 0 has loaded."""
        path = directory / FILE
        mine = path.read_bytes() if ranks.rank == 0 and path.exists() else b""
        if (found := ranks.share(mine)) and ranks.rank:
            with tempfile.TemporaryDirectory() as temporary:
                (Path(temporary) / FILE).write_bytes(found)
                self.load_extra(Path(temporary))
