"""Turn dax devices into memory nodes (KMEM DAX) and back, now and at every boot."""

import re
from typing import Any, Dict, List, Optional

from . import devices, numa, owned
from .command import CommandError, System
from .state import DaxDevice
from .step import Action, Applied

UNIT_NAME = "oeprov-system-ram.service"
UNIT = "/etc/systemd/system/" + UNIT_NAME
ENABLED = "/etc/systemd/system/multi-user.target.wants/" + UNIT_NAME
RECONFIGURE_SINCE = 66
NO_MOVABLE_SINCE = 67
# An older tool destroys a namespace whose memory is in use, which strands the node until a reboot.
KEEPS_ACTIVE_SINCE = 72
TIMEOUT = 1800.0  # seconds; moving a terabyte's pages away takes a while
_ATTEMPTS = 3  # memory in use for a moment does not go offline at once


def tool_version(text: str) -> int:
    """Major version of ``daxctl --version``: 65, 72.1, v66; 0 when not known."""
    match = re.search(r"\d+", text)
    return int(match.group()) if match else 0


def reconfigure_command(name: str, mode: str, movable: bool) -> List[str]:
    """The command that makes a dax device a memory node, or a device again."""
    argv = ["daxctl", "reconfigure-device", "--mode=" + mode]
    if mode == "devdax":
        argv.append("--force")  # takes the memory offline first
    elif not movable:
        argv.append("--no-movable")
    return argv + [name]


def held(command: List[str]) -> List[List[str]]:
    """Run the command while udev's rules are held: some bring memory online in another zone."""
    return [
        ["udevadm", "control", "--stop-exec-queue"],
        command,
        ["udevadm", "control", "--start-exec-queue"],
    ]


def online_commands(name: str, movable: bool, offline_first: bool) -> List[List[str]]:
    """The commands that bring a device's memory online in the wanted zone."""
    online = ["daxctl", "online-memory"] + ([] if movable else ["--no-movable"]) + [name]
    return ([["daxctl", "offline-memory", name]] if offline_first else []) + [online]


def _region(command: List[str], name: str) -> List[str]:
    """Lines of ``UNIT`` that make the region of a device; the kernel's drivers follow a little later."""
    device = f"/sys/bus/dax/devices/{name}"
    script = (
        f"tries=0; until [ -e {device} ] || {' '.join(command)}; do "
        # The kernel may not have found the expander yet.
        "tries=$((tries + 1)); [ $tries -lt 30 ] || exit 1; sleep 1; done; "
        f"udevadm settle --timeout=60 --exit-if-exists={device}"
    ).replace("$", "$$")
    return [f"ExecStart=/bin/sh -c '{script}'"]


def unit_key(dax: DaxDevice) -> str:
    """How the unit finds a device without a namespace: by its address, or by name if that is unknown.

    Names can change: since Linux 7.1 the drivers decide when they bind whether a CXL region or dax_hmem owns
    memory that the firmware reserved, and devices are numbered in that order.
    """
    return f"{dax.start:#x}" if dax.start else dax.chardev


