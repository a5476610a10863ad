"""The input of one of several workers, for comparison with the others'."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from oe_runtime.data import Source
from oe_runtime.data.identity import InputFile, difference


@dataclass(frozen=True)
class WorkerInput:
    """A worker and its input."""

    rank: int
    host: str
    files: Sequence[InputFile]

    @classmethod
    def read(cls, rank: int, source: Source) -> WorkerInput:
        """Read the input of this process. Raises DataError for an unreadable file."""
        return cls(rank, socket.gethostname(), source.identity())

    def to_json(self) -> str:
        """Return it as text for the other workers."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerInput:
        """Return the inverse of `to_json`."""
        values = json.loads(text)
        return cls(values["rank"], values["host"], [InputFile(*file) for file in values["files"]])

    def problem(self, first: WorkerInput) -> str:
        """Return why these two cannot train together, and what to do; empty if they can."""
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
