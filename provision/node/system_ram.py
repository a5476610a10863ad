"""Mode system-ram: namespaces and CXL devices as memory nodes without CPUs, and back."""

from typing import List, Optional

from . import cxl, daxctl, families, mount, ndctl, numa
from .directory import human
from .state import DaxDevice, Namespace, NumaNode, State
from .step import Desired, Part, Step

OFFLINE = "memhp_default_state=offline"  # daxctl brings memory online itself, as movable


def device_of(state: State, item: Namespace) -> List[DaxDevice]:
    """The dax device of a namespace, if it exists."""
    return [dax for dax in state.dax if item.chardev and dax.chardev == item.chardev]


def release(state: State, item: Namespace) -> Part:
    """Take the memory of a namespace out of use, so that the namespace can be created again."""
    version = daxctl.tool_version(state.tools.daxctl)
    for dax in device_of(state, item):
        if dax.mode != "system-ram":
            continue
        if (dax.online_memblocks and not dax.movable) or 0 < version < daxctl.KEEPS_ACTIVE_SINCE:
            # Non-movable memory does not go offline, and an old daxctl strands the node when it tries.
            return Part(reboot_why=f"memory of {dax.chardev} cannot be taken offline while it runs")
        step = Step(
            id="offline-" + dax.chardev,
            what=f"take the memory of {dax.chardev} offline",
            why="it is in use as system RAM",
            commands=[daxctl.reconfigure_command(dax.chardev, "devdax", movable=True)],
            action="reconfigure_dax",
            disturbs=True,
            args={"device": dax.chardev, "mode": "devdax"},
        )
        return Part(after=[step])
    return Part()


def forget(state: State) -> List[Step]:
    """Remove the unit that restores the mode at boot, and memkind's nodes; none if there is neither."""
    steps = []
    if daxctl.UNIT in state.files or daxctl.ENABLED in state.files:
        steps.append(
            Step(
                id="system-ram-forget",
                what="remove " + daxctl.UNIT,
                why="the mode must not come back at the next boot",
                commands=[["systemctl", "disable", "--now", daxctl.UNIT_NAME], ["rm", daxctl.UNIT]],
                action="forget_system_ram",
            )
        )
    return steps + numa.forget_memkind(state)


def forget_argument(state: State, desired: Desired) -> Part:
    """Remove the kernel argument that keeps hot-added memory offline; empty unless our unit is still there.

    Without the unit the argument may be the administrator's own.
    """
    configured = state.kernel.cmdline + state.bootloader.cmdline.split()
    made = daxctl.UNIT in state.files or daxctl.ENABLED in state.files
    if not made or OFFLINE not in configured or OFFLINE in desired.kernel_arguments:
        return Part()
    return Part(
        remove_arguments=[OFFLINE], arguments_why="only mode system-ram needs hot-added memory offline"
    )


def preflight(state: State, desired: Desired, size: int) -> List[str]:
    """Why memory of this size cannot be added."""
    found = []
    # If it is not installed yet, the version of its package.
    version = daxctl.tool_version(state.tools.daxctl) or families.daxctl_version(state.os)
    if 0 < version < daxctl.RECONFIGURE_SINCE:
        found.append(
            f"daxctl {version} cannot reconfigure devices (needs {daxctl.RECONFIGURE_SINCE}); install a "
            "newer ndctl/daxctl in /usr/local, or use pmem_mode fsdax, which works with this one"
        )
    elif 0 < version < daxctl.NO_MOVABLE_SINCE and not desired.pmem_movable:
        found.append(
            f"daxctl {version} brings memory online as movable only (pmem_movable: false needs "
            f"{daxctl.NO_MOVABLE_SINCE})"
        )
    dram = numa.dram(state)
    if not dram or not size:
        return found
    if desired.pmem_movable and size > desired.pmem_max_movable_ratio * dram:
        found.append(
            f"{human(size)} of movable memory beside {human(dram)} of DRAM is {size / dram:.1f}:1, more than "
            f"pmem_max_movable_ratio {desired.pmem_max_movable_ratio:g}: the kernel's own data must fit in "
            "DRAM; use less, or raise the ratio"
        )
    free = sum(node.free for node in state.numa if node.cpus)
    if desired.pmem_map != "dev" and free and size // ndctl.PAGE_COST > free // 2:
        found.append(
            f"page structures for {human(size)} take {human(size // ndctl.PAGE_COST)} of DRAM and only "
            f"{human(free)} are free; set pmem_map: dev"
        )
    return found


def notes(desired: Desired, size: int) -> List[str]:
    """A note on the DRAM that the memory costs."""
    if desired.pmem_map == "dev" or not size:
        return []
    return [
        f"page structures take {human(size // ndctl.PAGE_COST)} of DRAM (1/64 of {human(size)}); pmem_map: "
        "dev puts them on the device"
    ]


