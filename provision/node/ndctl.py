"""Namespaces of persistent memory: which ones to use, what data is on them, and creating them."""

import re
from typing import Any, Dict, List, Optional

from . import daxctl, devices, filesystem, mount, owned
from .command import CommandError, System
from .directory import human
from .state import Namespace, Region, State
from .step import Action, Applied, Desired, Step

ALIGNMENT = 16 << 20  # of namespaces, where the kernel does not say
PAGE_COST = 64  # struct pages take 1/64 of the memory they describe
TIMEOUT = 1800.0  # seconds; page structures on a terabyte of the device itself take a while


def region_number(dev: str) -> str:
    """Region number of a namespace: namespace1.0 → 1."""
    match = re.match(r"namespace(\d+)", dev)
    return match.group(1) if match else "0"


def block_device(dev: str) -> str:
    """Block device of a namespace in fsdax mode: namespace1.0 → pmem1, namespace1.2 → pmem1.2."""
    region, _, number = dev.replace("namespace", "").partition(".")
    return "pmem" + region + ("." + number if number not in ("", "0") else "")


def dax_device(dev: str) -> str:
    """Dax device of a namespace in devdax mode: namespace1.2 → dax1.2."""
    return dev.replace("namespace", "dax")


def chosen(state: State, desired: Desired) -> List[Namespace]:
    """The namespaces to use, in order of region and number."""
    wanted = [
        item
        for item in state.namespaces
        if not desired.pmem_namespaces or item.dev in desired.pmem_namespaces
    ]
    return sorted(wanted, key=lambda item: devices.order(item.dev))


def missing(state: State, desired: Desired) -> List[str]:
    """A problem for each namespace that the inventory names and the host does not have."""
    known = [item.dev for item in state.namespaces]
    return [
        "pmem_namespaces: {} is not there; the host has {}".format(name, ", ".join(known) or "none")
        for name in desired.pmem_namespaces
        if name not in known
    ]


def is_ours(state: State, item: Namespace) -> bool:
    """oeprov made the namespace as it is, or was interrupted while making it."""
    return owned.is_ours(state.owned, item)


def data_in(state: State, item: Namespace) -> List[str]:
    """Objects that are lost when the namespace is created again, as consent names them.

    A file system always counts, and so does data without a signature (see ``content``). A namespace whose
    content cannot be read (devdax, sector, disabled) counts unless oeprov made it.
    """
    lost = filesystem.data_on(state, item.blockdev) if item.blockdev else []
    hidden = item.mode not in ("raw", "fsdax") or not item.enabled
    if not lost and hidden and not is_ours(state, item):
        lost = ["{}/{}".format(item.dev, item.uuid or item.raw_uuid or "no-uuid")]
    return lost


def convert(state: State, desired: Desired, item: Namespace, mode: str) -> List[Step]:
    """Take a namespace out of use and create it again in another mode."""
    steps = mount.unmount_step(state, item.blockdev) if item.blockdev else []
    lost = data_in(state, item)
    location = map_of(desired, mode, item)
    why = f"it is in mode {item.mode}" if item.enabled else "it is disabled"
    if lost:
        why += " and holds data: " + ", ".join(lost)
    steps.append(
        Step(
            id="namespace-" + item.dev,
            what=f"make {filesystem.sized(item.dev, item.size)} a {mode} namespace",
            why=why,
            destroys=lost,
            commands=[_command(["-f", "-e", item.dev], mode, location)],
            action="create_namespace",
            disturbs=True,
            args={"namespace": item.dev, "mode": mode, "map": location, "lose": lost},
        )
    )
    return steps


def create(state: State, desired: Desired, region: Region, mode: str, why: str) -> Step:
    """Create the first namespace of a region."""
    location = map_of(desired, mode)
    return Step(
        id="namespace-" + region.dev,
        what=f"create a {mode} namespace on {filesystem.sized(region.dev, region.available)}",
        why=why,
        commands=[_command(["--region=" + region.dev], mode, location)],
        action="create_namespace",
        args={"region": region.dev, "mode": mode, "map": location},
    )


def map_of(desired: Desired, mode: str, old: Optional[Namespace] = None) -> str:
    """Where page structures go; auto keeps those of an fsdax namespace, and else uses ndctl's default."""
    if desired.pmem_map != "auto":
        return desired.pmem_map
    if mode != "fsdax":
        return "mem"
    return (old.map if old and old.mode == "fsdax" else "") or "dev"


