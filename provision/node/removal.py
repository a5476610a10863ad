"""`oeprov destroy`: observe what oeprov made on a host, and plan its removal.

Data is removed by name only: an object that ``Desired.remove_objects`` does not have stays, and a note names
it. System packages and kernels stay, because others may use them.
"""

import os
import pwd
import re
from typing import Any, Dict, List, Tuple

from . import (
    ansible_python,
    bootentry,
    bootloader,
    build,
    daxctl,
    devices,
    drives,
    environments,
    filesystem,
    gpucheck,
    job,
    jobfiles,
    jobscript,
    kernel,
    memmap,
    mount,
    ndctl,
    numa,
    openat,
    owned,
    platforms,
    repositories,
    runtime,
    system_ram,
    systemd,
    tiering,
)
from .command import CommandError, System
from .grubdefaults import DEFAULTS
from .state import JobFiles, Namespace, Remains, State
from .step import Action, Applied, Desired, Part, Step, note_left

USER = "oeprov"
_SERVER = re.compile(r"server-\d+")
_OFFLINE = "memhp_default_state="
_FILES = [repositories.YUM, repositories.APT, repositories.BUNDLE, kernel.FAILED, build.WHEELS]
_FILES += [jobscript.SCRIPTS, jobscript.ENVIRONMENTS, ansible_python.PROGRAM, drives.RULES]
# The link that enables the unit goes first: without the unit it would not be found.
_FILES += [gpucheck.CHECKED, gpucheck.ENABLED, gpucheck.UNIT]


def observe(system: System, desired: Desired, state: State) -> Remains:
    """Observe jobs and our files; ``state`` has the mounts."""
    managed = platforms.get(desired.kind).managed
    pools, foreign = _pools(system, _pool_roots(desired, state))
    jobs: Dict[str, JobFiles] = {}
    for name in system.list(desired.remove_jobs):
        directory = os.path.join(desired.remove_jobs, name)
        if jobfiles.is_marked(system, directory):
            steps = openat.list_names(system, os.path.join(directory, "run", "checkpoints"))
            saved = len([item for item in steps if item.startswith("step-")])
            run = jobfiles.has_run(system, directory)
            jobs[name] = JobFiles(name, directory=directory, checkpoints=saved, run=run)
    for unit in systemd.ours(system) if managed else []:
        name = systemd.job_of(unit)
        found = jobs.get(name, JobFiles(name))
        jobs[name] = found._replace(units=found.units + [unit])
    for name, paths in pools.items():
        jobs[name] = jobs.get(name, JobFiles(name))._replace(pools=paths)
    files = [path for path in _FILES if system.exists(path)] if managed else []
    return Remains(
        jobs=[jobs[name] for name in sorted(jobs)],
        foreign=foreign,
        files=files,
        user=managed and _has_user(),
    )


def _has_user() -> bool:
    """The user of the services exists as oeprov makes it; another user of that name may be a person."""
    try:
        found = pwd.getpwnam(USER)
    except KeyError:
        return False
    return found.pw_dir == jobfiles.HOME and os.path.basename(found.pw_shell) in ("nologin", "false")


def _pool_roots(desired: Desired, state: State) -> List[str]:
    if not platforms.get(desired.kind).managed:
        return [path for path in [desired.pmem_directory, *desired.ssd_devices] if path]
    places = [drives.place(desired, name) for name in desired.ssd_devices]
    places += [item.where for item in state.mounts if mount.is_place(item.where, mount.pmem_use(desired))]
    return [os.path.join(where, "oeprov") for where in places]


def _pools(system: System, roots: List[str]) -> Tuple[Dict[str, List[str]], List[str]]:
    """Directories of jobs below ``roots``, by job; and all other paths there."""
    found: Dict[str, List[str]] = {}
    foreign = []
    for root in roots:
        for name in system.list(root):
            path = os.path.join(root, name)
            inside = openat.list_names(system, path)
            if inside and all(_SERVER.fullmatch(item) for item in inside):
                found.setdefault(name, []).append(path)
            else:
                foreign.append(path)
    return found, foreign