def _policy(state: State) -> Part:
    """Keep hot-added memory offline, or daxctl refuses to make it movable."""
    steps = []
    if state.memory.auto_online not in ("", "offline"):
        steps.append(
            Step(
                id="hotplug-policy",
                what="leave hot-added memory offline until daxctl brings it online",
                why=f"the kernel's policy is {state.memory.auto_online}, and daxctl stops with 'kernel "
                "policy will auto-online memory'",
                commands=[["write", numa.AUTO_ONLINE, "offline"]],
                action="set_online_policy",
                args={"policy": "offline"},
            )
        )
    elif not state.memory.auto_online or OFFLINE in state.kernel.cmdline:
        return Part()
    return Part(add_arguments=[OFFLINE], arguments_why="keeps the policy for hot-added memory", after=steps)


def _to_system_ram(name: str, desired: Desired, why: str, lost: List[str]) -> Step:
    return Step(
        id="system-ram-" + name,
        what=f"make {name} a memory node",
        why=why + "; read back afterwards",
        destroys=lost,
        commands=daxctl.held(daxctl.reconfigure_command(name, "system-ram", desired.pmem_movable))
        + [["daxctl", "list", "-d", name]],
        action="reconfigure_dax",
        args={"device": name, "mode": "system-ram", "movable": desired.pmem_movable},
    )


def _online(dax: DaxDevice, desired: Desired) -> List[Step]:
    """Bring the blocks of a device in mode system-ram online in the wanted zone."""
    wrong_zone = bool(dax.online_memblocks) and dax.movable != desired.pmem_movable
    if wrong_zone:
        zone = "movable" if desired.pmem_movable else "not movable"
        why = f"it is online, but not as memory that is {zone}"
    elif dax.online_memblocks < dax.total_memblocks:
        why = f"{dax.online_memblocks} of {dax.total_memblocks} blocks are online"
    else:
        return []
    return [
        Step(
            id="online-" + dax.chardev,
            what=f"bring the memory of {dax.chardev} online",
            why=why,
            commands=daxctl.online_commands(dax.chardev, desired.pmem_movable, wrong_zone),
            action="online_dax",
            disturbs=wrong_zone,
            args={"device": dax.chardev, "movable": desired.pmem_movable},
        )
    ]


def _persist(
    state: State, desired: Desired, uuids: List[str], devices: List[str], region: List[str]
) -> List[Step]:
    """Keep the mode across boots; an empty UUID is not known yet.

    ``devices`` are all dax devices; the first ``len(uuids)`` of them belong to namespaces. ``region`` is the
    command that makes a CXL region, [] without one or if something else makes it.
    """
    shown = [uuid or "<uuid of the namespace>" for uuid in uuids]
    keys = devices[len(uuids) :]
    if not region:
        known = {dax.chardev: daxctl.unit_key(dax) for dax in state.dax}
        keys = [known.get(name, name) for name in keys]
    text = daxctl.unit_text(shown, keys, desired.pmem_movable, region)
    enabled = daxctl.ENABLED in state.files
    if all(uuids) and state.files.get(daxctl.UNIT) == text and enabled:
        return []
    return [
        Step(
            id="system-ram-persist",
            what="enter the mode in " + daxctl.UNIT,
            why="without it the mode is lost at the next boot",
            commands=[["write", daxctl.UNIT, text], ["systemctl", "enable", daxctl.UNIT_NAME]],
            action="keep_system_ram",
            args=dict(
                {"devices": devices, "movable": desired.pmem_movable},
                **({"region": region} if region else {}),
            ),
        )
    ]


def handed_out(state: State) -> List[NumaNode]:
    """Nodes without CPUs that the firmware made of the memory, as on re7p.

    They count only if no device shows the memory, and ipmctl, if it knows modules, has as much volatile.
    """
    if state.regions or state.namespaces or state.dax:
        return []
    nodes = [node for node in numa.cpuless(state) if not numa.other_memory(state, node)]
    dimms, size = state.dimms, sum(node.size for node in nodes)
    if dimms.goals or (dimms.physical and not 0.9 * dimms.volatile <= size <= dimms.volatile):
        return []
    return nodes


def plan_handed_out(state: State, desired: Desired, nodes: List[NumaNode], memory: str) -> Part:
    """Write memkind's nodes; the firmware has done the rest."""
    names = [f"node {node.id} ({human(node.size)}, no CPUs)" for node in nodes]
    note = (
        f"{', '.join(names)}: taken for the {memory} memory, which the firmware hands out like any other; it "
        "is not movable, so the kernel may keep data of its own there"
    )
    before = mount.forget_step(state, desired)
    return Part(before=before, after=numa.plan_memkind(state, [node.id for node in nodes], []), notes=[note])


def _on_bus_model(state: State, part: Part) -> Part:
    """Switch devices of the old class model over first, which takes a boot."""
    if state.memory.dax_model != "class":
        return part
    step = Step(
        id="dax-model",
        what="switch the dax devices to the bus model",
        why="devices of the class model cannot be reconfigured",
        commands=[["daxctl", "migrate-device-model"]],
        action="migrate_dax_model",
    )
    return part._replace(before=[step], reboot_why="the dax model changes at boot")


