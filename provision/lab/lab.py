"""The lab: a few virtual nodes, their keys and inventory, kept in one directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from provision.cluster.errors import LabError
from provision.lab import emulator, image, machine, programs
from provision.lab import labels as label_area
from provision.lab.machine import Machine, Report
from provision.lab.node import Node
from provision.node.command import replace_file

_FIRST_SSH_PORT = 2221
_BLOCK = 128 << 20  # memory is plugged in blocks of this size


def _silent(_line: str) -> None:
    pass


class Lab:
    """The lab in ``directory``; images are shared between labs through ``images``."""

    def __init__(
        self,
        directory: Path | str = ".oeprov/lab",
        *,
        images: Path | str | None = None,
        inventory: Path | str | None = None,
        report: Report = _silent,
    ) -> None:
        # QEMU runs in a node's directory, and the inventory is read from anywhere.
        self.directory = Path(directory).absolute()
        self.images = Path(images).absolute() if images else self.directory / "images"
        self._inventory = Path(inventory).absolute() if inventory else None
        self._report = report

    @property
    def key(self) -> Path:
        """Private key that all nodes of this lab let in."""
        return self.directory / "key"

    @property
    def known_hosts(self) -> Path:
        """Host keys of the nodes."""
        return self.directory / "known_hosts"

    @property
    def inventory(self) -> Path:
        """The inventory that was written, or will be."""
        given = self._inventory or self._state().get("inventory")
        if given:
            return Path(given)
        return Path("inventory/lab.yml" if Path("inventory").is_dir() else "lab.yml").absolute()

    @property
    def nodes(self) -> list[Node]:
        """The nodes, running or not; none when the lab is down."""
        return [self._node(Machine(**spec)) for spec in self._state().get("nodes", [])]

    def _node(self, spec: Machine) -> Node:
        directory = self.directory / "nodes" / spec.name

        def qemu() -> list[str]:
            return emulator.command(self.images, spec.variant, self._report)

        return Node(spec, directory, self.key, self.known_hosts, self.accelerator, qemu)

    def node(self, name: str) -> Node:
        """The node of that name; LabError names those that there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.nodes) or "none: `oeprov lab up` makes them"
        raise LabError(f"the lab has no node {name}; it has: {names}")

    def up(
        self,
        nodes: int = 2,
        pmem: int = 2 << 30,
        variant: str = "bare-metal",
        memory: int = 1536 << 20,
        cpus: int = 1,
        sockets: int = 1,
        debian: int = 0,
        install: bool = False,
    ) -> list[Node]:
        """Bring up nodes and wait until ssh lets us in; sizes in bytes. ``debian``: 12 or 13; 0: as needed.

        Nodes that are there are started. A lab of another kind must be taken down first.
        """
        programs.require(install)
        machine.check_variant(variant)
        suite = _suite(variant, debian)
        if variant == "cxl":
            emulator.check()
        if pmem % _BLOCK or pmem < 2 * _BLOCK:
            what = "a drive" if variant == "nvme" else "persistent memory"
            raise LabError(f"{what} must be a multiple of 128M, and 256M at least: not {_text(pmem)}")
        if memory % _BLOCK or memory < 4 * _BLOCK:
            raise LabError(f"memory must be a multiple of 128M, and 512M at least: not {_text(memory)}")
        if nodes < 1 or cpus < 1 or sockets not in (1, 2):
            raise LabError("the lab needs one node, one CPU, and one or two sockets at least")
        if sockets == 2 and variant not in ("bare-metal", "re6p"):
            raise LabError(f"two sockets are for variants bare-metal and re6p, not {variant}")
        if memory % (sockets * _BLOCK):
            raise LabError(f"memory must be a multiple of 256M for two sockets: not {_text(memory)}")
        shape = Machine("", 0, variant, memory, pmem, cpus, sockets, 0, suite)
        with self._locked():
            self._check_shape(nodes, shape)
            self.accelerator()
            base = self._image(suite) if nodes > len(self.nodes) else None
            # A port is taken only once QEMU runs: no other lab may choose one meanwhile.
            with _lock(self.images / "ports", self._report):
                if base:
                    self._make_nodes(nodes, shape, base)
                for node in self.nodes:
                    node.start()
            self.inventory.parent.mkdir(parents=True, exist_ok=True)
            text = inventory_text([node.spec for node in self.nodes], self.key, self.known_hosts)
            self.inventory.write_text(text)
        self._report("waiting for ssh")
        for node in self.nodes:
            node.wait_ssh()
        return self.nodes

    def down(self) -> None:
        """Cut the power of all nodes and remove their disks and modules; images and the key stay."""
        with self._locked():
            for node in self.nodes:
                node.power_cut()
            shutil.rmtree(self.directory / "nodes", ignore_errors=True)
            inventory = self.inventory
            if inventory.exists() and inventory.read_text().startswith(_HEADER):
                inventory.unlink()
            self.known_hosts.unlink(missing_ok=True)
            (self.directory / "lab.json").unlink(missing_ok=True)

    def accelerator(self) -> list[str]:
        """QEMU arguments for the fastest way that works on this machine."""
        self.images.mkdir(parents=True, exist_ok=True)
        remembered = self.images / "accelerator.json"
        return machine.accelerator(lambda: self._image().kernel, remembered, self._report)

    def _image(self, suite: str = image.SUITE) -> image.GuestImage:
        found = image.find(self.images, suite)
        if found:
            return found
        with _lock(self.images / "lock", self._report):
            return image.find(self.images, suite) or image.build(self.images, self._report, suite)

    def _check_shape(self, count: int, shape: Machine) -> None:
        """LabError when what is there cannot be made into what is wanted."""
        there = self.nodes
        for node in there:
            if replace(shape, name=node.name, index=node.spec.index, ssh_port=node.ssh_port) != node.spec:
                raise LabError("a lab with other nodes is there; remove it first: `oeprov lab down`")
        if count < len(there):
            down = "to have fewer, remove it first: `oeprov lab down`"
            raise LabError(f"the lab has {len(there)} nodes; {down}")
        path = self.inventory
        if path.exists() and not path.read_text().startswith(_HEADER):
            raise LabError(f"{path} is there and was not written by the lab; give another --inventory FILE")

    def _make_nodes(self, count: int, shape: Machine, base: image.GuestImage) -> None:
        if not self.key.exists():
            programs.make_key(self.key, "oeprov lab")
        specs = [node.spec for node in self.nodes]
        taken = {spec.ssh_port for spec in specs}
        for index in range(len(specs) + 1, count + 1):
            port = _free_port(taken)
            taken.add(port)
            spec = replace(shape, name=f"lab-{index}", index=index, ssh_port=port)
            self._make_node(self._node(spec), base)
            specs.append(spec)
        self._write_state({"inventory": str(self.inventory), "nodes": [asdict(spec) for spec in specs]})
        self.known_hosts.write_text("".join(_known_host(self._node(spec)) for spec in specs))

    def _make_node(self, node: Node, base: image.GuestImage) -> None:
        directory, spec = node.directory, node.spec
        shutil.rmtree(directory, ignore_errors=True)  # of an `up` that was killed
        directory.mkdir(parents=True)
        overlay = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
        programs.run([*overlay, base.disk, directory / "disk.qcow2"])
        if spec.variant in ("bare-metal", "re6p"):
            for item in range(spec.sockets):
                module = directory / f"nvdimm{item}"
                labels = machine.LABEL if spec.variant == "bare-metal" else 0
                with module.open("wb") as file:
                    file.truncate(spec.pmem + labels)
                if labels:
                    label_area.write(module, labels)
        if spec.variant == "nvme":
            with (directory / machine.DRIVE).open("wb") as file:
                file.truncate(spec.pmem)
        programs.make_key(directory / "host_key", f"root@{node.name}")
        shutil.copy(self.key.with_suffix(".pub"), directory / "authorized_keys")

    def _state(self) -> dict[str, Any]:
        path = self.directory / "lab.json"
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise LabError(f"{path} cannot be read; remove {self.directory / 'nodes'} and this file")
        return state

    def _write_state(self, state: dict[str, Any]) -> None:
        replace_file(str(self.directory / "lab.json"), (json.dumps(state, indent=2) + "\n").encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _lock(self.directory / "lock", self._report):
            yield


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another oeprov works on this lab; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _suite(variant: str, debian: int) -> str:
    debian = debian or (13 if variant == "cxl" else 12)
    if debian not in machine.SUITES:
        raise LabError(f"the lab has Debian {' and '.join(map(str, machine.SUITES))}, not {debian}")
    if variant == "cxl" and debian < 13:
        raise LabError(f"variant cxl needs Debian 13, not {debian}: the kernel knows CXL memory since 6.3")
    return machine.SUITES[debian]


def _text(size: int) -> str:
    return f"{size >> 20}M" if size % (1 << 20) == 0 else f"{size} bytes"


def _free_port(taken: set[int]) -> int:
    for port in range(_FIRST_SSH_PORT, _FIRST_SSH_PORT + 500):
        if port in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LabError("no free port for ssh was found on 127.0.0.1")


def _known_host(node: Node) -> str:
    kind, key = (node.directory / "host_key.pub").read_text().split()[:2]
    return f"[127.0.0.1]:{node.ssh_port} {kind} {key}\n"


_HEADER = "# Written by `oeprov lab up`;"


def inventory_text(specs: Sequence[Machine], key: Path, known_hosts: Path) -> str:
    """The inventory of a lab: its nodes are parameter servers, this machine is the worker."""
    hosts = {
        spec.name: {
            "ansible_port": spec.ssh_port,
            "oeprov_kind": machine.VARIANTS[spec.variant],
            "parameter_server_port": spec.server_port,
            **({"ssd_devices": [spec.drive]} if spec.variant == "nvme" else {}),
        }
        for spec in specs
    }
    servers = {
        "ansible_host": "127.0.0.1",
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={known_hosts}",
        "parameter_server_host": "0.0.0.0",  # noqa: S104  the node's only network is QEMU's
    }
    controller = {
        "ansible_connection": "local",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "oeprov_kind": "local",
        "pmem_mode": "none",
    }
    document = {
        "all": {
            "children": {
                "parameter_servers": {"vars": servers, "hosts": hosts},
                "workers": {"hosts": {"controller": controller}},
            }
        }
    }
    body = yaml.safe_dump(document, sort_keys=False)
    return f"{_HEADER} `oeprov lab down` removes it. Edit a copy.\n{body}"