def plan(state: State, desired: Desired) -> Part:
    """Plan the removal of what oeprov made; notes list the data that was not named, and stays."""
    problems = [
        f"training job {name} runs on this host; stop it first: oeprov stop {name}" for name in state.jobs
    ]
    part = _jobs(state, desired)
    if not platforms.get(desired.kind).managed:
        return part._replace(before=part.before + _directory(state, desired, part), problems=problems)
    memory, kept = _memory(state, desired)
    arguments = _arguments(state, desired)
    default = plan_grub_default(state, desired.remove_grub_default)
    drive = drives.plan_removal(state, desired)
    left = bool(kept.notes or arguments.notes or drive.notes)
    after = drive.after + default.after + _files(state, desired, part, left)
    if state.dimms.app_direct:
        kept.notes.append("left: the goal of the modules, App Direct; ipmctl changes it")
    return Part(
        before=part.before + drive.before + memory + kept.before + arguments.before,
        remove_arguments=arguments.remove_arguments,
        arguments_why=arguments.arguments_why,
        reboot_why=arguments.reboot_why,
        after=after,
        notes=part.notes + drive.notes + kept.notes + arguments.notes + default.notes,
        problems=problems + filesystem.problems(state, memory + kept.before + arguments.before),
    )


def _jobs(state: State, desired: Desired) -> Part:
    steps, notes = [], []
    for item in state.remains.jobs:
        if item.units:
            steps.append(
                Step(
                    id="units-" + item.job,
                    what=f"remove the services of job {item.job}: {', '.join(item.units)}",
                    why="oeprov made them; none of them runs",
                    commands=[["rm", systemd.path(unit)] for unit in item.units],
                    action="remove_units",
                    args={"directory": item.directory or os.path.join(desired.remove_jobs, item.job)},
                )
            )
        paths = item.pools + ([item.directory] if item.directory else [])
        data = [
            "{} checkpoint{}".format(item.checkpoints, "" if item.checkpoints == 1 else "s"),
            "rows in " + ", ".join(item.pools),
        ]
        words = " and ".join([data[0]] * bool(item.run) + [data[1]] * bool(item.pools))
        name = "job/" + item.job
        if not paths:
            continue
        # On a user's own machine jobs are in the user's directory.
        mine = paths if platforms.get(desired.kind).managed else item.pools
        if words and name not in desired.remove_objects:
            notes.append(note_left(desired, f"job {item.job} ({words})", [name]))
            continue
        steps.append(
            Step(
                id="files-" + item.job,
                what="remove {}{}".format(", ".join(paths), ": " + words if words else ""),
                why=f"files of job {item.job}",
                destroys=[name] if words else [],
                commands=[["rm", "-r", path] for path in paths],
                action="remove_paths",
                args={"paths": paths, "parents": sorted({os.path.dirname(path) for path in mine})},
            )
        )
    return Part(before=steps, notes=notes)


def _directory(state: State, desired: Desired, jobs: Part) -> List[Step]:
    """Remove the directory in place of persistent memory, once it is empty."""
    path = desired.pmem_directory
    kept = any(item.pools and "job/" + item.job not in desired.remove_objects for item in state.remains.jobs)
    there = any(item.path == path and item.is_directory for item in state.directories)
    # If it has rows, their removal removes it too (``parents``).
    if not there or kept or state.remains.foreign or any(item.pools for item in state.remains.jobs):
        return []
    return [
        Step(
            id="directory",
            what=f"remove {path}, which is empty",
            why="it stands in for persistent memory",
            commands=[["rmdir", path]],
            action="remove_paths",
            args={"paths": [], "parents": [path]},
        )
    ]


def _is_ours(state: State, item: Namespace) -> bool:
    return ndctl.is_ours(state, item) or any(
        found.uuid in state.owned
        for found in state.filesystems
        if found.device == item.blockdev and found.uuid
    )


