"""What is wrong on a host and what to do about it: a pure function of its observed state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from provision.node import families, modules, mount, ndctl, platforms, tiering
from provision.node.daxctl import RECONFIGURE_SINCE, tool_version
from provision.node.directory import human
from provision.node.health import Health
from provision.node.platform_base import MEMORY_NODES
from provision.node.state import State
from provision.node.step import Desired, Plan

MOST_SKEW = 2.0  # seconds; beyond it, logs of hosts cannot be compared and certificates may be refused
_HUGE_SHARE = 0.1
_FULL_SHARE = 0.03
_WORN = 80  # percent of a drive's rated writes
_WARNINGS = {
    0: "few spare blocks are left",
    1: "it is too hot or too cold",
    2: "it is no longer reliable",
    3: "it takes no writes any more",
    4: "its backup of volatile memory failed",
    5: "its persistent memory is read-only",
}  # bits of NVMe's critical warning


@dataclass(frozen=True)
class Finding:
    """One problem: what was found, and what to do."""

    what: str
    do: str


def diagnose(state: State, desired: Desired, plan: Plan, health: Health, skew: float = 0.0) -> list[Finding]:
    """All problems of a host, the most fundamental first."""
    return list(_all(state, desired, plan, health, skew))


def _all(state: State, desired: Desired, plan: Plan, health: Health, skew: float) -> Iterator[Finding]:
    platform = platforms.get(desired.kind)
    yield from _modules(state, desired, health)
    if desired.pmem_mode == "fsdax":
        yield from _fsdax(state, desired)
    if desired.pmem_mode in MEMORY_NODES and not platform.handed_out(state, desired):
        yield from _system_ram(state, desired)
    if desired.pmem_mode == tiering.MODE:
        yield from _tiering(state, desired)
    if platform.managed:
        yield from _kernel(state)
    yield from _environments(state)
    yield from _drives(health)
    yield from _servers(health)
    if desired.parameter_server and platform.managed and health.firewall:
        yield from _firewall(health)
    yield from _machine(state, health, skew)
    for line in plan.problems:
        yield Finding(line, "until then, bootstrap changes nothing on this host")
    if plan.steps:
        steps = "; ".join(step.what for step in plan.steps)
        yield Finding(
            f"it differs from the inventory, {len(plan.steps)} step(s) to do: {steps}",
            "`oeprov plan` shows them, `oeprov bootstrap` does them",
        )
    for line in state.trouble:
        yield Finding(
            f"something could not be observed: {line}", "run oeprov as root there, or install the tool"
        )


def _modules(state: State, desired: Desired, health: Health) -> Iterator[Finding]:
    platform = platforms.get(desired.kind)
    wants = desired.pmem_mode in ("fsdax", *MEMORY_NODES) and platform.regions
    regions = [region for region in state.regions if region.type in platform.regions]
    if wants and not regions and not platform.handed_out(state, desired):
        yield _no_region(state, desired, health)
    for name, text in health.flags.items():
        words = [word for word in text.split() if word != "smart_notify"]
        if words:
            said = ", ".join(modules.WORDS.get(word, word) for word in words)
            yield Finding(
                f"persistent memory module {name} {said}",
                f"save its data; `ndctl list -DH -d {name}` and `ipmctl show -sensor` say more; replace it "
                "if that stays",
            )
    for name, blocks in health.bad_blocks.items():
        yield Finding(
            f"{name} has {blocks} blocks of 512 bytes that cannot be read",
            f"`ndctl list -M -r {name}` shows where; writing them anew clears them: restore the checkpoint, "
            "or make the namespace again",
        )


def _no_region(state: State, desired: Desired, health: Health) -> Finding:
    if platforms.get(desired.kind).no_region:
        return Finding(*platforms.get(desired.kind).no_region)
    if state.dimms.inaccessible > state.dimms.app_direct + state.dimms.volatile:
        return Finding(
            f"{human(state.dimms.inaccessible)} of persistent memory are neither memory nor App Direct",
            "`oeprov pmem-mode fsdax` sets the goal; if one was set and this stays, the firmware is fixed to "
            "1LM: look for 'volatile memory mode' in its setup",
        )
    if state.dimms.volatile and not state.dimms.app_direct:
        return Finding(
            "all persistent memory is in memory mode, where DRAM is its cache",
            f"`oeprov pmem-mode {desired.pmem_mode}` sets another goal and reboots",
        )
    if health.modules:
        return Finding(
            f"{len(health.modules)} persistent memory modules are there, and no region of them: their "
            "interleave set is broken (a module is missing, was moved or failed), or none was made",
            "`ipmctl show -dimm` and `ipmctl show -region` name the module; put it back in its slot, or make "
            "a new goal, which loses what is on all modules of the set",
        )
    return Finding(
        "there is no persistent memory: no region, and no module",
        f"is this machine of the right type ({desired.kind})? `ndctl list -DR` shows what the kernel sees; "
        "else correct oeprov_kind",
    )


def _fsdax(state: State, desired: Desired) -> Iterator[Finding]:
    for item in ndctl.chosen(state, desired):
        name = item.blockdev or item.chardev or item.dev
        if not item.enabled:
            yield Finding(
                f"{item.dev} is disabled",
                f"`ndctl enable-namespace {item.dev}`; the kernel's log says why when that fails",
            )
        elif item.mode != "fsdax":
            # re7p's and label-less ones are raw and yet have DAX.
            if item.mode == "raw" and mount.mounts_of(state, item.blockdev):
                continue
            yield Finding(
                f"{item.dev} is in mode {item.mode}, and pmem_mode asks for fsdax",
                "`oeprov pmem-mode fsdax --plan` shows the way, and what of its data would be lost",
            )
        else:
            mounts = mount.mounts_of(state, item.blockdev)
            if not mounts:
                uuids = [found.uuid for found in state.filesystems if found.device == item.blockdev]
                specs = ["/dev/" + name, *(f"UUID={uuid}" for uuid in uuids if uuid)]
                where = next((entry.where for entry in state.fstab if entry.spec in specs), "")
                yield Finding(
                    f"/dev/{name} is not mounted",
                    f"`mount {where}`; `journalctl -b -u systemd-fsck@*` says why a boot did not mount it"
                    if where
                    else "/etc/fstab does not have it: `oeprov bootstrap` enters it there and mounts it",
                )
            for item_mount in mounts:
                if not mount.has_dax(item_mount.options):
                    yield Finding(
                        f"{item_mount.where} is mounted without DAX: its files go through the page cache, "
                        "and what is written is not persistent at once",
                        "stop the training there, then `oeprov bootstrap` mounts it with -o dax; if the "
                        "kernel turns DAX off, dmesg says why (block size, reflink, no DAX in the device)",
                    )


def _system_ram(state: State, desired: Desired) -> Iterator[Finding]:
    version = tool_version(state.tools.daxctl) or families.daxctl_version(state.os)
    if 0 < version < RECONFIGURE_SINCE:
        yield Finding(
            f"daxctl is version {version}, and cannot make system RAM of a device",
            f"install ndctl and daxctl {RECONFIGURE_SINCE} or newer, or use pmem_mode fsdax",
        )
    for dax in state.dax:
        if dax.mode == "system-ram" and dax.online_memblocks < dax.total_memblocks:
            yield Finding(
                f"{dax.chardev} is system RAM, and only {dax.online_memblocks} of {dax.total_memblocks} of "
                "its blocks are online",
                f"`daxctl online-memory {dax.chardev}`; `systemctl status oeprov-system-ram` says what the "
                "boot did",
            )
    for item in ndctl.chosen(state, desired):
        if item.mode != "devdax":
            yield Finding(
                f"{item.dev} is in mode {item.mode}, and {desired.pmem_mode} is made of devdax",
                f"`oeprov pmem-mode {desired.pmem_mode} --plan` shows the way, and what of its data would be "
                "lost",
            )


def _tiering(state: State, desired: Desired) -> Iterator[Finding]:
    if tiering.UNIT not in state.files:
        return  # the plan says so
    for line in tiering.what_differs(state, desired):
        yield Finding(
            f"pages do not move between the memory nodes as they should: {line}",
            f"`systemctl restart {tiering.UNIT_NAME}` sets it, and `journalctl -u {tiering.UNIT_NAME}` says "
            "why a boot did not; if it changes again, look for it in /etc/sysctl.d and in tuned's profile",
        )


def _environments(state: State) -> Iterator[Finding]:
    for item in state.runtime.old:
        if not item.users:
            yield Finding(
                f"{item.path} ({human(item.bytes)}) is an earlier environment, and nothing runs from it",
                f"the next change of {state.runtime.venv} removes it, or `rm -r {item.path}`",
            )


def _drives(health: Health) -> Iterator[Finding]:
    for item in health.drives:
        if item.error:
            yield Finding(
                f"the wear of drive {item.device} is not known: {item.error}",
                "run oeprov as root there; `oeprov bootstrap` installs nvme-cli",
            )
        words = [text for bit, text in _WARNINGS.items() if item.warnings >> bit & 1]
        if words:
            yield Finding(
                f"drive {item.device} warns: {', '.join(words)}",
                "let the job write its checkpoints to files (training_checkpoint_rows: files), then replace "
                f"the drive; `nvme smart-log /dev/{item.device}` says more",
            )
        if item.used >= _WORN:
            yield Finding(
                f"drive {item.device} has used {item.used} % of the writes that it is rated for",
                "plan its replacement; a larger parameter_server_storage_cache writes less",
            )
        if item.media_errors:
            yield Finding(
                f"drive {item.device} could not read or write {item.media_errors} time(s)",
                f"`nvme error-log /dev/{item.device}` says where; replace it if the number grows",
            )


def wear_of(health: Health) -> list[str]:
    """One line per drive: wear, temperature, spare, and what was written."""
    return [
        f"drive {item.device}: {item.used} % of its rated writes used ({human(item.written)} written), "
        f"{item.spare} % of its spare blocks left (warns below {item.spare_least} %), {item.celsius} °C"
        for item in health.drives
        if not item.error
    ]


def _kernel(state: State) -> Iterator[Finding]:
    default = state.kernel.default
    if default and default != state.kernel.running:
        yield Finding(
            f"kernel {state.kernel.running} runs, and the next boot starts {default}",
            "`oeprov bootstrap` makes the one that kernel_version asks for the default",
        )
    for line in state.kernel.failed:
        name, when, why = [*line.split("\t"), "", ""][:3]
        yield Finding(
            f"{name} failed its trial boot{' on ' + when if when else ''}: {why or 'no reason is written'}",
            "the console's log of that boot says more; ask for another kernel_version, or try once more with "
            "`oeprov bootstrap --retry-trials`",
        )


def _servers(health: Health) -> Iterator[Finding]:
    for unit, how in sorted(health.servers.items()):
        job, server = re.sub(r"^oeprov-(.+)-(server-\d+)[.]service$", r"\1 \2", unit).split(" ")
        yield Finding(
            f"{server} of job {job} does not run: {how}",
            f"`systemctl start {unit}`, and `oeprov resume {job}` if the training ended; `oeprov stop {job}` "
            "if it is not wanted any more",
        )


def _firewall(health: Health) -> Iterator[Finding]:
    shut = [number for number, inside in sorted(health.lets_in.items()) if not inside]
    if shut or not health.lets_in:
        which = f"port {', '.join(shut)}" if shut else "the free ports that servers get at launch"
        ports = shut or ["7700"]
        if health.firewall == "firewalld":
            added = " ".join(f"--add-port={number}/tcp" for number in ports)
            command = f"firewall-cmd --permanent {added} && firewall-cmd --reload"
        else:
            command = f"ufw allow {','.join(ports)}/tcp"
        first = (
            "" if shut else "set parameter_server_port (7700, say, and one more for each further server); "
        )
        yield Finding(
            f"{health.firewall} is on and does not let in {which}: workers on other hosts do not reach them",
            f"{first}`{command}`, or let in the cluster's network",
        )


def _machine(state: State, health: Health, skew: float) -> Iterator[Finding]:
    for number, holder in sorted(health.ports.items()):
        if "oeprov-" not in holder:  # a server of ours, which may
            yield Finding(
                f"port {number} is taken by {holder}",
                "stop that, or set parameter_server_port and parameter_server_metrics_port to others, or 0",
            )
    for where, (free, size) in health.disks.items():
        if free < _FULL_SHARE * size:
            yield Finding(
                f"{where} is full: {human(free)} of {human(size)} are free",
                f"`du -xh {where} | sort -h | tail` shows what takes the room; jobs keep their rows in "
                "oeprov/JOB of each mount, and their checkpoints in /var/lib/oeprov/jobs",
            )
    if health.memory and health.huge_pages > _HUGE_SHARE * health.memory:
        yield Finding(
            f"{human(health.huge_pages)} of {human(health.memory)} are reserved as huge pages, which servers "
            "do not use",
            "take vm.nr_hugepages out of /etc/sysctl.d (or hugepages= off the kernel's command line)",
        )
    if health.transparent == "never":
        yield Finding(
            "transparent huge pages are off: large tables miss the TLB far more often",
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled, and take "
            "transparent_hugepage=never off the kernel's command line",
        )
    if abs(skew) > MOST_SKEW:
        way = "ahead of" if skew > 0 else "behind"
        states = ", ".join(f"{name} is {text or 'not there'}" for name, text in health.services.items())
        yield Finding(
            f"its clock is {abs(skew):.0f} s {way} this machine's{' (' + states + ')' if states else ''}",
            f"`systemctl enable --now {next(iter(health.services), 'chronyd')}` where it has a time server "
            "to ask, or set it right",
        )
