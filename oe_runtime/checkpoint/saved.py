"""A checkpoint opened with the headers of its table files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import oe_runtime._core as _core
from oe_runtime.checkpoint import store
from oe_runtime.errors import CheckpointError


@dataclass(frozen=True)
class Saved:
    """A published checkpoint, or the table files in another directory."""

    path: Path
    found: store.Checkpoint | None
    files: Mapping[str, Sequence[Mapping[str, Any]]]  # by table: the headers of its files, by server
    problems: Sequence[str] = field(default=())

    @classmethod
    def open(cls, path: Path) -> Saved:
        """Read manifest and headers; ``problems`` are those of unreadable table files."""
        found = store.read(path) if (path / store.MANIFEST).exists() else None
        files: dict[str, list[Mapping[str, Any]]] = {}
        names, problems = store.table_files(path)
        if found is None and not names and not problems:
            raise CheckpointError(f"{path} is not a checkpoint: it has no {store.MANIFEST}")
        for file in names:
            try:
                info = {"file": file.name, **json.loads(_core.table_file(str(file)))}
            except CheckpointError as error:
                problems.append(str(error))
                continue
            files.setdefault(info["table"], []).append(info)
        for name in {} if found is None else found.manifest["files"]:
            if name.endswith(store.WITH_ROWS) and not (path / name).exists():
                problems.append(f"{path / name}: No such file or directory; the checkpoint is not whole")
        for of_table in files.values():
            of_table.sort(key=lambda info: int(info["server"]))
        return cls(path, found, dict(sorted(files.items())), problems)

    @cached_property
    def directories(self) -> list[str]:
        """Its bases' directories, oldest first, and its own. Raises CheckpointError for a missing base."""
        paths = [self.path] if self.found is None else store.chain(self.path)
        return [str(path) for path in paths]

    def chains(self, table: str) -> list[list[str]]:
        """Return each server's files of a table, oldest first. Raises CheckpointError for a missing one."""
        return _core.table_chains(self.directories, table)

    @property
    def pool(self) -> Mapping[str, Any] | None:
        """The servers' storage that holds the rows of a run's checkpoint, if they are not in files."""
        pool = None if self.found is None else self.found.manifest.get("pool")
        return pool if isinstance(pool, dict) else None

    @property
    def others(self) -> dict[str, int]:
        """The files that belong to no table, with their bytes in the manifest."""
        listed = {} if self.found is None else self.found.manifest["files"]
        return {
            name: item["bytes"]
            for name, item in listed.items()
            if not name.endswith((*store.WITH_ROWS, ".oet.filter"))
        }

    def require(self) -> Saved:
        """Return itself. Raises CheckpointError if a table file cannot be read."""
        for problem in self.problems:
            raise CheckpointError(problem)
        return self

    def require_rows(self) -> Saved:
        """Return itself. Raises CheckpointError also if its rows are not in files."""
        if self.pool is not None:
            raise CheckpointError(
                f"{self.path} has its rows in {describe_storage(self.pool)}, not in files; with "
                "training_export_checkpoints: N every Nth checkpoint of a job has its rows in files"
            )
        return self.require()


def checkpoints_at(path: Path) -> list[Path]:
    """List the checkpoints of a run or of its ``checkpoints`` directory, else `path` itself."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: " + ("not a directory" if path.exists() else "there is no such path"))
    for directory in (path, path / "checkpoints"):
        if found := store.published(directory):
            return found
    return [path]


def describe_storage(pool: Mapping[str, Any]) -> str:
    """Describe the storage that holds a checkpoint's rows, from `pool` in its manifest."""
    servers = pool.get("servers")
    several = "" if servers == 1 else "s"
    return f"the storage of {servers} server{several} ({pool.get('storage')})"
