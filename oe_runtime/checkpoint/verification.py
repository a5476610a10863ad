"""What is wrong with a checkpoint, or with the pools of a server that is not running."""

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
    """Every problem of a table file, a checkpoint, all checkpoints of a run, or pools, a line each.

    Of pools (``pmem_libpmem``, ``dram_pmem``), `path` is the storage directory of servers, or one above it.
    """
    if path.is_file():
        return list(of_file(path))
    places = checkpoints_at(path)
    if places == [path] and (problems := of_pools(path)) is not None:
        return problems
    return [problem for place in places for problem in problems_of(place)]


def problems_of(place: Path) -> list[str]:
    """The same of one checkpoint. Pools, which a shared directory may have of anybody, are not looked for."""
    try:
        return list(dict.fromkeys(of_checkpoint(Saved.open(place))))
    except CheckpointError as error:
        return [str(error)]


def of_checkpoint(saved: Saved) -> Iterable[str]:
    """A line each that names file and field; every checksum is compared."""
    listed: set[str] = set()
    if saved.found is not None:
        yield from store.problems(saved.found)
        listed = set(saved.found.manifest["files"])
        for file in sorted(saved.path.glob("*.oet")):
            if file.name not in listed:
                yield f"{file} is not in {store.MANIFEST}: files"
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
                yield from _of_entry(saved, entry)


def of_file(path: Path) -> Iterable[str]:
    """The same of one table file."""
    return _failure(partial(_core.verify_table_file, str(path)))


def of_pools(path: Path) -> list[str] | None:
    """The same of all pools below a directory, every row included; None where there is none.

    Raises StorageError for a directory that a server uses.
    """
    directories = sorted({file.parent for file in path.rglob("oe-*.pool")})
    if not directories:
        return None
    return [problem for directory in directories for problem in _core.verify_pools(str(directory))]


def _of_entry(saved: Saved, entry: Mapping[str, Any]) -> Iterable[str]:
    """Where the manifest says something else of a table file than its header."""
    infos = (info for files in saved.files.values() for info in files)
    info = next((info for info in infos if info["file"] == entry["file"]), None)
    if info is None:
        return  # it cannot be read, which was said
    where = f"{saved.path / store.MANIFEST}: tables: {entry['file']}"
    said = {**entry}
    counts = said.pop("filter", None)
    for field, value in fields(said).items():
        if value != (there := fields(info).get(field)):
            yield f"{where}: {field} is {value!r}, but the file has {there!r}"
    if counts is not None:
        there = _filter_of(saved, info)
        if counts != there:
            yield f"{where}: filter is {counts!r}, but there is {there!r}"


def _filter_of(saved: Saved, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    file = saved.path / f"{info['file']}.filter"
    try:
        with file.open("rb") as stream:
            stream.seek(-8, os.SEEK_END)
            checksum = int.from_bytes(stream.read(), "little")
            return {"file": file.name, "bytes": stream.tell(), "checksum": f"{checksum:016x}"}
    except OSError:
        return None


def fields(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Of nested objects, the values by their dotted names."""
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
