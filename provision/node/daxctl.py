"""Memory nodes without CPUs (KMEM DAX): from a namespace or a CXL region to system RAM."""

import json
import re
from typing import Any, Dict, List

from . import mount, ndctl, numa
from .command import System
from .directory import human
from .part import Part
from .state import DaxDevice, Namespace, State
from .step import Action, Desired, Step

CONFIG = "/etc/daxctl.conf.d/oeprov.conf"
UNIT = "/etc/systemd/system/oeprov-system-ram.service"
RECONFIGURE_SINCE = 66
SERVICE_SINCE = 72  # daxdev-reconfigure@.service reads CONFIG at boot
PAGE_COST = 64  # struct pages take 1/64 of the memory they describe


def parse(text: str) -> List[DaxDevice]:
    """Devices of ``daxctl list``, which prints an object, an array or nothing."""
    if not text.strip():
        return []
    found = json.loads(text)
    items: List[Dict[str, Any]] = found if isinstance(found, list) else [found]
    return [
        DaxDevice(
            chardev=item["chardev"],
            size=int(item.get("size", 0)),
            mode=item.get("mode", "devdax"),
            target_node=int(item.get("target_node", -1)),
            align=int(item.get("align", 0)),
            movable=bool(item.get("movable", True)),
            online_memblocks=int(item.get("online_memblocks", 0)),
            total_memblocks=int(item.get("total_memblocks", 0)),
        )
        for item in items
        if "chardev" in item
    ]


def observe(system: System, trouble: List[str]) -> List[DaxDevice]:
    """Devices of ``daxctl list`` and the region that each hangs on."""
    if not system.which("daxctl"):
        return []
    result = system.run(["daxctl", "list"])
    if not result.ok:
        trouble.append(result.explain())
        return []
    found = []
    for item in parse(result.out):
        path = system.link("/sys/bus/dax/devices/" + item.chardev)
        regions = re.findall(r"/((?:cxl_)?region\d+)/", path)
        found.append(item._replace(region=regions[-1] if regions else ""))
    return found


def tool_version(text: str) -> int:
    """Major version of ``daxctl --version``: 65, 72.1, v66; 0 when not known."""
    match = re.search(r"\d+", text)
    return int(match.group()) if match else 0


def device_of(state: State, item: Namespace) -> List[DaxDevice]:
    """The dax device of a namespace, if it is there."""
    return [dax for dax in state.dax if item.chardev and dax.chardev == item.chardev]


def release(state: State, desired: Desired, item: Namespace) -> Part:
    """Takes a namespace's memory out of use, so that it can be made again."""
    for dax in device_of(state, item):
        if dax.mode != "system-ram":
            continue
        forget = _forget(state)
        if not dax.movable or tool_version(state.tools.daxctl) < SERVICE_SINCE:
            # Non-movable memory does not go offline, and before v72 the tool strands the node in trying.
            return Part(
                before=forget,
                reboot_why="memory of {} cannot be taken offline while it runs".format(dax.chardev),
            )
        step = Step(
            id="offline-" + dax.chardev,
            what="take the memory of {} offline".format(dax.chardev),
            why="it is in use as system RAM",
            commands=[["daxctl", "reconfigure-device", "--mode=devdax", "--force", dax.chardev]],
            action="reconfigure_dax",
            args={"device": dax.chardev, "mode": "devdax"},
        )
        return Part(after=forget + [step])
    return Part()


def _forget(state: State) -> List[Step]:
    """Removes what brings system-ram mode back at boot."""
    present = [path for path in (CONFIG, UNIT) if path in state.files]
    if not present:
        return []
    return [
        Step(
            id="system-ram-forget",
            what="remove " + ", ".join(present),
            why="the mode must not come back at the next boot",
            commands=[["rm", path] for path in present],
            action="remove_files",
            args={"paths": present},
        )
    ]


