"""A job's training script: what is refused beside it, its arguments, and what its workers are told.

Workers of this machine run it where it lies. To other hosts its directory travels: see ``script_files`` and
``script_delivery``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from provision.cluster import share
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.training_settings import MODEL_SETTINGS, TrainingSettings
from provision.jobs.request import Request, files_of_hosts, flag
from provision.jobs.store import Job


def check_settings(inventory: Inventory, given: Mapping[str, Any]) -> None:
    """Refuse settings that the script decides, by name, and arguments without a script."""
    script = given.get("script", inventory.training.script)
    if not script:
        if given.get("script_arguments"):
            words = " ".join(given["script_arguments"])
            raise TrainingError(
                f"arguments after --: found {words}; they are for a script: add --script FILE"
            )
        if inventory.training.script_arguments:
            raise TrainingError(
                f"{inventory.path}: training_script_arguments: they are for a script: set training_script too"
            )
        return
    flags = [flag(name) for name in MODEL_SETTINGS if name in given]
    if flags:
        raise TrainingError(
            f"{', '.join(flags)}: with --script {script} the script decides that; give it arguments after --"
        )
    variables = [f"training_{name}" for name in MODEL_SETTINGS if name in inventory.training.model_fields_set]
    if variables:
        raise TrainingError(
            f"{inventory.path}: {', '.join(variables)}: with script {script} the script decides that; "
            "remove the line, or give the script arguments after --"
        )


def settled(training: TrainingSettings, label: str = "--script", claim: str = "") -> TrainingSettings:
    """With the script's whole path; TrainingError names ``label`` where there is no such file here.

    Files below ``claim`` are those of pods, which this machine may not have.
    """
    if not training.script or (claim and PurePosixPath(claim) in PurePosixPath(training.script).parents):
        return training
    path = Path(training.script).expanduser()
    if path.is_dir():
        raise TrainingError(
            f"--script: {path} is a directory; name the program in it, such as {path}/train.py"
        )
    if not path.is_file():
        raise TrainingError(f"{label}: there is no file {path} on this machine")
    return training.model_copy(update={"script": str(path.absolute())})


def resumed(job: Job, wanted: Request, arguments: Sequence[str] | None) -> Request:
    """The request of a job that goes on, with other arguments of its script where they were given."""
    if not wanted.training.script:
        if arguments is not None:
            raise TrainingError(f"arguments after --: job {job.id} trains a built-in model, which takes none")
        return wanted
    training = settled(wanted.training)
    if arguments is not None:
        training = training.model_copy(update={"script_arguments": list(arguments)})
    return replace(wanted, training=training)


def job_name(training: TrainingSettings) -> str:
    """What a job is called that got no name: its model, or its script without the ending."""
    if not training.script:
        return training.model
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(training.script).stem).lstrip("._-")
    return name[:48] or "script"


def check(inventory: Inventory, wanted: Request) -> None:
    """Refuse what a job with a script cannot have; TrainingError names it."""
    if wanted.training.device == "gpu":
        for name in inventory.workers:
            if not inventory.hosts[name].platform.has_gpus:
                raise TrainingError(
                    f"training_device: gpu, but host {name} is of kind {inventory.hosts[name].kind.value}, "
                    "which has none; use auto"
                )


def data_check(host: Host, training: TrainingSettings) -> list[str]:
    """The program that says whether the files are there; the script alone knows how it reads them."""
    python = sys.executable if host.is_here else host.python
    text = (share.node_package() / "datafiles.py").read_text(encoding="utf-8")
    return [python, "-I", "-c", text, "match", *files_of_hosts(training).values()]


def words(training: TrainingSettings) -> list[str]:
    """The end of a worker's command line: the script's own arguments."""
    return ["--", *training.script_arguments] if training.script_arguments else []
