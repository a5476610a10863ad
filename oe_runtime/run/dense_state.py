"""What a checkpoint holds of a model besides the rows of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from oe_runtime.spec import TableSpec


class DenseState(Protocol):
    """The weights and the optimizer's variables of one model in training."""

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """The model's tables by name."""
        ...

    def values(self) -> dict[str, NDArray[Any]]:
        """Return copies of all variables, which later steps do not change."""
        ...

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return copies of those of all variables that a served model has."""
        ...

    def write(self, arrays: Mapping[str, NDArray[Any]], directory: Path) -> None:
        """Write the result of `values` as files in a checkpoint's directory."""
        ...

    def load(self, directory: Path, content: bytes | None = None) -> None:
        """Read those files, all or nothing. Raises CheckpointError for what does not fit.

        `content` is that of dense.npz, where another worker has read it; `directory` is for messages then.
        """
        ...
