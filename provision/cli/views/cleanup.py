"""``oeprov jobs``, ``jobs prune`` and ``jobs rm``: the list of jobs, the question, and what was removed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from provision.cluster.errors import OeprovError, TrainingError
from provision.cluster.state_directory import state_flag
from provision.jobs import cleanup, environments, request, store
from provision.jobs.cleanup import holding
from provision.jobs.holding import Holding, disk_bytes, local_time
from provision.jobs.screen import STYLE, make_console, say
from provision.node.directory import human


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
            f"{local_time(item.job.started):%Y-%m-%d %H:%M}" if item.job.started else "–",
            step,
            "–" if item.checkpoint is None else str(item.checkpoint),
            human(item.total),
        )
    return table


def _count(found: Collection[object]) -> str:
    return f"{len(found)} job" + ("" if len(found) == 1 else "s")


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
    request.check_consent(consent, [item.job.id for item in found], store.jobs_dir(state_dir))
    chosen = cleanup.select(found, states=states, older_than=older_than, keep=keep)
    kept = [item for item in chosen if item.only_rows and item.job.id not in consent]
    removable = [item for item in chosen if item not in kept]
    return _remove(removable, kept, state_dir, yes=yes, here_only=False, as_json=as_json)


def remove(
    state_dir: Path, names: list[str], *, yes: bool, consent: Collection[str], here_only: bool, as_json: bool
) -> int:
    """Remove the named jobs. TrainingError, and nothing is removed, if one of them must stay."""
    known, place = store.directories(state_dir), store.jobs_dir(state_dir)
    chosen = [holding(job) for job in dict.fromkeys(store.choose(known, name, place) for name in names)]
    request.check_consent(consent, [item.job.id for item in chosen], place)
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


def _remove(
    chosen: list[Holding], kept: list[Holding], state_dir: Path, *, yes: bool, here_only: bool, as_json: bool
) -> int:
    from provision.cli.views.terminal import Terminal  # slow to import, and a list asks nothing

    screen = Terminal(as_json=as_json)
    console = screen.console
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
    if chosen and not yes:
        if not screen.can_ask:
            raise TrainingError("no terminal to ask at: add --yes to remove them; nothing was removed")
        if not screen.confirm(f"Remove {_count(chosen)} with logs, checkpoints and exports?"):
            say(console, "nothing was removed")
            return 1
    removed: list[Holding] = []
    failed: dict[str, str] = {job.job.id: f"its pools hold the only rows: {job.only_rows}" for job in kept}
    code = 0
    for item in chosen:
        try:
            cleanup.remove(item, state_dir, here_only=here_only)
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
    lines += [f"  {item.job.id}: {line}" for line in item.stays]
    return [escape(line) for line in lines]