def unit_text(uuids: List[str], keys: List[str], movable: bool, region: Optional[List[str]] = None) -> str:
    """Text of ``UNIT``, which makes dax devices memory nodes at boot: namespaces by UUID, others by key.

    ``region`` is the command that makes the region of the only device first, if nothing else does; ``keys``
    then has its name.

    daxctl has a service for this since v72, but not for CXL, and Debian 12's udev rule passes an option that
    daxctl lacks; so every host gets this unit. It fails if memory is not online in the wanted zone then.
    It also fails if one of the devices does not come: an extent of CXL memory can be taken away.
    It holds udev's rules meanwhile: EL's 40-redhat.rules bring memory online too, on guests not as movable.
    """
    script = _script(uuids, keys, movable)
    return "\n".join(
        [
            "# Written by oeprov: persistent or CXL memory as memory nodes.",
            "[Unit]",
            "Description=Persistent or CXL memory as memory nodes",
            "Wants=systemd-udev-settle.service",
            "After=systemd-udev-settle.service",
            "",
            "[Service]",
            "Type=oneshot",
            "RemainAfterExit=yes",
            # The kernel retries a block with pinned pages until a signal comes.
            "TimeoutStartSec=600",
            *(_region(region, keys[0]) if region else []),
            f"ExecStart=/bin/sh -c '{script}'",
            "ExecStopPost=-/bin/sh -c 'udevadm control --start-exec-queue'",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def _script(uuids: List[str], keys: List[str], movable: bool) -> str:
    """Words of the unit's shell: wait for the devices, reconfigure each, bring its blocks online."""
    wanted, state = ("=", "online_movable") if movable else ("!=", "online_kernel")
    # The exit status of daxctl v66 proves nothing, the kernel's driver link does. Memory that is online in
    # another zone goes offline first, as far as it can.
    script = (
        'ours() {{ name="${{link##*/}}"; case "$(cat "$link/../uuid" 2>/dev/null) $name '
        '$(cat "$link/resource" 2>/dev/null)" in {patterns}) ;; *) return 1;; esac; }}; '
        "all() {{ there=0; for link in /sys/bus/dax/devices/*; do ours && there=$((there + 1)); done; "
        "[ $there -ge {number} ]; }}; "
        # Drivers may still be binding, and udev loads them.
        "tries=0; until all || [ $tries -ge 30 ]; do tries=$((tries + 1)); sleep 1; done; failed=0; "
        'all || {{ echo "only $there of {number} dax devices are there"; failed=1; }}; '
        'trap "udevadm control --start-exec-queue" 0; trap "exit 1" 15; '
        "udevadm control --stop-exec-queue; "
        "for link in /sys/bus/dax/devices/*; do ours || continue; "
        "daxctl reconfigure-device --mode=system-ram{option} $name; "
        'readlink "$link/driver" | grep -q "/kmem$" || failed=1; '
        '[ -e "$link/resource" ] || continue; '  # older kernels do not say where the device lies
        'first="$(cat "$link/resource")"; last=$((first + $(cat "$link/size"))); '
        "size=$((0x$(cat /sys/devices/system/memory/block_size_bytes))); "
        "number=$(((first + size - 1) / size)); "
        "while [ $(((number + 1) * size)) -le $last ]; do "
        "block=/sys/devices/system/memory/memory$number; number=$((number + 1)); "
        '[ -e "$block" ] || continue; '
        'zone=; read -r zone more <"$block/valid_zones"; '
        '[ "$zone" {wanted} Movable ] || echo offline >"$block/state"; '
        '[ "$(cat "$block/state")" = online ] || echo {state} >"$block/state"; '
        'zone=; read -r zone more <"$block/valid_zones"; '
        '[ "$(cat "$block/state")" = online ] && [ "$zone" {wanted} Movable ] || '
        '{{ echo "$name: ${{block##*/}} is $(cat "$block/state"), zone $zone"; failed=1; }}; '
        "done; done; exit $failed"
    ).format(
        patterns="|".join(
            [f'"{uuid} "*' for uuid in uuids]
            + [f'*" {key}"' if key.startswith("0x") else f'*" {key} "*' for key in keys]
        ),
        number=len(uuids) + len(keys),
        option="" if movable else " --no-movable",
        wanted=wanted,
        state=state,
    )
    # systemd expands $ and % itself, and takes backslashes and single quotes out.
    return script.replace("$", "$$").replace("%", "%%")


def _device(system: System, name: str) -> DaxDevice:
    """Wait for the dax device; CommandError if it does not appear."""

    def look() -> List[DaxDevice]:
        return [item for item in devices.dax_devices(system) if item.chardev == name]

    found = devices.wait_for(look)
    if not found:
        raise CommandError(
            f"there is no dax device {name}: is the kernel module device_dax there, and the namespace in "
            "mode devdax?"
        )
    return found[0]


def target_problem(name: str, target: int, nodes: List[Any]) -> List[str]:
    """Why a device cannot become a node of its own."""
    if target < 0:
        return [
            f"{name} has no target node: the firmware's tables give it no proximity domain, so it cannot "
            "become a memory node; use fsdax"
        ]
    if any(node.id == target and node.cpus for node in nodes):
        return [
            f"{name} would join node {target}, which has CPUs and DRAM: the two could not be distinguished"
        ]
    return []


def foreign_mode(item: DaxDevice) -> List[str]:
    """Why a device must be left alone: another driver than oeprov knows uses it, such as that of famfs."""
    if item.mode in ("devdax", "system-ram"):
        return []
    return [
        f"{item.chardev} is in use by the kernel's driver {item.mode}, which oeprov does not know (famfs has "
        "fsdev_dax); what is on it would be lost: unmount it and run `daxctl reconfigure-device "
        f"--mode=devdax {item.chardev}`, then plan again"
    ]


def in_place(item: DaxDevice, movable: bool) -> bool:
    """All memory of a device is online in the wanted zone."""
    online = item.online_memblocks == item.total_memblocks and item.total_memblocks > 0
    return item.mode == "system-ram" and online and item.movable == movable


def _explain(item: DaxDevice) -> str:
    return "{} of {} blocks are online, {}".format(
        item.online_memblocks, item.total_memblocks, "movable" if item.movable else "not all movable"
    )


def _to_system_ram(system: System, item: DaxDevice, movable: bool) -> Applied:
    name = item.chardev
    for problem in target_problem(name, item.target_node, numa.observe_nodes(system)):
        raise CommandError(problem)
    if in_place(item, movable):
        return Applied(False, f"{name} is node {item.target_node}")
    policy = system.read(numa.AUTO_ONLINE).strip()
    if movable and policy not in ("", "offline"):
        raise CommandError(
            f"{numa.AUTO_ONLINE} says {policy}: the kernel would bring the memory online by itself, and not "
            "as movable"
        )
    before, command, last = held(reconfigure_command(name, "system-ram", movable))
    system.run(before)
    try:
        result = system.run(command, timeout=TIMEOUT)
    finally:
        system.run(last)
    after = _device(system, name)
    if after.mode != "system-ram":
        raise CommandError(f"{name} is still a device: {result.explain()}")
    if not in_place(after, movable):
        return _bring_online(system, after, movable)
    return Applied(True, f"{name} is node {after.target_node}")


def _to_devdax(system: System, item: DaxDevice) -> Applied:
    name = item.chardev
    if item.mode == "devdax":
        return Applied(False, f"{name} is a device")
    for _ in range(_ATTEMPTS):
        result = system.run(reconfigure_command(name, "devdax", movable=True), timeout=TIMEOUT)
        after = _device(system, name)
        if after.mode == "devdax":
            return Applied(True, f"{name} is a device")
    raise CommandError(
        f"the memory of {name} (node {item.target_node}) does not go offline ({result.explain()}): end what "
        "uses that node, or reboot and run this again"
    )


def _reconfigure_dax(system: System, args: Dict[str, Any]) -> Applied:
    item = _device(system, args["device"])
    for problem in foreign_mode(item):
        raise CommandError(problem)
    owned.adopt(system)
    if args["mode"] == "devdax":
        return _to_devdax(system, item)
    return _to_system_ram(system, item, args["movable"])


def _bring_online(system: System, item: DaxDevice, movable: bool) -> Applied:
    name = item.chardev
    if in_place(item, movable):
        return Applied(False, _explain(item))
    said = ""
    wrong_zone = bool(item.online_memblocks) and item.movable != movable
    for argv in online_commands(name, movable, wrong_zone):
        result = system.run(argv, timeout=TIMEOUT)
        said = said if result.ok else result.explain()
    after = _device(system, name)
    if not in_place(after, movable):
        raise CommandError(
            "the memory of {} is not as it should be: {}{}; memory that is not movable leaves only with a "
            "reboot".format(name, _explain(after), " (" + said + ")" if said else "")
        )
    return Applied(True, _explain(after))


def _online_dax(system: System, args: Dict[str, Any]) -> Applied:
    item = _device(system, args["device"])
    if item.mode != "system-ram":
        raise CommandError(f"{args['device']} is not in mode system-ram: plan again")
    return _bring_online(system, item, args["movable"])


def _migrate_dax_model(system: System, args: Dict[str, Any]) -> Applied:
    # It writes a file for modprobe, which takes effect at the reboot.
    system.check(["daxctl", "migrate-device-model"])
    return Applied(True, "the bus model is used from the next boot on")


def _keep_system_ram(system: System, args: Dict[str, Any]) -> Applied:
    uuids, keys = [], []
    by_device = {item.chardev: item for item in devices.namespaces(system) if item.chardev}
    found = {dax.chardev: dax for dax in devices.dax_devices(system)}
    for name in args["devices"]:
        item = by_device.get(name)
        if item and item.uuid:
            uuids.append(item.uuid)
        elif item or name not in found:
            raise CommandError(f"{name} has no namespace with a UUID that could be kept")
        else:
            keys.append(name if args.get("region") else unit_key(found[name]))
    text = unit_text(uuids, keys, args["movable"], args.get("region"))
    changed = system.write(UNIT, text)
    if changed:
        system.check(["systemctl", "daemon-reload"])
    enabled = system.exists(ENABLED)
    if not enabled:
        system.check(["systemctl", "enable", "--quiet", UNIT_NAME])
    return Applied(changed or not enabled, f"{UNIT_NAME} brings it back at boot")


def _forget_system_ram(system: System, args: Dict[str, Any]) -> Applied:
    if not system.exists(UNIT) and not system.exists(ENABLED):
        return Applied(False, f"there is no {UNIT_NAME}")
    system.run(["systemctl", "disable", "--now", "--quiet", UNIT_NAME])
    system.remove(ENABLED)
    system.remove(UNIT)
    system.check(["systemctl", "daemon-reload"])
    return Applied(True, f"{UNIT_NAME} is gone")


ACTIONS: Dict[str, Action] = {
    "reconfigure_dax": _reconfigure_dax,
    "online_dax": _online_dax,
    "migrate_dax_model": _migrate_dax_model,
    "keep_system_ram": _keep_system_ram,
    "forget_system_ram": _forget_system_ram,
}
