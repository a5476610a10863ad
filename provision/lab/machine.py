"""One virtual machine: its QEMU command line, and its life from power on to power cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.cluster.errors import LabError
from provision.lab import programs

Report = Callable[[str], None]
QEMU = "qemu-system-x86_64"
VARIANTS = {
    "bare-metal": "bare_metal_pmem",  # → oeprov_kind
    "re6p": "re6p",
    "re7p": "re7p",
    "cxl": "cxl",
    "nvme": "nvme",
}
DRIVE = "nvme0.raw"  # in a node's directory: the drive of variant nvme
LABEL = 2 << 20  # bytes of a module's label area; its region is the backing file less this
PORTS = 10  # of the parameter servers of one node
SUITES = {12: "bookworm", 13: "trixie"}  # of Debian
CXL_SINCE = (8, 1)  # QEMU's volatile CXL memory


@dataclass(frozen=True)
class Machine:
    """What a machine is made of. Sizes in bytes.

    ``pmem`` is that of one module, one for each socket; of variant nvme, which has no module, of its drive.
    """

    name: str
    index: int
    variant: str
    memory: int
    pmem: int
    cpus: int  # of each socket
    sockets: int
    ssh_port: int
    suite: str = SUITES[12]

    @property
    def server_port(self) -> int:
        """First of the ports that parameter servers on this node listen on, in the guest and here."""
        return 7100 + 10 * (self.ssh_port - 2220)  # so that two labs on one machine differ

    @property
    def drive(self) -> str:
        """The guest's name for the drive of variant nvme."""
        return f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{self.serial}"

    @property
    def serial(self) -> str:
        """The serial number of that drive."""
        return f"oeprov-{self.name}"


def arguments(
    machine: Machine, accelerator: list[str], directory: Path, qemu: Sequence[str] = (QEMU,)
) -> list[str]:
    """The QEMU command line; all paths but one are relative to the node's ``directory``."""
    servers = range(machine.server_port, machine.server_port + PORTS)
    ports = [(machine.ssh_port, 22), *((port, port) for port in servers)]
    forwards = "".join(f",hostfwd=tcp:127.0.0.1:{here}-:{there}" for here, there in ports)
    argv = [*qemu, "-name", f"oeprov-{machine.name}", "-nodefaults", "-no-user-config", "-display", "none"]
    if machine.variant == "cxl":
        # Linux takes new CXL memory only if it can flush caches, which it does not believe of a hypervisor.
        accelerator = [*accelerator[:-1], accelerator[-1] + ",-hypervisor"]
    argv += [*accelerator, "-smp", _processors(machine), *_memory(machine)]
    argv += ["-chardev", "file,id=console,path=console.log,append=on", "-serial", "chardev:console"]
    argv += ["-qmp", "unix:qmp.sock,server=on,wait=off"]
    # What the guest has flushed is on the host's disk; what it has not may be lost with QEMU.
    argv += ["-drive", "if=none,id=disk,file=disk.qcow2,format=qcow2,cache=writeback,discard=unmap"]
    # With cxl, the guest's DMA goes through its DRAM (image.py): QEMU's devices reach no emulated CXL memory,
    # and stop for good when they are given an address there.
    through = ",iommu_platform=on,disable-legacy=on" if machine.variant == "cxl" else ""
    argv += ["-device", "virtio-blk-pci,bus=pcie.0,drive=disk" + through]
    argv += ["-netdev", "user,id=net0,restrict=on" + forwards]
    argv += ["-device", "virtio-net-pci,bus=pcie.0,netdev=net0,romfile=" + through]
    argv += ["-device", "virtio-rng-pci,bus=pcie.0" + through]
    argv += ["-fw_cfg", f"name=opt/oeprov/hostname,string={machine.name}"]
    argv += ["-fw_cfg", "name=opt/oeprov/host_key,file=host_key"]
    argv += ["-fw_cfg", "name=opt/oeprov/authorized_keys,file=authorized_keys"]
    # The absolute path tells this QEMU from others, see pid().
    return [*argv, "-daemonize", "-pidfile", str(directory / "pid")]


def _processors(machine: Machine) -> str:
    total = machine.cpus * machine.sockets
    return str(total) if machine.sockets == 1 else f"{total},sockets={machine.sockets}"


