"""What a run writes down to go on from: rows, dense weights, settings and position in one directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError
from oe_runtime.training.loop import Position
from oe_runtime.training.options import Options
from oe_runtime.training.run_directory import RunError

# How a setting is called on the command line, and what it means for the tables.
_NAMES = {"embeddings": "--stock or --servers/--in-process", "max_cardinality": "--max-cardinality"}


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that fits the options."""

    path: Path
    position: Position


def write(options: Options, position: Position, model: Any, client: Client | None, directory: Path) -> Path:
    """Publish a checkpoint of the model and its tables under `directory`; its path."""
    from oe_runtime.keras import dense

    def content(path: Path) -> Mapping[str, Any]:
        dense.save(model, path)
        tables = [] if client is None else client.save(path)
        training = {"settings": options.fixed(), "position": asdict(position)}
        return {"training": training, "tables": tables}

    return checkpoint.publish(directory, position.step, content, keep=options.keep_checkpoints)


def latest_path(run_directory: Path) -> Path | None:
    """The latest checkpoint of a run, if there is one."""
    found = checkpoint.latest(run_directory / "checkpoints")
    return None if found is None else found.path


def to_resume(options: Options) -> Resumed:
    """The run's latest checkpoint, verified; RunError names each setting that differs from the options."""
    found = checkpoint.latest(options.run_dir / "checkpoints")
    if found is None:
        raise RunError(
            f"nothing to resume: {options.run_dir} has no checkpoint; run without --resume to start"
        )
    try:
        training = found.manifest["training"]
        settings, position = training["settings"], Position(**training["position"])
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{found.path}/manifest.json: not a checkpoint of the trainer ({error})"
        ) from error
    differences = [
        _difference(name, settings.get(name), value)
        for name, value in options.fixed().items()
        if settings.get(name) != value
    ]
    if differences:
        raise RunError(f"cannot resume from {found.path}: " + "; ".join(differences))
    checkpoint.verify(found.path)
    return Resumed(found.path, position)


def _difference(name: str, saved: Any, wanted: Any) -> str:
    flag = _NAMES.get(name, "--" + name.replace("_", "-"))
    tables = "tables C1 to C26 have " if name in ("dim", "optimizer") else "the checkpoint has "
    return f"{tables}{name.replace('_', ' ')} {saved}, {flag} is {wanted}"


def restore(resumed: Resumed, model: Any, client: Client | None) -> None:
    """Put the checkpoint's weights into the compiled model and its rows onto the servers."""
    from oe_runtime.keras import dense

    if client is not None:
        client.restore(resumed.path)
    dense.load(model, resumed.path)
