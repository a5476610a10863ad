"""Trial boots: a new kernel or new arguments are booted once, and stay only after a health check.

Before the reboot, ``prepare_reboot`` adds a one-time entry to GRUB's menu and a timer that ends the trial;
nothing that an ordinary boot uses changes. After it, ``confirm_if_pending`` checks the host and removes both.
The old kernel and arguments return without help after

- a panic or an oops (``panic=15 oops=panic``),
- an initial ramdisk without a root file system (initramfs-tools reads ``panic=`` too; dracut has options),
- a kernel or an initial ramdisk that GRUB cannot load (not where boot entries are files of their own),
- a boot that was not confirmed in time: no network, emergency mode, a hanging service.

After the confirmation none of the trial's arguments stays, so a panic ends as it did before.

Not covered is a kernel that hangs before user space without a panic: that takes a hardware watchdog that the
firmware has started.
"""

import binascii
import json
import os
import re
import time
from typing import Any, Dict, List, NamedTuple

from . import bootentry, bootloader, fstab, kernel, kernelinstall, mount
from .bootentry import TRIAL
from .command import NOT_FOUND, CommandError, System
from .state import Bootloader, Mount
from .step import Action, Applied

RECORD = "/var/lib/oeprov/reboot.json"  # the reboot under way, and what to confirm after it
EXPIRED = "/var/lib/oeprov/trial-expired"  # the trial boot that nobody confirmed in time
TIMER = "oeprov-trial.timer"
_UNITS = "/etc/systemd/system/"
_SERVICE = "oeprov-trial.service"
_SETTLE_SECONDS = 120.0
_PMEM_SECONDS = 60.0
# Every boot reaches one of them.
_WANTED_BY = ("sysinit.target", "emergency.target")
# The effects of `panic=15 oops=panic` in /proc/sys/kernel.
_SYSCTLS = {"panic": "15", "panic_on_oops": "1"}
_HEAD = """\
[Unit]
Description=oeprov: return to the old kernel unless the trial boot is confirmed
# Only for this trial, and only once: a kernel's package may copy the argument into a permanent entry.
ConditionKernelCommandLine={}
ConditionPathExists=!{}
# In emergency mode too.
DefaultDependencies=no
IgnoreOnIsolate=yes
"""


class Boot(NamedTuple):
    """The facts by which a boot is judged."""

    boot_id: str = ""
    release: str = ""
    cmdline: List[str] = []
    pmem: List[str] = []  # regions and block devices of persistent memory
    system: str = ""  # what `systemctl is-system-running` says; empty: no systemd


def observe_boot(system: System) -> Boot:
    """Observe the running boot."""
    regions = [name for name in system.list("/sys/bus/nd/devices") if re.match(r"region\d+$", name)]
    blocks = [name for name in system.list("/sys/class/block") if name.startswith("pmem")]
    return Boot(
        boot_id=system.read("/proc/sys/kernel/random/boot_id").strip(),
        release=kernelinstall.running_release(system),
        cmdline=system.read("/proc/cmdline").split(),
        pmem=regions + blocks,
        system=system.run(["systemctl", "is-system-running"]).out.strip(),
    )


def check_boot(expect: Dict[str, Any], seen: Boot) -> List[str]:
    """Faults of a boot; ``expect`` is the record of ``prepare_reboot``."""
    found = []
    if seen.boot_id == expect["boot_id"]:
        found.append("the machine has not rebooted")
    if seen.release != expect["release"]:
        found.append(f"kernel {seen.release} runs instead of {expect['release']}")
    missing = [word for word in expect["arguments"] if word not in seen.cmdline]
    if missing:
        found.append("kernel arguments are missing: " + " ".join(missing))
    present = [word for word in expect["absent_arguments"] if word in seen.cmdline]
    if present:
        found.append("kernel arguments are still there: " + " ".join(present))
    gone = [name for name in expect["pmem"] if name not in seen.pmem]
    if gone:
        found.append("persistent memory has disappeared: " + " ".join(gone))
    if seen.system in ("maintenance", "stopping"):
        found.append(f"systemd says {seen.system!r}")
    return found