def map_notes(desired: Desired, name: str, size: int, location: str, making: bool) -> List[str]:
    """Notes on the DRAM for page structures, and on a map that differs from ``pmem_map``."""
    found = []
    if making and location == "mem" and size:
        found.append(
            f"{name}: page structures take {human(size // PAGE_COST)} of DRAM (1/64 of {human(size)})"
        )
    if desired.pmem_map not in ("auto", location) and location:
        found.append(
            f"{name} keeps its map {location}, though pmem_map asks for {desired.pmem_map}: to change it, "
            "the namespace must be created again, which loses its data"
        )
    return found


def _command(which: List[str], mode: str, location: str) -> List[str]:
    return ["ndctl", "create-namespace"] + which + ["--mode=" + mode, "--map=" + location]


def destroy(state: State, item: Namespace, why: str) -> Step:
    """Destroy a namespace."""
    lost = data_in(state, item)
    return Step(
        id="destroy-" + item.dev,
        what="destroy " + filesystem.sized(item.dev, item.size),
        why=why,
        destroys=lost,
        commands=[["ndctl", "destroy-namespace", "-f", item.dev]],
        action="destroy_namespace",
        disturbs=True,
        args={"namespace": item.dev, "lose": lost},
    )


def empty_regions(state: State, desired: Desired) -> List[Region]:
    """Regions of persistent memory that have no namespace yet, and room for one."""
    return [region for region in _without_namespace(state, desired) if _has_room(region)]


def _without_namespace(state: State, desired: Desired) -> List[Region]:
    if desired.pmem_namespaces:
        return []
    used = [item.region for item in state.namespaces]
    return [region for region in state.regions if region.type == "pmem" and region.dev not in used]


def _has_room(region: Region) -> bool:
    return region.available >= (region.align or ALIGNMENT)


def regions_without_room(state: State, desired: Desired) -> List[str]:
    """What holds regions in which no namespace is seen and none can be made."""
    return [
        f"{region.dev} has no namespace, and {human(region.available)} of its {human(region.size)} are "
        "available for one: the region is disabled, its modules are locked, or labels that the kernel does "
        f"not use hold it; `ndctl list -DRNi -r {region.dev}` and `dmesg | grep nd_` show which, and `ndctl "
        f"enable-region {region.dev}` enables it"
        for region in _without_namespace(state, desired)
        if not _has_room(region)
    ]


def alignment_problems(state: State, steps: List[Step]) -> List[str]:
    """Regions whose size does not fit the alignment of the namespaces that the steps create."""
    found = []
    names = [
        step.args.get("region") or "region" + region_number(step.args["namespace"])
        for step in steps
        if step.action == "create_namespace"
    ]
    for region in state.regions:
        align = region.align or ALIGNMENT
        if region.dev in names and region.bus != "cxl" and region.size % align:
            found.append(
                f"{region.dev} is {region.size} bytes, not a multiple of {human(align)}: the kernel refuses "
                "namespaces on it; for a virtual NVDIMM, make the backing file a multiple of that plus its "
                "label area"
            )
    return found


def media_problems(state: State, steps: List[Step]) -> List[str]:
    """Media errors of regions that become system RAM; dax devices have no list of their own."""
    names = [step.args["device"] for step in steps if step.args.get("mode") == "system-ram"]
    names = [re.sub(r"dax(\d+)\..*", r"region\1", name) for name in names]
    return [
        f"{region.dev} has {region.bad_blocks} unreadable blocks of 512 bytes, and a program that reads them "
        f"is killed; find them with `ndctl list -RM -r {region.dev}`, then clear them with `ndctl "
        "clear-errors NAMESPACE` (their data is lost)"
        for region in state.regions
        if region.bad_blocks and region.dev in names and region.bus != "cxl"
    ]


def foreign_problems(state: State, steps: List[Step]) -> List[str]:
    """Dax devices that the steps would change, and that a driver which oeprov does not know uses."""
    touched = [step.args.get(key, "") for step in steps for key in ("device", "namespace")]
    of_namespace = {item.chardev: item.dev for item in state.namespaces if item.chardev}
    return [
        problem
        for dax in state.dax
        if dax.chardev in touched or of_namespace.get(dax.chardev, "-") in touched
        for problem in daxctl.foreign_mode(dax)
    ]


def room_notes(state: State, desired: Desired) -> List[str]:
    """Notes on regions with room for another namespace."""
    found = []
    for region in state.regions:
        names = [item.dev for item in chosen(state, desired) if item.region == region.dev]
        if names and _has_room(region):
            found.append(
                f"{region.dev}: {human(region.available)} of {human(region.size)} are unused beside "
                f"{', '.join(names)}; `ndctl create-namespace --region={region.dev}` makes a namespace "
                "of them, which the next plan uses"
            )
    return found


