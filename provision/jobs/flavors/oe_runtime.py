"""oeprov's own runtime."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.training_settings import TrainingSettings
from provision.jobs import placement, request, script
from provision.jobs.backends.runners import runner_of
from provision.jobs.request import Request

place = placement.place


def settle(inventory: Inventory, wanted: Request) -> Request:
    """See ``Flavor``."""
    training = wanted.training
    if training.script:
        script.check(inventory, wanted)
    if training.follow:
        _check_follow(training)
    named = [name for name in ("schema", "label", "categories", "numbers") if getattr(training, name)]
    if named and training.schema != "criteo" and training.data.startswith("generate:"):
        raise TrainingError(
            f"--{named[0]}: {training.data} makes rows of Criteo's columns; name a file of yours with --data"
        )
    schema = schema_text(training.schema or "")
    if not schema:
        return wanted
    return replace(wanted, training=training.model_copy(update={"schema": schema}))


def _check_follow(training: TrainingSettings) -> None:
    if training.data.startswith("generate:"):
        raise TrainingError(f"--follow: {training.data} does not grow; name a directory with --data")
    for name in ("epochs", "holdout"):
        if getattr(training, name) is not None:
            raise TrainingError(f"--{name} does not go with --follow: a stream is read once, and completely")
    if training.eval_data and request.is_share(training.eval_data):
        raise TrainingError("--follow holds out no rows; name others with --eval-data PATH")


def schema_text(schema: str) -> str:
    """A schema as it travels: a name as it is, a file here as JSON in one word."""
    path = Path(schema).expanduser()
    if (
        not schema
        or schema.lstrip().startswith("{")
        or not (path.suffix or path.parent.name or path.exists())
    ):
        return schema
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TrainingError(f"--schema: cannot read {schema}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise TrainingError(
            f"--schema: {schema}{line}: {getattr(error, 'problem', 'it is no YAML')}"
        ) from None
    if not isinstance(value, dict):
        raise TrainingError(f"--schema: {schema} is no mapping of label, numbers, categories and so on")
    return json.dumps(value, separators=(",", ":"), default=str)


def check_data(inventory: Inventory, wanted: Request) -> None:
    """See ``Flavor``."""
    training, workers = wanted.training, placement.worker_hosts(inventory)
    if training.script:
        for key, path in request.files_of_hosts(training).items():
            request.check_path(key, path, workers, reader="script")
        return
    request.check_data("data", training.data, workers)
    apart = training.eval_data or ""
    if apart and not request.is_share(apart):
        request.check_data("eval_data", apart, workers)


def data_check(host: Host, wanted: Request) -> list[str]:
    """See ``Flavor``."""
    training = wanted.training
    if training.script:
        return script.data_check(host, training)
    names = ("max_bad_rows", "eval_data", "schema", "label", "categories", "numbers")
    flags = placement.arguments({name: getattr(training, name) for name in names})
    flags += ["--follow"] if training.follow else []
    python = runner_of(host).python
    if wanted.on:  # containers have a Python of their own, and TensorFlow, which this one may lack
        python, flags = sys.executable, [*flags, "--without-tensorflow"]
    return [python, "-m", "oe_runtime.data.check", *flags, "--", training.data]