def _sockets(machine: Machine) -> list[str]:
    """Two nodes with CPUs and half of the memory each; nodes 2 and 3 are for their modules.

    Without distances the kernel would not know which CPUs are beside a module.
    """
    argv = []
    for item in range(2):
        first = item * machine.cpus
        argv += ["-object", f"memory-backend-ram,id=ram{item},size={machine.memory // 2}"]
        argv += ["-numa", f"node,nodeid={item},memdev=ram{item},cpus={first}-{first + machine.cpus - 1}"]
    argv += ["-numa", "node,nodeid=2", "-numa", "node,nodeid=3"]
    for (source, target), value in _DISTANCES.items():
        argv += ["-numa", f"dist,src={source},dst={target},val={value}"]
    return argv


_DISTANCES = {(0, 1): 21, (0, 2): 17, (0, 3): 28, (1, 2): 28, (1, 3): 17, (2, 3): 28}


def _memory(machine: Machine) -> list[str]:
    """Memory, its nodes and the persistent memory of a variant.

    Node 0 has the CPUs, with two sockets also node 1. Persistent memory is on nodes of its own, so that
    system-ram gives nodes without CPUs.
    """
    node0 = f"node,nodeid=0,memdev=ram0,cpus=0-{machine.cpus - 1}"
    ram0 = f"memory-backend-ram,id=ram0,size={machine.memory}"
    argv = _sockets(machine) if machine.sockets == 2 else ["-object", ram0, "-numa", node0]
    if machine.variant == "re7p":
        # The second node begins at 4 GiB, in one piece, whatever the size of the first.
        total = machine.memory + machine.pmem
        argv += ["-machine", f"q35,max-ram-below-4g={machine.memory}", "-m", f"{total >> 20}M"]
        argv += ["-object", f"memory-backend-ram,id=ram1,size={machine.pmem}"]
        return [*argv, "-numa", "node,nodeid=1,memdev=ram1"]
    if machine.variant == "cxl":
        argv += ["-machine", "q35,cxl=on,cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G"]
        argv += ["-m", f"{machine.memory >> 20}M"]
        argv += ["-object", f"memory-backend-ram,id=cxl0,size={machine.pmem}"]
        argv += ["-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"]
        argv += ["-device", "cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2"]
        return [*argv, "-device", "cxl-type3,bus=rp0,volatile-memdev=cxl0,id=cxl-memory0"]
    if machine.variant == "nvme":
        # As for the disk: what the guest has flushed is on the host's disk.
        file = f"if=none,id=nvme0,file={DRIVE},format=raw,cache=writeback,discard=unmap"
        # With ioeventfd, which gains nothing under emulation, reads of QEMU 7.2 once never ended.
        device = f"nvme,bus=pcie.0,drive=nvme0,serial={machine.serial},ioeventfd=off"
        return [*argv, "-machine", "q35", "-m", f"{machine.memory >> 20}M", "-drive", file, "-device", device]
    label = LABEL if machine.variant == "bare-metal" else 0
    most = machine.memory + machine.sockets * (machine.pmem + (2 << 30)) + (2 << 30)
    slots = f"slots={machine.sockets},maxmem={most >> 20}M"
    argv += ["-machine", "q35,nvdimm=on", "-m", f"{machine.memory >> 20}M,{slots}"]
    for item in range(machine.sockets):
        if machine.sockets == 1:
            argv += ["-numa", "node,nodeid=1"]
        file = f"memory-backend-file,id=pmem{item},share=on,mem-path=nvdimm{item},size={machine.pmem + label}"
        module = f"nvdimm,id=nvdimm{item},memdev=pmem{item},node={item + machine.sockets}"
        argv += ["-object", file, "-device", module + (f",label-size={label}" if label else "")]
    return argv


def version() -> tuple[int, ...]:
    """QEMU's version, for comparing."""
    text = programs.run([QEMU, "--version"])
    return tuple(int(part) for part in text.split("version ")[1].split()[0].split(".")[:3])


def check_variant(variant: str) -> None:
    """LabError when there is no such variant."""
    if variant not in VARIANTS:
        raise LabError(f"{variant} is no variant of the lab; one of {', '.join(VARIANTS)}")


def direct_boot(
    kernel: Path, initrd: Path | None, disk: Path | None, command_line: str, console: Path
) -> list[str]:
    """A command line without boot loader and network, for a machine that ends by itself; emulated."""
    argv = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    argv += ["-machine", "q35", "-m", "1G", *EMULATION, "-smp", "2"]
    argv += ["-kernel", str(kernel), "-append", command_line]
    argv += ["-serial", f"file:{console}"]
    if initrd:
        argv += ["-initrd", str(initrd)]
    if disk:
        argv += ["-drive", f"if=virtio,file={disk},format=raw,cache=unsafe,discard=unmap"]
    return argv


