"""GRUB: the entry that it starts, and edits of kernel arguments that keep the existing ones."""

import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import bootentry, grubdefaults
from .command import CommandError, System
from .grubdefaults import DEFAULTS, OVERRIDES
from .state import BootEntry, Bootloader, State
from .step import Action, Applied, Step

BLS = "/boot/loader/entries"
_MKCONFIG_TIMEOUT = 600.0
# grub-probe reads every disk and hangs if one does; it runs twice within the timeout of an observation.
_PROBE_TIMEOUT = 40.0
# File systems that GRUB can write to: it overwrites blocks, which copy-on-write and logs forbid.
_WRITABLE = ("ext2", "xfs", "fat", "jfs", "reiserfs")


def config_files(system: System) -> Dict[str, str]:
    """Text of GRUB's defaults and of the files that are sourced after them, in that order."""
    names = [name for name in system.list(OVERRIDES) if name.endswith(".cfg")]
    paths = [DEFAULTS] + [OVERRIDES + "/" + name for name in names]
    return {path: system.read(path) for path in paths if system.exists(path)}


def observe(system: System) -> Bootloader:
    """Observe GRUB's configuration; ``kind`` is empty if there is none."""
    files = config_files(system)
    if not files.get(DEFAULTS):
        return Bootloader()
    name = "grub2" if system.exists("/boot/grub2") else "grub"
    directory = "/boot/" + name
    environment = bootentry.parse_grubenv(system.read(directory + "/grubenv"))
    entries = bls_entries(system, environment)
    config, stray = _config_paths(system, directory)
    if not entries:
        entries = [menu.entry for menu in bootentry.parse_menu(system.read(config))]
    return Bootloader(
        kind="grub",
        defaults_file=files[DEFAULTS],
        cmdline=" ".join(grubdefaults.configured_words(files)),
        cmdline_lines=len(grubdefaults.cmdline_values(files[DEFAULTS])),
        saved_default=grubdefaults.default_of(files) == "saved",
        has_grubby=bool(system.which("grubby")),
        bls=bool(system.list(BLS)),
        mkconfig=name + "-mkconfig",
        config_path=config,
        entries=entries,
        saved_entry=environment.get("saved_entry", ""),
        next_entry=environment.get("next_entry", ""),
        overrides={path: text for path, text in files.items() if path != DEFAULTS},
        stray_config=stray,
    )


def _config_paths(system: System, directory: str) -> Tuple[str, str]:
    """(path of the grub.cfg that GRUB reads, path of an unused one or empty).

    On EFI machines EL 7 and 8 keep it on the EFI partition. Other systems have a file there that only loads
    the one in /boot, and must not be regenerated.
    """
    path = directory + "/grub.cfg"
    link = system.link("/etc/grub2-efi.cfg") if system.exists("/sys/firmware/efi") else ""
    efi = os.path.normpath(os.path.join("/etc", link))
    if not link or efi == path or not system.exists(efi):
        return path, ""
    words = re.findall(r"^\s*([a-z]+)", system.read(efi), re.MULTILINE)
    # A complete menu may have such an entry too.
    if "configfile" in words and not {"menuentry", "linux", "linuxefi", "blscfg"} & set(words):
        return path, ""
    return efi, path if system.exists(path) else ""


def bls_entries(system: System, environment: Dict[str, str]) -> List[BootEntry]:
    """Entries of the Boot Loader Specification, without oeprov's entry for a trial."""
    names = [
        name for name in system.list(BLS) if name.endswith(".conf") and name != bootentry.TRIAL + ".conf"
    ]
    return [bootentry.parse_bls(name, system.read(BLS + "/" + name), environment) for name in names]


