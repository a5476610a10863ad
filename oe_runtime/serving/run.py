"""The model of a run of `oe_runtime.train`, made anew from what the run's directory says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from oe_runtime.client import Client
from oe_runtime.serving.description import ServingError


def serving_model_of(run_directory: Path, path: Path) -> Path:
    """Write the run's model without rows to `path`, which must not exist; imports TensorFlow."""
    from oe_runtime.training.options import Options
    from oe_runtime.training.stopping import StopRequest
    from oe_runtime.training.trainee import KerasTrainee

    file = run_directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ServingError(
            f"{run_directory} is neither a model to serve nor the directory of a run: {file.name}: {error}"
        ) from error
    if config.get("stock"):
        raise ServingError(f"{run_directory} is a run with --stock; serve what its --export wrote")
    try:
        # One worker is enough to make the model of many.
        options = cast(Options, SimpleNamespace(**(config | {"workers": (), "rank": 0})))
        with Client.in_process() as client:
            KerasTrainee(options, client, StopRequest(with_parent=False)).model.save_serving_model(path)
    except (AttributeError, KeyError, TypeError) as error:
        raise ServingError(f"{file} is of another version of the trainer: {error}") from error
    return path
