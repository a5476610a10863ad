"""``oeprov jobs``: the disk space of jobs, and the removal of old ones.

Listing asks no host and no cluster. Removal takes a job's directory, its rows in persistent memory and what
it has on its hosts; a job is refused while anything of it may still run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from provision.cluster.errors import OeprovError, TrainingError, did_you_mean
from provision.cluster.state_directory import state_flag
from provision.hosts.journal import cluster_lock
from provision.jobs import environments, store
from provision.jobs.backends import units
from provision.jobs.backends.kubernetes import record
from provision.jobs.backends.ssh import Fleet
from provision.jobs.metrics import summary
from provision.jobs.screen import STYLE, make_console, say
from provision.jobs.stopping import is_running
from provision.jobs.store import Job, JobSpec
from provision.node.directory import human

INCOMPLETE = "incomplete"  # a directory without job.json
ENDED = ("done", "failed", "interrupted", "unreadable", INCOMPLETE)
_LAUNCH_SECONDS = 3600.0  # a younger directory without job.json may be a launch in progress


@dataclass
class Holding:
    """One job with the space it takes and what would be lost with it."""

    job: Job
    state: str
    running: bool = False  # it runs, or may still run
    problem: str = ""  # why its files cannot be read
    denied: bool = False  # it is another user's
    bytes: int = 0  # of its directory here
    spec: JobSpec | None = None
    pools: list[tuple[Path, int]] = field(default_factory=list)  # of servers here, with their bytes
    step: int | None = None
    steps: int | None = None
    checkpoint: int | None = None
    claims: list[str] = field(default_factory=list)  # volumes on Kubernetes of a job that can resume
    left: list[str] = field(default_factory=list)  # where servers left rows that no checkpoint tells of

    @property
    def changed(self) -> float:
        """When it was last started or ended, in seconds since 1970."""
        files = (self.job.job_file, self.job.state_file, self.job.cluster_file, self.job.directory)
        return max(map(store.modified, files)) / 1e9

    @property
    def total(self) -> int:
        """Bytes on this machine."""
        return self.bytes + sum(size for _, size in self.pools)

    @property
    def on_hosts(self) -> dict[str, list[str]]:
        """Its directories by host; those of pools may no longer exist."""
        found: dict[str, list[str]] = {}
        for item in self.spec.units if self.spec else []:
            places = [str(units.job_directory(self.job.id))] if item.role == "worker" else []
            places += [item.pools] if item.pools else []
            known = found.setdefault(item.host, [])
            known += [place for place in places if place not in known]
        return {host: places for host, places in found.items() if places}

    @property
    def only_rows(self) -> str:
        """Where the rows of its newest checkpoint are, if in no file; else empty."""
        if self.claims:
            return f"volumes of its cluster ({', '.join(self.claims)})"
        if self.state == "unreadable" and not self.denied and self.job.pool_servers() is not None:
            return "persistent memory, of which its job.json would say where"
        if self.left:
            return ", ".join(self.left)
        if self.state == "done" or self.checkpoint is None or self.spec is None:
            return ""
        if self.job.checkpoint() is not None and self.job.pool_servers() is None:
            return ""
        places = [f"{path} here" for path, _ in self.pools]
        places += [f"{item.pools} on {item.host}" for item in self.spec.units if item.pools]
        return ", ".join(places)

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {
            "job": self.job.id,
            "name": self.job.name,
            **{name: getattr(self, name) for name in ("state", "problem", "step", "steps", "bytes")},
            "on": "kubernetes" if self.job.on_kubernetes else "hosts",
            "started": _time(self.job.started).isoformat() if self.job.started else None,
            "checkpoint_step": self.checkpoint,
            "pools": [{"path": str(path), "bytes": size} for path, size in self.pools],
            "on_hosts": self.on_hosts,
            "only_rows": self.only_rows,
            "directory": str(self.job.directory),
        }


def holding(job: Job) -> Holding:
    """What a job holds, from its files; never raises for what is in them."""
    size = disk_bytes(job.directory)
    if job.broken:
        denied = not os.access(job.directory, os.R_OK | os.X_OK)
        return Holding(
            job, "unreadable" if denied else INCOMPLETE, bytes=size, problem=job.broken, denied=denied
        )
    running = False
    try:
        running = is_running(job)
        if job.on_kubernetes:
            phase = record.read(job).phase
            claims = [] if phase == "done" else _claims(job)
            return Holding(job, phase, running=running, bytes=size, claims=claims)
        state, spec = job.state(), job.spec()
        job.read_state()  # raises if it is unknown whether the job runs
    except TrainingError as error:
        return Holding(job, "unreadable", running=running, problem=str(error), bytes=size)
    facts = summary(job.metrics_file)
    newest = job.checkpoint()
    here = [Path(item.pools) for item in spec.processes if item.pools and not item.unit]
    return Holding(
        job,
        state.phase,
        running=running,
        bytes=size,
        spec=spec,
        pools=[(path, disk_bytes(path)) for path in here if path.is_dir()],
        step=facts.step,
        steps=facts.steps,
        checkpoint=facts.checkpoint_step if newest is None else newest[0],
        left=job.rows_left()
        if spec.is_servers_alone or not (state.phase == "done" or job.has_checkpoint())
        else [],
    )


def disk_bytes(directory: Path) -> int:
    """Bytes of a directory on disk; hard links count once, unreadable files not at all."""
    total, seen, todo = 0, set(), [str(directory)]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                todo.append(entry.path)
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total


def show(state_dir: Path, *, as_json: bool) -> int:
    """List every job with what it takes; returns 0."""
    found = [holding(job) for job in store.directories(state_dir)]
    if as_json:
        total = sum(item.total for item in found)
        made = [
            {"path": str(item.path), "bytes": disk_bytes(item.path), "jobs": list(item.jobs)}
            for item in environments.found(state_dir)
        ]
        jobs = [item.to_json() for item in found]
        print(json.dumps({"jobs": jobs, "bytes": total, "environments": made}))
        return 0
    console = make_console()
    if not found:
        console.print(f"no jobs in {store.jobs_dir(state_dir)}; start one with: oeprov launch-training")
        _show_environments(state_dir, console)
        return 0
    console.print(_table(found))
    say(console, f"{_count(found)}, {human(sum(item.total for item in found))} on this machine")
    for item in found:
        if item.problem:
            say(console, f"[red]✗[/] {item.job.id}: {escape(item.problem)}")
    for item in found:
        for host, places in item.on_hosts.items() if not item.running else ():
            say(console, f"[dim]{item.job.id} may have more on host {host}: {escape(', '.join(places))}[/]")
    _show_environments(state_dir, console)
    return 0


def _show_environments(state_dir: Path, console: Console) -> None:
    """One line for the environments of scripts here, if there are any."""
    made = environments.found(state_dir)
    if not made:
        return
    unused = sum(not item.jobs for item in made)
    of_none = f"; {unused} of no job, which `oeprov jobs rm` or `prune` removes" if unused else ""
    size = human(sum(disk_bytes(item.path) for item in made))
    place = environments.directory(state_dir)
    say(console, f"packages of scripts: {len(made)} in {escape(str(place))}, {size}{of_none}")


def _table(found: list[Holding]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("job", overflow="fold")
    for name in ("state", "started"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "saved", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in found:
        name = item.job.name
        step = "–" if item.step is None else f"{item.step}/{item.steps or '?'}"
        table.add_row(
            f"[bold]{escape(name)}[/]{escape(item.job.id.removeprefix(name))}",
            f"[{STYLE.get(item.state, 'cyan')}]{item.state}[/]",
            f"{_time(item.job.started):%Y-%m-%d %H:%M}" if item.job.started else "–",
            step,
            "–" if item.checkpoint is None else str(item.checkpoint),
            human(item.total),
        )
    return table


def _count(found: Collection[object]) -> str:
    return f"{len(found)} job" + ("" if len(found) == 1 else "s")


def _time(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9).astimezone().replace(microsecond=0)


def select(
    found: Iterable[Holding], *, states: Collection[str], older_than: float, keep: int
) -> list[Holding]:
    """The jobs that ``prune`` removes, oldest first: not running, in one of ``states``.

    No ``states``: all but "unreadable" and "incomplete". ``older_than``: seconds since they were started or
    ended. ``keep``: the number of newest jobs that stay.
    """
    now = time.time()
    mine = [item for item in found if not item.running and not item.denied]
    wanted = states or [state for state in ENDED if state not in ("unreadable", INCOMPLETE)]
    ended = [item for item in mine if item.state in wanted]
    least = {INCOMPLETE: max(older_than, _LAUNCH_SECONDS)}
    return [
        item
        for item in ended[: max(0, len(ended) - keep)]
        if now - item.changed >= least.get(item.state, older_than)
    ]


def prune(
    state_dir: Path,
    *,
    states: Collection[str],
    older_than: float,
    keep: int,
    yes: bool,
    consent: Collection[str],
    as_json: bool,
) -> int:
    """Remove the selected jobs; those whose pools hold the only rows only if ``consent`` names them.

    TrainingError for a consent that names no job.
    """
    found = [holding(job) for job in store.directories(state_dir)]
    check_consent(consent, [item.job.id for item in found], store.jobs_dir(state_dir))
    chosen = select(found, states=states, older_than=older_than, keep=keep)
    kept = [item for item in chosen if item.only_rows and item.job.id not in consent]
    removable = [item for item in chosen if item not in kept]
    return _remove(removable, kept, state_dir, yes=yes, here_only=False, as_json=as_json)


def remove(
    state_dir: Path, names: list[str], *, yes: bool, consent: Collection[str], here_only: bool, as_json: bool
) -> int:
    """Remove the named jobs. TrainingError, and nothing is removed, if one of them must stay."""
    known, place = store.directories(state_dir), store.jobs_dir(state_dir)
    chosen = [holding(job) for job in dict.fromkeys(store.choose(known, name, place) for name in names)]
    check_consent(consent, [item.job.id for item in chosen], place)
    for item in chosen:
        if item.denied:
            raise TrainingError(item.problem)
        if item.running:
            stop = f"oeprov stop {item.job.id}{state_flag(state_dir)}"
            raise TrainingError(f"job {item.job.id} is running, or may be; stop it first: {stop}")
    doomed = [item for item in chosen if item.only_rows and item.job.id not in consent]
    if doomed:
        flags = " ".join(f"--consent {shlex.quote(item.job.id)}" for item in doomed)
        raise TrainingError(
            f"the rows of the newest checkpoint of job {doomed[0].job.id} are only in "
            f"{doomed[0].only_rows}; to lose them, add: {flags}"
        )
    return _remove(chosen, [], state_dir, yes=yes, here_only=here_only, as_json=as_json)


def check_consent(consent: Collection[str], ids: Collection[str], place: Path) -> None:
    """Refuse a consent that names none of the jobs ``ids`` of the directory ``place``."""
    for name in consent:
        if name not in ids:
            hint = did_you_mean(name, ids)
            raise TrainingError(
                f"--consent {name}: it is none of these jobs of {place}: {', '.join(ids) or 'none'}{hint}; "
                "nothing was removed"
            )


def _remove(
    chosen: list[Holding], kept: list[Holding], state_dir: Path, *, yes: bool, here_only: bool, as_json: bool
) -> int:
    console = make_console(as_json=as_json)
    for item in kept:
        say(
            console,
            f"[yellow]![/] {item.job.id} stays: the rows of its newest checkpoint are only in "
            f"{escape(item.only_rows)}; to lose them: --consent {item.job.id}",
        )
    if not chosen:
        say(console, "there is no job to remove")
    else:
        console.print(_table(chosen))
        for item in chosen:
            for line in _beyond(item, here_only=here_only):
                say(console, line)
    if chosen and not yes and not _agreed(console, chosen):
        say(console, "nothing was removed")
        return 1
    removed: list[Holding] = []
    failed: dict[str, str] = {job.job.id: f"its pools hold the only rows: {job.only_rows}" for job in kept}
    code = 0
    for item in chosen:
        try:
            _remove_job(item, state_dir, here_only=here_only)
        except (OeprovError, OSError) as error:
            why = str(error) if isinstance(error, OeprovError) else f"{error.filename}: {error.strerror}"
            say(console, f"[red]✗[/] {item.job.id}: {escape(why)}")
            failed[item.job.id], code = why, 1
        else:
            removed.append(item)
    freed = sum(item.total for item in removed)
    unused = environments.remove_unused(state_dir)
    if unused:
        say(console, f"[green]✓[/] removed packages of scripts that no job uses: {len(unused)}")
    if removed:
        say(console, f"[green]✓[/] removed {_count(removed)}, {human(freed)}")
    if as_json:
        print(json.dumps({"removed": [item.job.id for item in removed], "kept": failed, "bytes": freed}))
    return code


def _beyond(item: Holding, *, here_only: bool) -> list[str]:
    """What else is removed with a job's directory, or stays: one line each."""
    lines = [f"  {item.job.id}: rows in {path} ({human(size)})" for path, size in item.pools]
    what = "stays" if here_only else "is removed too, if it is there"
    for host, places in item.on_hosts.items():
        lines.append(f"  {item.job.id} on host {host}: {', '.join(places)} {what}")
    if item.job.on_kubernetes and item.state != "unreadable":
        found = record.read(item.job)
        lines.append(f"  {item.job.id}: its run stays in claim {found.claim}: {found.run}")
        if found.phase != "done" and (claims := _claims(item.job)):
            lines.append(
                f"  {item.job.id}: its volumes stay in namespace {found.namespace}: {', '.join(claims)}"
            )
    return [escape(line) for line in lines]