def grubenv_on(system: System, loader: Bootloader) -> str:
    """What holds the environment block, by grub-probe; see ``Bootloader.grubenv_on``."""
    probe, directory = tool(loader, "probe"), os.path.dirname(loader.config_path)
    path = directory + "/grubenv"
    target = path if system.exists(path) else directory
    layers = system.run([probe, "--target=abstraction", target], timeout=_PROBE_TIMEOUT)
    kind = system.run([probe, "--target=fs", target], timeout=_PROBE_TIMEOUT) if layers.ok else layers
    if not kind.ok:
        return ""
    words = layers.out.split()
    for known in ("cryptodisk", "lvm"):
        if known in words:
            return known
    if words:
        return "raid" if "diskfilter" in words else " ".join(words)
    found = kind.out.strip()
    return "plain" if found in _WRITABLE else found


def defaults_of(loader: Bootloader) -> Dict[str, str]:
    """GRUB's defaults and what is sourced after them, as they were seen."""
    files = {DEFAULTS: loader.defaults_file}
    files.update(loader.overrides)
    return files


def default_release(loader: Bootloader) -> str:
    """Release that an ordinary boot starts by grub.cfg; empty if unknown."""
    default = grubdefaults.default_of(defaults_of(loader))
    return bootentry.default_release(loader.entries, default, loader.saved_entry)


def tool(loader: Bootloader, name: str) -> str:
    """Name of a GRUB program on this machine: grub-reboot or grub2-reboot."""
    return ("grub2-" if "grub2" in loader.mkconfig else "grub-") + name


def trial_path(loader: Bootloader) -> str:
    """The file with the one-time entry."""
    if loader.bls:
        return f"{BLS}/{bootentry.TRIAL}.conf"
    return os.path.dirname(loader.config_path or "/boot/grub/grub.cfg") + "/custom.cfg"


class Change(NamedTuple):
    """Kernel arguments to add and to remove, and why."""

    add: List[str]
    remove: List[str]
    why: str


def _made_from_defaults(loader: Bootloader) -> bool:
    """Arguments must also be in the defaults file, or the next grub-mkconfig loses them.

    If boot entries are files, grubby keeps the arguments there; on EL 7 it only edits grub.cfg.
    """
    return not (loader.has_grubby and loader.bls)


def _configured(state: State) -> List[List[str]]:
    """Arguments of the next boot in each place; the places must agree."""
    loader = state.bootloader
    if not loader.kind:
        return [state.kernel.cmdline]
    entry = bootentry.find(loader.entries, state.kernel.default or state.kernel.running)
    places = [entry.arguments] if entry else []
    return places + [loader.cmdline.split()] if _made_from_defaults(loader) or not places else places


def mkconfig_command(state: State) -> List[str]:
    """The command that regenerates grub.cfg."""
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
    places = _configured(state)
    add = [word for word in change.add if any(word not in words for words in places)]
    return add, [word for word in change.remove if any(word in words for words in places)]


def reboot_needed(state: State, change: Change) -> bool:
    """The running kernel was booted with other arguments."""
    running = state.kernel.cmdline
    return any(word not in running for word in change.add) or any(word in running for word in change.remove)


def plan(state: State, change: Change) -> List[Step]:
    """One step that edits the arguments; none if the configuration has them."""
    add, remove = pending(state, change)
    if not add and not remove:
        return []
    return [_edit_step("boot-arguments", state, Change(add, remove, change.why))]


def _edit_step(name: str, state: State, change: Change) -> Step:
    loader, commands = state.bootloader, []
    if _made_from_defaults(loader):
        commands.append(["edit", DEFAULTS, "GRUB_CMDLINE_LINUX"] + signed(change))
    if loader.has_grubby:
        commands.append(_grubby_command(change.add, change.remove))
    else:
        commands.append(mkconfig_command(state))
    return Step(
        id=name,
        what="kernel arguments: " + describe(change.add, change.remove),
        why=change.why,
        commands=commands,
        action="edit_boot_arguments",
        role="kernel",
        args={"add": change.add, "remove": change.remove},
    )


