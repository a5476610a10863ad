"""``oeprov rollback``: restores the kernel or the mode of persistent memory from before a change.

The journal has the earlier values. The way back is a plan like any other: consent, trial boot, checks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from provision.cluster.errors import ConvergeError
from provision.cluster.inventory import Inventory
from provision.cluster.settings import GpuSettings, SsdSettings
from provision.converge import changes
from provision.converge.changes import How
from provision.hosts import history
from provision.hosts.journal import Journal
from provision.hosts.survey import ClusterSurvey, survey


def kernel(inventory: Inventory, how: How) -> int:
    """Boot the kernel that ran before, on trial, and make it the default; exit codes of bootstrap."""
    found = _survey(inventory)
    now = {name: state.kernel.running for name, state in found.states.items()}
    hosts = {}
    for name, release in history.last(_journal(how.state_dir), inventory.cluster, "kernel", now).items():
        installed = found.states[name].kernel.installed
        if release not in installed:
            raise ConvergeError(
                f"host {name}: its earlier kernel {release} is not installed any more; set kernel_version to "
                f"an installed one: {', '.join(installed)}"
            )
        host = inventory.hosts[name]
        settings = host.kernel.model_copy(update={"version": release, "source": "distribution"})
        hosts[name] = replace(host, kernel=settings, ssd=SsdSettings(), gpu=GpuSettings())
    if not hosts:
        return _report_nothing(how, "kernel")
    code = changes.kernel_only(replace(inventory, hosts=hosts), how)
    if code == 0 and not how.screen.as_json:
        words = f"note: set kernel_version in {inventory.path}, or the next bootstrap plans to undo this"
        how.screen.say(escape(words))
    return code


def pmem_mode(inventory: Inventory, how: How) -> int:
    """Restore the earlier mode of persistent memory; exit codes of bootstrap."""
    found = _survey(inventory)
    now = {name: inventory.hosts[name].platform.find_mode(state) for name, state in found.states.items()}
    modes = history.last(_journal(how.state_dir), inventory.cluster, "mode", now)
    if not modes:
        return _report_nothing(how, "mode of persistent memory")
    if len(set(modes.values())) > 1:
        said = ", ".join(f"{name}: {mode}" for name, mode in modes.items())
        raise ConvergeError(
            f"these hosts had different modes ({said}); select hosts of one mode with --limit"
        )
    chosen = replace(inventory, hosts={name: inventory.hosts[name] for name in modes})
    return changes.pmem_mode(chosen, next(iter(modes.values())), how)


def _survey(inventory: Inventory) -> ClusterSurvey:
    found = survey(inventory)
    for error in found.lost:
        raise ConvergeError(f"host {error.host}: {error.reason}; nothing was changed")
    return found


def _journal(state_dir: Path) -> Journal:
    return Journal(state_dir / "journal.jsonl", "rollback")


def _report_nothing(how: How, what: str) -> int:
    how.screen.report({"converged": True, "changed": []})
    if not how.screen.as_json:
        words = f"{how.state_dir / 'journal.jsonl'} has no other {what} of these hosts: nothing to do"
        how.screen.say(escape(words))
    return 0
