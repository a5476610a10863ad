"""What the checkpoints of a script's run hold besides rows: a model's variables, and where its loop is."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.run.dense_state import DenseState
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.run_directory import RunError
from oe_runtime.spec import TableSpec
from oe_runtime.support import dense_file

FILE = "script.npz"  # what the loop needs to go on, beside dense.npz
_PREFIX = "script/"


class ScriptState:
    """A model's DenseState, with `extra` arrays of its loop."""

    def __init__(self, model: Any, dense: DenseState) -> None:
        self.model = model
        self._dense = dense
        self.loaded: dict[str, NDArray[Any]] = {}  # the loop's arrays of the checkpoint that was loaded
        self._rank = 0
        self._gathered: dict[str, NDArray[Any]] = {}  # the other workers' own arrays

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the loop's arrays that are the same in all workers; for subclasses."""
        return {}

    def own(self) -> Mapping[str, NDArray[Any]]:
        """Return copies of the loop's arrays that each worker has of its own; for subclasses."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return what the model and its optimizer are told, as JSON has it, by name; for subclasses."""
        return {}

    def equal_values(self) -> Mapping[str, NDArray[Any]]:
        """Return arrays that every step leaves the same in all workers; for subclasses."""
        return {}

    def gather(self, ranks: Ranks) -> None:
        """Before a checkpoint: let worker 0 have the other workers' own arrays."""
        self._rank, self._gathered = ranks.rank, {}
        for rank in range(1, ranks.count):
            mine = io.BytesIO()
            if rank == ranks.rank:
                np.savez(mine, **self.own())  # type: ignore[arg-type]
            found = ranks.share(mine.getvalue(), rank)
            if ranks.rank == 0:
                with np.load(io.BytesIO(found), allow_pickle=False) as file:
                    self._gathered |= {f"{name}/{rank}": file[name] for name in file.files}

    def loaded_own(self, name: str) -> NDArray[Any] | None:
        """Return this worker's array of `own` in the checkpoint that was loaded, if there is one.

        A worker that the checkpoint has none of takes worker 0's.
        """
        return self.loaded.get(f"{name}/{self._rank}", self.loaded.get(name))

    def gradients(self) -> int:
        """Return how many values of dense gradients the workers sum in each step; for subclasses."""
        return 0

    def bind(self, workers: Any) -> None:
        """Let the dense weights be those of asynchronous workers. Raises RunError; for subclasses."""
        raise RunError(
            "--workqueue: asynchronous workers train models of Keras 3 and PyTorch; leave the flag out for "
            "this one"
        )

    def begin_window(self) -> None:
        """Forget the steps so far, for `window`; for subclasses."""

    def window(self, ranks: Ranks, metrics: Mapping[str, Any]) -> tuple[float, float | None]:
        """Return the mean loss and AUC of all workers' steps since the last call, by the model's metrics.

        `metrics` are this worker's. Raises RunError for a model without; for subclasses.
        """
        raise RunError("only Keras models have metrics of their own: return the mean loss of the step's rows")

    @property
    def batches_ahead(self) -> int:
        """How many batches beyond the present one `announce` takes; for subclasses."""
        return 0

    def announce(self, batch: Any, following: Sequence[Any]) -> None:
        """Before a step of `batch`: note what the next train on, to prefetch their rows; for subclasses."""

    def lay_out_ahead(self, lay_out: Callable[[], list[Any]]) -> list[Any]:
        """Return the layouts of the next batches, or none where that would change results; for subclasses."""
        return lay_out()

    def reads_ahead(self, data: Any) -> bool:
        """Whether to read a program's own `data` a batch ahead, for `announce`; for subclasses."""
        return False

    def begin_epoch(self, data: Any, done: int | None) -> None:
        """Before an epoch of the program's own `data`; for subclasses.

        `done`: its batches that were trained before the checkpoint; None if the run does not go on here.
        """

    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step since the last call; for subclasses that can tell."""
        return True

    def fit(self, loop: Any, course: Any, fit: Callable[[int], Any], epochs: int) -> Any:
        """See oe_runtime.run.loops.Loop.fit; for subclasses. Raises RunError."""
        raise RunError(
            "loop.fit is for PyTorch: of a Keras model call fit itself, with "
            "callbacks=[embed.JobCallback(job)]"
        )

    def skipped(self) -> None:
        """After the batches that were trained before the checkpoint; for subclasses."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """See DenseState."""
        return self._dense.tables

    def values(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        arrays = {**self.own(), **self._gathered, **self.extra()}
        return self._dense.values() | {_PREFIX + name: value for name, value in arrays.items()}

    def weights(self) -> dict[str, NDArray[Any]]:
        """See DenseState."""
        return self._dense.weights()

    def write(self, arrays: Mapping[str, NDArray[Any]], directory: Path) -> None:
        """See DenseState."""
        extra = {name: value for name, value in arrays.items() if name.startswith(_PREFIX)}
        self._dense.write({name: v for name, v in arrays.items() if name not in extra}, directory)
        if extra:
            plain = {name.removeprefix(_PREFIX): value for name, value in extra.items()}
            dense_file.write(plain, directory, FILE)

    def load(self, directory: Path, content: bytes | None = None) -> None:
        """See DenseState. Workers other than worker 0 get the loop's arrays by `share_extra`."""
        self._dense.load(directory, content)
        path = directory / FILE
        self.load_extra(dense_file.read(path) if content is None and path.exists() else {})

    def load_extra(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Take the loop's arrays of a checkpoint."""
        self.loaded = arrays

    def share_extra(self, ranks: Ranks, directory: Path) -> None:
        """Give the other workers the loop's arrays of the checkpoint that worker 0 has loaded."""
        self._rank = ranks.rank
        path = directory / FILE
        mine = path.read_bytes() if ranks.rank == 0 and path.exists() else b""
        if (found := ranks.share(mine)) and ranks.rank:
            self.load_extra(dense_file.read(path, found))
