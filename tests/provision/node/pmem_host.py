"""A simulated host with persistent memory: its files in memory, and the tools that change it.

Only what ``provision.node`` looks at is there. It can lose its power before or after any change, and boots as
a real one would: mounts from /etc/fstab, memory nodes from our unit, goals of the modules, ``memmap``.
"""

from __future__ import annotations

import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from provision.node import daxctl, pmem, tiering
from provision.node.apply import apply
from provision.node.command import NOT_FOUND, CommandError, Result, System
from provision.node.observe import observe
from provision.node.state import State, decode, encode
from provision.node.step import Desired, Part, Step

GIB = 1 << 30
MIB = 1 << 20
BLOCK = 128 * MIB
CONTENT = b"rows of somebody else"
READS = ("blkid", "dumpe2fs", "udevadm", "dmesg", "systemctl show", "ipmctl show", "ipmctl version")


class PowerCut(Exception):
    """The host lost its power."""


@dataclass
class Content:
    """A file system: type, UUID, block size."""

    type: str
    uuid: str
    block_size: int = 4096


@dataclass
class Ns:
    """A namespace as the simulation keeps it."""

    mode: str = "raw"
    map: str = "mem"
    uuid: str = ""
    raw_uuid: str = ""
    content: Content | None = None
    data: str = ""  # what lies there without a signature; empty: zeros
    bad_blocks: int = 0
    error: int = 0  # of every read
    kmem: bool = False
    online: int = 0
    movable: bool = True


class MemoryFiles(System):
    """A machine whose files and symbolic links are in memory."""

    def __init__(self, root: str, files: dict[str, str], links: dict[str, str]) -> None:
        super().__init__(root)
        self.files = files
        self.links = links
        self.known: dict[str, str] = {}  # resolved paths

    def resolve(self, path: str) -> str:
        """The path without symbolic links."""
        if path not in self.known:
            parent, name = posixpath.split(path.rstrip("/"))
            if not name:
                return "/"
            base = self.resolve(parent)
            found = posixpath.dirname(base) if name == ".." else f"{base.rstrip('/')}/{name}"
            if found in self.links:
                found = self.resolve(posixpath.normpath(f"{posixpath.dirname(found)}/{self.links[found]}"))
            self.known[path] = found
        return self.known[path]

    def read(self, path: str, encoding: str = "utf-8") -> str:
        """As a System reads."""
        return self.files.get(self.resolve(path), "")

    def list(self, path: str) -> list[str]:
        """As a System lists."""
        base = self.resolve(path).rstrip("/") + "/"
        names = [
            item[len(base) :].split("/")[0] for item in (*self.files, *self.links) if item.startswith(base)
        ]
        return sorted(set(names))

    def exists(self, path: str) -> bool:
        """As a System looks."""
        return self.resolve(path) in self.files or bool(self.list(path))

    def link(self, path: str) -> str:
        """As a System reads links."""
        parent, name = posixpath.split(path)
        return self.links.get(posixpath.join(self.resolve(parent), name), "")


