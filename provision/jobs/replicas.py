"""``oeprov serve``: replicas of a model that answer requests, as a job; see ``servers_run``.

Each replica is one ``python -m oe_runtime.serve``. It follows the run's checkpoints by itself, unless the
job's step file names the step to serve.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from provision.cluster.container_settings import ContainerSettings
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.settings import Kind, RolloutSettings
from provision.cluster.training_settings import TrainingSettings
from provision.hosts import errands
from provision.hosts.journal import cluster_lock
from provision.hosts.stop_request import StopRequest
from provision.jobs import jobspec, launching, store
from provision.jobs.backends import containers, registry, ssh, units
from provision.jobs.backends.runners import runner_of
from provision.jobs.backends.ssh import Fleet
from provision.jobs.backends.units import Place
from provision.jobs.background import start_and_wait
from provision.jobs.metrics import summary
from provision.jobs.placement import Placement, arguments
from provision.jobs.request import LaunchOptions, ServeOptions, scheme
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job, JobSpec, JobState, ProcessSpec
from provision.node import replicas as node
from provision.node.command import CommandError, System

CLUSTER = "local"  # of replicas whose model is of no job
_SWITCH_SECONDS = 600  # until all replicas serve another step
_HERE = Host(
    name="localhost",
    address="127.0.0.1",
    port=0,
    user="",
    connection="local",
    private_key="",
    ssh_arguments=(),
    become=False,
    python=sys.executable,
    groups=(),
    kind=Kind("local"),
)


def serve(options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """Start replicas of a model of this machine or of a job; returns them once they listen.

    TrainingError: nothing runs.
    """
    if options.model is not None and _is_place(options.model):
        return start(options, None, state_dir=state_dir, screen=screen)
    source = _find_source(options.model, state_dir)
    return registry.backend_of(source).serve(source, options, state_dir=state_dir, screen=screen)


def manifests(options: ServeOptions, *, state_dir: Path) -> str:
    """The objects of replicas of a job, for a place where they are applied by hand."""
    if options.model is not None and _is_place(options.model):
        raise TrainingError(f"--print: {options.model} is no job on Kubernetes; leave it out")
    source = _find_source(options.model, state_dir)
    return registry.backend_of(source).manifests(source, options)


def _find_source(name: str | None, state_dir: Path) -> Job:
    try:
        return store.find_trained(state_dir, name)
    except TrainingError as error:
        if not name:
            raise
        raise TrainingError(f"{error}; nor is there a directory {name} here") from None


def start(options: ServeOptions, source: Job | None, *, state_dir: Path, screen: JobScreen) -> Job:
    """Start replicas where the run of ``source`` is, or on this machine."""
    spec = None if source is None else source.spec()
    worker = None if spec is None else spec.worker_unit
    rows = None if options.rows is None else _rows(options.rows, state_dir)
    if source is None:
        host, model = _HERE, str(_absolute(options.model or ""))
    elif worker is None:
        host, model = _HERE, str(_choose_model(source))
    else:
        host, model = Fleet(source, source.spec()).hosts[worker.host], _run_there(source)
        if rows is not None:
            raise TrainingError(
                f"--rows: job {source.id} has rows of its own on host {host.name}; leave it out"
            )
    name = options.name or (Path(model).name if source is None else source.name)
    jobspec.check_name(name)
    engine = str(spec.settings.get("on") or "") if spec is not None else ""
    if spec is not None and engine:
        _check_engine(spec, engine, options)
    options = options.with_paths(here=worker is None)
    _check_ports(options, here=worker is None)
    now = datetime.now()
    job = store.create(state_dir, f"{name}-serving", now)
    settings = {"model": model, "rows": rows or "", "name": name, **({"on": engine} if engine else {})}
    python = sys.executable if worker is None else worker.argv[0]
    processes = [_replica(job, host, python, options, settings, item) for item in range(options.replicas)]
    if spec is not None and engine:
        processes = [containers.wrapped_replica(job, spec, item) for item in processes]
    job.write_spec(
        JobSpec(
            id=job.id,
            created=now.astimezone().isoformat(timespec="seconds"),
            cluster=CLUSTER if spec is None else spec.cluster,
            inventory="" if spec is None else spec.inventory,
            settings=settings,
            hosts={} if worker is None else {host.name: ssh.connection(host)},
            processes=processes,
        )
    )
    if worker is None:
        stop_request = StopRequest()
        job.write_state(JobState.supervised_here())
        with stop_request.on_signals():
            start_and_wait(job, stop_request, f"oeprov stop {job.id}")
    else:
        _start_units(job, host, options, state_dir, screen)
    return job


def _check_engine(source: JobSpec, engine: str, options: ServeOptions) -> None:
    """Refuse replicas in containers that cannot start; make the directory that they are to write to."""
    containers.check_engine(engine, {"worker_image": containers.image_of(source)})
    if place := options.files.get("compile_to"):
        Path(place).expanduser().mkdir(parents=True, exist_ok=True)


def _start_units(job: Job, host: Host, options: ServeOptions, state_dir: Path, screen: JobScreen) -> None:
    """Start replicas on a host over SSH, where systemd keeps them up."""
    spec = job.spec()
    parts: tuple[Any, ...] = (
        RolloutSettings(),
        TrainingSettings(),
        ContainerSettings(),
        KubernetesSettings(),
    )
    inventory = Inventory(Path(spec.inventory), spec.cluster, {host.name: host}, [host.name], [], *parts)
    launch = launching.Launch(inventory, LaunchOptions(), state_dir, screen)
    units = []
    for number, item in enumerate(spec.processes):
        port = options.port and options.port + number
        for unit in runner_of(host).server_start(job, item, Place(), port, fresh=True):
            units.append({**unit, "address": options.host})
    with launch.stop_request.on_signals(), cluster_lock(state_dir, spec.cluster):
        launch.prepare(job, Placement(spec.processes, {host.name: units}))
    job.write_state(JobState(phase="running", processes=job.state().processes))


def _check_ports(options: ServeOptions, *, here: bool) -> None:
    """Refuse ports that the replicas cannot have, as far as this machine knows."""
    for port, flag in ((options.port, "--port"), (options.grpc_port or 0, "--grpc-port")):
        if port and port + options.replicas - 1 > 65535:
            raise TrainingError(f"{flag} {port}: {options.replicas} replicas need ports beyond 65535")
        if port and here:
            jobspec.check_free(options.host, port, options.replicas, flag)
    if options.port and options.grpc_port and abs(options.port - options.grpc_port) < options.replicas:
        raise TrainingError(
            f"--port {options.port} and --grpc-port {options.grpc_port} are too close for "
            f"{options.replicas} replicas; set them {options.replicas} apart at least"
        )


def _replica(
    job: Job, host: Host, python: str, options: ServeOptions, settings: dict[str, str], number: int
) -> ProcessSpec:
    name, runner = f"replica-{number}", runner_of(host)
    directory = runner.directory(job)
    has_steps = not host.is_here or bool(_kept_steps(settings["rows"] or settings["model"]))
    if "--servers" in options.arguments:
        has_steps = False
    flags = arguments(
        {
            "rows": settings["rows"],
            "name": settings["name"],
            "host": options.host,
            "port": options.port and options.port + number,
            "grpc_port": options.grpc_port and options.grpc_port + number,
            "ready_file": directory / "ready" / f"{name}.json",
            "step_file": directory / "step" if has_steps else None,
        }
    )
    argv = [python, "-m", "oe_runtime.serve", settings["model"], *flags, *runner.ending, *options.arguments]
    return ProcessSpec(
        name=name,
        role="replica",
        host=host.name,
        argv=argv,
        unit=runner.unit(job, name),
        start_timeout=options.start_timeout,
    )


def _is_place(name: str) -> bool:
    """Whether a word names a directory or a URL, not a job."""
    return os.sep in name or os.path.lexists(name)  # a URL has slashes too


def _absolute(name: str) -> str | Path:
    """A directory of this machine, or a URL as it is."""
    if "://" in name:
        return name
    path = Path(name).expanduser().absolute()
    if not path.is_dir():
        raise TrainingError(f"{path}: there is no such directory")
    return path


def _rows(name: str, state_dir: Path) -> str:
    if _is_place(name):
        return str(_absolute(name))
    job = store.find_trained(state_dir, name)
    if place := registry.backend_of(job).results(job):
        raise TrainingError(f"--rows {name}: the checkpoints of job {job.id} are not here, but on {place}")
    return str(job.run_dir)


def _choose_model(job: Job) -> Path:
    """The job's run if it has checkpoints to follow, else its export."""
    if _kept_steps(job.run_dir):
        return job.run_dir
    export = summary(job.metrics_file).export
    if export and job.here(export).is_dir():
        return job.here(export)
    raise TrainingError(
        f"job {job.id} has neither a checkpoint with its rows in files nor an export yet; train with "
        "--checkpoint-rows files or --export-checkpoints N"
    )