def _memory(state: State, desired: Desired) -> Tuple[List[Step], Part]:
    """Stop the use of persistent memory; namespaces are destroyed by name only."""
    steps, notes, doomed = tiering.forget(state), [], []
    for item in state.namespaces:
        if not _is_ours(state, item):
            continue
        release = system_ram.release(state, item)
        steps += release.after
        if release.reboot_why:
            notes.append(f"{release.reboot_why}: it stays system RAM until the next boot")
        if item.blockdev and all(
            mount.is_place(found.where, mount.pmem_use(desired))
            for found in mount.mounts_of(state, item.blockdev)
        ):
            steps += mount.unmount_for_good(state, item.blockdev)
        if item.mode == "raw" and not item.labels:
            continue  # the memory as delivered
        name = "{}/{}".format(item.dev, item.uuid or item.raw_uuid or "no-uuid")
        data = [lost for lost in ndctl.data_in(state, item) if lost != name]
        if name in desired.remove_objects and not release.reboot_why:
            step = ndctl.destroy(state, item, "oeprov made it, and it was named")
            doomed.append(step._replace(destroys=[name] + data))
        else:
            notes.append(note_left(desired, f"{item.dev} ({item.mode}) and what is on it", [name] + data))
    # CXL memory has no namespace.
    of_namespaces = [item.chardev for item in state.namespaces]
    notes += [
        f"{dax.chardev} stays a memory node until the next boot"
        for dax in state.dax
        if dax.mode == "system-ram" and dax.chardev not in of_namespaces and daxctl.UNIT in state.files
    ]
    steps += mount.forget_for_good(state, mount.pmem_use(desired), "fstab-forget")
    steps += system_ram.forget(state)
    problems = ndctl.foreign_problems(state, steps + doomed)
    return steps, Part(before=doomed, notes=notes, problems=problems)


def _arguments(state: State, desired: Desired) -> Part:
    """Remove kernel arguments that oeprov added; memmap= only if the data on its range was named."""
    configured = state.kernel.cmdline + state.bootloader.cmdline.split()
    known = [
        word
        for word in dict.fromkeys(configured)
        if word in desired.kernel_arguments
        or devices.is_memmap(word)
        or word == memmap.NOKASLR
        or word.startswith(_OFFLINE)
    ]
    if not desired.remove_known:
        if not known:
            return Part()
        note = (
            "left: kernel arguments {}: the journal here does not have the arguments from before oeprov; if "
            "these are oeprov's, {}"
        )
        way = f"take them out of {DEFAULTS} and run {' '.join(bootloader.mkconfig_command(state))}"
        if state.bootloader.has_grubby:
            way = 'grubby --update-kernel=ALL --remove-args="{}"'.format(" ".join(known))
        return Part(notes=[note.format(" ".join(known), way)])
    added = [word for word in known if word not in desired.remove_arguments_before]
    lost = [data for item in state.namespaces for data in ndctl.data_in(state, item)]
    part = Part()
    if lost and any(map(devices.is_memmap, added)):
        if all(name in desired.remove_objects for name in lost):
            part = Part(before=memmap.leave(state, desired, "the range becomes ordinary memory"))
        else:
            part = Part(notes=[note_left(desired, "memmap= and what lies on its range", lost)])
            added = [word for word in added if not devices.is_memmap(word) and word != memmap.NOKASLR]
    running = [word for word in added if word in state.kernel.cmdline]
    return part._replace(
        remove_arguments=added,
        arguments_why="oeprov added them" if added else "",
        reboot_why="kernel arguments are taken back" if running else "",
    )


def _files(state: State, desired: Desired, jobs: Part, kept: bool) -> List[Step]:
    """Remove the environment, configuration, the registry and the services' user, if nothing needs them."""
    venv, home = state.runtime.venv, state.runtime.home or state.runtime.venv
    paths = list(dict.fromkeys([venv, home])) if state.runtime.made else []
    # Last: after an interruption they count as old ones, which are oeprov's.
    paths += [environments.folder(home)] if state.runtime.place or state.runtime.old else []
    # Ansible may use that one until the end: see ansible_python.plan_removal.
    paths += [path for path in state.remains.files if path != ansible_python.PROGRAM]
    if not kept and state.owned:
        paths.append(owned.PATH)
    steps = []
    if paths:
        steps.append(
            Step(
                id="remove-files",
                what="remove " + ", ".join(paths),
                why="oeprov made them",
                commands=[["rm", "-r", path] for path in paths],
                action="remove_paths",
                args={"paths": paths, "parents": _parents(state, desired)},
            )
        )
    if state.remains.user and not jobs.notes:
        steps.append(
            Step(
                id="remove-user",
                what=f"remove the user {USER}",
                why="services ran as it, and it has no files left",
                commands=[["userdel", USER]],
                action="remove_user",
                args={"parents": _parents(state, desired)},
            )
        )
    return steps


