"""Which step the replicas of a job serve: the kept ones of a run, and the one that they are told to serve.

Replicas read the step from the job's step file, and say in their ready files which they serve
(``python -m oe_runtime.serve --step-file … --ready-file …``).
"""

import json
import os
import re
import time
from typing import Any, Dict, List, Optional

from . import openat
from .command import CommandError, System, printable

_CHECKPOINT = re.compile(r"step-(\d{1,18})(?:\.\d+)?")
_POLL_SECONDS = 0.02


def kept_steps(system: System, run: str) -> List[int]:
    """The steps of the published checkpoints in a run, or in its checkpoints, whose rows are in files."""
    found = set()
    for folder in (run, os.path.join(run, "checkpoints")):
        for name in openat.list_names(system, folder):
            match = _CHECKPOINT.fullmatch(name)
            manifest = _read(system, os.path.join(folder, name, "manifest.json")) if match else {}
            if match and manifest and "pool" not in manifest:
                found.add(int(match.group(1)))
    return sorted(found)


def pin(system: System, args: Dict[str, Any]) -> Dict[str, Any]:
    """Let the replicas of a job here serve a kept step, and wait until all do.

    ``args``: ``directory`` of the job; ``run`` whose checkpoints they serve; ``names`` of the replicas;
    ``step``, or none for the one before the served; ``newest``: follow the newest instead; ``seconds`` that
    they may take. Gives ``version``, the served step. CommandError: they serve what they did.
    """
    step = None if args["newest"] else _choose(system, args)
    file = os.path.join(args["directory"], "step")
    before = openat.read(system, file)
    _write(system, file, "" if step is None else f"{step}\n")
    try:
        return {"version": _wait(system, args, step)}
    except CommandError:
        _write(system, file, before)
        raise


def _choose(system: System, args: Dict[str, Any]) -> int:
    steps = kept_steps(system, args["run"])
    kept = ", ".join(map(str, steps)) or "none"
    if args["step"] is not None:
        if args["step"] not in steps:
            raise CommandError(f"step {args['step']} is not kept; kept are {kept}")
        return int(args["step"])
    served = [_ready(system, args, name).get("version") for name in args["names"]]
    known = [version for version in served if isinstance(version, int)]
    if not known:
        raise CommandError("no replica says which step it serves; name one with --step")
    earlier = [step for step in steps if step < min(known)]
    if not earlier:
        raise CommandError(f"step {min(known)} is served, and none before it is kept; kept are {kept}")
    return earlier[-1]


def _wait(system: System, args: Dict[str, Any], step: Optional[int]) -> int:
    """Wait until each replica serves the step; the step that they serve."""
    deadline, waiting, version = time.time() + args["seconds"], list(args["names"]), 0
    while waiting:
        ready = _ready(system, args, waiting[0])
        if "step" in ready and ready["step"] == step and isinstance(ready.get("version"), int):
            if ready.get("problem"):
                problem = printable(str(ready["problem"]))
                raise CommandError(f"{waiting[0]}: {problem}; the earlier step stays")
            version = ready["version"]
            waiting.pop(0)
            continue
        if time.time() > deadline:
            raise CommandError(f"{waiting[0]} did not say in {args['seconds']} s that it serves the step")
        time.sleep(_POLL_SECONDS)
    return version


def _ready(system: System, args: Dict[str, Any], name: str) -> Dict[str, Any]:
    return _read(system, os.path.join(args["directory"], "ready", name + ".json"))


def _read(system: System, path: str) -> Dict[str, Any]:
    """A JSON file; empty if it is none."""
    try:
        found = json.loads(openat.read(system, path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(system: System, file: str, text: str) -> None:
    """Write the step file as its directory's owner's."""
    with openat.directory(system, os.path.dirname(file)) as found:
        owner = os.fstat(found)
    openat.write(system, file, text, 0o600, owner.st_uid, owner.st_gid)
