"""Prints plans for people: what destroys data or reboots, then one block for all hosts with the same steps.

The length depends on how much hosts differ, not on their number. ``oeprov plan --host`` and ``--json`` have
every step of every host.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, takewhile

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from provision.cluster.errors import HostError
from provision.cluster.host_names import alike, fold
from provision.converge.outlook import Outlook
from provision.inventory import vault
from provision.jobs.screen import say
from provision.node.step import CONSENT, Plan, Step

_COLUMNS = 120  # from this width on, reasons stand beside their steps
_MOST_BLOCKS = 8  # then the hosts of smaller blocks join the block that is most like theirs
_MOST_FORMS = 3  # of one step in a block; more are shown as one, with … where they differ
_MOST_OBJECTS = 10  # lines of objects that lose data
_MOST_REASONS = 2  # of one step in a block
_NAMES = 60  # letters for the names of hosts in a line
_GAP = "…"
_WORDS = re.compile(r"\w+|\W")
_DIGITS = re.compile(r"\S*\d\S*")


_Found = list[tuple[str, Step]]  # hosts with their step


@dataclass
class Block:
    """Hosts with the same steps, or, where a cluster has many kinds of plans, with similar ones."""

    plans: list[Plan] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts."""
        return [plan.host for plan in self.plans]

    def steps(self) -> dict[str, _Found]:
        """By the step's id, in an order that fits all plans: the hosts that have it, and it."""
        sorter: TopologicalSorter[str] = TopologicalSorter()
        found: dict[str, _Found] = {}
        for plan in self.plans:
            for step in plan.steps:
                found.setdefault(step.id, []).append((plan.host, step))
                sorter.add(step.id)
            for before, after in pairwise(plan.steps):
                sorter.add(after.id, before.id)
        try:
            return {name: found[name] for name in sorter.static_order()}
        except CycleError:  # some hosts do two steps the other way round
            return found


def blocks(plans: Iterable[Plan]) -> list[Block]:
    """Plans with steps as a few blocks, in the order of their first hosts."""
    found = alike((plan, tuple(step.id for step in plan.steps)) for plan in plans if plan.steps)
    large = sorted(found, key=lambda ids: -len(found[ids]))[:_MOST_BLOCKS]
    made = {ids: Block() for ids in found if ids in set(large)}
    for ids, members in found.items():
        nearest = ids if ids in made else max(large, key=lambda other: _likeness(ids, other))
        for plan in members:
            made[nearest].plans.append(plan)
    return list(made.values())


def _likeness(one: Sequence[str], other: Sequence[str]) -> float:
    first, second = set(one), set(other)
    return len(first & second) / len(first | second)


def show(console: Console, plans: Iterable[Plan], turns: str = "", outlook: Outlook | None = None) -> None:
    """Print what is lost and what reboots, the steps, the line of ``turns``, then notes and problems."""
    plans = list(plans)
    if any(plan.steps for plan in plans):
        _show_consequences(console, plans, outlook)
        for block in blocks(plans):
            console.print()
            _show_block(console, block)
        console.print()
    if turns:
        say(console, escape(turns))
    for mark, lines in (
        ("[dim]note[/]     ", [(plan.host, note) for plan in plans for note in plan.notes]),
        ("[red]problem[/]  ", [(plan.host, problem) for plan in plans for problem in plan.problems]),
    ):
        show_lines(console, mark, lines)


def show_lines(console: Console, mark: str, lines: Iterable[tuple[str, str]]) -> None:
    """Print one line per text, with the hosts that it is about; ``mark`` is Rich markup before each.

    More than three texts that differ in words with digits (addresses, sizes) are one line, with … there. A
    text with a flag of --consent stays whole: the flag is for copying.
    """
    shown = [(host, vault.hide(text)) for host, text in lines]
    keys = (((host, text), text if CONSENT in text else _DIGITS.sub("0", text)) for host, text in shown)
    for members in alike(keys).values():
        texts = alike(members)
        if len(texts) > _MOST_FORMS:
            texts = {_common(texts): [host for host, _ in members]}
        for text, hosts in texts.items():
            say(console, f"{mark}{escape(name_hosts(hosts))}: {escape(text)}")


def show_lost(console: Console, lost: Iterable[HostError]) -> None:
    """Print the hosts that could not be observed, by the reason."""
    show_lines(console, "[red]✗[/] ", [(error.host, error.reason) for error in lost])


def show_commands(console: Console, plans: Iterable[Plan]) -> None:
    """Print the commands of each step; hosts with the same ones have one entry."""
    steps = ((plan.host, (step.what, *map(_line, step.commands))) for plan in plans for step in plan.steps)
    for (what, *commands), hosts in alike(steps).items():
        say(console, f"[bold]{escape(name_hosts(hosts))}[/]: {escape(what)}")
        for command in commands:
            say(console, f"    {escape(command)}")


def _line(argv: Iterable[str]) -> str:
    return " ".join(word if word.startswith("<") else shlex.quote(word) for word in argv)


def name_hosts(names: Sequence[str]) -> str:
    """The folded names, and their number if there are several."""
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{fold(names, _NAMES)} ({len(names):,} hosts)"