def preflight(state: State, desired: Desired, size: int) -> List[str]:
    """Why so much memory cannot be added, before anything is touched."""
    found = []
    version = tool_version(state.tools.daxctl)
    if version and version < RECONFIGURE_SINCE:
        found.append(
            "daxctl {} cannot reconfigure devices (needs {}); install a newer ndctl/daxctl".format(
                version, RECONFIGURE_SINCE
            )
        )
    dram = numa.dram(state)
    if not dram or not size:
        return found
    if desired.pmem_movable and size > desired.pmem_max_movable_ratio * dram:
        found.append(
            "{} of movable memory beside {} of DRAM is {:.1f}:1, more than pmem_max_movable_ratio {:g}: "
            "the kernel's own data must fit in DRAM; use less, or raise the ratio".format(
                human(size), human(dram), size / dram, desired.pmem_max_movable_ratio
            )
        )
    free = sum(node.free for node in state.numa if node.cpus)
    if desired.pmem_map == "mem" and free and size // PAGE_COST > free // 2:
        found.append(
            "page structures for {} take {} of DRAM and only {} are free; set pmem_map: dev".format(
                human(size), human(size // PAGE_COST), human(free)
            )
        )
    return found


def notes(desired: Desired, size: int) -> List[str]:
    """What adding the memory costs."""
    if desired.pmem_map == "dev" or not size:
        return []
    return [
        "page structures take {} of DRAM (1/64 of {}); pmem_map: dev puts them on the device".format(
            human(size // PAGE_COST), human(size)
        )
    ]


def target_problem(state: State, dax: DaxDevice) -> List[str]:
    """The node that the memory would become is missing or is not a node of its own."""
    if dax.target_node < 0:
        return [
            "{} has no target node: the firmware's tables give it no proximity domain, so it cannot become a "
            "memory node; use fsdax".format(dax.chardev)
        ]
    if any(node.id == dax.target_node and node.cpus for node in state.numa):
        return [
            "{} would join node {}, which has CPUs and DRAM: the two could not be told apart any more".format(
                dax.chardev, dax.target_node
            )
        ]
    return []


def _policy(state: State) -> Part:
    """Hot-added memory must come offline, or daxctl refuses to make it movable."""
    argument = "memhp_default_state=offline"
    steps = []
    if state.memory.auto_online not in ("", "offline"):
        path = "/sys/devices/system/memory/auto_online_blocks"
        steps.append(
            Step(
                id="hotplug-policy",
                what="leave hot-added memory offline until daxctl brings it online",
                why="the kernel's policy is {}, and daxctl stops with 'kernel policy will auto-online "
                "memory'".format(state.memory.auto_online),
                commands=[["write", path, "offline"]],
                action="write_file",
                args={"path": path, "text": "offline"},
            )
        )
    elif not state.memory.auto_online or argument in state.kernel.cmdline:
        return Part()
    return Part(add_arguments=[argument], arguments_why="keeps the policy for hot-added memory", after=steps)


def _to_system_ram(name: str, desired: Desired, why: str) -> Step:
    argv = ["daxctl", "reconfigure-device", "--mode=system-ram"]
    if not desired.pmem_movable:
        argv.append("--no-movable")
    return Step(
        id="system-ram-" + name,
        what="make {} a memory node".format(name),
        why=why + "; read back afterwards",
        commands=[argv + [name], ["daxctl", "list", "-d", name]],
        action="reconfigure_dax",
        args={"device": name, "mode": "system-ram", "movable": desired.pmem_movable},
    )


def _online(dax: DaxDevice, desired: Desired) -> List[Step]:
    """Brings blocks of a device online, in the wanted zone, that is system RAM already."""
    argv = ["daxctl", "online-memory"] + ([] if desired.pmem_movable else ["--no-movable"]) + [dax.chardev]
    commands = [argv]
    if dax.online_memblocks and dax.movable != desired.pmem_movable:
        zone = "movable" if desired.pmem_movable else "not movable"
        why = "it is online, but not as memory that is {}".format(zone)
        commands = [["daxctl", "offline-memory", dax.chardev], argv]
    elif dax.online_memblocks < dax.total_memblocks:
        why = "{} of {} blocks are online".format(dax.online_memblocks, dax.total_memblocks)
    else:
        return []
    return [
        Step(
            id="online-" + dax.chardev,
            what="bring the memory of {} online".format(dax.chardev),
            why=why,
            commands=commands,
            action="online_dax",
            args={"device": dax.chardev, "movable": desired.pmem_movable},
        )
    ]


def config_text(uuids: List[str], movable: bool) -> str:
    """Text of ``CONFIG``: what daxctl does at boot, by the namespaces' UUIDs."""
    sections = [
        "[reconfigure-device oeprov-{}]\nnvdimm.uuid = {}\nmode = system-ram\nonline = true\n"
        "movable = {}\n".format(number, uuid, "true" if movable else "false")
        for number, uuid in enumerate(uuids)
    ]
    return "\n".join(sections)


def unit_text(devices: List[str], movable: bool) -> str:
    """Text of ``UNIT``, for tools before v72 and for CXL, which the configuration cannot name."""
    option = "" if movable else " --no-movable"
    lines = [
        "ExecStart=-/usr/bin/daxctl reconfigure-device --mode=system-ram{} {}".format(option, item)
        for item in devices
    ]
    return "\n".join(
        [
            "[Unit]",
            "Description=Persistent or CXL memory as memory nodes",
            "After=systemd-udev-settle.service",
            "",
        ]
        + ["[Service]", "Type=oneshot", "RemainAfterExit=yes"]
        + lines
        + ["", "[Install]", "WantedBy=multi-user.target", ""]
    )


def _persist(state: State, desired: Desired, uuids: List[str], devices: List[str]) -> List[Step]:
    """Keeps the mode across boots; an empty UUID stands for one that is not known yet."""
    service = tool_version(state.tools.daxctl) >= SERVICE_SINCE or not state.tools.daxctl
    if desired.kind != "cxl" and service:
        path, text, known = CONFIG, config_text(uuids, desired.pmem_movable), all(uuids)
        shown = config_text([uuid or "<uuid of the namespace>" for uuid in uuids], desired.pmem_movable)
        commands = [["write", path, shown]]
    else:
        path, text, known = UNIT, unit_text(devices, desired.pmem_movable), True
        commands = [["write", path, text], ["systemctl", "enable", path.rsplit("/", 1)[-1]]]
    if known and state.files.get(path) == text:
        return []
    return [
        Step(
            id="system-ram-persist",
            what="enter the mode in " + path,
            why="without it the mode is lost at the next boot",
            commands=commands,
            action="write_file",
            args={"path": path, "text": text if known else "", "devices": devices},
        )
    ]


def plan_system_ram(state: State, desired: Desired) -> Part:
    """Every namespace (or CXL device) a memory node without CPUs, now and after a reboot."""
    if state.memory.dax_model == "class":
        return Part(
            before=[
                Step(
                    id="dax-model",
                    what="switch the dax devices to the bus model",
                    why="devices of the class model cannot be reconfigured",
                    commands=[["daxctl", "migrate-device-model"]],
                    action="migrate_dax_model",
                )
            ],
            reboot_why="the dax model changes at boot",
            after=_devices(state, desired).after,
        )
    return _devices(state, desired)


def _devices(state: State, desired: Desired) -> Part:
    cxl = desired.kind == "cxl"
    steps: List[Step] = []
    problems: List[str] = []
    names: List[str] = []
    uuids: List[str] = []
    nodes: List[int] = []
    size: int = 0
    settled = True  # nothing is converted, so that nodes and UUIDs are known
    for item in [] if cxl else ndctl.chosen(state, desired):
        name = item.chardev or "dax" + re.sub(r"\D*(\d+)\D.*", r"\1.0", item.dev)
        size += item.size
        names.append(name)
        devices = device_of(state, item)
        if item.mode != "devdax":
            steps += ndctl.convert(state, desired, item, "devdax")
            settled = False
        uuids.append(item.uuid if item.mode == "devdax" else "")
        if item.mode == "devdax" and devices and devices[0].mode == "system-ram":
            steps += _online(devices[0], desired)
        else:
            steps.append(_to_system_ram(name, desired, "it is a {} namespace".format(item.mode)))
            settled = settled and bool(devices)
        for dax in devices:
            problems += target_problem(state, dax)
            nodes.append(dax.target_node)
    for dax in state.dax if cxl else []:
        size += dax.size
        names.append(dax.chardev)
        nodes.append(dax.target_node)
        problems += target_problem(state, dax)
        if dax.mode == "system-ram":
            steps += _online(dax, desired)
        else:
            steps.append(_to_system_ram(dax.chardev, desired, "it is a {} device".format(dax.mode)))
    for region in [] if cxl else ndctl.empty_regions(state, desired):
        name = "dax{}.0".format(region.dev.replace("region", ""))
        steps.append(ndctl.create(state, desired, region.dev, "devdax", "the region has no namespace"))
        steps.append(_to_system_ram(name, desired, "the namespace is new"))
        size += region.size
        names.append(name)
        uuids.append("")
        settled = False
    if not names:
        return Part(problems=ndctl.missing(state, desired) or [_nothing(state, desired)])
    adding = any(step.action in ("reconfigure_dax", "create_namespace") for step in steps)
    forget = [] if settled else mount.forget_step(state, desired)
    steps = forget + steps + _persist(state, desired, uuids, names)
    steps += numa.plan_memkind(state, nodes if settled and nodes else [])
    policy = _policy(state)
    return policy._replace(
        after=policy.after + steps,
        notes=notes(desired, size) if adding else [],
        problems=ndctl.missing(state, desired)
        + problems
        + (preflight(state, desired, size) if adding else []),
    )


def _nothing(state: State, desired: Desired) -> str:
    if desired.kind == "cxl" and any(region.type == "ram" for region in state.regions):
        return "the CXL region has no dax device: is the kernel's dax_cxl driver there (6.3 or newer)?"
    return ndctl.nothing_there(state, desired)


ACTIONS: Dict[str, Action] = {}
