"""The trainer's ``metrics.jsonl``: one event a line, followed as it grows or summed up."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class MetricsTail:
    """New whole lines of ``metrics.jsonl``, as they come."""

    path: Path
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.offset = self.path.stat().st_size

    def read(self) -> list[Event]:
        """Events since the last call; lines that are not JSON objects are left out."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""  # written anew
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: bytes) -> Event | None:
    """One line of ``metrics.jsonl``; None when it is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