def _show_consequences(console: Console, plans: Sequence[Plan], outlook: Outlook | None) -> None:
    """What a user must know before agreeing, counted."""
    table = Table.grid(padding=(0, 2))
    doomed = [(plan.host, item) for plan in plans for item in plan.destroys]
    boots = [plan.host for plan in plans if any(step.reboots for step in plan.steps)]
    lost = f"{_number(len(doomed), 'object')} on {_number(len({host for host, _ in doomed}), 'host')}"
    table.add_row(*(("[bold red]destroys[/]", f"[red]{lost}[/]") if doomed else ("destroys", "nothing")))
    named = list(alike(doomed).items())
    for item, owners in named[:_MOST_OBJECTS]:
        table.add_row("", Text(f"{name_hosts(owners)}: {item}", "red", overflow="fold"))
    if more := sum(len(owners) for _, owners in named[_MOST_OBJECTS:]):
        table.add_row("", f"[red]and {_number(more, 'more object')}: see --host NAME or --json[/]")
    said = _reboots(boots, outlook)
    table.add_row(*(("[bold yellow]reboots[/]", Text(said, "yellow")) if boots else ("reboots", "no host")))
    console.print(table)


def _reboots(hosts: Sequence[str], outlook: Outlook | None) -> str:
    """The hosts that reboot, in how many turns, and how long that takes."""
    if outlook is None or not hosts:
        return name_hosts(hosts) if hosts else ""
    if len(hosts) == 1:
        return f"{hosts[0]}, {outlook.words}"
    turns = f" in {_number(outlook.turns, 'turn')}"
    return f"{_number(len(hosts), 'host')}{turns}, {outlook.words}: {fold(hosts, _NAMES)}"


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}" + "s" * (count != 1)


def _show_block(console: Console, block: Block) -> None:
    counts = [len(plan.steps) for plan in block.plans]
    some = f"{min(counts)} to " * (min(counts) < max(counts))
    head = f"{name_hosts(block.hosts)}: {some}{_number(max(counts), 'step')}"
    console.print(Text(head, "bold", overflow="fold"))
    wide = console.width >= _COLUMNS
    table = Table.grid(padding=(0, 1 + wide))
    table.add_column(justify="right", min_width=3)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for number, found in enumerate(block.steps().values(), 1):
        for place, (what, why, marks) in enumerate(_rows(found, block)):
            left = Text(what) if wide or not why else Text.assemble(what, (f": {why}", "dim"))
            for mark in marks:
                left.append("\n").append_text(mark)
            table.add_row("" if place else str(number), left, *([Text(why)] if wide else []))
    console.print(table)


def _rows(found: _Found, block: Block) -> Iterator[tuple[str, str, list[Text]]]:
    """What a step does, why, and the marks below it: rows of hosts that lose data, then of the others.

    A row per form of the step, or one row for many forms.
    """
    by_loss = alike(((host, step), not step.destroys) for host, step in found)
    for loses_nothing in sorted(by_loss):
        some = by_loss[loses_nothing]
        forms = alike(((host, step), vault.hide(step.what)) for host, step in some)
        if len(forms) > _MOST_FORMS:
            host, step = some[0]
            example = _differs(f"{len(forms):,} forms, on {host}: {vault.hide(step.what)}")
            yield _common(forms), _why(some), [*_marks(some, block), example]
            continue
        sizes = [len(members) for members in forms.values()]
        largest = max(sizes)
        for what, members in forms.items():
            is_rest = len(forms) > 1 and len(members) == largest and sizes.count(largest) == 1
            yield what, _why(members), _marks(members, block, names=not is_rest)


def _why(found: _Found) -> str:
    """Why the hosts need the step; of reasons with nothing in common, the most frequent ones."""
    reasons = Counter(vault.hide(step.why) for _, step in found)
    common = _common(reasons)
    if common != _GAP:
        return common
    words = [reason for reason, _ in reasons.most_common(_MOST_REASONS)]
    return "; or: ".join(words + ["another reason"] * (len(reasons) > len(words)))


def _marks(found: _Found, block: Block, *, names: bool = True) -> list[Text]:
    """What a step destroys, whether it reboots, and which hosts of its block have it (or how many)."""
    marks = []
    doomed = [(host, item) for host, step in found for item in step.destroys]
    if doomed:
        named = alike(doomed)
        same = all(len(owners) == len(found) for owners in named.values())
        words = ", ".join(named) if same else f"{_number(len(doomed), 'object')}, named above"
        marks.append(Text(f"✗ destroys {words}", "red"))
    if any(step.reboots for _, step in found):
        marks.append(Text("↻ reboots", "yellow"))
    if len(found) < len(block.hosts):
        some = f"only {name_hosts([host for host, _ in found])}"
        marks.append(_differs(some if names else f"{len(found):,} of {_number(len(block.hosts), 'host')}"))
    return marks


def _differs(words: str) -> Text:
    return Text(f"→ {words}", "cyan")


def _common(texts: Iterable[str]) -> str:
    """What texts have in common, with … where they differ: "make ext4 on pmem0 (… GiB)"."""
    words = [_WORDS.findall(text) for text in texts]
    if len(words) == 1 or not words:
        return "".join(*words)
    if len({len(found) for found in words}) == 1:
        joined = "".join(each[0] if len(set(each)) == 1 else _GAP for each in zip(*words, strict=True))
        return re.sub(rf"{_GAP}(?:[^\w\s]?{_GAP})+", _GAP, joined)
    first = _beginning(words)
    last = _beginning([found[len(first) :][::-1] for found in words])[::-1]
    return "".join([*first, _GAP, *last])


def _beginning(lists: Sequence[Sequence[str]]) -> list[str]:
    """What the lists have in common from their first word on."""
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*lists, strict=False))]