def plan_leftovers(state: State) -> List[Step]:
    """One step that removes a trial's own arguments from boot entries; kernel packages copy them there."""
    words = leftovers(state.bootloader)
    why = "a kernel's package has copied them from a trial boot; with them every panic ends in a reboot"
    return [_edit_step("trial-leftovers", state, Change([], words, why))] if words else []


def leftovers(loader: Bootloader) -> List[str]:
    """A trial's own arguments in other entries, except those that entries without its mark have too."""
    places = [entry.arguments for entry in _own(loader)] + [loader.cmdline.split()]
    marked = {place: bootentry.trial_words(words) for place, words in enumerate(places)}
    wanted = {word for place, words in enumerate(places) if not marked[place] for word in words}
    found = [word for words in marked.values() for word in words if word not in wanted]
    return list(dict.fromkeys(found))


def describe(add: List[str], remove: List[str]) -> str:
    """A change of arguments in words."""
    parts = [add and "add " + " ".join(add), remove and "remove " + " ".join(remove)]
    return ", ".join(part for part in parts if part)


def key(add: List[str], remove: List[str]) -> str:
    """The name of a change of arguments in the list of failed trials."""
    return " ".join(signed(Change(add, remove, "")))


def signed(change: Change) -> List[str]:
    """Arguments with + and - before them."""
    return ["+" + word for word in change.add] + ["-" + word for word in change.remove]


def _grubby_command(add: List[str], remove: List[str]) -> List[str]:
    argv = ["grubby", "--update-kernel=ALL"]
    if remove:
        argv.append("--remove-args=" + " ".join(remove))
    if add:
        argv.append("--args=" + " ".join(add))
    return argv


def plan_saved_default(state: State, installs: bool) -> List[Step]:
    """One step that makes the running kernel the default by name, so that a failed trial returns to it.

    ``installs``: a kernel is installed before; it becomes the first entry, and so the default if unnamed.
    """
    loader = state.bootloader
    if loader.has_grubby or not loader.kind:
        return []
    named = loader.saved_default and (
        not loader.entries or loader.saved_entry in _names(loader, state.kernel.running)
    )
    returns = bool(state.kernel.default) and state.kernel.default == state.kernel.running
    if named or (returns and not installs):
        return []
    return [
        Step(
            id="boot-saved-default",
            what="set GRUB_DEFAULT=saved, and the running kernel as the default",
            why="a failed trial boot must return to the running kernel",
            commands=[
                [tool(loader, "set-default"), f"<entry of {state.kernel.running}>"],
                ["edit", DEFAULTS, "GRUB_DEFAULT=saved"],
                mkconfig_command(state),
            ],
            action="set_saved_default",
            role="kernel",
            preparing=True,
            args={},
        )
    ]


def _names(loader: Bootloader, release: str) -> List[str]:
    entry = bootentry.find(loader.entries, release)
    return [entry.id, entry.title, entry.id.rsplit(">", 1)[-1]] if entry else []


def problems(state: State, change: Change) -> List[str]:
    """Why the arguments cannot be changed."""
    add, remove = pending(state, change)
    if not add and not remove:
        return []
    if not state.bootloader.kind:
        return [
            f"kernel arguments ({describe(add, remove)}) cannot be changed: there is no {DEFAULTS}; oeprov "
            "changes them through GRUB only"
        ]
    found = grubdefaults.quoting_problems(add)
    places = grubdefaults.unreadable(defaults_of(state.bootloader))
    if places and _made_from_defaults(state.bootloader):
        found.append('{}: write the kernel arguments on one line, as NAME="value"'.format(", ".join(places)))
    return found


