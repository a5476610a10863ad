"""The input of one of several workers, as the others compare it with theirs."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from oe_runtime.data import Source
from oe_runtime.data.identity import InputFile, difference


@dataclass(frozen=True)
class WorkerInput:
    """Whose input it is, and which."""

    rank: int
    host: str
    files: Sequence[InputFile]

    @classmethod
    def of(cls, rank: int, source: Source) -> WorkerInput:
        """That of this process. DataError for a file that cannot be read."""
        return cls(rank, socket.gethostname(), source.identity())

    def to_json(self) -> str:
        """As text for the other workers."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerInput:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(values["rank"], values["host"], [InputFile(*file) for file in values["files"]])

    def problem(self, first: WorkerInput) -> str:
        """Why these two cannot train together, and what to do; empty if they can."""
        generated = any(file.name.startswith("generate:") for file in [*self.files, *first.files])
        found = difference(
            self.files, first.files, self._name, first._name, unit="rows" if generated else "bytes"
        )
        if not found:
            return ""
        if generated:
            return f"--data: {found}; start all workers with the same rows and packages"
        return f"--data: {found}; all workers need the same files: copy them from one host to the others"

    @property
    def _name(self) -> str:
        return f"worker {self.rank} (host {self.host})"
