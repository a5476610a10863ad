"""Changes of hosts (``bootstrap``, ``pmem-mode``): observe, plan, show, ask, apply, observe again."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape

from provision.artifacts.bundle import Bundle
from provision.cluster.errors import ConvergeError, InventoryError, did_you_mean
from provision.cluster.host_names import alike, fold
from provision.cluster.inventory import Host, Inventory
from provision.cluster.settings import GpuSettings, KernelSettings, SsdSettings
from provision.cluster.state_directory import state_flag
from provision.converge import outlook, planning, rolling
from provision.converge.rolling import Failures, Rollout, some
from provision.converge.screen import Progress, Screen
from provision.hosts import carrier, history, playbook, runs
from provision.hosts.journal import Journal, cluster_lock
from provision.hosts.playbook import TaskResult
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey, interpreter, survey
from provision.inventory import edit as inventory_edit
from provision.inventory.loader import load
from provision.jobs import drained, store
from provision.jobs.store import ACTIVE
from provision.monitoring import stack
from provision.node.ansible_python import CARRIED
from provision.node.state import State, decode, difference, encode
from provision.node.step import Plan, Step

# A reboot or a newly installed tool can reveal more steps: then it plans again, at most so many times.
ROUNDS = 4
_COMMAND = 500  # letters of a command line in the journal; --limit may name thousands of hosts
_MANY = 20  # hosts of an inventory, from which on a file names those that are left
_NAMED = 5


@dataclass(frozen=True)
class Consent:
    """What the user agreed to by flags: all harmless steps (``yes``), and objects as ``HOST:OBJECT``.

    ``failures``: what a failed host means for the others.
    """

    yes: bool = False
    objects: Sequence[str] = ()
    failures: Failures = Failures.limited


@dataclass(frozen=True)
class How:
    """How hosts are changed: where oeprov's state is, what the user agreed to, and where it is shown.

    ``check``: only show what would be changed.
    """

    state_dir: Path
    consent: Consent
    screen: Screen
    check: bool = False

    def has_consent(self) -> bool:
        """Whether the user agrees to the shown steps, by --yes or at a prompt."""
        if self.consent.yes:
            return True
        if not self.screen.can_ask:
            raise ConvergeError("no terminal to ask at: add --yes to agree to these steps")
        return self.screen.confirm("Apply these steps?")

    def identity(self, run: str, cluster: str) -> dict[str, str]:
        """Who changes the hosts. The cluster's lock allows one live run per owner."""
        where = f"{platform.node()} (pid {os.getpid()})"
        owner = f"{platform.node()}:{self.state_dir.absolute()}:{cluster}"
        return {"id": run, "owner": owner, "where": where}


def bootstrap(inventory: Inventory, how: How, *, bundle: Bundle | None = None) -> int:
    """Converge every host to the inventory; 0: converged, 1: not; with ``check`` 2: changes are pending.

    With a bundle, hosts download nothing.
    """
    if bundle is not None:
        inventory = bundle.used_by(inventory, how.state_dir)
    code = _Change(inventory, "bootstrap", how, bundle=bundle).run()
    if code == 0 and not how.check and stack.has_metrics(inventory):
        # Without this run's --limit: Prometheus scrapes the whole cluster.
        stack.write(load(inventory.path, state_dir=how.state_dir), how.state_dir / "monitoring")
    return code


def pmem_mode(inventory: Inventory, mode: str, how: How, *, write_inventory: bool = False) -> int:
    """Switch the persistent memory of every host to ``mode``; exit codes as for ``bootstrap``.

    Skips hosts without any (``pmem_mode: none``, of a kind that cannot do ``mode``). ``write_inventory``
    writes ``mode`` into the inventory afterwards; without it, the user at a terminal is asked.
    """
    inventory = replace(inventory, hosts=_hosts_with_mode(inventory, mode))
    code = _Change(with_mode(inventory, mode, how.state_dir), "pmem_mode", how).run()
    if code == 0 or (how.check and code == 2):
        return _offer_mode(inventory, mode, how, wanted=write_inventory) or code
    return code