def _claims(job: Job) -> list[str]:
    try:
        return [str(item["metadata"]["name"]) for item in record.volume_claims(record.documents(job))]
    except (TrainingError, KeyError, TypeError):
        return []


def _agreed(console: Console, chosen: list[Holding]) -> bool:
    if not sys.stdin.isatty():
        raise TrainingError("no terminal to ask at: add --yes to remove them; nothing was removed")
    answer = console.input(f"Remove {_count(chosen)} with logs, checkpoints and exports? \\[y/N] ")
    return answer.strip().lower() in ("y", "yes")


def _remove_job(item: Holding, state_dir: Path, *, here_only: bool) -> None:
    """Remove a job, on its hosts first: if one does not answer, the job stays and can be removed later."""
    if item.spec is None:
        _remove_directory(item.job)
        return
    with cluster_lock(state_dir, item.spec.cluster):  # nobody may resume it now
        if is_running(item.job):
            raise TrainingError(f"it was started meanwhile; stop it first: oeprov stop {item.job.id}")
        if not here_only:
            for error in Fleet(item.job, item.spec).remove():
                raise TrainingError(
                    f"{error.host}: {error.reason}; the job stays; try again, or remove only what is here: "
                    f"oeprov jobs rm {item.job.id} --here-only"
                )
        for process in item.spec.processes:
            item.job.remove_pools(process)
        if left := [path for path, _ in item.pools if path.exists()]:
            raise TrainingError(
                f"{left[0]} could not be removed; check whether a server uses it, and who may write there"
            )
        _remove_directory(item.job)


def _remove_directory(job: Job) -> None:
    if job.directory.is_symlink():
        raise TrainingError(f"{job.directory} is a link; remove it and what it points to yourself")
    # First the files that make it a job: the rest must not look like a whole one.
    for path in (job.job_file, job.cluster_file):
        path.unlink(missing_ok=True)
    shutil.rmtree(job.directory)
