#!/usr/bin/python3
"""A stand-in for ipmctl on oeprov's virtual lab nodes. It reaches no hardware.

The real tool cannot see an emulated module. This one keeps memory allocation goals in a file, applies them
when the node has booted again, and prints what ipmctl 03.00.00.0468 prints, as text and as nvmxml. Memory
mode changes what it reports and nothing else: the node's memory stays what it is.

  ipmctl version
  ipmctl show -memoryresources | -goal | -dimm | -topology | -d ATTRIBUTES -dimm    [-socket IDS]
  ipmctl create [-f] -goal [-socket IDS] [MemoryMode=PERCENT] [PersistentMemoryType=AppDirect]
  ipmctl delete -goal | delete [-f] -pcd                    everywhere: [-u B|MiB|GiB] [-o text|nvmxml]

A line in /etc/ipmctl-lab.conf chooses how it fails:
  never-applies  it is 02.00.00.3809, whose goals are accepted and stay pending over every boot
  fixed-1lm      the firmware takes a memory mode goal and leaves the capacity inaccessible
  error-18       goals are refused until the platform configuration data is deleted (delete -pcd)
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from collections.abc import Sequence

PACKAGE_VERSION = "03.00.00.0468-1+oeprov1"
VERSION, BROKEN_VERSION = "03.00.00.0468-1", "02.00.00.3809"
NAME = "Intel(R) Optane(TM) Persistent Memory Command Line Interface"
ROOT = os.environ.get("IPMCTL_LAB_ROOT", "/")  # tests give another
Row = dict[str, str]
UNITS = {"B": 1, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
RESERVED = 2 << 20  # of each module: its labels
REBOOT = "A reboot is required to process new memory allocation goals."
NO_GOALS = (
    "There are no goal configs defined in the system.\n"
    "Please use 'show -region' to display currently valid persistent memory regions."
)
NAMESPACES = (
    "Create region configuration goal failed: Error 124 - Namespaces exist on specified PMem modules. "
    "They have to be removed before running this command.\n"
    "WARNING: Removing Namespaces will erase existing data. Please make a backup first."
)
PCD_REBOOT = (
    "\nData dependencies may result in other commands being affected. A system reboot is required before all "
    "changes will take effect."
)
ERROR_18 = (
    "Create region configuration goal failed: Error 18 - No usable PMem modules due to all PMem modules "
    "being one of the following:\n- PMem modules unmanageable\n- PMem modules non-functional\n"
    "- PMem modules have a population issue"
)


class Failure(Exception):
    """What is printed, and the exit status."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def in_root(path: str) -> str:
    """A path under ROOT."""
    return os.path.join(ROOT, path)


def read(path: str) -> str:
    """Text of a file; empty when it cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


class Modules:
    """One module per socket, for each region that the kernel shows; with its goal, over boots."""

    def __init__(self) -> None:
        self.file = in_root("var/lib/ipmctl-lab/state.json")
        self.failure = read(in_root("etc/ipmctl-lab.conf"))
        found = glob.glob(in_root("sys/bus/nd/devices/region*"))
        if not found:
            raise Failure("Initialization failed. No PMem modules in the system.")
        sizes = {int(re.sub(r"\D", "", os.path.basename(path))): path for path in found}
        self.sizes = [int(read(sizes[number] + "/size")) for number in sorted(sizes)]
        # memory: percent of the capacity that is memory now (None: inaccessible); goal: the same after a boot
        self.sockets: list[dict[str, int | None]] = [{"memory": 0, "goal": None} for _ in self.sizes]
        self.pcd_bad = self.failure == "error-18"
        self.boot = read(in_root("proc/sys/kernel/random/boot_id"))
        try:
            with open(self.file) as file:
                state = json.load(file)
        except (OSError, ValueError):
            return
        if len(state["sockets"]) == len(self.sockets):
            self.sockets = state["sockets"]
        self.pcd_bad = self.pcd_bad and not state["pcd_deleted"]
        if state["boot"] != self.boot:
            self._apply()

    def _apply(self) -> None:
        """What the firmware does at boot."""
        for socket in self.sockets:
            goal = socket["goal"]
            if goal is not None and self.failure != "never-applies":
                refused = self.failure == "fixed-1lm" and goal > 0
                socket["memory"], socket["goal"] = None if refused else goal, None
        self.save()

    def save(self) -> None:
        """Keep it for the next call, also over a power cut."""
        os.makedirs(os.path.dirname(self.file), exist_ok=True)
        deleted = self.failure == "error-18" and not self.pcd_bad
        with open(self.file + ".new", "w") as file:
            json.dump({"boot": self.boot, "sockets": self.sockets, "pcd_deleted": deleted}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.file + ".new", self.file)

    def namespaces(self) -> bool:
        """Whether a module's labels hold a namespace; those of modules without labels are not seen here."""
        for path in glob.glob(in_root("sys/bus/nd/devices/namespace*")):
            if read(path + "/nstype") == "5" and read(path + "/size") not in ("", "0"):
                return True
        return False


