"""The description of a SavedModel without rows, in a file beside it.

`DistributedModel.save_serving_model` writes it. The SavedModel has two signatures, `ids` (absent without
lookups) and `forward`, with inputs `input_0`, `input_1`… in the order of the description, and `weights`. The
outputs of `ids` are `ids_0`…. `forward` also takes `rows_0`…, the rows of a group of lookups, one after the
other, and `sizes`, the number of ids per lookup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oe_runtime.errors import ServingError

FILE = "oe_runtime.json"
PROGRAM = "model.pt2"  # of PyTorch, in place of a SavedModel
ROWS = "rows"  # the directory of its tables
LENGTHS = ".lengths"  # after the name of an input of lists: the input that has their lengths
FORMAT = 2


@dataclass(frozen=True)
class Tensor:
    """An input or output; `shape` has None for every free size.

    An example of one with `lengths` is a list of any length. Arrays have the elements of all lists in one
    dimension, and the input of that name the length of each list.
    """

    name: str
    dtype: str
    shape: Sequence[int | None] | None
    lengths: str | None = None


SIGNATURE = "serving_default"  # that requests mean without another


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives by one of its names."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


@dataclass(frozen=True)
class Lookup:
    """Rows for `forward`: those of `table`, for the ids at this position in the outputs of `ids`."""

    table: str
    ids: int


@dataclass(frozen=True)
class Description:
    """Inputs, outputs, and the rows that they need."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    tables: Sequence[Mapping[str, Any]]  # specifications, every default filled in
    lookups: Sequence[Lookup]
    groups: Sequence[Sequence[int]]  # the lookups whose rows `forward` takes as one tensor
    weights: Sequence[str]  # their names in dense.npz, in the order of the SavedModel's `weights`

    def write(self, file: Path) -> None:
        """Write it as JSON."""
        # Earlier versions refuse a field that they do not know, and read models without lists.
        fields = asdict(
            self, dict_factory=lambda pairs: {k: v for k, v in pairs if (k, v) != ("lengths", None)}
        )
        file.write_text(json.dumps({"format": FORMAT, **fields}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Description:
        """Read it. Raises ServingError naming the file and the problem."""
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            if fields.pop("format") != FORMAT:
                raise ServingError(f"{file}: this version reads format {FORMAT} only")
            return cls(
                inputs=[Tensor(**tensor) for tensor in fields.pop("inputs")],
                outputs=[Tensor(**tensor) for tensor in fields.pop("outputs")],
                lookups=[Lookup(**lookup) for lookup in fields.pop("lookups")],
                **fields,
            )
        except OSError as error:
            raise ServingError(f"{file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ServingError(f"{file} is damaged: {error}") from error
