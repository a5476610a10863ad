"""GRUB: kernel arguments without losing those that are there."""

import re
from typing import Dict, List, NamedTuple, Tuple

from .command import System
from .state import Bootloader, State
from .step import Action, Step

DEFAULTS = "/etc/default/grub"
_LINE = re.compile(r"""^\s*GRUB_CMDLINE_LINUX=(?P<quote>["']?)(?P<value>.*?)(?P=quote)\s*(?:#.*)?$""")
_DEFAULT = re.compile(r"""^\s*GRUB_DEFAULT=["']?(?P<value>[^"'#\s]*)""")


def cmdline_values(text: str) -> List[str]:
    """Values of all GRUB_CMDLINE_LINUX lines; the file is sourced by a shell, so the last one counts."""
    found = [_LINE.match(line) for line in text.splitlines()]
    return [match.group("value") for match in found if match]


def edit_cmdline(text: str, add: List[str], remove: List[str]) -> str:
    """The defaults file with arguments added to and removed from its one effective GRUB_CMDLINE_LINUX line.

    Never appends a second such line: that would erase ``console=``, ``crashkernel=`` and the rest. A file
    without one gets one. Nothing else in the file changes; doing it twice changes nothing more.
    """
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if _LINE.match(line)]
    if not places:
        return "\n".join(lines + ['GRUB_CMDLINE_LINUX="{}"'.format(" ".join(add))]) + "\n"
    match = _LINE.match(lines[places[-1]])
    words = match.group("value").split() if match else []
    kept = [word for word in words if word not in remove]
    kept += [word for word in add if word not in kept]
    if kept == words:
        return text
    # Always double quotes: an unquoted value could not hold a second word.
    lines[places[-1]] = 'GRUB_CMDLINE_LINUX="{}"'.format(" ".join(kept))
    return "\n".join(lines) + "\n"


def edit_default(text: str, value: str) -> str:
    """The defaults file with GRUB_DEFAULT set to ``value``."""
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if _DEFAULT.match(line)]
    for number in places:
        lines[number] = "GRUB_DEFAULT=" + value
    if not places:
        lines.insert(0, "GRUB_DEFAULT=" + value)
    return "\n".join(lines) + "\n"


def parse(text: str) -> Tuple[str, int, bool]:
    """(effective GRUB_CMDLINE_LINUX, number of such lines, whether GRUB_DEFAULT is saved)."""
    values = cmdline_values(text)
    defaults = [match.group("value") for match in map(_DEFAULT.match, text.splitlines()) if match]
    return (values[-1] if values else "", len(values), bool(defaults) and defaults[-1] == "saved")


def observe(system: System) -> Bootloader:
    """GRUB's configuration; ``kind`` is empty where there is none."""
    text = system.read(DEFAULTS)
    if not text:
        return Bootloader()
    cmdline, count, saved = parse(text)
    name = "grub2" if system.exists("/boot/grub2") else "grub"
    config = "/boot/{}/grub.cfg".format(name)
    return Bootloader(
        kind="grub",
        defaults_file=text,
        cmdline=cmdline,
        cmdline_lines=count,
        saved_default=saved,
        grubenv_on=_grubenv_on(system, "/boot/{}".format(name)),
        has_grubby=bool(system.which("grubby")),
        bls=bool(system.list("/boot/loader/entries")),
        mkconfig=name + "-mkconfig",
        config_path=config,
    )


def _grubenv_on(system: System, directory: str) -> str:
    source = system.run(["findmnt", "-n", "-o", "SOURCE", "--target", directory]).out.strip()
    if source.startswith(("/dev/mapper/", "/dev/dm-")):
        return "lvm"
    return "raid" if source.startswith("/dev/md") else "plain"


class Change(NamedTuple):
    """Kernel arguments to have and not to have, and why."""

    add: List[str]
    remove: List[str]
    why: str


def configured(state: State) -> List[str]:
    """Arguments that the next boot will have by its configuration; without GRUB, the running ones."""
    return state.bootloader.cmdline.split() if state.bootloader.kind else state.kernel.cmdline


def mkconfig_command(state: State) -> List[str]:
    """Regenerates grub.cfg."""
    argv = [
        state.bootloader.mkconfig or "grub-mkconfig",
        "-o",
        state.bootloader.config_path or "/boot/grub/grub.cfg",
    ]
    if state.bootloader.bls:
        # EL 9.3 and later: without it the boot entries keep their old arguments.
        argv.append("--update-bls-cmdline")
    return argv


def pending(state: State, change: Change) -> Tuple[List[str], List[str]]:
    """(arguments to add, arguments to remove) in the configuration."""
    known = configured(state)
    return [word for word in change.add if word not in known], [
        word for word in change.remove if word in known
    ]


def reboot_needed(state: State, change: Change) -> bool:
    """The running kernel was not booted with what is wanted."""
    running = state.kernel.cmdline
    return any(word not in running for word in change.add) or any(word in running for word in change.remove)


def plan(state: State, change: Change) -> List[Step]:
    """One step that edits the arguments; none when the configuration has them."""
    add, remove = pending(state, change)
    if not add and not remove:
        return []
    commands = []
    if state.bootloader.has_grubby:
        argv = ["grubby", "--update-kernel=ALL"]
        if remove:
            argv.append("--remove-args=" + " ".join(remove))
        if add:
            argv.append("--args=" + " ".join(add))
        commands.append(argv)
    else:
        commands.append(
            ["edit", DEFAULTS, "GRUB_CMDLINE_LINUX"]
            + ["+" + word for word in add]
            + ["-" + word for word in remove]
        )
        commands.append(mkconfig_command(state))
    what = [", ".join(add) and "add " + " ".join(add), ", ".join(remove) and "remove " + " ".join(remove)]
    return [
        Step(
            id="boot-arguments",
            what="kernel arguments: " + ", ".join(part for part in what if part),
            why=change.why,
            commands=commands,
            action="edit_boot_arguments",
            args={"add": add, "remove": remove},
        )
    ]


def plan_saved_default(state: State) -> List[Step]:
    """GRUB_DEFAULT=saved, without which a kernel cannot be booted once on trial."""
    if state.bootloader.saved_default or state.bootloader.has_grubby or not state.bootloader.kind:
        return []
    return [
        Step(
            id="boot-saved-default",
            what="set GRUB_DEFAULT=saved",
            why="a kernel can be booted once on trial only when GRUB remembers its default",
            commands=[["edit", DEFAULTS, "GRUB_DEFAULT=saved"], mkconfig_command(state)],
            action="set_saved_default",
            args={},
        )
    ]


def notes(state: State) -> List[str]:
    """What is odd about the configuration."""
    if state.bootloader.cmdline_lines < 2:
        return []
    values = cmdline_values(state.bootloader.defaults_file)
    hidden = sorted({word for value in values[:-1] for word in value.split()} - set(values[-1].split()))
    return (
        [
            "{} has {} GRUB_CMDLINE_LINUX lines and only the last counts; it hides: {}".format(
                DEFAULTS, len(values), " ".join(hidden) or "nothing"
            )
        ]
        if values
        else []
    )


ACTIONS: Dict[str, Action] = {}