def notes(state: State) -> List[str]:
    """Oddities of the configuration."""
    found = []
    loader = state.bootloader
    values = grubdefaults.cmdline_values(loader.defaults_file)
    if len(values) > 1:
        hidden = sorted({word for value in values[:-1] for word in value.split()} - set(values[-1].split()))
        found.append(
            "{} has {} GRUB_CMDLINE_LINUX lines and only the last counts; it hides: {}".format(
                DEFAULTS, len(values), " ".join(hidden) or "nothing"
            )
        )
    own = grubdefaults.assignments(defaults_of(loader), grubdefaults.CMDLINE)
    if values and own and own[0].path != DEFAULTS:
        found.append(f"{own[0].path} sets GRUB_CMDLINE_LINUX anew, so {DEFAULTS} does not count")
    if loader.stray_config:
        found.append(
            f"GRUB reads {loader.config_path} on this EFI machine; {loader.stray_config} is an unused "
            "leftover: remove it, so that nobody edits it by mistake"
        )
    return found


def regenerate(system: System, loader: Bootloader) -> None:
    """Regenerate grub.cfg atomically; a power cut during grub-mkconfig alone would leave no menu."""
    path = loader.config_path
    if loader.bls:
        system.check([loader.mkconfig, "-o", path, "--update-bls-cmdline"], timeout=_MKCONFIG_TIMEOUT)
        return
    new = path + ".oeprov"
    try:
        system.check([loader.mkconfig, "-o", new], timeout=_MKCONFIG_TIMEOUT)
        text = system.read(new)
        if not bootentry.parse_menu(text):
            raise CommandError(f"{loader.mkconfig} made a menu without entries; {path} stays as it was")
        mode = os.stat(system.path(path)).st_mode & 0o777 if system.exists(path) else 0o600
        system.write(path, text, mode)
    finally:
        system.remove(new)
        system.remove(new + ".new")


def _set_saved_default(system: System, args: Dict[str, Any]) -> Applied:
    running = system.read("/proc/sys/kernel/osrelease").strip()
    return Applied(set_default(system, running), f"an ordinary boot starts {running}")


def set_default(system: System, release: str) -> bool:
    """Make ``release`` the default by name; True if anything changed.

    CommandError if it has no entry, or if GRUB would still start another.
    """
    loader = observe(system)
    if loader.has_grubby:
        return _set_default_by_grubby(system, release)
    entry = bootentry.find(loader.entries, release)
    if entry is None:
        raise CommandError(f"{loader.config_path} has no entry of kernel {release}; is it installed?")
    changed = False
    if loader.saved_entry != entry.id:
        system.check([tool(loader, "set-default"), entry.id])
        changed = True
    if not loader.saved_default:
        save_default(system, loader, "saved")
        changed = True
    now = default_release(observe(system))
    if now != release:
        raise CommandError(
            "GRUB's default is kernel {} after it was set to {}".format(now or "unknown", release)
        )
    return changed


def save_default(system: System, loader: Bootloader, value: str) -> None:
    """Set GRUB_DEFAULT, or remove it if the value is empty; CommandError for a line that cannot be edited."""
    files = defaults_of(loader)
    problem = default_problem(loader)
    if problem:
        raise CommandError(problem)
    edit_defaults(system, loader, grubdefaults.edit_default(files, value), default=value)


def default_problem(loader: Bootloader) -> str:
    """Why GRUB_DEFAULT cannot be set; empty if it can."""
    places = grubdefaults.unreadable(defaults_of(loader), ("GRUB_DEFAULT",))
    return (
        "{}: write GRUB_DEFAULT on a line of its own, as NAME=value".format(", ".join(places))
        if places
        else ""
    )


def _set_default_by_grubby(system: System, release: str) -> bool:
    path = "/boot/vmlinuz-" + release
    if system.check(["grubby", "--default-kernel"]).strip() == path:
        return False
    system.check(["grubby", "--set-default", path])
    now = system.check(["grubby", "--default-kernel"]).strip()
    if now != path:
        raise CommandError("grubby's default is {} after it was set to {}".format(now or "unknown", path))
    return True