@dataclass
class Host(MemoryFiles):
    """``spaces`` maps a region's number to its one namespace (None: empty)."""

    root: str
    labels: bool = True
    spaces: dict[int, Ns | None] = field(default_factory=lambda: {0: Ns()})
    size: int = 2 * GIB
    target_nodes: dict[int, int] = field(default_factory=lambda: {0: 1, 1: 3})
    policy: str = "offline"
    goals: str = ""
    modules: str = ""  # "", "memorymode" or "appdirect": what the firmware made of the modules
    firmware_fixed: bool = False  # accepts goals and leaves the capacity Inaccessible
    memmap_platform: bool = False
    turns_dax_off: bool = False
    units: str = ""  # what systemctl show says
    busy: tuple[str, ...] = ()
    tiering: bool = False  # its unit runs
    tiers: dict[str, str] = field(default_factory=dict)  # of the kernel: name -> nodes
    refuses_tiering: bool = False  # as kernels before 5.18
    cut_at: int = -1
    events: int = 0
    boots: int = 0
    asked: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.root, {}, {})
        self.mounts: list[tuple[str, str]] = []
        self.arguments = ["quiet"]
        self.files["/run/systemd/system/units"] = ""  # it is booted
        self.files["/etc/fstab"] = "# /etc/fstab\nUUID=root /\text4 errors=remount-ro 0 1\n"
        self.boot()

    # What lies where

    def _file(self, path: str, text: object) -> None:
        self.files[path] = f"{text}\n"

    def _link(self, path: str, target: str) -> None:
        self.links[path] = "../" * (path.count("/") - 1) + target.lstrip("/")

    def render(self) -> None:
        """Make /sys, /dev and /proc anew."""
        self.known = {}
        for store in (self.files, self.links):
            for path in [item for item in store if item.startswith(("/sys", "/dev"))]:
                del store[path]
        self._file("/sys/devices/system/memory/block_size_bytes", f"{BLOCK:x}")
        self._file("/sys/devices/system/memory/auto_online_blocks", self.policy)
        self._file(tiering.DEMOTION, "true" if self.tiering else "false")
        self._file(tiering.BALANCING, 2 if self.tiering and not self.refuses_tiering else 1)
        for name, nodes in self.tiers.items():
            self._file(f"/sys/devices/virtual/memory_tiering/{name}/nodelist", nodes)
        self._node(0, 16 * GIB, "0-3")
        memory_node = self.memmap_platform and not self._memmap()
        if memory_node:
            self._node(1, self.size, "")
        for number, space in self.spaces.items():
            self._region(number, space)
        mounts = [f"/dev/{device} {where} ext4 rw,relatime{self._dax()} 0 0" for device, where in self.mounts]
        self._file("/proc/mounts", "\n".join(["proc /proc proc rw 0 0", *mounts]))
        self._file("/proc/cmdline", " ".join(self.arguments))

    def _dax(self) -> str:
        return "" if self.turns_dax_off else ",dax=always"

    def _memmap(self) -> bool:
        return any("!" in word for word in self.arguments)

    def _node(self, number: int, size: int, cpus: str) -> None:
        base = f"/sys/devices/system/node/node{number}"
        self._file(
            base + "/meminfo", f"Node {number} MemTotal: {size >> 10} kB\nNode 0 MemFree: {size >> 11} kB"
        )
        self._file(base + "/cpulist", cpus)
        self._file(base + "/distance", "10 20")

    def _region(self, number: int, space: Ns | None) -> None:
        bus = "/sys/devices/platform/ndbus0"
        base = f"{bus}/region{number}"
        self._file(bus + "/provider", "e820" if self.memmap_platform else "ACPI.NFIT")
        self._link(f"/sys/bus/nd/devices/region{number}", base)
        for name, value in (
            ("size", self.size),
            ("available_size", 0 if space else self.size),
            ("devtype", "nd_pmem"),
            ("numa_node", 0),
            ("align", "0x1000000"),
        ):
            self._file(f"{base}/{name}", value)
        namespace = f"{base}/namespace{number}.0"
        self._link(f"/sys/bus/nd/devices/namespace{number}.0", namespace)
        self._file(namespace + "/size", self.size if space else 0)
        if space is None:
            return
        legacy = self.memmap_platform and space.mode == "fsdax"
        kinds = {"fsdax": ("memory", "pfn"), "devdax": ("dax", "dax"), "raw": ("raw", "")}
        mode, kind = kinds[space.mode]
        holder = "" if legacy or not kind else f"{kind}{number}.1"
        self._file(namespace + "/mode", mode)
        self._file(namespace + "/holder", holder)
        if self.labels:
            self._file(namespace + "/uuid", space.raw_uuid)
        held = f"{base}/{holder}" if holder else namespace
        if holder:
            self._link(f"/sys/bus/nd/devices/{holder}", held)
            self._file(held + "/uuid", space.uuid)
            self._file(held + "/mode", {"mem": "ram", "dev": "pmem"}[space.map])
            self._file(held + "/size", self.size - 32 * MIB)
            self._file(held + "/align", 2 * MIB)
        self._link(held + "/driver", "/sys/bus/nd/drivers/any")
        self._file("/sys/bus/nd/drivers/any/bind", "")
        if space.mode == "devdax":
            self._dax_device(number, space, held)
        else:
            self._file(f"{held}/block/pmem{number}/size", self.size // 512)
            self._file(f"/dev/pmem{number}", "")
            bad = f"8 {space.bad_blocks}" if space.bad_blocks else ""
            self._file(f"/sys/class/block/pmem{number}/badblocks", bad)

    def _dax_device(self, number: int, space: Ns, held: str) -> None:
        name = f"dax{number}.0"
        base = f"{held}/{name}"
        self._link(f"/sys/bus/dax/devices/{name}", base)
        start = 4 * GIB * (number + 1)
        for key, value in (
            ("size", self.size - BLOCK),
            ("resource", hex(start)),
            ("target_node", self.target_nodes[number]),
            ("align", 2 * MIB),
        ):
            self._file(f"{base}/{key}", value)
        driver = "kmem" if space.kmem else "device_dax"
        self._file(f"/sys/bus/dax/drivers/{driver}/bind", "")
        self._link(base + "/driver", f"/sys/bus/dax/drivers/{driver}")
        if not space.kmem:
            return
        self._node(self.target_nodes[number], space.online * BLOCK, "")
        for block in range(self._blocks()):
            path = f"/sys/devices/system/memory/memory{start // BLOCK + block}"
            self._file(path + "/state", "online" if block < space.online else "offline")
            self._file(path + "/valid_zones", "Movable" if space.movable else "Normal")

    def _blocks(self) -> int:
        return (self.size - BLOCK) // BLOCK

    # Power

    def event(self) -> None:
        """A change is about to happen, or has just happened."""
        if self.events == self.cut_at:
            raise PowerCut
        self.events += 1

    def boot(self, add: list[str] | None = None, remove: list[str] | None = None) -> None:
        """Power on: what was only in memory is gone, what was written down comes back."""
        self.boots += 1
        self._file("/proc/sys/kernel/random/boot_id", f"boot-{self.boots}")
        self.arguments = [word for word in self.arguments if word not in (remove or [])] + (add or [])
        if self.goals and not self.firmware_fixed:
            self.modules = self.goals
            self.spaces = {0: None, 1: None} if self.goals == "appdirect" else {}
        self.goals = ""
        if self.memmap_platform:
            old = self.spaces.get(0)
            # Of what the range held as memory, some is there after the boot.
            new = Ns("fsdax", data=f"memory of boot {self.boots}")
            self.spaces = {0: old or new} if self._memmap() else {}
        self.mounts = []
        self.policy = "offline"
        self.tiering = self.exists(tiering.ENABLED) and not self.refuses_tiering
        unit = self.read(daxctl.UNIT) if self.exists(daxctl.ENABLED) else ""
        for space in self.spaces.values():
            if space:
                space.kmem = space.mode == "devdax" and space.uuid in unit
                space.online = self._blocks() if space.kmem else 0
        for line in self.files["/etc/fstab"].splitlines():
            row = line.split()
            for number, space in self.spaces.items():
                content = space.content if space and space.mode == "fsdax" else None
                if content and row[0] == f"UUID={content.uuid}" and "nofail" in row[3]:
                    self.mounts.append((f"pmem{number}", row[1]))
        self.render()

    # Tools

    def write(self, path: str, text: str, mode: int = 0o644) -> bool:
        """As on a real system, where power may go before and after."""
        if self.files.get(path) == text:
            return False
        self.event()
        self.files[path] = text
        self.policy = self.read("/sys/devices/system/memory/auto_online_blocks").strip()
        self.event()
        return True

    def remove(self, path: str) -> bool:
        """The same."""
        self.event()
        return self.files.pop(path, None) is not None or self.links.pop(path, None) is not None

    def pieces(self, path: str, choose: Callable[[int], list[tuple[int, int]]]) -> Iterator[bytes]:
        """Of a device: zeros, or the same bytes everywhere."""
        space = self._space(path)
        if space.error:
            raise CommandError(f"{path} cannot be read at byte 0: {os.strerror(space.error)}")
        said = (space.content.uuid if space.content else space.data).encode() or b"\0"
        for _, length in choose(1 << 12):
            yield (said * length)[:length]

    def which(self, name: str) -> str:
        """Every tool that is simulated is installed."""
        return f"/usr/bin/{name}" if hasattr(self, "_" + _method(name)) else ""

    def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
        """Carry a command out; power may go before and after one that changes something."""
        self.asked.append(argv)
        method = getattr(self, "_" + _method(argv[0]), None)
        if method is None:
            return Result(argv, NOT_FOUND, "", "")
        changes = not " ".join(argv).startswith(READS)
        if changes:
            self.event()
        code, out = method(argv[1:])
        if changes:
            self.render()
            self.event()
        return Result(argv, code, out if code == 0 else "", "" if code == 0 else out)

    def _space(self, device: str) -> Ns:
        space = self.spaces[int(re.findall(r"\d+", device)[0])]
        assert space is not None
        return space

    def _ndctl(self, words: list[str]) -> tuple[int, str]:
        if words == ["--version"]:
            return 0, "76\n"
        if words[0] == "destroy-namespace":
            number = int(words[2][9])
            assert not self._space(words[2]).kmem
            left = self._space(words[2]).data
            self.spaces[number] = None if self.labels else Ns(data=left)
            return 0, ""
        assert words[0] == "create-namespace"
        options = dict(word[2:].split("=") for word in words if word.startswith("--"))
        number = int(words[3][9]) if words[1] == "-f" else int(options["region"][6:])
        space = self.spaces[number]
        if space and space.kmem:
            return 1, "failed to reconfigure namespace: Device or resource busy"
        if f"pmem{number}" in [device for device, _ in self.mounts]:
            return 1, "namespace is mounted"
        hidden = space.content if space else None
        self.spaces[number] = Ns(
            options["mode"],
            options["map"],
            str(uuid.uuid4()),
            str(uuid.uuid4()) if self.labels else "",
            hidden if options["mode"] == "fsdax" else None,
            space.data if space else "",
        )
        return 0, "{}"

    def _daxctl(self, words: list[str]) -> tuple[int, str]:
        if words == ["--version"]:
            return 0, "76.1\n"
        space = self._space(words[-1])
        if words[0] == "reconfigure-device" and "--mode=devdax" in words:
            space.kmem, space.online = False, 0
        elif words[0] == "reconfigure-device":
            space.kmem, space.movable = True, "--no-movable" not in words
            space.data = "what programs wrote"
            space.online = self._blocks()
            return 1, "reconfigured 0 devices"  # as v66 says after success
        elif words[0] == "online-memory":
            space.online, space.movable = self._blocks(), "--no-movable" not in words
        elif words[0] == "offline-memory":
            space.online = 0
        return 0, "reconfigured 1 device"

    def _blkid(self, words: list[str]) -> tuple[int, str]:
        space = self._space(words[-1])
        content = None if space.error else space.content  # as the real one, which says nothing of errors
        return (0, f"UUID={content.uuid}\nTYPE={content.type}\n") if content else (2, "")

    def _dumpe2fs(self, words: list[str]) -> tuple[int, str]:
        content = self._space(words[-1]).content
        return 0, f"Block size: {content.block_size if content else 0}\n"

    def _wipefs(self, words: list[str]) -> tuple[int, str]:
        space = self._space(words[-1])
        # Only the signature goes.
        space.content, space.data = None, space.data or "what lies behind a signature"
        return 0, ""

    def _mkfs_ext4(self, words: list[str]) -> tuple[int, str]:
        space = self._space(words[-1])
        # The superblock comes last.
        space.data = "groups of blocks"
        self.event()
        space.content = Content("ext4", words[words.index("-U") + 1])
        return 0, ""

    def _mount(self, words: list[str]) -> tuple[int, str]:
        assert Path(self.path(words[-1])).is_dir()
        self.mounts.append((words[-2].rsplit("/", 1)[1], words[-1]))
        return 0, ""

    def _umount(self, words: list[str]) -> tuple[int, str]:
        if words[0] in self.busy:
            return 32, "target is busy"
        self.mounts = [item for item in self.mounts if item[1] != words[0]]
        return 0, ""

    def _udevadm(self, words: list[str]) -> tuple[int, str]:
        return 0, ""

    def _systemctl(self, words: list[str]) -> tuple[int, str]:
        if words[0] == "show":
            return 0, self.units
        self.known = {}
        link = f"{posixpath.dirname(daxctl.ENABLED)}/{words[-1]}"
        if words[0] == "enable":
            self.links[link] = "../" + words[-1]
        if words[0] == "disable":
            self.links.pop(link, None)
        if words[-1] == tiering.UNIT_NAME and words[0] in ("restart", "disable"):
            assert words[0] == "restart" or "--now" in words
            self.tiering = words[0] == "restart" and not self.refuses_tiering
            return (1, "Job failed") if words[0] == "restart" and self.refuses_tiering else (0, "")
        return 0, ""

    def _ipmctl(self, words: list[str]) -> tuple[int, str]:
        if words == ["version"]:
            return 0, "Intel(R) Optane(TM) Persistent Memory Command Line Interface Version 02.00.00.3885\n"
        if words[0] == "create":
            self.goals = "memorymode" if "memorymode" in words[-1] else "appdirect"
        elif words[0] == "delete":
            self.goals = ""
        elif "-memoryresources" in words:
            return 0, self._resources()
        elif "-dimm" in words:
            return 0, "---DimmID=0x0001---\n   SocketID=0x0000\n---DimmID=0x1001---\n   SocketID=0x0001\n"
        elif "-goal" in words and self.goals:
            sizes = "2 GiB | 0 GiB" if self.goals == "memorymode" else "0 GiB | 2 GiB"
            return 0, "".join(f" 0x000{n} | 0x{n}001 | {sizes} | 0 GiB\n" for n in (0, 1))
        return 0, ""

    def _resources(self) -> str:
        parts = dict.fromkeys(("Volatile", "AppDirect", "Inaccessible"), 0)
        name = {"memorymode": "Volatile", "appdirect": "AppDirect"}.get(self.modules, "Inaccessible")
        parts[name] = 4
        parts["Physical"] = 4
        return "".join(f" {key} | - | {value}.000 GiB | - \n" for key, value in parts.items())


def _method(name: str) -> str:
    return name.replace(".", "_")


def look(host: Host, desired: Desired) -> tuple[State, Part]:
    """What is seen and what would be done."""
    state = observe(host, desired)
    # It came over the wire.
    state = decode(State, encode(state))
    return state, pmem.plan(state, desired)


def carry_out(host: Host, steps: list[Step], consent: list[str]) -> list[bool]:
    """Apply steps that were agreed to; whether each changed something."""
    for step in steps:
        assert set(step.destroys) <= set(consent), f"{step.id} destroys {step.destroys}"
    return [apply(step, host).changed for step in steps]


def converge(host: Host, desired: Desired, consent: list[str]) -> State:
    """Observe, plan and apply until nothing is left, with reboots; the last state."""
    for _ in range(5):
        state, part = look(host, desired)
        assert not part.problems, part.problems
        missing = [word for word in part.add_arguments if word not in state.kernel.cmdline]
        if not (part.before or part.after or part.reboot_why or missing):
            return state
        carry_out(host, part.before, consent)
        if part.reboot_why:
            host.boot(missing, part.remove_arguments)
            continue
        host.arguments += missing
        carry_out(host, part.after, consent)
    raise AssertionError("it does not converge")
