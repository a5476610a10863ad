"""Follows a playbook: results become journal entries, and progress over hosts for a person.

Few hosts have a line per step. For more it prints a line per turn, per failure and per minute; a terminal
also has a summary that is redrawn.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from provision.converge.outlook import Pace, in_turn
from provision.hosts.carrier import Carried
from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.inventory import vault
from provision.jobs.metrics import duration
from provision.jobs.screen import say
from provision.node.step import Plan, Step

# Tasks of playbooks/bootstrap.yml, pmem_mode.yml and of roles/kernel.
PREPARED = "Record that the host is prepared"
DONE = "Record that the host is done"
REBOOT = "Reboot"

FEW = 10  # hosts, up to which each step has a line
_MOST_FAILURES = 20  # lines of steps that failed; all are in the report at the end
_MOST_TURNS = 20  # lines of turns, about
_BEAT = 60.0  # seconds without a line
_REDRAW = 1.0  # seconds between two summaries
_TRUST = 0.25  # of the expected time: how much the speed so far must show before it counts half
_UNSEEN = 0.9  # of a phase's time, at most, passes without a finished step
_SLOWEST = 3
_GAP = re.compile(r"<[^<>]+>")  # a value that the plan did not know yet
_ORDER = ("done", "rebooting", "changing", "prepared", "preparing", "failed", "waiting")
_BUSY = ("preparing", "changing", "rebooting")


class StepView:
    """Keeps finished steps in ``done``, and the state of each host.

    ``turns``: groups of hosts that are changed together; ``pace``: what steps take, for the remaining time.
    """

    def __init__(
        self,
        console: Console,
        journal: Journal,
        plans: Mapping[str, Plan],
        turns: Sequence[Sequence[str]] = (),
        pace: Pace | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.journal = journal
        self.plans = plans
        self.spinner: Callable[[Any], None] = lambda words: None
        self.done: list[dict[str, Any]] = []
        self.states = dict.fromkeys(plans, "waiting")
        self._few = len(plans) <= FEW
        self._clock = clock
        self._begun: set[tuple[str, str]] = set()
        self._over: set[tuple[str, str]] = set()
        self._since: dict[str, float] = {}
        self._drawn = (float("-inf"), Text())
        self._failures = 0
        self._turns = [[name for name in turn if name in plans] for turn in turns]
        self._shown_turns = 0
        self._phases = _phases(plans, self._turns, pace) if pace else []
        self._start = self._last_line = clock()
        self._phase = (0, self._start)  # the number of the current one, and when it began
        self._lock = threading.RLock()  # the beat is a thread of its own
        self._ended = threading.Event()

    @contextmanager
    def show_by(self, spinner: Callable[[Any], None]) -> Iterator[None]:
        """Show progress by ``spinner``, and at least each minute in a line."""
        self.spinner = spinner
        if self._few:
            yield
            return
        spinner(self)
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def start(self, host: str, role: str, task: str) -> None:
        """A task begins: record its role's steps before they are done."""
        if self._few:
            self.spinner(f"{host}: {task}")
        plan = self.plans.get(host)
        if plan and role:
            self._move(host, self._busy_state(host, task))
        for step in plan.role_steps(role) if plan and role else []:
            if (host, step.id) not in self._begun:
                self._begun.add((host, step.id))
                self.journal.begin(host, step.id, step.what)

    def start_carried(self, host: str, step: Step) -> None:
        """A step that Ansible does not carry out begins."""
        if self._few:
            self.spinner(f"{host}: {step.what}")
        self._move(host, "preparing")
        self.journal.begin(host, step.id, step.what)

    def carried(self, found: Carried) -> None:
        """Such a step ended."""
        item = {"id": found.step.id, "what": found.step.what, "ok": found.ok, "message": found.message}
        self._step(found.host, {**item, "seconds": found.seconds})
        if not found.ok:
            self._move(found.host, "failed")
        elif len(self.plans[found.host].steps) == 1:  # Ansible has nothing to do there
            self._move(found.host, "done")
            self._show_turns()
        if not found.ok and self._failures <= _MOST_FAILURES:
            self._say(f"[red]✗[/] {found.host}: {escape(vault.hide(found.message))}")

    def _busy_state(self, host: str, task: str) -> str:
        if self.states[host] in ("waiting", "preparing"):
            return "preparing"
        return "rebooting" if task == REBOOT else "changing"

    def result(self, result: TaskResult) -> None:
        """A task ended: record its steps, and print what a person should know of it."""
        for item in result.result.get("steps") or []:
            self._step(result.host, item)
        if result.host not in self.states:
            return
        if result.status in ("failed", "unreachable"):
            if result.role or result.status == "unreachable":  # a task outside a role changes nothing
                self._move(result.host, "failed")
        elif result.task == REBOOT and result.role:
            if result.status == "ok":
                self.journal.rebooted(result.host, result.seconds)
            self._move(result.host, "changing")
        elif result.task == PREPARED:
            self._move(result.host, "prepared")
        elif result.task == DONE:
            self._move(result.host, "done")
            self._show_turns()

    def fail(self, names: Collection[str]) -> None:
        """These hosts are left out of the rest of the run."""
        for name in names:
            self._move(name, "failed")

    def _step(self, host: str, item: Mapping[str, Any]) -> None:
        ok, message, seconds = bool(item["ok"]), str(item.get("message", "")), float(item["seconds"])
        self.journal.end(host, item["id"], ok=ok, message=message, seconds=seconds)
        with self._lock:
            self.done.append({"host": host, **item})
            self._over.add((host, item["id"]))
        self._failures += not ok
        if not self._few and (ok or self._failures > _MOST_FAILURES):
            return
        what = message if ok and message and _GAP.search(str(item["what"])) else str(item["what"])
        mark = "[green]✓[/]" if ok else "[red]✗[/]"
        self._say(f"{mark} {host}: {escape(what)} ({seconds:.1f} s)")
        if not self._few and self._failures == _MOST_FAILURES:
            self._say("[red]✗[/] further failures are counted; the report at the end has all of them")

    def _move(self, host: str, state: str) -> None:
        with self._lock:
            if self.states[host] not in (state, "failed", "done"):
                self.states[host] = state
                self._since[host] = self._clock()

    def _show_turns(self) -> None:
        """Print a line for each turn that has ended; of very many turns, for some."""
        step = -(-len(self._turns) // _MOST_TURNS)
        while self._shown_turns < len(self._turns) and self._is_over(self._turns[self._shown_turns]):
            self._shown_turns += 1
            if not self._few and (self._shown_turns % step == 0 or self._shown_turns == len(self._turns)):
                self._say_progress()

    def _is_over(self, turn: Sequence[str]) -> bool:
        return all(self.states[name] in ("done", "failed") for name in turn)

    def _beat(self) -> None:
        while not self._ended.wait(max(1.0, self._last_line + _BEAT - self._clock())):
            self.beat()

    def beat(self) -> None:
        """Print the progress over many hosts if nothing was printed for a minute."""
        if not self._few and self._clock() - self._last_line >= _BEAT:
            self._say_progress()

    def _say_progress(self) -> None:
        self._say(f"{duration(self._clock() - self._start)}  {escape('; '.join(self.lines()))}")

    def _say(self, text: str) -> None:
        self._last_line = self._clock()
        say(self.console, text)

    def lines(self) -> list[str]:
        """The progress: hosts by state, the turn and the time that remains, and the slowest hosts."""
        with self._lock:
            states, since, now = dict(self.states), dict(self._since), self._clock()
            left = self._remaining()
        counts = Counter(states.values())
        found = [f"{counts[state]:,} {state}" for state in _ORDER if counts[state]]
        lines = [f"{len(states):,} hosts: {', '.join(found)}"]
        words = []
        if len(self._turns) > 1:
            words.append(f"{min(self._shown_turns, len(self._turns))} of {len(self._turns)} turns done")
        words.append(f"ETA {duration(left)}" if left is not None else "ETA –")
        lines.append(", ".join(words))
        busy = sorted(
            (name for name, state in states.items() if state in _BUSY), key=lambda name: since[name]
        )
        if busy:
            slow = (f"{name} {states[name]} {duration(now - since[name])}" for name in busy[:_SLOWEST])
            lines.append(f"slowest: {', '.join(slow)}")
        return lines

    def _remaining(self) -> float | None:
        """Seconds to go: what the phases are expected to take, at the speed of those done so far."""
        whole = sum(seconds for seconds, _ in self._phases)
        if not whole:
            return None
        part, now = 0.0, self._clock()
        for number, (seconds, steps) in enumerate(self._phases):
            total = sum(steps.values())
            over = sum(
                took
                for (host, step), took in steps.items()
                if (host, step) in self._over or self.states[host] in ("done", "failed")
            )
            if over < total and self._phase[0] < number:
                self._phase = (number, now)
            share = over / total
            if self._phase[0] == number and over < total:  # a reboot has no step that ends meanwhile
                share = max(share, min(_UNSEEN, (now - self._phase[1]) / seconds))
            part += seconds * share
            if over < total:
                break
        spent = now - self._start
        trust = whole * _TRUST
        return max(0.0, (whole - part) * (spent + trust) / (part + trust))

    def __rich__(self) -> Text:
        """The summary that a terminal redraws."""
        now = self._clock()
        if now - self._drawn[0] >= _REDRAW:
            first, *others = self.lines()
            self._drawn = (now, Text("\n  ".join([f"{duration(now - self._start)}  {first}", *others])))
        return self._drawn[1]


def _phases(
    plans: Mapping[str, Plan], turns: Sequence[Sequence[str]], pace: Pace
) -> list[tuple[float, dict[tuple[str, str], float]]]:
    """Preparation, then each turn: the expected seconds, and those of each of its steps."""
    groups: list[dict[str, list[Step]]] = [
        {name: [step for step in plan.steps if step.preparing] for name, plan in plans.items()},
        *({name: in_turn(plans[name]) for name in turn} for turn in turns),
    ]
    found = []
    for group in groups:
        steps = {(name, step.id): pace.seconds(step) for name, own in group.items() for step in own}
        if steps:  # each takes more than 0 s
            found.append((pace.together([own for own in group.values() if own]), steps))
    return found
