"""Changes of hosts (``bootstrap``, ``pmem-mode``): observe, plan, show, ask, apply, observe again."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from provision.artifacts.bundle import Bundle
from provision.cluster.errors import ConvergeError, InventoryError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.settings import GpuSettings, KernelSettings
from provision.cluster.state_directory import state_flag
from provision.converge import planview, rolling
from provision.converge.stepview import StepView
from provision.hosts import carrier, history, playbook
from provision.hosts.journal import Journal, cluster_lock
from provision.hosts.playbook import TaskResult
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey, interpreter, survey
from provision.inventory import edit as inventory_edit
from provision.inventory.loader import load
from provision.jobs import store
from provision.jobs.screen import say
from provision.jobs.store import ACTIVE
from provision.monitoring import stack
from provision.node.ansible_python import CARRIED
from provision.node.state import State, difference
from provision.node.step import Plan, Step

# A reboot or a newly installed tool can reveal more steps: then it plans again, at most so many times.
ROUNDS = 4


@dataclass(frozen=True)
class Consent:
    """What the user agreed to by flags: all harmless steps (``yes``), and objects as ``HOST:OBJECT``."""

    yes: bool = False
    objects: Sequence[str] = ()


def bootstrap(
    inventory: Inventory,
    *,
    state_dir: Path,
    consent: Consent,
    as_json: bool = False,
    check: bool = False,
    bundle: Bundle | None = None,
) -> int:
    """Converge every host to the inventory; 0: converged, 1: not; with ``check`` 2: changes are pending.

    With a bundle, hosts download nothing.
    """
    if bundle is not None:
        inventory = bundle.used_by(inventory, state_dir)
    code = _Change(inventory, "bootstrap", state_dir, consent, as_json, bundle=bundle).run(check=check)
    if code == 0 and not check and stack.has_metrics(inventory):
        # Without this run's --limit: Prometheus scrapes the whole cluster.
        stack.write(load(inventory.path, state_dir=state_dir), state_dir / "monitoring")
    return code


def pmem_mode(
    inventory: Inventory,
    mode: str,
    *,
    state_dir: Path,
    consent: Consent,
    as_json: bool = False,
    check: bool = False,
    write_inventory: bool = False,
) -> int:
    """Switch the persistent memory of every host to ``mode``; exit codes as for ``bootstrap``.

    Skips hosts without any (``pmem_mode: none``, of a kind that cannot do ``mode``). ``write_inventory``
    writes ``mode`` into the inventory afterwards; without it, the user at a terminal is asked.
    """
    inventory = replace(inventory, hosts=_hosts_with_mode(inventory, mode))
    changed = with_mode(inventory, mode, state_dir)
    change = _Change(changed, "pmem_mode", state_dir, consent, as_json)
    code = change.run(check=check)
    if code == 0 or (check and code == 2):
        return _offer_mode(inventory, mode, change, check=check, wanted=write_inventory) or code
    return code


def _hosts_with_mode(inventory: Inventory, mode: str) -> dict[str, Host]:
    """The hosts that can do the mode; ConvergeError when one with persistent memory cannot."""
    able = {name: host for name, host in inventory.hosts.items() if not host.platform.refuse(mode)}
    for name, host in inventory.hosts.items():
        if name not in able and (not able or host.pmem.mode != "none"):
            raise ConvergeError(f"host {name}: mode {mode}: {host.platform.refuse(mode)}")
    return able


def _offer_mode(inventory: Inventory, mode: str, change: _Change, *, check: bool, wanted: bool) -> int:
    """Write the new mode into the inventory if the user agrees; 1 when writing failed."""
    console = change.console
    hosts = [host.name for host in inventory.hosts.values() if host.pmem.mode != mode]
    if not hosts or (check and not wanted):
        return 0
    path = inventory.path
    if not wanted:
        said = f"note: {escape(str(path))} still has another pmem_mode for {', '.join(hosts)}"
        say(console, f"{said}: the next bootstrap would plan to undo this change")
    try:
        edits = inventory_edit.edits_for(path, hosts, "pmem_mode", mode, alike=inventory.hosts)
        for line in [line for edit in edits for line in edit.diff()]:
            say(console, f"  {escape(line)}")
        if check:
            return 0
        ask = not wanted and not change.as_json and not change.consent.yes and sys.stdin.isatty()
        if wanted or (ask and confirm(console, "Write this into the inventory?")):
            for edit in edits:
                edit.write()
                say(console, f"[green]✓[/] wrote {escape(str(edit.path))}")
        elif not ask:
            flags = f"-i {shlex.quote(str(path))}{_limit_flag(inventory, mode, change.state_dir)}"
            flags += state_flag(change.state_dir)
            say(console, f"to write it: oeprov pmem-mode {mode} {flags} --write-inventory")
    except InventoryError as error:
        say(console, f"[{'red' if wanted else 'yellow'}]{'✗' if wanted else '!'}[/] {escape(str(error))}")
        return 1 if wanted else 0
    return 0


def _limit_flag(inventory: Inventory, mode: str, state_dir: Path) -> str:
    """The --limit that selects these hosts; empty when the mode applies to no other host."""
    try:
        if _hosts_with_mode(load(inventory.path, state_dir=state_dir), mode).keys() == inventory.hosts.keys():
            return ""
    except ConvergeError:
        pass  # without --limit, another host would be refused
    return f" --limit {shlex.quote(','.join(inventory.hosts))}"


def confirm(console: Console, question: str) -> bool:
    """The answer at the terminal; no unless it is yes."""
    answer = console.input(f"{question} [y/N] ", markup=False)  # markup would take [y/N] for a style
    return answer.strip().lower() in ("y", "yes")


def kernel_only(
    inventory: Inventory, *, state_dir: Path, consent: Consent, as_json: bool = False, check: bool = False
) -> int:
    """Converge only the kernel of every host."""
    return _Change(inventory, "bootstrap", state_dir, consent, as_json, roles=("kernel",)).run(check=check)


def with_mode(inventory: Inventory, mode: str, state_dir: Path) -> Inventory:
    """The inventory with ``mode`` on every host, and with no wishes but persistent memory."""
    hosts = {}
    for name, host in inventory.hosts.items():
        directory = host.pmem.directory
        if mode == "directory" and not directory:
            directory = str((state_dir / "pmem0").absolute())
        pmem = host.pmem.model_copy(update={"mode": mode, "directory": directory})
        # Kernel arguments stay, except those that the mode itself needs.
        hosts[name] = replace(host, pmem=pmem, kernel=KernelSettings(), gpu=GpuSettings())
    return replace(inventory, hosts=hosts)


def remove(
    inventory: Inventory,
    *,
    state_dir: Path,
    consent: Consent,
    as_json: bool = False,
    check: bool = False,
    remarks: Callable[[ClusterSurvey], list[str]],
) -> tuple[int, ClusterSurvey]:
    """Carry out the plans of hosts with ``removal``; returns the exit code and the last survey.

    ``remarks`` makes lines from the first survey, which are printed before the user is asked.
    """
    # The playbook pmem_mode does the steps of all roles in the plan's order.
    change = _Change(inventory, "destroy", state_dir, consent, as_json, playbook="pmem_mode", remarks=remarks)
    code = change.run(check=check)
    return code, change.found


class _Change:
    """One run of ``bootstrap``, ``pmem-mode`` or ``destroy``."""

    def __init__(
        self,
        inventory: Inventory,
        name: str,
        state_dir: Path,
        consent: Consent,
        as_json: bool,
        *,
        bundle: Bundle | None = None,
        playbook: str = "",
        roles: tuple[str, ...] = (),
        remarks: Callable[[ClusterSurvey], list[str]] = lambda _: [],
    ) -> None:
        """``playbook``: when not named ``name``; ``roles``: do only the steps of these (default: all)."""
        self.inventory = inventory
        self.bundle = bundle
        self.playbook = playbook or name
        self.found = ClusterSurvey()  # the last survey
        self.roles = roles
        self.remarks = remarks
        self.name = name
        self.state_dir = state_dir
        self.consent = consent
        self.as_json = as_json
        self.console = Console(stderr=as_json)
        self.id = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        self.journal = Journal(state_dir / "journal.jsonl", self.id)
        self.done: list[dict[str, Any]] = []
        self.applied = False
        self.failed: set[str] = set()  # hosts where a role failed

    def run(self, *, check: bool) -> int:
        begun = time.monotonic()
        if check:
            found = self._survey()
            self._remark(found)
            return self._report(found, begun, check=True)
        with cluster_lock(self.state_dir, self.inventory.cluster):
            self._show_interrupted_steps()
            found = self._survey()
            self._remark(found)
            outcome = "ok" if found.pending else "nothing to do"
            if not found.pending:
                self.journal.write("run", cluster=self.inventory.cluster, hosts=list(found.plans))
            for number in range(ROUNDS):
                if not found.pending:
                    break
                self._check_applicable(found)
                if not self._has_consent(found):
                    self.console.print("nothing more was changed" if number else "nothing was changed")
                    return 1
                if not number:
                    self.journal.write("run", cluster=self.inventory.cluster, hosts=list(found.plans))
                outcome, run_log = self._apply(found, number)
                before, found = found, self._survey(quiet=True)
                if outcome != "ok" or _is_same(before, found):
                    if run_log is not None:
                        say(self.console, f"Ansible's log: {run_log}")
                    break
                if found.pending and number + 1 < ROUNDS:
                    self.console.print("Steps that only became visible now:")
                    self._show(found)
            if outcome == "canceled":
                self.console.print("[yellow]![/] stopped halfway; run the command again to continue")
                return 130
            self.journal.write("finished", outcome=outcome, failed=sorted(self.failed))
            code = self._report(found, begun)
            return 1 if outcome == "failed" else code

    def _remark(self, found: ClusterSurvey) -> None:
        for line in self.remarks(found):
            say(self.console, f"[yellow]![/] {escape(line)}")

    def _show_interrupted_steps(self) -> None:
        steps = self.journal.interrupted(self.inventory.cluster)
        for host, step in {item.host: item for item in reversed(steps)}.items():
            say(
                self.console,
                f"[yellow]![/] {host}: an earlier run ({step.run}) was interrupted during or before: "
                f"{escape(step.what)}; planning again from the current state",
            )

    def _survey(self, quiet: bool = False) -> ClusterSurvey:
        with self.console.status("observing the hosts"):
            found = survey(self.inventory)
        found.plans = {
            name: plan._replace(steps=self._wanted_steps(plan)) for name, plan in found.plans.items()
        }
        self.found = found
        if not quiet:
            self._show(found)
        for error in found.lost:
            say(self.console, f"[red]✗[/] {escape(str(error))}")
        return found

    def _wanted_steps(self, plan: Plan) -> list[Step]:
        steps = [step for step in plan.steps if self._is_wanted(step)]
        # A Python for Ansible alone is for bootstrap to install.
        return [] if self.name == "pmem_mode" and [step.id for step in steps] == ["python"] else steps

    def _is_wanted(self, step: Step) -> bool:
        if step.role == CARRIED:
            return True
        if self.roles:
            return step.role in self.roles
        return self.name != "pmem_mode" or step.scope != "training"

    def _show(self, found: ClusterSurvey) -> None:
        turns = rolling.describe(found.pending, self._turns(found))
        planview.show(self.console, found.plans.values(), turns)

    def _turns(self, found: ClusterSurvey) -> list[list[str]]:
        return rolling.turns(self.inventory, found.pending, [error.host for error in found.lost])

    def _check_applicable(self, found: ClusterSurvey) -> None:
        unsettled = self.journal.unsettled(self.inventory.cluster) if found.lost else {}
        for error in found.lost:
            if error.host in unsettled:
                raise ConvergeError(
                    f"host {error.host} became unreachable while {unsettled[error.host]} changed it "
                    f"({error.reason}); no other host was changed: wait for it, repair it, or leave it out "
                    f"with --limit 'all:!{error.host}'"
                )
        for plan in found.plans.values():
            if plan.problems:
                done = "earlier steps stay done" if self.done else "nothing was changed"
                raise ConvergeError(f"host {plan.host}: {plan.problems[0]}; {done}")
        for plan in found.pending if self.bundle else []:
            lacks = self.bundle.lacks(found.states[plan.host].os) if self.bundle else ""
            if lacks:
                raise ConvergeError(f"host {plan.host}: {lacks}; nothing was changed")
        for job in store.all_jobs(self.state_dir):
            if job.state().phase in ACTIVE:
                raise ConvergeError(
                    f"training job {job.id} is running on this cluster; stop it first: oeprov stop {job.id}"
                )

    def _has_consent(self, found: ClusterSurvey) -> bool:
        """Whether the user agrees: by --consent to each lost object, by --yes or a prompt to the rest."""
        doomed = [f"{plan.host}:{item}" for plan in found.pending for item in plan.destroys]
        missing = [item for item in doomed if item not in self.consent.objects]
        if missing:
            flags = " ".join(f"--consent {item}" for item in missing)
            raise ConvergeError(f"data would be lost; to agree, add: {flags}")
        if self.consent.yes:
            return True
        if not sys.stdin.isatty():
            raise ConvergeError("no terminal to ask at: add --yes to agree to these steps")
        return confirm(self.console, "Apply these steps?")

    def _apply(self, found: ClusterSurvey, number: int) -> tuple[str, Path | None]:
        self.applied = True
        plans = {plan.host: plan for plan in found.pending}
        view = StepView(self.console, self.journal, plans)
        stop = StopRequest()
        for name in plans:
            host = self.inventory.hosts[name]
            if host.platform.managed and not found.states[name].bare:
                history.write(self.journal, self.inventory.cluster, name, found.states[name], host.kind)
        if self.bundle:
            with self.console.status("sending the bundle"):
                for name in plans:
                    self.bundle.send(self.inventory.hosts[name], found.states[name])
        with stop.on_signals(), self.console.status("starting Ansible") as spinner:
            view.spinner = spinner.update
            if not self._carry({name: plan.steps[0] for name, plan in plans.items()}, view):
                self.done += view.done
                return "failed", None
            plans = self._plans_for_ansible(plans, found)
            if stop.count or not plans:
                self.done += view.done
                return "canceled" if stop.count else "ok", None
            turns = [
                turn for turn in ([x for x in turn if x in plans] for turn in self._turns(found)) if turn
            ]
            order = [name for turn in turns for name in turn]
            hosts = replace(self.inventory, hosts={name: self.inventory.hosts[name] for name in order})
            run = playbook.run(
                self.playbook,
                hosts,
                state_dir=self.state_dir,
                run_id=f"{self.id}-{number + 1}" if number else self.id,
                variables={
                    "oeprov_run": self._identity(),
                    "oeprov_order": ",".join(order),
                    "oeprov_serial": [len(turn) for turn in turns],
                    "kernel_reboot_ok": True,  # the user agreed to a plan that shows the reboots
                },
                host_variables={
                    name: {
                        "oeprov_plan": self._approved(plan),
                        **interpreter(self.inventory.hosts[name], found.states[name]),
                    }
                    for name, plan in plans.items()
                },
                stop=stop,
                tags=sorted({step.role for plan in plans.values() for step in plan.steps}),
                on_start=view.start,
                on_result=view.result,
            )
            if run.outcome == "ok":
                last = {name: plan.steps[-1] for name, plan in plans.items()}
                run = replace(run, outcome="ok" if self._carry(last, view) else "failed")
        self.done += view.done
        for failure in run.failures:
            self._explain(failure, found)
        # A task outside a role changes nothing.
        self.failed |= {failure.host for failure in run.failures if failure.role}
        return run.outcome, run.log

    def _carry(self, steps: Mapping[str, Step], view: StepView) -> bool:
        """Carry out those of these steps that are not Ansible's, one on each host; False if one failed."""
        wanted = {name: step for name, step in steps.items() if step.role == CARRIED}
        for item in carrier.carry_out(self.inventory.hosts, wanted, self._identity(), view.start_carried):
            view.carried(item)
            self.failed |= set() if item.ok else {item.host}
        return not self.failed

    def _plans_for_ansible(self, plans: Mapping[str, Plan], found: ClusterSurvey) -> dict[str, Plan]:
        """What is left for Ansible; hosts that got a Python are observed again, and their plans compared.

        A host whose other steps are only known now waits for the next round, which shows them.
        """
        new = [name for name, plan in plans.items() if plan.steps[0].role == CARRIED]
        ready = {name: plan for name, plan in plans.items() if name not in new}
        hosts = {name: self.inventory.hosts[name] for name in new}
        again = survey(replace(self.inventory, hosts=hosts)) if hosts else ClusterSurvey()
        for name, plan in again.plans.items():
            steps = self._wanted_steps(plan)
            agreed = plans[name].steps[1:]
            if steps and not plan.problems and list(map(_gist, steps)) == list(map(_gist, agreed)):
                found.states[name], found.plans[name] = again.states[name], plan._replace(steps=steps)
                ready[name] = found.plans[name]
        return ready

    def _identity(self) -> dict[str, str]:
        """Who changes the hosts. The cluster's lock allows one live run per owner."""
        where = f"{platform.node()} (pid {os.getpid()})"
        owner = f"{platform.node()}:{self.state_dir.absolute()}:{self.inventory.cluster}"
        return {"id": self.id, "owner": owner, "where": where}

    def _approved(self, plan: Plan) -> dict[str, Any]:
        """What the module on the host may do: the agreed steps, only from the state of their plan."""
        prefix = plan.host + ":"
        objects = [item.removeprefix(prefix) for item in self.consent.objects if item.startswith(prefix)]
        return {
            "digest": plan.digest,
            "desired": self.inventory.hosts[plan.host].desired().to_dict(),
            "steps": [step.id for step in plan.steps],
            "consent": objects,
        }

    def _explain(self, failure: TaskResult, found: ClusterSurvey) -> None:
        where = f"{failure.host}: {failure.task}"
        say(self.console, f"[red]✗[/] {escape(where)}: {escape(failure.message)}")
        moved, before = failure.result.get("state"), found.states.get(failure.host)
        if isinstance(moved, dict) and before is not None:
            for line in difference(before, State.from_dict(moved)):
                say(self.console, f"    {escape(line)}")

    def _report(self, found: ClusterSurvey, begun: float, *, check: bool = False) -> int:
        changed = self.applied
        seconds = time.monotonic() - begun
        hosts = f"{len(found.plans)} host" + ("" if len(found.plans) == 1 else "s")
        if found.converged:
            words = "converged" if changed else "converged already: nothing to do"
            self.console.print(f"[green]✓[/] {hosts} {words} ({seconds:.1f} s)")
        elif changed or not found.pending:
            for plan in found.plans.values():
                for line in plan.problems + [f"still to do: {step.what}" for step in plan.steps]:
                    say(self.console, f"[red]✗[/] {plan.host}: {escape(line)}")
        code = 0 if found.converged else 1
        if check and found.pending and not found.lost and not any(p.problems for p in found.plans.values()):
            code = 2
        if self.as_json:
            report = {
                "converged": found.converged,
                "changed": [item for item in self.done if item["ok"]],
                "failed": [item for item in self.done if not item["ok"]],
                "pending": [plan.to_dict() for plan in found.plans.values() if not plan.converged],
                "unreachable": {error.host: error.reason for error in found.lost},
                "seconds": round(seconds, 2),
            }
            print(json.dumps(report))
        return code


def _gist(step: Step) -> tuple[str, list[str], bool]:
    """What the user agrees to in a step."""
    return step.id, step.destroys, step.reboots


def _is_same(before: ClusterSurvey, after: ClusterSurvey) -> bool:
    """Whether the last round achieved nothing, so that another round would not either."""
    return {plan.host: plan.steps for plan in before.pending} == {
        plan.host: plan.steps for plan in after.pending
    }
