"""``fetch``: copy what a worker on another host has written to the job's directory here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Host
from provision.hosts import payload, remote
from provision.jobs import store
from provision.jobs.backends import units
from provision.jobs.backends.ssh import Fleet
from provision.jobs.screen import say
from provision.jobs.store import RESULTS, Job
from provision.node.answer import MARKER
from provision.node.command import printable

CHECKPOINTS = "checkpoints"
_PIECE = 1 << 20
_SHOWN = 5  # names in a message


def fetch(job: Job, *, checkpoints: bool = False, replace: bool = False) -> int:
    """Copy a job's export and report to its directory here, and ``checkpoints`` if asked; returns 0.

    Each of them appears whole or not at all. TrainingError if one is here already, unless ``replace``;
    HostError if the host does not answer.
    """
    console = Console()
    fleet = Fleet(job, job.spec())
    if fleet.worker is None:
        say(console, f"the worker of job {job.id} is on this machine: all it has written is in {job.run_dir}")
        return 0
    names = [*RESULTS, *([CHECKPOINTS] if checkpoints else [])]
    there = [job.run_dir / item for item in names if os.path.lexists(job.run_dir / item)]
    if there and not replace:
        raise TrainingError(
            f"{there[0]} exists already; to replace it by what is on host {fleet.worker.host}: "
            f"oeprov fetch {shlex.quote(job.id)} --replace"
        )
    host = fleet.hosts[fleet.worker.host]
    fleet.take_events()
    since = fleet.mirrored  # what the worker exports from now on may be missing in what is fetched
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=job.run_dir) as temporary:
        sizes, others = _receive(job, host, names, Path(temporary), console)
        if others:
            shown = printable(", ".join(others[:_SHOWN]))
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            say(
                console,
                f"[yellow]![/] left out on host {host.name}, since only plain files of the job's user are "
                f"fetched: {escape(shown)}{more}",
            )
        received = [item for item in names if (Path(temporary) / item).exists()]
        if not received:
            raise TrainingError(
                f"host {host.name} has no {' or '.join(names)} of job {job.id}; export and report.html come "
                "at the end of training"
            )
        for item in received:
            new, path = Path(temporary) / item, job.run_dir / item
            if os.path.lexists(path):
                path.rename(new.with_name(new.name + ".old"))  # removed with the temporary directory
            new.rename(path)
        _note(job, received, since)
    for item in received:
        mine = {path: size for path, size in sizes.items() if path.split("/")[0] == item}
        count = f"{len(mine)} files, " if len(mine) > 1 else ""
        say(
            console,
            f"[green]✓[/] {job.run_dir / item} ({count}{decimal(sum(mine.values()))} from {host.name})",
        )
    for item in names:
        if item not in received:
            say(console, f"[yellow]![/] host {host.name} has no {item} of this job")
    return 0


def _note(job: Job, names: list[str], since: int) -> None:
    """Record that these hold what the worker had written before byte ``since`` of its events."""
    try:
        known = dict(json.loads(job.fetched_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    store.write_json(job.fetched_file, {**known, **dict.fromkeys(names, since)})


def _receive(
    job: Job, host: Host, names: list[str], to: Path, console: Console
) -> tuple[dict[str, int], list[str]]:
    """Receive ``names`` into ``to``; the bytes of each file, and what else is there.

    HostError if the stream ends early.
    """
    top = str(units.job_directory(job.id) / "run")
    command = remote.elevated(host, shlex.join(payload.command(host.python)))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    given = payload.pack("files", {"top": top, "names": names})
    with (
        remote.pipe(host, command, given) as stream,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        sizes, others = _announced(stream)
        total, free = sum(sizes.values()), shutil.disk_usage(job.run_dir).free
        if total > free:
            raise TrainingError(
                f"{job.run_dir} has {decimal(free)} free, and the files take {decimal(total)}; make room"
            )
        task = bar.add_task(f"from {host.name}", total=total)
        try:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for name, size in sizes.items():
                    if name.split("/")[0] not in names:
                        raise tarfile.TarError(f"{name} was not asked for")
                    _extract(archive, name, size, to, lambda count: bar.advance(task, count))
        except (tarfile.TarError, EOFError) as error:
            raise HostError(host.name, f"files of job {job.id} were cut off ({error}); try again") from None
    return sizes, others


def _announced(stream: IO[bytes]) -> tuple[dict[str, int], list[str]]:
    for line in stream:
        if line.startswith(MARKER.encode()):
            found: dict[str, Any] = json.loads(line[len(MARKER) :])
            sizes = {str(name): int(size) for name, size in found["files"].items()}
            return sizes, [str(name) for name in found["others"]]
    return {}, []


def _extract(
    archive: tarfile.TarFile, name: str, size: int, to: Path, advance: Callable[[int], None]
) -> None:
    """The next file of the archive, which must be the one that was announced."""
    member = archive.next()
    source = archive.extractfile(member) if member is not None and member.isfile() else None
    parts = Path(name).parts
    bad = ".." in parts or "\0" in name
    if member is None or source is None or (member.name, member.size) != (name, size) or bad:
        raise tarfile.TarError(f"{name} is missing")
    path = to.joinpath(*parts)
    if not path.is_relative_to(to):
        raise tarfile.TarError(f"{name} is not below the job's directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
            advance(len(piece))