def _parents(state: State, desired: Desired) -> List[str]:
    """Our directories that may be empty afterwards."""
    above = os.path.dirname(state.runtime.venv)
    places = [desired.remove_jobs, os.path.dirname(numa.ENVIRONMENT)]
    return places + ([above] if os.path.basename(above) == "oeprov" else [])


def _remove_units(system: System, args: Dict[str, Any]) -> Applied:
    found = job.stop(system, {"directory": args["directory"], "keep": True, "keep_pools": True})
    left = systemd.ours(system, os.path.basename(args["directory"]))
    if left:
        raise CommandError(f"{', '.join(left)} still in {systemd.DIRECTORY}, though stopped")
    return Applied(bool(found["stopped"]), "removed " + (", ".join(found["stopped"]) or "nothing"))


def _remove_paths(system: System, args: Dict[str, Any]) -> Applied:
    changed = False
    for path in args["paths"]:
        # The stamp of an environment goes last: after an interruption it still counts as ours.
        changed = openat.remove(system, path, last=runtime.STAMP) or changed
        if os.path.lexists(system.path(path)):
            raise CommandError(f"{path} is still there")
    for path in args["parents"]:
        changed = openat.remove_empty(system, path) or changed
    return Applied(changed, "removed" if changed else "nothing was there")


def _remove_user(system: System, args: Dict[str, Any]) -> Applied:
    if not _has_user():
        return Applied(False, "there is no user " + USER)
    for path in args["parents"]:  # of jobs that left no files
        system.remove_empty(path)
    system.check(["userdel", USER])
    return Applied(True, f"the user {USER} is gone")


def plan_grub_default(state: State, before: str) -> Part:
    """One step that sets GRUB_DEFAULT back (empty: no line), if the running kernel stays the default.

    Otherwise a note: a removal must not make an untested kernel the default.
    """
    loader = state.bootloader
    if loader.has_grubby or not loader.saved_default or before == "saved":
        return Part()
    starts = bootentry.default_release(loader.entries, before, loader.saved_entry)
    if starts != state.kernel.running:
        note = (
            "left: GRUB_DEFAULT=saved in {}; before oeprov it was {}, with which the next boot would start "
            "{}, and {} runs"
        )
        then = "kernel " + starts if starts else "an unknown kernel"
        return Part(notes=[note.format(DEFAULTS, before or "not set", then, state.kernel.running)])
    return Part(
        after=[
            Step(
                id="boot-default-back",
                what=f"set GRUB_DEFAULT={before} again" if before else "remove GRUB_DEFAULT=saved",
                why=f"oeprov set it to saved; kernel {starts} stays the default",
                commands=[
                    ["edit", DEFAULTS, "-GRUB_DEFAULT=saved"] + ["+GRUB_DEFAULT=" + before] * bool(before),
                    bootloader.mkconfig_command(state),
                ],
                action="restore_grub_default",
                role="kernel",
                args={"value": before, "release": starts},
            )
        ]
    )


def _restore_grub_default(system: System, args: Dict[str, Any]) -> Applied:
    value, release = args["value"], args["release"]
    said = f"GRUB_DEFAULT={value}" if value else "no GRUB_DEFAULT"
    loader = bootloader.observe(system)
    if not loader.saved_default:
        return Applied(False, "GRUB_DEFAULT is not saved any more")
    bootloader.save_default(system, loader, value)
    now = bootloader.default_release(bootloader.observe(system))
    if now != release:
        bootloader.set_default(system, release)
        raise CommandError(
            "with {} the next boot would start kernel {} instead of {}; it is saved again".format(
                said, now or "unknown", release
            )
        )
    return Applied(True, f"{said} again; an ordinary boot starts {release}")


ACTIONS: Dict[str, Action] = {
    "restore_grub_default": _restore_grub_default,
    "remove_units": _remove_units,
    "remove_paths": _remove_paths,
    "remove_user": _remove_user,
}
