"""Programs of other projects as processes of a job; see provision/node/adapter.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from provision.cluster import share
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.jobs import placement, request
from provision.jobs.backends import ADAPTER
from provision.jobs.backends.runners import runner_of
from provision.jobs.request import Request, is_url
from provision.jobs.store import Job, ProcessSpec, Role


def sources_of(host: Host) -> str:
    """Where the flavor's sources are on the host, as provision/node/foreign.py puts them."""
    return host.runtime.sources or host.runtime.venv + "-sources"


def program(host: Host, name: str) -> str:
    """Path of a program of the environment."""
    return str(Path(host.runtime.venv) / "bin" / name)


def data_check(host: Host, kind: str, data: str, *more: str) -> list[str]:
    """The command that checks data on the worker's host; see provision/node/datafiles.py."""
    text = (share.node_package() / "datafiles.py").read_text(encoding="utf-8")
    return [runner_of(host).own_python, "-I", "-c", text, kind, data, *more]


def process(
    job: Job, host: Host, role: Role, name: str, options: Sequence[str], argv: Sequence[str], **more: Any
) -> ProcessSpec:
    """A process that runs ``argv`` under the adapter with these ``options`` of it."""
    runner = runner_of(host)
    begin = [runner.own_python, "-I", str(runner.sent(job, share.node_package() / ADAPTER))]
    made = ["--directory", more["pools"]] if more.get("pools") else []
    return ProcessSpec(
        name=name,
        role=role,
        host=host.name,
        argv=[*begin, *options, *made, *runner.ending, "--", *argv],
        unit=runner.unit(job, name),
        adapted=True,
        **more,
    )


def worker_options(job: Job, host: Host, model: str, progress: str, export: str = "") -> list[str]:
    """The adapter's options for a worker."""
    run = runner_of(host).directory(job) / "run"
    options = ["--metrics", str(run / "metrics.jsonl"), "--model", model, "--progress", progress]
    return [*options, "--export", export] if export else options


def environment(host: Host) -> dict[str, str]:
    """Environment variables of a training process: the inventory's, and the library to start with."""
    found = placement.worker_environment(host)
    if host.runtime.preload:
        found.setdefault("LD_PRELOAD", host.runtime.preload)
    return found


def settled(inventory: Inventory, wanted: Request, flavor: str, models: Sequence[str]) -> Request:
    """The request with our trainer's defaults; TrainingError for containers and unknown models."""
    if wanted.on:
        raise TrainingError(
            f"--on {wanted.on} is for oe_runtime; flavor {flavor} runs on hosts: leave it out"
        )
    if wanted.training.script:
        raise TrainingError(
            f"--script: flavor {flavor} trains with its own scripts; leave --script out, or set "
            "runtime_flavor: oe_runtime"
        )
    if wanted.training.model not in models:
        raise TrainingError(
            f"--model: found {wanted.training.model!r}; flavor {flavor} has {', '.join(models)}"
            "; oe_runtime has all four"
        )
    for host in inventory.hosts.values():
        for name in host.server.process_options():
            raise TrainingError(
                f"host {host.name}: {host.server.prefix}{name} is for servers of oe_runtime; flavor {flavor} "
                "has no such option: remove the line"
            )
    for name in ("schema", "label", "categories", "numbers", "eval_data", "eval_every"):
        if getattr(wanted.training, name):
            what = (
                "evaluates as its script does" if name.startswith("eval") else "reads Criteo's columns only"
            )
            raise TrainingError(
                f"{request.flag(name)}: flavor {flavor} {what}; leave it out, or train with oe_runtime"
            )
    if wanted.training.follow:
        raise TrainingError(f"--follow is for oe_runtime; flavor {flavor} reads files that are all there")
    if wanted.training.upload_to:
        raise TrainingError(f"--upload-to is for oe_runtime; flavor {flavor} does not upload: leave it out")
    if is_url(wanted.training.data):
        raise TrainingError(
            f"--data: {wanted.training.data}: flavor {flavor} reads files on the worker's host; copy it there"
        )
    # Their scripts have defaults of their own; they train as our trainer does.
    ours = {"server_wait": 0, "restarts": 0, "on_worker_lost": "stop"}
    training = wanted.training.decided().model_copy(update=ours)
    return replace(wanted, training=training)