def _run_there(job: Job) -> str:
    """The run of a job whose worker is a unit on another host."""
    return str(units.job_directory(job.id) / "run")


def _kept_steps(run: str | Path) -> list[int]:
    """The kept steps of a run of this machine; none of what has no checkpoints, and of a URL."""
    return [] if "://" in str(run) else node.kept_steps(System(), os.path.realpath(run))


def find(state_dir: Path, name: str | None) -> Job:
    """The replicas of this id, name, model or beginning; without one the last that run, or the last."""
    found = [job for job in store.directories(state_dir) if not job.broken and job.served]
    if not found:
        raise TrainingError(f"nothing is served in {store.jobs_dir(state_dir)}; start it: oeprov serve JOB")
    running = [job for job in found if registry.backend_of(job).is_running(job)]
    if name is None:
        return (running or found)[-1]
    named = [job for job in running if job.served == name]
    return named[0] if len(named) == 1 else store.choose(found, name, store.jobs_dir(state_dir))


def roll_back(
    state_dir: Path, name: str | None, step: int | None, *, newest: bool, screen: JobScreen
) -> tuple[Job, int | None, float]:
    """Let all replicas serve a kept step; by default the one before the served; with ``newest`` follow again.

    Returns them with the served step, if known, and the seconds that it took. TrainingError, HostError: they
    serve what they did.
    """
    job = find(state_dir, name)
    backend = registry.backend_of(job)
    if not backend.is_running(job):
        state = backend.holding(job, 0).state
        raise TrainingError(f"{job.id} does not run: it is {state}; start it: oeprov serve")
    begun = time.monotonic()
    served = backend.roll_back(job, step, newest=newest, screen=screen)
    return job, served, time.monotonic() - begun


