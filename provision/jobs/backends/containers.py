"""``launch-training --on docker|podman``: a job of this machine whose processes run in containers.

Each child of the supervisor is the engine's ``run`` with a process of the job as its command. It passes on
signals, the exit status and standard input, so that containers end with their launcher. The job's directory
has the same path inside and outside. So `status`, `logs`, `stop` and `resume` are those of processes.
Processes write below it only: the launcher's own files in it (`job.json` has the commands that `resume`
runs here) are read-only inside.

Replicas of such a job (``oeprov serve``) run in containers too, with the image and arguments of its workers.

The network is the host's: servers listen on loopback, and no port is forwarded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.jobs.request import Request, files_of_hosts
from provision.jobs.store import LOCAL_RANK, LOCAL_WORLD_SIZE, Job, JobSpec, ProcessSpec

ENGINES = ("docker", "podman")
_ANSWER_SECONDS = 60
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # noqa: S108 - the container's own
# Folders of the job's directory.
_WRITTEN_BY_WORKERS = ("run",)
_WRITTEN_BY_SERVERS = ("run", "ready", "metrics")
_WRITTEN_BY_REPLICAS = ("ready",)
_PROGRAM = ("python", "-m")  # begins what runs in a container
# Steps that bootstrap would take on the host, and that images make unnecessary.
IN_IMAGES = ("packages", "runtime")


def check(inventory: Inventory, engine: str) -> None:
    """Refuse hosts, an engine or images that cannot be used."""
    for name in [*inventory.parameter_servers, *inventory.workers]:
        if not inventory.hosts[name].is_here:
            raise TrainingError(
                f"--on {engine} runs containers on this machine, and host {name} is reached over ssh; use an "
                "inventory with kind local, or --on hosts"
            )
    images = inventory.containers
    check_engine(engine, {"server_image": images.server_image, "worker_image": images.worker_image})


def check_engine(engine: str, images: Mapping[str, str]) -> None:
    """Refuse an engine that does not answer, or has not these images, each by its setting."""
    if shutil.which(engine) is None:
        raise TrainingError(f"--on {engine}: there is no program {engine} on this machine's PATH")
    answer = _ask(engine, "info")
    if answer.returncode:
        raise TrainingError(f"--on {engine}: {engine} info fails: {last_line(answer)}")
    for key, image in images.items():
        answer = _ask(engine, "image", "inspect", image)
        if answer.returncode:
            raise TrainingError(
                f"container_{key}: {engine} has no image {image} ({last_line(answer)}); "
                f"containers/README.md says how to build it, or: {engine} pull {image}"
            )


def _ask(engine: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [engine, *words], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainingError(f"--on {engine}: {engine} {words[0]}: {error}") from None


def last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """The last line that a program printed, or its exit status."""
    lines = [line.strip() for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {answer.returncode}"


def wrapped(job: Job, inventory: Inventory, wanted: Request, spec: ProcessSpec) -> ProcessSpec:
    """The process in a container of its own."""
    server = spec.role == "parameter_server"
    settings = inventory.containers
    # The engines refuse a second mount at one place, so that data beside the script are writable with it.
    mounts: dict[str, str] = {}
    if not server:
        mounts.update((_place(path), ":ro") for path in files_of_hosts(wanted.training).values())
        if wanted.training.script:
            beside, state_dir = Path(wanted.training.script).parent, job.directory.parent.parent
            mounts[str(beside)] = ""
            if beside in state_dir.parents:  # other jobs are not the script's to change
                mounts[str(state_dir)] = ":ro"
    if server and spec.storage:
        mounts[str(Path(spec.pools).parent) if spec.pools else spec.storage] = ""
    mounts[str(job.directory)] = ":ro"
    for name in _WRITTEN_BY_SERVERS if server else _WRITTEN_BY_WORKERS:
        mounts[str(job.directory / name)] = ""
    # Each start of the workers sets these in the engine's own environment, and the engine passes them on.
    renewed = {key: value for key, value in spec.environment.items() if key in (LOCAL_RANK, LOCAL_WORLD_SIZE)}
    environment = {**_ENVIRONMENT, **spec.environment}
    more = [f"--env={key}" if key in renewed else f"--env={key}={environment[key]}" for key in environment]
    more += [*settings.arguments, settings.server_image if server else settings.worker_image]
    words = _command(wanted.on, job, spec, mounts, more)
    return spec.model_copy(update={"argv": words, "environment": renewed})


def _command(
    engine: str, job: Job, spec: ProcessSpec, mounts: Mapping[str, str], more: Sequence[str]
) -> list[str]:
    """The command line of a process in a container; ``more``: variables, more arguments, and the image."""
    return [
        *_engine_words(engine),
        *[f"--volume={path}:{path}{mode}" for path, mode in mounts.items()],
        # The engines' system call filter allows memkind's mbind with this capability only.
        *(["--cap-add=SYS_NICE"] if "pmem_memkind" in spec.argv else []),
        f"--label=oeprov.job={job.id}",
        f"--label=oeprov.process={spec.name}",
        f"--workdir={job.directory}",
        *more,
        *_PROGRAM,
        *spec.argv[2:],
    ]


def image_of(source: JobSpec) -> str:
    """The image of the workers of a job in containers."""
    return _worker_words(source)[-1]


def _worker_words(source: JobSpec) -> list[str]:
    """What ``_command`` was told of the first worker as ``more``, without what each of its starts sets."""
    words = next(item for item in source.processes if item.role == "worker").argv
    begin = next(place for place, word in enumerate(words) if word.startswith("--workdir=")) + 1
    end = next(place for place in range(begin, len(words)) if tuple(words[place : place + 2]) == _PROGRAM)
    renewed = (f"--env={LOCAL_RANK}", f"--env={LOCAL_WORLD_SIZE}")
    return [word for word in words[begin:end] if word not in renewed]


def wrapped_replica(job: Job, source: JobSpec, spec: ProcessSpec) -> ProcessSpec:
    """The replica of a job in containers, in one of its own: it sees what its command line names."""
    mounts = {str(job.directory): ":ro"}
    mounts.update({str(job.directory / name): "" for name in _WRITTEN_BY_REPLICAS})
    for path in _named(spec.argv[1:]):
        if path.is_dir():
            mounts[str(path)] = ""  # it marks what it serves, so that training keeps that
        # With its directory a file may be replaced by another one, as certificates are.
        elif str(path.parent) in ("/", "/tmp"):  # noqa: S108 - the container has its own
            mounts.setdefault(str(path), ":ro")
        else:
            mounts.setdefault(str(path.parent), ":ro")
    words = _command(source.settings["on"], job, spec, mounts, _worker_words(source))
    return spec.model_copy(update={"argv": words})


def _named(words: Sequence[str]) -> Iterator[Path]:
    """The files and directories of this machine that a command line names by their whole paths."""
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        if path.is_absolute() and path.exists():
            yield path


def _engine_words(engine: str) -> Sequence[str]:
    words = [
        engine,
        "run",
        "--rm",
        "--init",  # passes on signals: a first process gets only those that it handles
        "--interactive",  # standard input is the supervisor's pipe: the process ends when it closes
        "--network=host",
        f"--user={os.getuid()}:{os.getgid()}",  # whose files the job's are
        "--read-only",
        "--tmpfs=/tmp",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--security-opt=label=disable",  # SELinux would need new labels on persistent memory and on data
    ]
    if engine == "podman" and os.getuid() != 0:
        words.append("--userns=keep-id")  # so that the user inside is the one outside
    return words


def _place(data: str) -> str:
    """What is mounted for data: a file, a directory, or the directory of a pattern."""
    path = Path(data)
    return str(path if path.exists() else path.parent)