def plan_namespaces(state: State, desired: Desired, absent: str) -> Part:
    """Make every namespace a memory node, now and at each boot; ``absent``: why there is no memory."""
    steps: List[Step] = []
    problems: List[str] = ndctl.missing(state, desired)
    names: List[str] = []
    uuids: List[str] = []
    nodes: List[int] = []
    size: int = 0
    settled = True  # nothing is converted, so nodes and UUIDs are known
    for item in ndctl.chosen(state, desired):
        name = item.chardev or ndctl.dax_device(item.dev)
        size += item.size
        names.append(name)
        found = device_of(state, item)
        ready = item.mode == "devdax" and item.enabled
        if not ready:
            steps += ndctl.convert(state, desired, item, "devdax")
            settled = False
        uuids.append(item.uuid if ready else "")
        if ready and found and found[0].mode == "system-ram":
            steps += _online(found[0], desired)
        else:
            # The content of a devdax namespace cannot be read, and is lost when it becomes memory.
            lost = ndctl.data_in(state, item) if ready else []
            steps.append(_to_system_ram(name, desired, f"it is a {item.mode} namespace", lost))
            settled = settled and bool(found)
        for dax in found:
            problems += daxctl.target_problem(dax.chardev, dax.target_node, state.numa)
            nodes.append(dax.target_node)
    for region in ndctl.empty_regions(state, desired):
        name = f"dax{region.dev.replace('region', '')}.0"
        steps.append(ndctl.create(state, desired, region, "devdax", "the region has no namespace"))
        steps.append(_to_system_ram(name, desired, "the namespace is new", []))
        size += region.available
        names.append(name)
        uuids.append("")
        settled = False
    full = ndctl.regions_without_room(state, desired)
    if not names:
        return _on_bus_model(state, Part(problems=problems or full or [absent]))
    problems += ndctl.alignment_problems(state, steps)
    # Entries of /etc/fstab go before their devices do.
    before = [] if settled else mount.forget_step(state, desired)
    nodes = nodes if settled and nodes else []
    part = _finish(state, desired, before + steps, uuids, names, nodes, size, problems)
    return part._replace(notes=part.notes + full)


def plan_devices(state: State, desired: Desired, absent: str) -> Part:
    """Make every dax device of a CXL region a memory node; see ``plan_namespaces``."""
    steps: List[Step] = []
    problems: List[str] = []
    if not state.dax:
        if any(region.type == "ram" for region in state.regions):
            problem = (
                "the CXL region has no dax device: is the kernel's dax_cxl driver there (6.3 or newer)? From "
                "Linux 7.1 on, `dmesg | grep -e hmem -e cxl` says which driver owns the memory"
            )
            return _on_bus_model(state, Part(problems=[problem]))
        return _on_bus_model(state, Part(problems=[absent]))
    for dax in state.dax:
        problems += daxctl.target_problem(dax.chardev, dax.target_node, state.numa)
        if dax.mode == "system-ram":
            steps += _online(dax, desired)
        else:
            # A device of a persistent CXL region has a namespace, and may hold data.
            lost = [
                name
                for item in state.namespaces
                if item.chardev == dax.chardev
                for name in ndctl.data_in(state, item)
            ]
            steps.append(_to_system_ram(dax.chardev, desired, f"it is a {dax.mode} device", lost))
    by_device = {item.chardev: item.uuid for item in state.namespaces if item.chardev}
    ordered = sorted(state.dax, key=lambda dax: dax.chardev not in by_device)
    names = [dax.chardev for dax in ordered]
    uuids = [by_device[name] for name in names if name in by_device]
    nodes = [dax.target_node for dax in state.dax]
    size = sum(dax.size for dax in state.dax)
    return _finish(state, desired, steps, uuids, names, nodes, size, problems)


def plan_region(state: State, desired: Desired, create: Step) -> Part:
    """Make a volatile CXL region, and its device a memory node."""
    (name,) = [cxl.dax_device(region) for region in state.cxl.decoders.values()]
    (size,) = state.cxl.expanders.values()
    steps = [create, _to_system_ram(name, desired, "the region is new", [])]
    return _finish(state, desired, steps, [], [name], [], size, [], create.commands[0])


def _finish(
    state: State,
    desired: Desired,
    steps: List[Step],
    uuids: List[str],
    names: List[str],
    nodes: List[int],
    size: int,
    problems: List[str],
    region: Optional[List[str]] = None,
) -> Part:
    """Put the hot-plug policy before the steps, and the unit and memkind's nodes behind them."""
    adding = any(step.action in ("reconfigure_dax", "create_namespace") for step in steps)
    if region is None:
        # The unit that made the region goes on making it, if this is still its device.
        made = cxl.made_by(state.files.get(daxctl.UNIT, ""))
        region = cxl.create_command(*made) if made and not uuids and len(names) == 1 else []
    steps = steps + _persist(state, desired, uuids, names, region) + numa.plan_memkind(state, nodes, names)
    policy = _policy(state)
    part = policy._replace(
        after=policy.after + steps,
        notes=notes(desired, size) if adding else [],
        problems=problems + (preflight(state, desired, size) if adding else []),
    )
    return _on_bus_model(state, part)