def pin(job: Job, step: int | None, *, newest: bool) -> int:
    """``roll_back`` of replicas on hosts; the step that they serve."""
    spec = job.spec()
    first = spec.processes[0]
    model = spec.settings["rows"] or spec.settings["model"]
    if "--step-file" not in first.argv:
        raise TrainingError(f"{job.id} serves {model}, which has no kept checkpoints on its machine")
    args = {
        "directory": os.path.realpath(job.directory),
        "run": os.path.realpath(model),
        "names": [item.name for item in spec.processes],
        "step": step,
        "newest": newest,
        "seconds": _SWITCH_SECONDS,
    }
    if first.unit:
        fleet = Fleet(job, spec)
        args |= {"directory": str(units.job_directory(job.id)), "run": model}
        answer = errands.run(fleet.hosts[first.host], "pin", args, _SWITCH_SECONDS + 60)
    else:
        try:
            answer = node.pin(System(), args)
        except CommandError as error:
            raise TrainingError(f"{job.id}: {error}") from None
    return int(answer["version"])


def urls(job: Job, report: dict[str, Any]) -> list[str]:
    """Where each replica answers requests for the model, or all do."""
    if "urls" in report:
        return list(report["urls"])
    spec = job.spec()
    start, end = f"{scheme(spec.processes[0].argv)}://", f"/v1/models/{spec.settings['name']}"
    return [f"{start}{item['endpoint']}{end}" for item in report["processes"] if item["endpoint"]]
