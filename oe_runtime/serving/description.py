"""What a SavedModel without rows says of itself, in a file beside it.

`DistributedModel.save_serving_model` writes it; it has two signatures, `ids` (none without lookups) and
`forward`, with inputs `input_0`, `input_1`… in the order of the description, and `weights`. The outputs of
`ids` are `ids_0`…; `forward` also takes `rows_0`…, the rows of a group of lookups, one after the other, and
`sizes`, how many each lookup has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oe_runtime.errors import OeError
from oe_runtime.spec import TableSpec

FILE = "oe_runtime.json"
FORMAT = 2


class ServingError(OeError):
    """A model that cannot be served, or not with these rows; names the file and the field."""


class InputError(ServingError):
    """A request that the model cannot answer; names the input and what is wrong with it."""


@dataclass(frozen=True)
class Tensor:
    """An input or output; `shape` has None for every size that is free."""

    name: str
    dtype: str
    shape: Sequence[int | None] | None


@dataclass(frozen=True)
class Lookup:
    """Rows that `forward` takes: those of `table`, of the ids that `ids` returns at this place."""

    table: str
    ids: int


@dataclass(frozen=True)
class Description:
    """What goes in and comes out, and which rows are needed for it."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    tables: Sequence[Mapping[str, Any]]  # specifications, every default filled in
    lookups: Sequence[Lookup]
    groups: Sequence[Sequence[int]]  # the lookups whose rows `forward` takes as one tensor
    weights: Sequence[str]  # their names in dense.npz, in the order of the SavedModel's `weights`

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Description:
        """Raises ServingError naming the file and what is wrong with it."""
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            if fields.pop("format") != FORMAT:
                raise ServingError(f"{file}: format is another than {FORMAT}, which this version reads")
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

    def specs(self) -> list[TableSpec]:
        """The tables."""
        return [TableSpec.from_json(spec) for spec in self.tables]