def prepare_reboot(system: System, args: Dict[str, Any]) -> Applied:
    """Record what must hold after the reboot, and set a trial boot up; the caller reboots.

    Idempotent. The one-time entry is selected last, when the way back is on the disk.
    """
    now = observe_boot(system)
    release = args["release"] or (kernelinstall.installed_releases(system) or [now.release])[-1]
    if release != now.release:
        kernelinstall.check_installed(system, release, [])
    record = {
        "id": binascii.hexlify(os.urandom(4)).decode(),
        "boot_id": now.boot_id,
        "from": now.release,
        "release": release,
        "trial": args["trial"],
        "arguments": args["arguments"],
        "absent_arguments": args["absent_arguments"],
        "pmem": now.pmem if args["pmem_stays"] else [],
        "mounts": _mounted_at_boot(system) if args["pmem_stays"] else [],
        "sysctls": {name: _read_sysctl(system, name) for name in _SYSCTLS},
        "limit": args["trial_limit"],
        "what": args["failure_key"] or release,
        "state": "prepared",
        "why": "",
    }
    if not args["trial"]:
        if release != now.release:
            bootloader.set_default(system, release)
        _save(system, record)
        return Applied(True, f"ready to reboot into {release}")
    loader = bootloader.observe(system)
    _write_entry(system, loader, record)
    _write_units(system, record)
    _save(system, record)
    system.check(["sync"], timeout=600)
    system.check([bootloader.tool(loader, "reboot"), TRIAL])
    if bootloader.observe(system).next_entry != TRIAL:
        raise CommandError("GRUB's environment block does not have the one-time entry after it was set")
    return Applied(
        True,
        f"{record['what']} is booted once; unless it is confirmed within {record['limit']} s, {now.release} "
        "returns",
    )


def _trial_arguments(system: System, record: Dict[str, Any]) -> List[str]:
    dracut = bootentry.GIVE_UP_DRACUT if system.which("dracut") else []
    return bootentry.GIVE_UP + [_mark(record)] + dracut


def _mark(record: Dict[str, Any]) -> str:
    """The kernel argument that only this trial's entry has."""
    return bootentry.MARK + str(record["id"])


def _write_entry(system: System, loader: Bootloader, record: Dict[str, Any]) -> None:
    """Write the one-time entry: as a BLS file if entries are files, else into custom.cfg."""
    entry = bootentry.find(loader.entries, record["release"])
    if entry is None:
        raise CommandError(
            "there is no boot entry of kernel {} in {}".format(
                record["release"], loader.config_path or "GRUB"
            )
        )
    words = bootentry.changed(entry.arguments, record["arguments"], record["absent_arguments"])
    words += _trial_arguments(system, record)
    title = f"{record['release']} on trial (oeprov)"
    if loader.bls:
        text = system.read(f"{bootloader.BLS}/{entry.id}.conf")
        system.write(bootloader.trial_path(loader), bootentry.copy_bls(text, title, words))
        return
    menu = system.read(loader.config_path)
    if "custom.cfg" not in menu:
        raise CommandError(
            f"{loader.config_path} does not read custom.cfg, where an entry for one boot would be: is "
            "/etc/grub.d/41_custom there and executable?"
        )
    menus = {item.entry.id: item for item in bootentry.parse_menu(menu)}
    old = bootentry.find(loader.entries, record["from"])
    if old is None:
        raise CommandError(f"{loader.config_path} has no entry of kernel {record['from']}")
    block = bootentry.trial_entry(menus[entry.id], title, words, menus[old.id])
    path = bootloader.trial_path(loader)
    before = system.read(path)
    system.edit(path, bootentry.with_block(before, block))
    checked = system.run([bootloader.tool(loader, "script-check"), system.path(path)])
    if not checked.ok and checked.code != NOT_FOUND:
        system.edit(path, before)
        raise CommandError("the one-time entry for GRUB: " + checked.explain())