def edit_defaults(
    system: System,
    loader: Bootloader,
    files: Dict[str, str],
    add: Tuple[str, ...] = (),
    remove: Tuple[str, ...] = (),
    default: Optional[str] = None,
) -> bool:
    """Write GRUB's defaults and regenerate grub.cfg; a failure restores the files.

    ``add``, ``remove``, ``default``: what the edit means. If a shell reads something else, CommandError
    before anything is written.
    """
    before = config_files(system)
    check_defaults(system, before, files, add, remove, default)
    changed = False
    try:
        for path, text in files.items():
            changed = system.edit(path, text) or changed
        regenerate(system, loader)
    except CommandError:
        for path, text in before.items():
            system.edit(path, text)
        raise
    return changed


def check_defaults(
    system: System,
    before: Dict[str, str],
    after: Dict[str, str],
    add: Tuple[str, ...] = (),
    remove: Tuple[str, ...] = (),
    default: Optional[str] = None,
) -> None:
    """Compare what a shell, as grub-mkconfig is one, reads before and after an edit.

    CommandError names a variable that differs from what the edit means.
    """
    changed = [path for path in after if after[path] != before.get(path, "")]
    if not changed:
        return
    names, script = grubdefaults.shell_script(before, after)
    values = []
    for files in (before, after):
        if any("\0" in text for text in files.values()):
            raise CommandError(f"{', '.join(files)}: a NUL byte is in it; nothing was changed")
        done = system.run(["sh", "-c", script, "sh"] + list(files.values()))
        found = done.out.split("\0")[:-1]
        if not done.ok or len(found) != len(names):
            how = "its end is not reached" if done.ok else done._replace(argv=["sh"]).explain()
            raise CommandError(f"{', '.join(files)}: a shell cannot read it: {how}; nothing was changed")
        values.append(dict(zip(names, found)))  # noqa: B905 - Python 3.6
    wrong = grubdefaults.wrong_values(values[0], values[1], list(add), list(remove), default)
    if wrong:
        raise CommandError(
            f"{', '.join(changed)}: after the edit a shell would read {wrong[0]} as "
            f"{values[1].get(wrong[0], '')!r}; nothing was changed; set it once, on a line of its own"
        )


def _lacking(loader: Bootloader, add: List[str], remove: List[str]) -> List[str]:
    """Entries of this system's kernels that lack ``add`` or still have ``remove``."""
    return [
        item.title
        for item in _own(loader)
        if set(add) - set(item.arguments) or set(remove) & set(item.arguments)
    ]


def _own(loader: Bootloader) -> List[BootEntry]:
    """Ordinary entries of this system's kernels."""
    return [
        item
        for item in loader.entries
        if item.release and "recovery" not in item.id + item.title and not item.id.startswith("osprober")
    ]


def edit_boot_arguments(system: System, args: Dict[str, Any]) -> Applied:
    """Add and remove kernel arguments in every boot entry; CommandError if an entry stays as it was."""
    add, remove = args["add"], args["remove"]
    said = describe(add, remove)
    loader = observe(system)
    if not loader.kind:
        raise CommandError(f"kernel arguments ({said}): there is no {DEFAULTS}")
    files = defaults_of(loader)
    made = _made_from_defaults(loader)
    refused = grubdefaults.quoting_problems(add) + (grubdefaults.unreadable(files) if made else [])
    if refused:
        raise CommandError(f"kernel arguments ({said}): {'; '.join(refused)}")
    edited = grubdefaults.edit_arguments(files, add, remove) if made else files
    if edited == files and not _lacking(loader, add, remove):
        return Applied(False, "the boot entries are up to date: " + said)
    if loader.has_grubby:
        check_defaults(system, config_files(system), edited, tuple(add), tuple(remove))
        system.check(_grubby_command(add, remove))
        for path, text in edited.items():
            system.edit(path, text)
    else:
        edit_defaults(system, loader, edited, tuple(add), tuple(remove))
    left = _lacking(observe(system), add, remove)
    if left:
        raise CommandError(f"kernel arguments ({said}): boot entry {left[0]!r} did not get them")
    return Applied(True, said)


ACTIONS: Dict[str, Action] = {
    "set_saved_default": _set_saved_default,
    "edit_boot_arguments": edit_boot_arguments,
}