def _hosts_with_mode(inventory: Inventory, mode: str) -> dict[str, Host]:
    """The hosts that can do the mode; ConvergeError when one with persistent memory cannot."""
    able = {name: host for name, host in inventory.hosts.items() if not host.platform.refuse(mode)}
    for name, host in inventory.hosts.items():
        if name not in able and (not able or host.pmem.mode != "none"):
            raise ConvergeError(f"host {name}: mode {mode}: {host.platform.refuse(mode)}")
    return able


def _offer_mode(inventory: Inventory, mode: str, how: How, *, wanted: bool) -> int:
    """Write the new mode into the inventory if the user agrees; 1 when writing failed."""
    screen = how.screen
    hosts = [host.name for host in inventory.hosts.values() if host.pmem.mode != mode]
    if not hosts or (how.check and not wanted):
        return 0
    path = inventory.path
    if not wanted:
        said = f"note: {escape(str(path))} still has another pmem_mode for {', '.join(hosts)}"
        screen.say(f"{said}: the next bootstrap would plan to undo this change")
    try:
        edits = inventory_edit.edits_for(path, hosts, "pmem_mode", mode, alike=inventory.hosts)
        for line in [line for edit in edits for line in edit.diff()]:
            screen.say(f"  {escape(line)}")
        if how.check:
            return 0
        ask = not wanted and not screen.as_json and not how.consent.yes and screen.can_ask
        if wanted or (ask and screen.confirm("Write this into the inventory?")):
            for edit in edits:
                edit.write()
                screen.say(f"[green]✓[/] wrote {escape(str(edit.path))}")
        elif not ask:
            flags = f"-i {shlex.quote(str(path))}{_limit_flag(inventory, mode, how.state_dir)}"
            flags += state_flag(how.state_dir)
            screen.say(f"to write it: oeprov pmem-mode {mode} {flags} --write-inventory")
    except InventoryError as error:
        screen.say(f"[{'red' if wanted else 'yellow'}]{'✗' if wanted else '!'}[/] {escape(str(error))}")
        return 1 if wanted else 0
    return 0


def _check_consent(inventory: Inventory, consent: Consent) -> None:
    for item in consent.objects:
        host, colon, name = item.partition(":")
        if not colon or not name:
            raise ConvergeError(f"--consent {item}: write HOST:OBJECT, as the plan does; nothing was changed")
        if not any(item.startswith(f"{known}:") for known in inventory.hosts):
            hint = did_you_mean(host, inventory.hosts)
            raise ConvergeError(
                f"--consent {item}: {inventory.path} has no host {host}, or --limit leaves it out{hint}; "
                "nothing was changed"
            )


def _limit_flag(inventory: Inventory, mode: str, state_dir: Path) -> str:
    """The --limit that selects these hosts; empty when the mode applies to no other host."""
    try:
        if _hosts_with_mode(load(inventory.path, state_dir=state_dir), mode).keys() == inventory.hosts.keys():
            return ""
    except ConvergeError:
        pass  # without --limit, another host would be refused
    return f" --limit {shlex.quote(','.join(inventory.hosts))}"


def kernel_only(inventory: Inventory, how: How) -> int:
    """Converge only the kernel of every host."""
    return _Change(inventory, "bootstrap", how, roles=("kernel",)).run()


def with_mode(inventory: Inventory, mode: str, state_dir: Path) -> Inventory:
    """The inventory with ``mode`` on every host, and with no wishes but persistent memory."""
    hosts = {}
    for name, host in inventory.hosts.items():
        directory = host.pmem.directory
        if mode == "directory" and not directory:
            directory = str((state_dir / "pmem0").absolute())
        pmem = host.pmem.model_copy(update={"mode": mode, "directory": directory})
        # Kernel arguments stay, except those that the mode itself needs.
        hosts[name] = replace(host, pmem=pmem, ssd=SsdSettings(), kernel=KernelSettings(), gpu=GpuSettings())
    return replace(inventory, hosts=hosts)