def _write_units(system: System, record: Dict[str, Any]) -> None:
    """Write the timer that ends a trial boot; it starts in no other boot."""
    timer = (
        f"\n[Timer]\nOnBootSec={record['limit']}\nAccuracySec=1s\n"
        f"\n[Install]\nWantedBy={' '.join(_WANTED_BY)}\n"
    )
    head = _HEAD.format(_mark(record), EXPIRED)
    service = (
        f"\n[Service]\nType=oneshot\nExecStart=-/bin/cp /proc/cmdline {EXPIRED}\n"
        "ExecStart=/bin/systemctl --force reboot\n"
    )
    system.write(_UNITS + TIMER, head + timer)
    system.write(_UNITS + _SERVICE, head + service)
    system.remove(EXPIRED)
    # Not started now, since only the next boot needs it.
    system.check(["systemctl", "--no-reload", "enable", TIMER])


def confirm_if_pending(system: System) -> str:
    """Judge a reboot that ``prepare_reboot`` prepared; returns one line about it, empty if there was none.

    CommandError if the host returned to the old kernel, or is unhealthy.
    """
    record = system.read_json(RECORD)
    if not record or record["boot_id"] == observe_boot(system).boot_id:
        return ""
    return confirm(system).message


def confirm(system: System) -> Applied:
    """The same for a reboot that must have happened: CommandError if it did not."""
    record = system.read_json(RECORD)
    if not record:
        return Applied(False, "no reboot waits to be confirmed")
    seen = _settled(system, record)
    if seen.boot_id == record["boot_id"]:
        raise CommandError(f"the machine has not rebooted; boot id {seen.boot_id} is still the same")
    _mount_again(system, record)
    if record["trial"] and _mark(record) not in seen.cmdline:
        return _returned(system, record, seen)
    if record["state"] == "failed":
        raise CommandError(_unhealthy(system, record))
    problems = check_boot(record, seen)
    if problems and record["trial"]:
        record.update(state="failed", why="; ".join(problems))
        _save(system, record)
        _record_failure(system, record)
        raise CommandError(_unhealthy(system, record))
    if problems:
        system.remove(RECORD)
        raise CommandError("after the reboot: " + "; ".join(problems))
    # Saved before the timer goes: an interruption in between is not a failure.
    record["state"] = "confirmed"
    _save(system, record)
    _clean(system)
    _drop_failure(system, record)
    _reset_sysctls(system, record)
    system.remove(RECORD)
    return Applied(
        True, "rebooted: kernel {} runs{}".format(seen.release, ", trial passed" if record["trial"] else "")
    )


def _settled(system: System, record: Dict[str, Any]) -> Boot:
    """Wait until systemd has started its units and persistent memory has appeared; the boot then."""
    started = time.time()
    # The wait ends before the trial's own timer.
    most = record["limit"] - _uptime(system) - 20 if record["trial"] else _SETTLE_SECONDS
    while True:
        seen = observe_boot(system)
        passed = time.time() - started
        busy = seen.system in ("initializing", "starting") and passed < min(_SETTLE_SECONDS, most)
        waits = bool(set(record["pmem"]) - set(seen.pmem)) and passed < min(_PMEM_SECONDS, most)
        if not busy and not waits:
            return seen
        time.sleep(2)


def _mounted(system: System) -> List[Mount]:
    return mount.parse_mounts(system.read("/proc/mounts"))


def _mounted_at_boot(system: System) -> List[str]:
    """Mount points of persistent memory that a boot mounts again."""
    places = [entry.where for entry in fstab.parse(system.read(fstab.PATH))]
    found = [item.where for item in _mounted(system) if item.device.startswith("/dev/pmem")]
    return [where for where in found if where in places]


def _mount_again(system: System, record: Dict[str, Any]) -> None:
    """Mount what the boot left unmounted, because a device appeared late.

    If that fails, the plan and `oeprov doctor` say so.
    """
    there = [item.where for item in _mounted(system)]
    for where in record.get("mounts", []):
        if where not in there:
            system.run(["mount", where])


def _uptime(system: System) -> float:
    """Seconds since the kernel started."""
    return float((system.read("/proc/uptime").split() or ["0"])[0])


