"""Damage in checkpoints, and in the pools of servers that are not running."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import oe_runtime._core as _core
from oe_runtime.checkpoint import store
from oe_runtime.checkpoint.saved import Saved, checkpoints_at
from oe_runtime.errors import CheckpointError


def verify(path: Path) -> list[str]:
    """Return every problem of a table file, a checkpoint, all checkpoints of a run, or pools, as lines.

    For pools (``pmem_libpmem``, ``dram_pmem``) and logs (``dram_ssd``), `path` is the storage directory of
    servers, or one above it.
    """
    if path.is_file():
        return list(_failure(partial(_core.verify_table_file, str(path))))
    places = checkpoints_at(path)
    if places == [path] and (problems := storage_problems(path)) is not None:
        return problems
    return [problem for place in places for problem in problems_of(place)]


def problems_of(place: Path) -> list[str]:
    """Return every problem of one checkpoint. Pools in a shared directory are not looked for."""
    try:
        return list(dict.fromkeys(checkpoint_problems(Saved.open(place))))
    except CheckpointError as error:
        return [str(error)]


def checkpoint_problems(saved: Saved) -> Iterable[str]:
    """Yield lines that name file and field; every checksum is compared."""
    listed: set[str] = set()
    if saved.found is not None:
        yield from store.problems(saved.found)
        listed = set(saved.found.manifest["files"])
        for file in sorted(file for end in store.WITH_ROWS for file in saved.path.glob(f"*{end}")):
            if file.name not in listed:
                yield f"{file} is not in {store.MANIFEST}: files"
        listed.update(info["file"] for files in saved.files.values() for info in files)
    yield from saved.problems
    for table, files in saved.files.items():
        for info in files:
            yield from _failure(partial(_core.verify_table_file, str(saved.path / info["file"])))
        yield from _failure(partial(saved.chains, table))
    if saved.found is not None:
        tables = saved.found.manifest.get("tables", [])
        for entry in tables if isinstance(tables, list) else [tables]:
            name = entry.get("file") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or name not in listed:
                yield f"{saved.path / store.MANIFEST}: tables: {name!r} is not in files"
            else:
                yield from _entry_problems(saved, entry)


def storage_problems(path: Path) -> list[str] | None:
    """Return the problems of all pools and logs below a directory, every row included; None without any.

    Raises StorageError for a directory that a server uses.
    """
    kinds = (("oe-*.pool", _core.verify_pools), ("oe-*.log", _core.verify_logs))
    found = [
        (directory, look)
        for pattern, look in kinds
        for directory in sorted({file.parent for file in path.rglob(pattern)})
    ]
    if not found:
        return None
    return [problem for directory, look in found for problem in look(str(directory))]


def _entry_problems(saved: Saved, entry: Mapping[str, Any]) -> Iterable[str]:
    """Yield where the manifest differs from the header of a table file."""
    infos = (info for files in saved.files.values() for info in files)
    info = next((info for info in infos if info["file"] == entry["file"]), None)
    if info is None:
        return  # unreadable, which is reported already
    where = f"{saved.path / store.MANIFEST}: tables: {entry['file']}"
    said = {**entry}
    counts = said.pop("filter", None)
    for field, value in fields(said).items():
        if value != (there := fields(info).get(field)):
            yield f"{where}: {field} is {value!r}, but the file has {there!r}"
    if counts is not None:
        there = _filter_entry(saved, info)
        if counts != there:
            yield f"{where}: filter is {counts!r}, but there is {there!r}"


def _filter_entry(saved: Saved, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    file = saved.path / f"{info['file']}.filter"
    try:
        with file.open("rb") as stream:
            stream.seek(-8, os.SEEK_END)
            checksum = int.from_bytes(stream.read(), "little")
            return {"file": file.name, "bytes": stream.tell(), "checksum": f"{checksum:016x}"}
    except OSError:
        return None


def fields(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to values by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            flat |= fields(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _failure(work: Callable[[], object]) -> Iterable[str]:
    try:
        work()
    except CheckpointError as error:
        yield str(error)