def remove(
    inventory: Inventory, how: How, remarks: Callable[[ClusterSurvey], list[str]]
) -> tuple[int, ClusterSurvey]:
    """Carry out the plans of hosts with ``removal``; returns the exit code and the last survey.

    ``remarks`` makes lines from the first survey, which are printed before the user is asked.
    """
    # The playbook pmem_mode does the steps of all roles in the plan's order.
    change = _Change(inventory, "destroy", how, playbook="pmem_mode", remarks=remarks)
    return change.run(), change.found


def _phases(rollout: Rollout, book: str) -> Iterator[tuple[str, list[str]]]:
    """(phase, hosts) of each run of the playbook: the preparation of all hosts, then their turns.

    Only ``bootstrap`` prepares hosts apart from their turns. A run of hosts that are not disturbed, or of one
    host, does both at once.
    """
    waiting = rollout.left
    if rollout.stopped or not waiting:
        return
    apart = book == "bootstrap" and len(waiting) > 1 and not rollout.is_quiet
    if apart:
        yield "prepare", waiting
    while turn := rollout.next():
        yield ("turn" if apart else "all"), turn


def _fail(names: Collection[str], rollout: Rollout, view: Progress) -> None:
    """Leave hosts that failed before their turn out of the rest of the run."""
    rollout.fail(names)
    view.fail(names)