def _returned(system: System, record: Dict[str, Any], seen: Boot) -> Applied:
    """Handle a host that runs the old kernel again."""
    taken = bootloader.observe(system).next_entry != TRIAL
    expired = record["id"] in system.read(EXPIRED)
    _clean(system)
    if record["state"] in ("confirmed", "failed"):
        system.remove(RECORD)
        return Applied(True, f"kernel {seen.release} runs again")
    if not taken:
        system.remove(RECORD)
        raise CommandError(f"GRUB did not start the one-time entry; kernel {seen.release} runs as before")
    record["why"] = "it did not come up (panic, no root file system, emergency mode, hang), or power was lost"
    if expired:
        record["why"] = (
            f"it came up, but was not confirmed within {record['limit']} s: the controller went away, or "
            "could not reach it"
        )
    _record_failure(system, record)
    system.remove(RECORD)
    raise CommandError(
        f"{record['what']} failed its trial boot, and the machine returned to kernel {seen.release}: "
        f"{record['why']}; recorded in {kernel.FAILED}"
    )


def _unhealthy(system: System, record: Dict[str, Any]) -> str:
    left = max(0.0, record["limit"] - _uptime(system))
    return (
        f"{record['what']} is on trial and not healthy: {record['why']}; the machine returns to kernel "
        f"{record['from']} within {left:.0f} s; recorded in {kernel.FAILED}"
    )


def _read_sysctl(system: System, name: str) -> str:
    return system.read("/proc/sys/kernel/" + name).strip()


def _reset_sysctls(system: System, record: Dict[str, Any]) -> None:
    """Restore how the kernel panics: after a passed trial its message matters more than the reboot."""
    for name, before in record.get("sysctls", {}).items():
        if record["trial"] and before and _read_sysctl(system, name) == _SYSCTLS[name]:
            system.write("/proc/sys/kernel/" + name, before + "\n")


def _other_failures(system: System, record: Dict[str, Any]) -> List[str]:
    return [line for line in system.read(kernel.FAILED).splitlines() if line.split("\t")[0] != record["what"]]


def _drop_failure(system: System, record: Dict[str, Any]) -> None:
    """Remove what has passed now from the list of failed trials."""
    others = _other_failures(system, record)
    if others:
        system.write(kernel.FAILED, "".join(line + "\n" for line in others))
    else:
        system.remove(kernel.FAILED)


def _record_failure(system: System, record: Dict[str, Any]) -> None:
    """Add a line to the list of failed trials, and remove an older one about the same."""
    lines = _other_failures(system, record)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    lines.append("\t".join([record["what"], when, record["why"]]))
    system.write(kernel.FAILED, "".join(line + "\n" for line in lines))


def _clean(system: System) -> None:
    """Remove the timer and the one-time entry; CommandError if the timer would still end this boot."""
    if system.exists(_UNITS + TIMER):
        system.run(["systemctl", "stop", TIMER])
        if system.run(["systemctl", "is-active", TIMER]).out.strip() == "active":
            raise CommandError(f"{TIMER} cannot be stopped: it would reboot this machine")
        system.run(["systemctl", "--no-reload", "disable", TIMER])
        system.remove(_UNITS + TIMER)
        system.remove(_UNITS + _SERVICE)
        system.run(["systemctl", "daemon-reload"])
    system.remove(EXPIRED)
    loader = bootloader.observe(system)
    path = bootloader.trial_path(loader)
    rest = "" if loader.bls else bootentry.with_block(system.read(path), "")
    if not rest.strip():
        system.remove(path)
    else:
        system.edit(path, rest)
    if loader.next_entry == TRIAL:
        grubenv = os.path.dirname(loader.config_path) + "/grubenv"
        system.check([bootloader.tool(loader, "editenv"), grubenv, "unset", "next_entry"])


def _save(system: System, record: Dict[str, Any]) -> None:
    system.write(RECORD, json.dumps(record, sort_keys=True) + "\n")


ACTIONS: Dict[str, Action] = {"reboot": prepare_reboot}