def label_note(item: Namespace) -> str:
    """A note on a namespace without a label."""
    return f"{item.dev} has no label: its size cannot change, and ownership is kept in {owned.PATH}"


def _in_region(system: System, region: str) -> List[Namespace]:
    return [item for item in devices.namespaces(system) if item.region == region]


def give_up(system: System, item: Namespace, lose: List[str]) -> None:
    """Make sure that the namespace is unused, and that consent covers what is lost."""
    if item.blockdev:
        filesystem.wipe(system, item.blockdev, lose)
    for dax in devices.dax_devices(system):
        if dax.chardev == item.chardev and dax.mode == "system-ram":
            raise CommandError(
                f"{item.dev} ({dax.chardev}) is in use as system RAM: it must go offline first"
            )
        for problem in daxctl.foreign_mode(dax) if dax.chardev == item.chardev else []:
            raise CommandError(problem)
    state = State(namespaces=[item], owned=owned.observe(system))
    unseen = [name for name in data_in(state, item) if name not in lose]
    if unseen:
        raise CommandError(f"{unseen[0]} appeared after the plan was made; nothing was changed: plan again")


def _create_namespace(system: System, args: Dict[str, Any]) -> Applied:
    mode, name = args["mode"], args.get("namespace", "")
    region = args.get("region") or "region" + region_number(name)
    before = _in_region(system, region)
    old: Optional[Namespace] = next((item for item in before if item.dev == name), None)
    if old and old.mode == mode and old.enabled:
        return Applied(False, f"{name} is in mode {mode}")
    if before and not name:
        if before[0].mode == mode and before[0].enabled:
            return Applied(False, f"{region} has {before[0].dev} in mode {mode}")
        raise CommandError(
            f"{region} has {before[0].dev} in mode {before[0].mode}, which appeared after the plan was made: "
            "plan again"
        )
    if old:
        give_up(system, old, args.get("lose", []))
    expected = name or region.replace("region", "namespace") + ".0"
    # Registered before it exists; the tool chooses its UUID.
    word = owned.making(expected, mode)
    owned.change(system, [word], [])
    which = ["-f", "-e", name] if old else ["--region=" + region]
    result = system.run(_command(which, mode, args["map"]), timeout=TIMEOUT)
    devices.settle(system)
    known = [item.dev for item in before if item.dev != name]
    # The tool's exit status is no proof; what the kernel shows is.
    made = [item for item in _in_region(system, region) if item.dev not in known and item.mode == mode]
    made = [item for item in made if item.enabled and (item.blockdev or item.chardev)]
    if not made:
        raise CommandError(
            "{} is not in mode {} afterwards: {}".format(
                name or region, mode, result.explain().replace("\n", " ")
            )
        )
    item = made[0]
    gone = [old.uuid, old.raw_uuid, owned.vacant(old.blockdev, old.uuid)] if old else []
    empty = [owned.vacant(item.blockdev, item.uuid)] if item.blockdev else []
    owned.change(system, [item.uuid, item.raw_uuid] + empty, [word] + gone)
    if item.dev != expected:
        raise CommandError(
            f"the kernel named the new namespace {item.dev} instead of {expected}; nothing is lost: run it "
            "again, and the plan goes on with that name"
        )
    return Applied(True, f"{item.dev} is in mode {mode} ({item.blockdev or item.chardev})")


def _destroy_namespace(system: System, args: Dict[str, Any]) -> Applied:
    name = args["namespace"]
    old = next((item for item in devices.namespaces(system) if item.dev == name), None)
    # One without a label stays, as raw.
    if old is None or (not old.labels and old.mode == "raw"):
        return Applied(False, f"there is no {name}")
    give_up(system, old, args.get("lose", []))
    result = system.run(["ndctl", "destroy-namespace", "-f", name], timeout=TIMEOUT)
    devices.settle(system)
    left = next((item for item in devices.namespaces(system) if item.dev == name), None)
    if left is not None and (left.labels or left.mode not in ("raw", "fsdax")):
        raise CommandError(f"{name} is still there: {result.explain()}")
    owned.change(system, [], [old.uuid, old.raw_uuid, owned.vacant(old.blockdev, old.uuid)])
    return Applied(True, f"{name} is destroyed")


ACTIONS: Dict[str, Action] = {
    "create_namespace": _create_namespace,
    "destroy_namespace": _destroy_namespace,
}
