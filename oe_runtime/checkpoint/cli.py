"""``python -m oe_runtime.checkpoint``: show, verify, compare and rewrite checkpoints, without a server.

A directory that ``Client.save`` wrote works like a checkpoint, except for ``reshard``. Exit status: 0
success; 1 an error, or problems found by ``verify``; 2 differences found by ``diff``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import oe_runtime._core as _core
from oe_runtime.checkpoint import store
from oe_runtime.checkpoint.remote import Mirror
from oe_runtime.checkpoint.saved import Saved, checkpoints_at, describe_storage
from oe_runtime.checkpoint.verification import fields, problems_of, verify
from oe_runtime.errors import CheckpointError, OeError
from oe_runtime.spec import DTYPES, STATE_DTYPES
from oe_runtime.support import remote_files
from oe_runtime.support.argument_types import count

_MEMORY = 1024  # MiB for rows in a comparison
_PATIENCE = 600.0  # seconds that `reshard` waits for a run that publishes in the same directory
MOST_SERVERS = 1024  # each has an open file while they are written
_ALL = sys.maxsize  # how many checkpoints `reshard` keeps
_ENTRY = ("file", "table", "server", "servers", "rows", "version", "bytes", "checksum", "spec")


# ---- inspect


def inspect(path: Path) -> dict[str, Any]:
    """Return the content of a table file, a checkpoint, or every checkpoint of a run, as JSON values."""
    if path.is_file():
        return {"file": str(path), **json.loads(_core.table_file(str(path)))}
    places = checkpoints_at(path)
    if places != [path]:
        return {"path": str(path), "checkpoints": [_summary(Saved.open(place)) for place in places]}
    return _summary(Saved.open(path).require())


def _summary(saved: Saved) -> dict[str, Any]:
    manifest = {} if saved.found is None else saved.found.manifest
    base = manifest.get("base")
    return {
        "path": str(saved.path),
        "step": manifest.get("step"),
        "format": manifest.get("format"),
        "base": base and base["name"],
        "pool": saved.pool,
        "tables": [_table(name, files) for name, files in saved.files.items()],
        "other_files": saved.others,
        "problems": list(saved.problems),
    }


def _table(name: str, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    increments = [info for info in files if "base" in info]
    return {
        "name": name,
        **{key: value for key, value in files[0]["spec"].items() if key != "name"},
        "rows": sum(info["rows"] for info in files),
        "tombstones": sum(info["tombstones"] for info in increments),
        "increment": bool(increments),
        "servers": files[0]["servers"],
        "version": files[0]["version"],
        "bytes": sum(info["bytes"] for info in files),
        "formats": sorted({info["format"] for info in files}),
    }


def _show(found: Mapping[str, Any]) -> Iterable[str]:
    if "file" in found:
        yield f"{found['file']}: table {found['table']}, server {found['server']} of {found['servers']}"
        yield f"  format {found['format']}, version {found['version']}, checksum {found['checksum']}"
        if "base" in found:
            yield f"  an increment on the file with checksum {found['base']}"
            yield f"  {found['tombstones']} tombstones"
        yield f"  {found['rows']} rows of {found['row_bytes']} bytes, {found['bytes']} bytes"
        yield f"  {_spec(found['spec'])}"
    elif "checkpoints" in found:
        rows: list[Sequence[str]] = [("checkpoint", "step", "tables", "rows", "servers", "bytes", "")]
        for item in found["checkpoints"]:
            tables = item["tables"]
            size = sum(table["bytes"] for table in tables) + sum(item["other_files"].values())
            servers = ",".join(map(str, sorted({table["servers"] for table in tables})))
            note = f"increment on {item['base']}" if item["base"] else ""
            if item["pool"]:
                note = f"rows in {describe_storage(item['pool'])}"
            if item["problems"]:
                note = "damaged; see oeprov checkpoint verify"
            total = sum(table["rows"] for table in tables)
            name = Path(item["path"]).name
            rows.append(tuple(map(str, (name, item["step"], len(tables), total, servers, size, note))))
        yield from _columns(rows)
    else:
        step = "" if found["step"] is None else f": step {found['step']}, format {found['format']}"
        base = f", an increment on {found['base']}" if found["base"] else ""
        yield found["path"] + step + base
        rows = [("table", "dim", "dtype", "rows", "servers", "bytes", "format", "optimizer", "initializer")]
        for table in found["tables"]:
            total = str(table["rows"]) + (f" (-{table['tombstones']})" if table["increment"] else "")
            formats = ",".join(map(str, table["formats"]))
            sizes = (table["dim"], _dtypes(table), total, table["servers"], table["bytes"], formats)
            rows.append(tuple(map(str, (table["name"], *sizes, *map(_flat, _two(table))))))
        yield from _columns(rows)
        for name, size in found["other_files"].items():
            yield f"{name}: {size} bytes"
        if pool := found["pool"]:
            rows_of = pool.get("rows")
            counted = isinstance(rows_of, dict) and all(isinstance(rows, int) for rows in rows_of.values())
            in_all = f": {sum(rows_of.values())} rows of {len(rows_of)} tables" if counted else ""
            yield f"rows in {describe_storage(pool)}{in_all}"


def _two(spec: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return spec["optimizer"], spec["initializer"]


def _dtypes(spec: Mapping[str, Any]) -> str:
    state = f" (state {spec['state_dtype']})" if "state_dtype" in spec else ""
    return f"{spec['dtype']}{state}"


def _flat(settings: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in settings.items() if name != "name")
    return f"{settings['name']} ({values})" if values else str(settings["name"])


def _spec(spec: Mapping[str, Any]) -> str:
    index = spec["index"] + (f" of {spec['input_dim']} keys" if spec["index"] == "array" else "")
    return f"dim {spec['dim']}, {_dtypes(spec)}, {index}, " + ", ".join(map(_flat, _two(spec)))


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


# ---- diff


def diff(before: Path, after: Path, memory: int = _MEMORY << 20) -> dict[str, Any]:
    """Return the differences of two checkpoints, of any numbers of servers, as JSON values."""
    left, right = (Saved.open(_one(path)).require_rows() for path in (before, after))
    tables: dict[str, dict[str, Any]] = {}
    for name in sorted({*left.files, *right.files}):
        if name not in left.files or name not in right.files:
            tables[name] = {"only": "before" if name in left.files else "after"}
            continue
        rows = json.loads(_core.compare_tables(left.chains(name), right.chains(name), memory))
        specs = [fields(saved.files[name][0]["spec"]) for saved in (left, right)]
        changed = {
            key: [spec.get(key) for spec in specs]
            for key in sorted({*specs[0], *specs[1]})
            if specs[0].get(key) != specs[1].get(key)
        }
        tables[name] = {"spec": changed, **rows}
    return {
        "before": str(left.path),
        "after": str(right.path),
        "tables": tables,
        "files": _files(left, right),
    }


def _one(path: Path) -> Path:
    """Return the checkpoint itself, or the newest one of a run."""
    return checkpoints_at(path)[-1]


def _files(left: Saved, right: Saved) -> list[str]:
    """Return the other files whose checksums differ or that only one side has."""
    if left.found is None or right.found is None:
        return []
    sums = [
        {name: saved.found.manifest["files"][name]["sha256"] for name in saved.others}  # type: ignore[union-attr]
        for saved in (left, right)
    ]
    return sorted(name for name in {*sums[0], *sums[1]} if sums[0].get(name) != sums[1].get(name))


def _differs(found: Mapping[str, Any]) -> bool:
    counts = ("only_before", "only_after", "changed")
    tables = found["tables"].values()
    return bool(found["files"]) or any(
        "only" in item or item["spec"] or any(item[count] for count in counts) for item in tables
    )


def _show_diff(found: Mapping[str, Any]) -> Iterable[str]:
    header = ("table", "rows", "only before", "only after", "changed", "largest: weights", "state")
    rows: list[Sequence[str]] = [header]
    notes: list[str] = []
    for name, item in found["tables"].items():
        if "only" in item:
            notes.append(f"table {name} is only in {found[item['only']]}")
            continue
        notes += [f"table {name}: {key} was {old}, is {new}" for key, (old, new) in item["spec"].items()]
        total = str(item["rows"][0]) + (f" → {item['rows'][1]}" if item["rows"][0] != item["rows"][1] else "")
        counts = [str(item[key]) for key in ("only_before", "only_after", "changed")]
        rows.append((name, total, *counts, *(f"{float(item[key]):g}" for key in ("weights", "state"))))
    yield from _columns(rows)
    yield from notes
    yield from (f"{name} differs" for name in found["files"])
    if not _differs(found):
        yield "no difference"


# ---- reshard


def reshard(
    path: Path, servers: int, output: Path | None = None, *, dtype: str = "", state_dtype: str = ""
) -> Path:
    """Publish a checkpoint again, with its tables as `servers` servers would save them; return its path.

    With `dtype` and `state_dtype`, the tables' rows and optimizer's states get these dtypes. Goes under
    `output`, or beside the old one as a newer checkpoint of the same step. Increments become complete. The
    old checkpoint stays. Raises CheckpointError for one with problems or without rows; nothing is published
    then.
    """
    if not 1 <= servers <= MOST_SERVERS:
        raise CheckpointError(f"{servers} servers are not between 1 and {MOST_SERVERS}")
    path = _one(path)
    if problems := problems_of(path):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{problems[0]}{more}; nothing was written")
    saved = Saved.open(path).require_rows()
    if saved.found is None:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {store.MANIFEST}")
    for base in saved.directories[:-1]:
        for problem in problems_of(Path(base)):
            raise CheckpointError(f"{problem}; nothing was written")
    manifest = saved.found.manifest

    def write(target: Path) -> Mapping[str, Any]:
        for name in saved.others:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path / name, target / name)
        tables: list[dict[str, Any]] = []
        for name in saved.files:
            chains = saved.chains(name)
            written = json.loads(_core.reshard_table(chains, name, str(target), servers, dtype, state_dtype))
            tables += [{key: entry[key] for key in _ENTRY} for entry in written]
        kept = {key: manifest[key] for key in manifest if key not in ("format", "step", "base", "files")}
        return {**kept, "tables": tables}

    directory = output or path.resolve().parent
    return store.publish(directory, saved.found.step, write, keep=_ALL, patience=_PATIENCE)


# ---- the command line


def _place(text: str) -> str:
    try:
        remote_files.is_remote(text)
    except remote_files.InvalidUrl as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oe_runtime.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("inspect", "show its content"), ("verify", "compare every checksum")):
        command = commands.add_parser(name, help=words)
        command.add_argument(
            "path",
            type=_place,
            help="a checkpoint, a run's checkpoints, or one table file; verify: or a storage directory; "
            "checkpoints also by URL: s3://…",
        )
        command.add_argument("--json", action="store_true")
    command = commands.add_parser("diff", help="compare two checkpoints")
    command.add_argument("before", type=_place)
    command.add_argument("after", type=_place)
    command.add_argument("--memory", type=count(1), default=_MEMORY, metavar="MIB", help="for rows")
    command.add_argument("--json", action="store_true")
    command = commands.add_parser("reshard", help="rewrite a checkpoint for another number of servers")
    command.add_argument("path", type=_place)
    command.add_argument("--servers", type=int, required=True)
    command.add_argument("--dtype", default="", choices=DTYPES, help="of the rows; default: as they are")
    command.add_argument("--state-dtype", default="", choices=STATE_DTYPES, help="of the optimizer's state")
    command.add_argument("--output", type=_place)
    command.add_argument("--json", action="store_true")
    return parser


def _run(options: argparse.Namespace, mirror: Mirror) -> int:
    if options.command == "inspect":
        found = inspect(mirror.headers(options.path))
        lines, code = _show(found), 0
    elif options.command == "verify":
        path, problems = mirror.all(options.path)
        if not problems or store.published(path):
            problems = [*problems, *verify(path)]
        found = {"path": options.path, "problems": problems}
        lines, code = problems or [f"{options.path}: no problem found"], int(bool(problems))
    elif options.command == "diff":
        before, after = (mirror.newest(name) for name in (options.before, options.after))
        found = diff(before, after, options.memory << 20)
        lines, code = _show_diff(found), 2 if _differs(found) else 0
    else:
        remote = [name for name in (options.output or options.path,) if remote_files.is_remote(name)]
        if remote:
            raise CheckpointError(f"{remote[0]}: reshard writes to a local directory; name one with --output")
        output = None if options.output is None else Path(options.output)
        dtypes = {"dtype": options.dtype, "state_dtype": options.state_dtype}
        path = reshard(mirror.newest(options.path), options.servers, output, **dtypes)
        found, lines, code = {"path": str(path)}, [f"wrote {path}"], 0
    print(mirror.with_urls(json.dumps(found) if options.json else "\n".join(lines)), flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    mirror = Mirror()
    try:
        return _run(_parser().parse_args(argv), mirror)
    except OeError as error:
        print(f"error: {mirror.with_urls(str(error))}", file=sys.stderr)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 1