EMULATION = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
_KVM = ["-accel", "kvm", "-cpu", "host"]


def run_to_end(argv: list[str], seconds: float) -> bool:
    """Run a machine that ends by itself; False when it did not within ``seconds`` and was killed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        raise LabError(f"QEMU failed: {_last_line(done.stderr)}")
    return True


def accelerator(kernel: Callable[[], Path], remembered: Path, report: Report) -> list[str]:
    """KVM where ``kernel`` truly boots under it, else emulation; what was found is kept in ``remembered``.

    A KVM device that answers proves nothing: guests were seen to hang under it. So a kernel boots until it
    panics for want of a root file system, within a time limit.
    """
    device = os.access("/dev/kvm", os.R_OK | os.W_OK)
    facts = {"qemu": list(version()), "host": os.uname().release, "kvm": device}
    try:
        known = json.loads(remembered.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    if known.get("facts") != facts:
        works = device and _kvm_boots(kernel(), remembered.parent / "kvm-probe.log")
        known = {"facts": facts, "works": works}
        remembered.write_text(json.dumps(known))
        if not works:
            report("KVM does not work here: machines are emulated, about ten times slower")
    return _KVM if known["works"] else EMULATION


def _kvm_boots(kernel: Path, console: Path) -> bool:
    argv = direct_boot(kernel, None, None, "console=ttyS0 panic=-1", console)
    at = argv.index("-accel")
    argv[at : at + len(EMULATION)] = _KVM
    try:
        ended = run_to_end(argv, seconds=20)
    except LabError:
        return False
    return ended and "Kernel panic" in console.read_text(errors="replace")


def start(machine: Machine, accelerator: list[str], directory: Path, qemu: Sequence[str] = (QEMU,)) -> None:
    """Power on; returns once QEMU runs. Raises LabError with what QEMU says when it refuses."""
    for name in ("qmp.sock", "pid"):
        (directory / name).unlink(missing_ok=True)
    argv = arguments(machine, accelerator, directory, qemu)
    try:
        done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise LabError(f"{QEMU} is not installed") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{machine.name}: QEMU did not start within 60 s") from None
    if done.returncode:
        said = _last_line(done.stderr)
        if "host forwarding" in said:
            last = machine.server_port + PORTS - 1
            said += (
                f" (ports {machine.ssh_port} and {machine.server_port} to {last} must be free on 127.0.0.1)"
            )
        raise LabError(f"{machine.name}: QEMU refused to start: {said}")


def pid(directory: Path) -> int:
    """Process id of the node's QEMU; 0 when it does not run."""
    try:
        number = int((directory / "pid").read_text())
        # The number may belong to another process by now.
        words = Path(f"/proc/{number}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return 0
    ours = any(Path(word).name == QEMU for word in words)
    return number if ours and str(directory / "pid") in words else 0


def kill(directory: Path) -> None:
    """Power cut: QEMU ends at once, without a chance to write anything."""
    number = pid(directory)
    if number:
        os.kill(number, signal.SIGKILL)
        _wait_gone(directory, 10)


def power_button(directory: Path, seconds: float) -> bool:
    """Press the power button and wait until the machine is off; False when it is not by then."""
    if pid(directory):
        qmp(directory, "system_powerdown")
        return _wait_gone(directory, seconds)
    return True


def _wait_gone(directory: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while pid(directory):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def qmp(directory: Path, command: str, **given: Any) -> Any:
    """Answer of one QEMU monitor command, such as ``set_link`` with name="net0", up=False."""
    request = {"execute": command, **({"arguments": given} if given else {})}
    handle = os.open(directory, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            # A socket's path may have 108 characters only.
            connection.connect(f"/proc/self/fd/{handle}/qmp.sock")
            stream = connection.makefile("rw")
            stream.readline()
            for line in ({"execute": "qmp_capabilities"}, request):
                stream.write(json.dumps(line) + "\n")
                stream.flush()
                answer = _answer(stream)
    except OSError as error:
        raise LabError(f"{directory.name}: QEMU's monitor does not answer: {error}") from None
    finally:
        os.close(handle)
    if "error" in answer:
        raise LabError(f"{directory.name}: QEMU refused {command}: {answer['error'].get('desc', '')}")
    return answer["return"]


def _answer(stream: Any) -> dict[str, Any]:
    for line in stream:
        message: dict[str, Any] = json.loads(line)
        if "event" not in message:
            return message
    raise ConnectionError("it closed the connection")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