def capacity(number: int, unit: str) -> str:
    """A capacity as ipmctl writes it."""
    return f"{number} B" if unit == "B" else f"{number / UNITS[unit]:.3f} {unit}"


def dimm(socket: int) -> str:
    """DimmID of the module in a socket."""
    return f"0x{socket * 0x1000 + 1:04x}"


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Rows (dictionaries) as ipmctl's text table."""
    widths = [max([len(name)] + [len(row[name]) for row in rows]) for name in names]
    head = " " + " | ".join(name.ljust(width) for name, width in zip(names, widths, strict=True))
    lines = [head, "=" * (len(head) + 1)]
    for row in rows:
        cells = [row[name].ljust(width) for name, width in zip(names, widths, strict=True)]
        lines.append((" " + " | ".join(cells)).rstrip())
    return "\n".join(lines)


def listing(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Rows as ipmctl's list, which begins with the DimmID of each."""
    lines = []
    for row in rows:
        lines.append("---DimmID={}---".format(row["DimmID"]))
        lines += [f"   {name}={row[name]}" for name in names if name != "DimmID"]
    return "\n".join(lines)


def xml(rows: Sequence[Row], outer: str, inner: str) -> str:
    """Rows as nvmxml."""
    lines = ['<?xml version="1.0"?>', f" <{outer}>"]
    for row in rows:
        lines.append(f"  <{inner}>")
        lines += [f"   <{name}>{text}</{name}>" for name, text in row.items()]
        lines.append(f"  </{inner}>")
    return "\n".join([*lines, f" </{outer}>"])


VALUED = {"-u": "-u", "-units": "-u", "-o": "-o", "-output": "-o", "-d": "-d", "-display": "-d"}
TARGETS = ("-goal", "-dimm", "-socket", "-memoryresources", "-topology", "-pcd")


class Command:
    """A command line, taken apart: verb, options, targets and properties."""

    def __init__(self, words: Sequence[str]) -> None:
        self.verb, self.force = words[0], False
        self.options = {"-u": "GiB", "-o": "text"}
        self.targets: Row = {}
        self.properties: Row = {}
        rest = list(words[1:])
        while rest:
            word = rest.pop(0)
            if word in VALUED and rest:
                self.options[VALUED[word]] = rest.pop(0)
            elif word in ("-f", "-force"):
                self.force = True
            elif word in TARGETS:
                free = rest and not rest[0].startswith("-") and "=" not in rest[0]
                self.targets[word] = rest.pop(0) if free else ""
            elif self.verb == "create" and re.match(r"(?i)(memorymode|persistentmemorytype|reserved)=", word):
                name, value = word.split("=", 1)
                self.properties[name.lower()] = value.lower()
            else:
                raise Failure(f"Syntax Error: Invalid or unexpected token {word}.", 201)
        if self.options["-u"] not in UNITS or self.options["-o"] not in ("text", "nvmxml"):
            raise Failure("Syntax Error: Incorrect value for option -units or -output.", 201)
        self.xml = self.options["-o"] == "nvmxml"

    def sockets(self, count: int) -> list[int]:
        """The sockets that are meant; all of them by default."""
        given = self.targets.get("-socket", "")
        numbers = [int(text, 0) for text in given.split(",") if text] or list(range(count))
        if [number for number in numbers if number >= count]:
            raise Failure("Syntax Error: Incorrect value for target -socket.", 201)
        return numbers


def main(words: Sequence[str]) -> int:
    """Run one command line; the exit status."""
    if not words or words[0] in ("help", "-h", "-help", "--help"):
        print(__doc__)
        return 0
    if words[0] not in ("version", "show", "create", "delete"):
        text = "Syntax Error: First token must be a verb, '{}' is not a supported verb."
        raise Failure(text.format(words[0]), 201)
    command = Command(words)
    if command.verb == "version":
        broken = read(in_root("etc/ipmctl-lab.conf")) == "never-applies"
        row = {"Component": NAME, "Version": BROKEN_VERSION if broken else VERSION}
        print(
            xml([row], "SoftwareList", "Software")
            if command.xml
            else "{Component} Version {Version}".format(**row)
        )
        return 0
    target = next((name for name in TARGETS if name in command.targets and name != "-socket"), "")
    # `show -dimm … -goal` is about goals: the first of TARGETS wins, and -goal is the first.
    action = ACTIONS.get((command.verb, target))
    if not action:
        raise Failure(f"Syntax Error: Invalid or unexpected token {target or command.verb}.", 201)
    print(action(command, Modules()))
    return 0


def goal_rows(command: Command, modules: Modules) -> list[Row]:
    """One row per module with a goal."""
    rows = []
    for number in command.sockets(len(modules.sizes)):
        percent = modules.sockets[number]["goal"]
        if percent is not None:
            memory = modules.sizes[number] * percent // 100
            rows.append(
                {
                    "SocketID": f"0x{number:04x}",
                    "DimmID": dimm(number),
                    "MemorySize": capacity(memory, command.options["-u"]),
                    "AppDirect1Size": capacity(modules.sizes[number] - memory, command.options["-u"]),
                    "AppDirect2Size": capacity(0, command.options["-u"]),
                }
            )
    return rows


def show_goal(command: Command, modules: Modules) -> str:
    """The goals that wait for a boot."""
    rows = goal_rows(command, modules)
    if command.xml:
        return xml(rows, "ConfigGoalList", "ConfigGoal")
    return table(rows, list(rows[0])) + "\n" + REBOOT if rows else NO_GOALS


def create_goal(command: Command, modules: Modules) -> str:
    """Keep a goal for the next boot."""
    try:
        percent = int(command.properties.get("memorymode", "0"))
    except ValueError:
        percent = -1
    if not 0 <= percent <= 100:
        raise Failure("Syntax Error: Incorrect value for property MemoryMode.", 201)
    if command.properties.get("persistentmemorytype", "appdirect") not in (
        "appdirect",
        "appdirectnotinterleaved",
    ):
        raise Failure("Syntax Error: Incorrect value for property PersistentMemoryType.", 201)
    if modules.pcd_bad:
        raise Failure(ERROR_18, 18)
    if modules.namespaces():
        raise Failure(NAMESPACES, 124)
    numbers = command.sockets(len(modules.sizes))
    if [number for number in numbers if modules.sockets[number]["goal"] is not None] and not command.force:
        raise Failure(
            "Create region configuration goal failed: Error 119 - PMem modules on one or more sockets "
            "already have a configured goal. Delete this existing goal before creating a new one.",
            119,
        )
    for number in numbers:
        modules.sockets[number]["goal"] = percent
    rows = goal_rows(command, modules)
    if not command.force and not command.xml:
        print("The following configuration will be applied:\n" + table(rows, list(rows[0])))
        print("Do you want to continue? [y/n] ", end="", flush=True)
        if sys.stdin.readline().strip() not in ("y", "Y"):
            raise Failure("")
    modules.save()
    if command.xml:
        return xml(rows, "ConfigGoalList", "ConfigGoal")
    return "Created following region configuration goal\n\n" + table(rows, list(rows[0])) + "\n" + REBOOT


def delete_goal(command: Command, modules: Modules) -> str:
    """Forget the goals that were not applied."""
    lines = []
    for number in command.sockets(len(modules.sizes)):
        none = modules.sockets[number]["goal"] is None
        said = "Error 122 - There is no goal configuration on this PMem module." if none else "Success"
        lines.append(f"Delete memory allocation goal from PMem module {dimm(number)}: {said}")
        modules.sockets[number]["goal"] = None
    modules.save()
    return "\n".join(lines)


def delete_pcd(command: Command, modules: Modules) -> str:
    """Delete the platform configuration data: the capacity is inaccessible (of real modules after a boot)."""
    if not command.force:
        print("WARNING: Modifying the Platform Configuration Data can result in loss of data!")
        print("Do you want to continue? [y/n] ", end="", flush=True)
        if sys.stdin.readline().strip() not in ("y", "Y"):
            raise Failure("")
    modules.pcd_bad = False
    for socket in modules.sockets:
        socket["memory"], socket["goal"] = None, None
    modules.save()
    text = "Clear Config partition(s) on PMem module {}: Success"
    lines = [text.format(dimm(number)) for number in range(len(modules.sizes))]
    lines.append(PCD_REBOOT)
    return "\n".join(lines)


def show_memory_resources(command: Command, modules: Modules) -> str:
    """What the capacity is used for."""
    dram = int(re.findall(r"MemTotal:\s+(\d+)", read(in_root("proc/meminfo")) or "MemTotal: 0")[0]) << 10
    volatile = direct = inaccessible = 0
    for size, socket in zip(modules.sizes, modules.sockets, strict=True):
        inaccessible += RESERVED
        memory = socket["memory"]
        if memory is None:
            inaccessible += size
        else:
            volatile += size * memory // 100
            direct += size - size * memory // 100
    cache = dram if volatile else 0
    rows = []
    for name, ddr, module in (
        ("Volatile", dram - cache, volatile),
        ("AppDirect", None, direct),
        ("Cache", cache, None),
        ("Inaccessible", 0, inaccessible),
        ("Physical", dram, volatile + direct + inaccessible),
    ):
        cells = [ddr, module, (ddr or 0) + (module or 0)]
        texts = ["-" if number is None else capacity(number, command.options["-u"]) for number in cells]
        rows.append({"MemoryType": name, "DDR": texts[0], "PMemModule": texts[1], "Total": texts[2]})
    return xml(rows, "MemoryResources", "data") if command.xml else table(rows, list(rows[0]))


def show_dimm(command: Command, modules: Modules) -> str:
    """The modules; with -d, chosen attributes."""
    rows = []
    for number in command.sockets(len(modules.sizes)):
        rows.append(
            {
                "DimmID": dimm(number),
                "Capacity": capacity(modules.sizes[number] + RESERVED, command.options["-u"]),
                "LockState": "Disabled, Frozen",
                "HealthState": "Healthy",
                "FWVersion": "02.02.00.1553",
                "SocketID": f"0x{number:04x}",
            }
        )
    names = ["DimmID", "Capacity", "LockState", "HealthState", "FWVersion"]
    if "-d" in command.options:
        names = command.options["-d"].split(",")
        if [name for name in names if name not in rows[0]]:
            raise Failure("Syntax Error: Incorrect value for option -display.", 201)
    if command.xml:
        chosen = ["DimmID"] + [name for name in names if name != "DimmID"]
        return xml([{name: row[name] for name in chosen} for row in rows], "DimmList", "Dimm")
    return listing(rows, names) if "-d" in command.options else table(rows, names)


def show_topology(command: Command, modules: Modules) -> str:
    """Where the modules are."""
    rows = []
    for number in command.sockets(len(modules.sizes)):
        rows.append(
            {
                "DimmID": dimm(number),
                "MemoryType": "Logical Non-Volatile Device",
                "Capacity": capacity(modules.sizes[number] + RESERVED, command.options["-u"]),
                "PhysicalID": f"0x{0x20 + number:04x}",
                "DeviceLocator": f"CPU{number + 1}_DIMM_A2",
            }
        )
    return xml(rows, "DimmTopologyList", "DimmTopology") if command.xml else table(rows, list(rows[0]))


ACTIONS = {
    ("show", "-goal"): show_goal,
    ("show", "-memoryresources"): show_memory_resources,
    ("show", "-dimm"): show_dimm,
    ("show", "-topology"): show_topology,
    ("create", "-goal"): create_goal,
    ("delete", "-goal"): delete_goal,
    ("delete", "-pcd"): delete_pcd,
}

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        print(str(failure))
        sys.exit(failure.code)