class _Change:
    """One run of ``bootstrap``, ``pmem-mode`` or ``destroy``."""

    def __init__(
        self,
        inventory: Inventory,
        name: str,
        how: How,
        *,
        bundle: Bundle | None = None,
        playbook: str = "",
        roles: tuple[str, ...] = (),
        remarks: Callable[[ClusterSurvey], list[str]] | None = None,
    ) -> None:
        """``playbook``: when not named ``name``; ``roles``: do only the steps of these (default: all).

        ``remarks`` (default: ``_unused_consent``) makes lines from the first survey.
        """
        self.inventory = inventory
        self.bundle = bundle
        self.playbook = playbook or name
        self.found = ClusterSurvey()  # the last survey
        self.roles = roles
        self.remarks = remarks or self._unused_consent
        self.name = name
        self.how = how
        self.state_dir = how.state_dir
        self.consent = how.consent
        self.screen = how.screen
        self.id = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        self.journal = Journal(how.state_dir / "journal.jsonl", self.id, inventory.cluster)
        self.done: list[dict[str, Any]] = []
        self.applied = False
        self.failures = how.consent.failures
        self.failed: set[str] = set()  # hosts where a role failed
        self.fallen: set[str] = set()  # hosts that failed in this run, in whichever phase
        self.out: set[str] = set()  # these and hosts with problems: later rounds leave them out
        self.stopped = ""  # why the hosts that are left were not changed

    def run(self) -> int:
        """Survey, ask, change, report. ConvergeError for a consent that names no object of a host."""
        begun = time.monotonic()
        _check_consent(self.inventory, self.consent)
        if self.how.check:
            found = self._survey()
            self._remark(found)
            return self._report(found, begun)
        with cluster_lock(self.state_dir, self.inventory.cluster):
            self._show_interrupted_steps()
            found = self._survey()
            self._remark(found)
            outcome = "ok" if found.pending else "nothing to do"
            if not found.pending:
                self._begin(found, [])
            log, is_stuck = None, False
            for number in range(ROUNDS):
                if not found.pending:
                    break
                self._check_applicable(found)
                pending = self._changeable(found)
                if not pending:
                    break
                if not self._has_consent(pending):
                    self.screen.say("nothing more was changed" if number else "nothing was changed")
                    return 1
                if not number:
                    self._begin(found, pending)
                ended, run_log = self._apply(found, pending, number)
                log = run_log or log
                outcome = ended if ended != "ok" else outcome
                before, found = found, self._survey(quiet=True)
                if ended == "canceled" or self.stopped or _is_same(before, found):
                    is_stuck = True
                    break
                if self._changeable(found) and number + 1 < ROUNDS:
                    self.screen.say("Steps that only became visible now:")
                    self._show(found)
            if log is not None and (is_stuck or outcome == "failed"):
                self.screen.say(f"Ansible's log: {log}")
            self._report_left(found)
            if outcome == "canceled":
                self.screen.say("[yellow]![/] stopped halfway; run the command again to continue")
                return 130
            self.journal.write("finished", outcome=outcome, failed=sorted(self.failed), stopped=self.stopped)
            code = self._report(found, begun)
            return 1 if outcome == "failed" else code

    def _begin(self, found: ClusterSurvey, pending: Sequence[Plan]) -> None:
        """Record the run: who changes which hosts, by which command."""
        self.journal.write(
            "run",
            cluster=self.inventory.cluster,
            hosts=list(found.plans),
            pending=[plan.host for plan in pending],
            who=f"{_user()}@{platform.node()}",
            command=_shortened(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        )

    def _changeable(self, found: ClusterSurvey) -> list[Plan]:
        """Plans with steps of hosts that have no problem and have not failed in this run."""
        return [
            plan for plan in found.pending if not self._problem(plan, found) and plan.host not in self.out
        ]

    def _problem(self, plan: Plan, found: ClusterSurvey) -> str:
        """Why a host cannot be changed; empty if it can."""
        if plan.problems:
            return plan.problems[0]
        return self.bundle.lacks(found.states[plan.host].os) if self.bundle else ""

    def _report_left(self, found: ClusterSurvey) -> None:
        """Say why the run stopped, and write the hosts that are not converged to a file for --limit."""
        if self.stopped:
            self.screen.say(f"[red]✗[/] the change stopped: {escape(self.stopped)}")
        left = [
            *(plan.host for plan in found.plans.values() if not plan.converged),
            *(error.host for error in found.lost),
        ]
        if not left or not self.applied or len(self.inventory.hosts) < _MANY:
            return
        path = self.state_dir / "left" / f"{self.id}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}\n" for name in left))
        flag = f"--limit {shlex.quote(f'@{path}')}"
        self.screen.say(f"{len(left)} hosts are left; to go on with these alone, add: {escape(flag)}")

    def _unused_consent(self, found: ClusterSurvey) -> list[str]:
        lost = {f"{plan.host}:{item}" for plan in found.plans.values() for item in plan.destroys}
        return [
            f"{item} was named, but no step of this plan destroys it"
            for item in self.consent.objects
            if item not in lost and any(item.startswith(f"{name}:") for name in found.plans)
        ]

    def _remark(self, found: ClusterSurvey) -> None:
        for line in self.remarks(found):
            self.screen.say(f"[yellow]![/] {escape(line)}")

    def _show_interrupted_steps(self) -> None:
        steps = runs.interrupted(self.journal, self.inventory.cluster)
        lines = (
            (
                host,
                f"an earlier run ({run.id}) was interrupted during or before: {step.what}; planning again "
                "from the current state",
            )
            for host, (run, step) in {host: (run, step) for run, host, step in reversed(steps)}.items()
        )
        self.screen.show_lines("[yellow]![/] ", lines)

    def _survey(self, quiet: bool = False) -> ClusterSurvey:
        with self.screen.status("observing the hosts"):
            found = survey(self.inventory)
        found.plans = {
            name: plan._replace(steps=self._wanted_steps(plan))
            for name, plan in planning.name_unknown_jobs(found.plans, self.state_dir).items()
        }
        self.found = found
        if not quiet:
            self._show(found)
        self.screen.show_lost(found.lost)
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
        turns = self._turns(found)
        view = outlook.look(found.pending, turns, self.journal)
        self.screen.show_plan(found.plans.values(), rolling.describe(found.pending, turns), view)

    def _turns(self, found: ClusterSurvey) -> list[list[str]]:
        return rolling.turns(self.inventory, found.pending, [error.host for error in found.lost])

    def _check_applicable(self, found: ClusterSurvey) -> None:
        ask = found.lost and not self.applied and self.failures is not Failures.keep_going
        unsettled = runs.unsettled(self.journal, self.inventory.cluster) if ask else {}
        for error in found.lost:
            if error.host in unsettled:
                raise ConvergeError(
                    f"host {error.host} became unreachable while {unsettled[error.host]} changed it "
                    f"({error.reason}); no other host was changed: wait for it, repair it, or leave it out "
                    f"with --limit 'all:!{error.host}'"
                )
        bad = {
            plan.host: self._problem(plan, found)
            for plan in found.plans.values()
            if plan.host not in self.out
        }
        bad = {name: words for name, words in bad.items() if words}
        strict = self.failures is Failures.fail_fast
        if bad and (strict or not self._changeable(found)):
            done = "earlier steps stay done" if self.done else "nothing was changed"
            name, words = next(iter(bad.items()))
            more = f" (and {len(bad) - 1} more hosts)" if len(bad) > 1 else ""
            raise ConvergeError(f"host {name}: {words}{more}; {done}")
        if found.lost and strict:
            lost = some([error.host for error in found.lost])
            raise ConvergeError(f"{lost} cannot be reached; nothing was changed (--fail-fast)")
        if bad:
            self.out.update(bad)
            self.screen.say(
                f"[yellow]![/] {len(bad)} host{'s are' if len(bad) > 1 else ' is'} left out for problems: "
                f"{escape(some(list(bad)))}"
            )
        self._check_jobs([plan.host for plan in found.pending])

    def _check_jobs(self, changed: Collection[str]) -> None:
        """Refuse to change the cluster of a running job, except for drained hosts, which it has left."""
        out = drained.hosts_of(self.state_dir, self.inventory.cluster)
        for job in store.all_jobs(self.state_dir):
            if job.state().phase not in ACTIVE:
                continue
            spec = job.spec()
            mine = spec.cluster == self.inventory.cluster
            used = {item.host for item in spec.processes}
            left = [name for name in changed if name in used or name not in out]
            if mine and not left:
                continue
            way = ""
            if mine and spec.has_worker:
                way = f", or keep it running: oeprov drain {left[0]}, then this with --limit {left[0]}"
            raise ConvergeError(
                f"training job {job.id} is running on this cluster; stop it first: oeprov stop {job.id}{way}"
            )

    def _has_consent(self, pending: list[Plan]) -> bool:
        """Whether the user agrees: by --consent to each lost object, by --yes or a prompt to the rest."""
        agreed = set(self.consent.objects)
        doomed = ((plan.host, item) for plan in pending for item in plan.destroys)
        missing = [(host, item) for host, item in doomed if f"{host}:{item}" not in agreed]
        if missing:
            named = alike(missing)
            flags = " ".join(
                f"--consent {shlex.quote(f'{fold(hosts)}:{item}')}" for item, hosts in named.items()
            )
            raise ConvergeError(f"data would be lost; to agree, add: {flags}")
        return self.how.has_consent()

    def _apply(self, found: ClusterSurvey, pending: list[Plan], number: int) -> tuple[str, Path | None]:
        """Change the hosts in turns; returns the outcome and Ansible's log of the last run."""
        self.applied = True
        plans = {plan.host: plan for plan in pending}
        hosts = {name: self.inventory.hosts[name] for name in plans}
        managed = {
            name: found.states[name]
            for name, host in hosts.items()
            if host.platform.managed and not found.states[name].bare
        }
        kinds = {name: host.kind for name, host in hosts.items()}
        history.write(self.journal, self.inventory.cluster, managed, kinds)
        lost = [error.host for error in found.lost]
        rollout = Rollout(
            self.inventory, pending, lost, failures=self.failures, down=self.failed, earlier=len(self.fallen)
        )
        turns = rolling.turns(self.inventory, pending, lost)
        view = self.screen.follow(self.journal, plans, turns, outlook.pace(pending, self.journal))
        if self.bundle:
            with self.screen.status("sending the bundle"):
                unsent = self.bundle.send_all(hosts, found.states)
            self.screen.show_lost(unsent)
            _fail([error.host for error in unsent], rollout, view)
        stop = StopRequest()
        with (
            stop.on_signals(),
            self.screen.status("starting Ansible") as spinner,
            view.show_by(spinner.update),
        ):
            plans = self._prepare_python(plans, found, rollout, view)
            outcome, log = (
                ("canceled", None) if stop.count else self._roll(plans, found, rollout, view, stop, number)
            )
        self.done += view.done
        self.fallen.update(rollout.failed)
        self.out.update(rollout.failed)
        if rollout.failed and outcome == "ok":
            outcome = "failed"
        if rollout.stopped and not self.stopped:
            self.stopped = rollout.stopped
            if rollout.left:
                bad = list(rollout.failed)
                limit = ":!".join(["all", *bad[:_NAMED]])
                self.stopped += (
                    f"; nothing was changed on {len(rollout.left)} host(s) after that: {some(rollout.left)}; "
                    f"repair {some(bad)}, or leave it out with --limit '{limit}', and run this again"
                )
            outcome = "failed"
        return outcome, log

    def _prepare_python(
        self, plans: Mapping[str, Plan], found: ClusterSurvey, rollout: Rollout, view: Progress
    ) -> dict[str, Plan]:
        """Give hosts the Python for Ansible that their plans begin with; returns what is left for it."""
        if rollout.stopped:
            return {}
        _fail(self._carry({name: plans[name].steps[0] for name in rollout.left}, view), rollout, view)
        if rollout.stopped:
            return {}
        ready = self._plans_for_ansible({name: plans[name] for name in rollout.left}, found)
        rollout.leave([name for name in rollout.left if name not in ready])
        return ready

    def _roll(
        self,
        plans: Mapping[str, Plan],
        found: ClusterSurvey,
        rollout: Rollout,
        view: Progress,
        stop: StopRequest,
        number: int,
    ) -> tuple[str, Path | None]:
        """Run the playbook, phase after phase; returns the outcome and Ansible's log of the last run."""
        outcome, log = "ok", None
        # A turn that disturbs several hosts waits until all are prepared: a failed canary stops it.
        for count, (phase, names) in enumerate(_phases(rollout, self.playbook)):
            chosen = {name: plans[name] for name in names}
            run = self._play(phase, chosen, found, f"{number + 1}.{count + 1}", stop, view)
            log = run.log
            self._explain(run.failures, found)
            failed = list(dict.fromkeys(failure.host for failure in run.failures))
            # A task outside a role changes nothing.
            self.failed |= {failure.host for failure in run.failures if failure.role}
            if run.outcome == "canceled":
                return "canceled", log
            if run.outcome == "failed":
                outcome = "failed"
            if run.outcome == "failed" and not failed:
                self.stopped = f"Ansible failed; its log is {run.log}"
                break
            if phase == "prepare":
                _fail(failed, rollout, view)
                continue
            last = {name: plan.steps[-1] for name, plan in chosen.items() if name not in failed}
            failed += self._carry(last, view)
            view.fail(failed)
            rollout.end(names, failed)
        return outcome, log

    def _play(
        self,
        phase: str,
        plans: Mapping[str, Plan],
        found: ClusterSurvey,
        number: str,
        stop: StopRequest,
        view: Progress,
    ) -> playbook.PlaybookRun:
        """Run the plays of one phase on the hosts of these plans."""
        first = number == "1.1"
        return playbook.run(
            self.playbook,
            replace(self.inventory, hosts={name: self.inventory.hosts[name] for name in plans}),
            state_dir=self.state_dir,
            run_id=self.id if first else f"{self.id}-{number}",
            variables={
                "oeprov_run": self._identity(),
                "oeprov_phase": phase,
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

    def _carry(self, steps: Mapping[str, Step], view: Progress) -> list[str]:
        """Carry out those of these steps that are not Ansible's, one per host; returns where one failed."""
        wanted = {name: step for name, step in steps.items() if step.role == CARRIED}
        failed = []
        for item in carrier.carry_out(self.inventory.hosts, wanted, self._identity(), view.start_carried):
            view.carried(item)
            failed += [] if item.ok else [item.host]
        self.failed.update(failed)
        return failed

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
        return self.how.identity(self.id, self.inventory.cluster)

    def _approved(self, plan: Plan) -> dict[str, Any]:
        """What the module on the host may do: the agreed steps, only from the state of their plan."""
        prefix = plan.host + ":"
        objects = [item.removeprefix(prefix) for item in self.consent.objects if item.startswith(prefix)]
        return {
            "digest": plan.digest,
            "desired": encode(self.inventory.hosts[plan.host].desired()),
            "steps": [step.id for step in plan.steps],
            "consent": objects,
        }

    def _explain(self, failures: Sequence[TaskResult], found: ClusterSurvey) -> None:
        """Print each failure with its hosts, and how their state had moved since the plan."""
        lines = []
        for failure in failures:
            moved, before = failure.result.get("state"), found.states.get(failure.host)
            words = [f"{failure.task}: {failure.message}"]
            if isinstance(moved, dict) and before is not None:
                words += [f"    {line}" for line in difference(before, decode(State, moved))]
            lines.append((failure.host, "\n".join(words)))
        self.screen.show_lines("[red]✗[/] ", lines)

    def _report(self, found: ClusterSurvey, begun: float) -> int:
        changed = self.applied
        seconds = time.monotonic() - begun
        hosts = f"{len(found.plans)} host" + ("" if len(found.plans) == 1 else "s")
        if found.converged:
            words = "converged" if changed else "converged already: nothing to do"
            self.screen.say(f"[green]✓[/] {hosts} {words} ({seconds:.1f} s)")
        elif changed or not found.pending:
            left = (
                (plan.host, line)
                for plan in found.plans.values()
                for line in plan.problems + [f"still to do: {step.what}" for step in plan.steps]
            )
            self.screen.show_lines("[red]✗[/] ", left)
        code = 0 if found.converged else 1
        broken = found.lost or any(plan.problems for plan in found.plans.values())
        if self.how.check and found.pending and not broken:
            code = 2
        self.screen.report(
            {
                "converged": found.converged,
                "changed": [item for item in self.done if item["ok"]],
                "failed": [item for item in self.done if not item["ok"]],
                "pending": [encode(plan) for plan in found.plans.values() if not plan.converged],
                "consent": [
                    name
                    for plan in found.plans.values()
                    for name in plan.consentable
                    if name not in self.consent.objects
                ],
                "unreachable": {error.host: error.reason for error in found.lost},
                "seconds": round(seconds, 2),
            }
        )
        return code


def _gist(step: Step) -> tuple[str, list[str], bool]:
    """What the user agrees to in a step."""
    return step.id, step.destroys, step.reboots


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in passwd
        return str(os.getuid())


def _shortened(text: str) -> str:
    return text if len(text) <= _COMMAND else f"{text[:_COMMAND]}…"


def _is_same(before: ClusterSurvey, after: ClusterSurvey) -> bool:
    """Whether the last round achieved nothing, so that another round would not either."""
    return {plan.host: plan.steps for plan in before.pending} == {
        plan.host: plan.steps for plan in after.pending
    }
