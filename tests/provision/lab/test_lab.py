"""The lab without machines: command lines by variant, labels, inventory, state, the stand-in for ipmctl."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from provision.cluster import share
from provision.cluster.errors import LabError
from provision.inventory.loader import load
from provision.lab import Lab, emulator, image, labels, machine, programs
from provision.lab import lab as lab_module
from provision.lab import node as node_module
from provision.lab.machine import Machine
from provision.lab.node import BOOT_SECONDS
from provision.node import ipmctl as node_ipmctl

GIB, MIB = 1 << 30, 1 << 20


def spec(**changes: Any) -> Machine:
    settings: dict[str, Any] = {
        "name": "lab-1",
        "index": 1,
        "variant": "bare-metal",
        "memory": 1536 * MIB,
        "pmem": 2 * GIB,
        "cpus": 2,
        "sockets": 1,
        "ssh_port": 2221,
    }
    return Machine(**{**settings, **changes})


def values(argv: list[str], option: str) -> list[str]:
    """What follows each ``option``."""
    return [argv[at + 1] for at, word in enumerate(argv) if word == option]


def arguments(**changes: Any) -> list[str]:
    return machine.arguments(spec(**changes), machine.EMULATION, Path("/lab/nodes/lab-1"))


def numa(argv: list[str]) -> list[str]:
    return values(argv, "-numa")


class TestCommandLine:
    def test_bare_metal_has_labels_behind_a_whole_region(self) -> None:
        argv = arguments()
        (backing,) = [text for text in values(argv, "-object") if "nvdimm0" in text]
        assert f"size={2 * GIB + 2 * MIB}" in backing
        assert "share=on" in backing
        assert f"nvdimm,id=nvdimm0,memdev=pmem0,node=1,label-size={2 * MIB}" in values(argv, "-device")
        assert values(argv, "-machine") == ["q35,nvdimm=on"]

    def test_the_module_is_on_a_node_without_cpus_and_memory(self) -> None:
        assert numa(arguments()) == ["node,nodeid=0,memdev=ram0,cpus=0-1", "node,nodeid=1"]

    def test_hotplug_has_room_for_every_module(self) -> None:
        (memory,) = values(arguments(sockets=2), "-m")
        assert memory.startswith("1536M,slots=2,maxmem=")
        assert int(memory.split("maxmem=")[1][:-1]) >= 1536 + 2 * 2 * 1024

    def test_two_sockets_have_cpus_memory_and_a_module_each(self) -> None:
        argv = arguments(sockets=2)
        assert values(argv, "-smp") == ["4,sockets=2"]
        assert numa(argv)[:4] == [
            "node,nodeid=0,memdev=ram0,cpus=0-1",
            "node,nodeid=1,memdev=ram1,cpus=2-3",
            "node,nodeid=2",
            "node,nodeid=3",
        ]
        assert {"dist,src=0,dst=2,val=17", "dist,src=1,dst=3,val=17"} < set(numa(argv)[4:])
        assert len(numa(argv)[4:]) == 6, "QEMU wants the distance of every pair"
        halves = [text for text in values(argv, "-object") if text.startswith("memory-backend-ram")]
        assert halves == [f"memory-backend-ram,id=ram{item},size={768 * MIB}" for item in range(2)]
        assert [text for text in values(argv, "-device") if text.startswith("nvdimm,id=nvdimm1")] == [
            f"nvdimm,id=nvdimm1,memdev=pmem1,node=3,label-size={2 * MIB}"
        ]

    def test_re6p_has_no_labels(self) -> None:
        argv = arguments(variant="re6p")
        assert "nvdimm,id=nvdimm0,memdev=pmem0,node=1" in values(argv, "-device")
        assert any(f"size={2 * GIB}" in text for text in values(argv, "-object"))

    def test_re7p_is_memory_in_one_piece_behind_4_gib(self) -> None:
        argv = arguments(variant="re7p")
        assert not [text for text in values(argv, "-device") if "nvdimm" in text]
        assert values(argv, "-machine") == [f"q35,max-ram-below-4g={1536 * MIB}"]
        assert values(argv, "-m") == ["3584M"]
        assert numa(argv)[1] == "node,nodeid=1,memdev=ram1"

    def test_cxl_memory_is_volatile(self) -> None:
        assert any("volatile-memdev=cxl0" in text for text in values(arguments(variant="cxl"), "-device"))

    def test_ports_are_forwarded_on_loopback_only(self) -> None:
        (network,) = values(arguments(ssh_port=2222), "-netdev")
        forwards = [part.split("=", 1)[1] for part in network.split(",") if part.startswith("hostfwd=")]
        assert forwards[0] == "tcp:127.0.0.1:2222-:22"
        assert forwards[1:] == [f"tcp:127.0.0.1:{port}-:{port}" for port in range(7120, 7130)]
        assert "restrict=on" in network

    def test_what_is_flushed_reaches_the_disk(self) -> None:
        assert "cache=writeback" in values(arguments(), "-drive")[0]

    def test_devices_reach_the_dram_of_a_node_with_cxl_memory(self) -> None:
        devices = [text for text in values(arguments(variant="cxl"), "-device") if "virtio" in text]
        assert len(devices) == 3
        assert all("iommu_platform=on" in text for text in devices)
        assert "iommu_platform" not in " ".join(arguments())

    def test_nvme_has_a_drive_that_the_inventory_names(self, tmp_path: Path) -> None:
        argv = arguments(variant="nvme")
        assert "nvme,bus=pcie.0,drive=nvme0,serial=oeprov-lab-1,ioeventfd=off" in values(argv, "-device")
        assert any(text.startswith("if=none,id=nvme0,file=nvme0.raw") for text in values(argv, "-drive"))
        assert not [text for text in values(argv, "-device") if "nvdimm" in text]
        text = lab_module.inventory_text([spec(variant="nvme")], tmp_path / "key", tmp_path / "known")
        assert "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_oeprov-lab-1" in text

    def test_cxl_needs_a_newer_qemu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(machine, "version", lambda: (7, 2, 22))
        with pytest.raises(LabError, match=r"needs QEMU 8\.1 or newer .*; this is 7\.2\.22\. As root"):
            emulator.check()
        monkeypatch.setattr(machine, "version", lambda: (8, 1, 0))
        emulator.check()

    def test_root_gets_debian_13s_qemu_for_cxl_once(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[list[str]] = []

        def run(argv: list[Any], **_: Any) -> str:
            asked.append([str(word) for word in argv])
            next(word for word in argv if isinstance(word, Path)).mkdir()
            return ""

        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(machine, "version", lambda: (7, 2, 22))
        monkeypatch.setattr(image, "sources", lambda _suite: [])
        monkeypatch.setattr(image, "apt_options", list)
        monkeypatch.setattr(programs, "run", run)
        emulator.check()
        for _ in range(2):
            words = emulator.command(tmp_path, "cxl", lambda _line: None)
        root = tmp_path / "qemu-trixie"
        assert [(words[0], "trixie" in words) for words in asked] == [("mmdebstrap", True)]
        assert [path.name for path in tmp_path.iterdir()] == ["qemu-trixie"]
        assert words[:4] == [
            f"{root}/usr/lib64/ld-linux-x86-64.so.2",
            "--library-path",
            f"{root}/usr/lib/x86_64-linux-gnu",
            f"{root}/usr/bin/qemu-system-x86_64",
        ]
        argv = machine.arguments(spec(variant="cxl"), machine.EMULATION, Path("/lab"), words)
        assert argv[: len(words)] == words
        assert emulator.command(tmp_path, "bare-metal", lambda _line: None) == [machine.QEMU]
        monkeypatch.setattr(machine, "version", lambda: (10, 0, 13))
        assert emulator.command(tmp_path, "cxl", lambda _line: None) == [machine.QEMU]

    def test_unknown_variant(self) -> None:
        with pytest.raises(
            LabError, match="optane is no variant of the lab; one of bare-metal, re6p, re7p, cxl, nvme"
        ):
            machine.check_variant("optane")


class TestAccelerator:
    """KVM is used where a kernel was seen to boot under it, and nowhere else."""

    @pytest.fixture(autouse=True)
    def _qemu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "version", lambda: (7, 2, 22))
        monkeypatch.setattr(os, "access", lambda *_: True)

    def probe(self, directory: Path) -> list[str]:
        return machine.accelerator(lambda: directory / "vmlinuz", directory / "accelerator.json", print)

    def test_a_guest_that_hangs_means_emulation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "run_to_end", lambda *_, **__: False)
        assert self.probe(tmp_path) == machine.EMULATION

    def test_a_qemu_that_ends_without_a_booted_kernel_means_emulation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kvm-probe.log").write_text("")
        monkeypatch.setattr(machine, "run_to_end", lambda *_, **__: True)
        assert self.probe(tmp_path) == machine.EMULATION

    def test_a_booted_kernel_means_kvm_and_is_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kvm-probe.log").write_text("Kernel panic - not syncing: VFS: Unable to mount root fs")
        seen: list[list[str]] = []
        monkeypatch.setattr(machine, "run_to_end", lambda argv, **_: not seen.append(argv))
        for _ in range(2):
            assert self.probe(tmp_path)[:2] == ["-accel", "kvm"]
        assert len(seen) == 1
        assert "tcg" not in " ".join(seen[0])
        monkeypatch.setattr(machine, "version", lambda: (9, 0, 0))
        self.probe(tmp_path)
        assert len(seen) == 2, "another QEMU is tried again"


def test_the_first_boot_of_an_image_may_take_as_long_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(machine, "run_to_end", lambda _, seconds: bool(allowed.append(seconds)))
    (tmp_path / "first-boot.log").write_text("Installing for i386-pc platform.\n")
    with pytest.raises(LabError, match=f"no end within {BOOT_SECONDS} s"):
        image._install_grub(tmp_path)
    (tmp_path / "first-boot.log").write_text("lab: disk is bootable\n")
    image._install_grub(tmp_path)
    assert allowed == [BOOT_SECONDS] * 2


class TestLabels:
    HEAD = struct.Struct("<16s3sBIQQQQIHHQ")

    @pytest.mark.parametrize("area", [128 << 10, 2 * MIB])
    def test_two_index_blocks_that_a_kernel_accepts(self, tmp_path: Path, area: int) -> None:
        """The conditions of drivers/nvdimm/label.c; that a kernel does accept them is tested in tests/lab."""
        module = tmp_path / "nvdimm0"
        module.write_bytes(b"\xff" * (area + 4096))
        labels.write(module, area)
        data = module.read_bytes()
        assert len(data) == area + 4096
        assert data[:4096] == b"\xff" * 4096, "the region is left alone"
        sequences = []
        for which in (0, 1):
            start = 4096 + which * self.HEAD.unpack_from(data, 4096)[5]
            fields = self.HEAD.unpack_from(data, start)
            signature, _, size_class, sequence, mine, size, other, first, slots, *version, checksum = fields
            assert (signature, 1 << 7 + size_class, version) == (b"NAMESPACE_INDEX\0", 128, [1, 1])
            assert (mine, other, first) == (which * size, (1 - which) * size, 2 * size)
            assert size % 256 == 0
            assert 2 * size + slots * 128 <= area
            block = data[start : start + size]
            free = block[self.HEAD.size : self.HEAD.size + -(-slots // 8)]
            assert sum(byte.bit_count() for byte in free) == slots
            words = [*struct.unpack(f"<{size // 4}I", block)]
            words[16:18] = 0, 0  # the checksum itself counts as zero
            assert checksum == sum_of(words)
            sequences.append(sequence)
        assert sorted(sequences) == [1, 2]


def sum_of(words: list[int]) -> int:
    """Fletcher's checksum as the specification words it: the sum of all words, and the sum of those sums."""
    sums = [sum(words[: count + 1]) % (1 << 32) for count in range(len(words))]
    return (sum(sums) % (1 << 32)) << 32 | sums[-1]


class TestInventory:
    @pytest.mark.parametrize(
        ("variant", "kind"),
        [
            ("bare-metal", "bare_metal_pmem"),
            ("re6p", "re6p"),
            ("re7p", "re7p"),
            ("cxl", "cxl"),
            ("nvme", "nvme"),
        ],
    )
    def test_it_is_one_that_oeprov_reads(self, tmp_path: Path, variant: str, kind: str) -> None:
        specs = [spec(name=f"lab-{i}", index=i, ssh_port=2220 + i, variant=variant) for i in (1, 2)]
        path = tmp_path / "lab.yml"
        path.write_text(lab_module.inventory_text(specs, tmp_path / "key", tmp_path / "known_hosts"))
        found = load(path, None, state_dir=tmp_path)
        assert list(found.parameter_servers) == ["lab-1", "lab-2"]
        assert list(found.workers) == ["controller"]
        host = found.hosts["lab-2"]
        assert (host.address, host.port, host.user, host.kind.value) == ("127.0.0.1", 2222, "root", kind)
        assert host.private_key == str(tmp_path / "key")
        assert f"UserKnownHostsFile={tmp_path / 'known_hosts'}" in path.read_text()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab whose machines are files only."""
    built = image.GuestImage(tmp_path / "images/abc", "6.1.0-55-amd64", "6.1.0-56-amd64")

    def run(argv: list[Any], **_: Any) -> str:
        if argv[0] == "ssh-keygen":
            Path(argv[-1]).write_text("private")
            Path(f"{argv[-1]}.pub").write_text(f"ssh-ed25519 {argv[-1].name} comment")
        return ""

    monkeypatch.setattr(programs, "require", lambda install=False: None)
    monkeypatch.setattr(programs, "run", run)
    monkeypatch.setattr(Lab, "_image", lambda self, suite: built)
    monkeypatch.setattr(Lab, "accelerator", lambda self: machine.EMULATION)
    monkeypatch.setattr(node_module.Node, "wait_ssh", lambda self, *_: None)
    monkeypatch.setattr(machine, "start", lambda *_: None)
    return Lab(tmp_path / "lab", inventory=tmp_path / "lab.yml")


class TestState:
    def test_nodes_are_kept(self, lab: Lab) -> None:
        lab.up(nodes=2, pmem=GIB)
        same = Lab(lab.directory)
        assert [node.name for node in same.nodes] == ["lab-1", "lab-2"]
        assert len({node.ssh_port for node in same.nodes}) == 2
        assert same.inventory == lab.inventory
        lines = same.known_hosts.read_text().splitlines()
        assert [line.split()[0] for line in lines] == [f"[127.0.0.1]:{node.ssh_port}" for node in same.nodes]
        assert (same.nodes[0].directory / "nvdimm0").stat().st_size == GIB + 2 * MIB

    def test_more_nodes_may_come_later_but_not_fewer_or_others(self, lab: Lab) -> None:
        (first,) = [node.spec for node in lab.up(nodes=1, pmem=GIB)]
        assert lab.up(nodes=2, pmem=GIB)[0].spec == first
        with pytest.raises(LabError, match=r"the lab has 2 nodes; to have fewer, .*oeprov lab down"):
            lab.up(nodes=1, pmem=GIB)
        with pytest.raises(LabError, match="a lab with other nodes is there"):
            lab.up(nodes=2, pmem=2 * GIB)

    def test_the_system_is_chosen_and_kept(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "version", lambda: machine.CXL_SINCE)
        for shape, suite in (({}, "bookworm"), ({"debian": 13}, "trixie"), ({"variant": "cxl"}, "trixie")):
            (node,) = lab.up(nodes=1, pmem=GIB, **shape)
            assert node.spec.suite == suite
            lab.down()
        lab.up(nodes=1, pmem=GIB, debian=13)
        with pytest.raises(LabError, match="a lab with other nodes is there"):
            lab.up(nodes=1, pmem=GIB)

    def test_down_removes_what_up_made_but_no_file_of_others(self, lab: Lab) -> None:
        lab.up(nodes=1, pmem=GIB)
        lab.down()
        assert not lab.nodes
        assert not lab.inventory.exists()
        assert not (lab.directory / "nodes").exists()
        lab.inventory.write_text("all: {}\n")
        with pytest.raises(LabError, match="was not written by the lab; give another --inventory FILE"):
            lab.up(nodes=1, pmem=GIB)
        assert not lab.nodes, "said before anything was made"
        assert lab.inventory.read_text() == "all: {}\n"
        lab.down()
        assert lab.inventory.exists()

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ({"pmem": 100 * MIB}, "persistent memory must be a multiple of 128M, .*: not 100M"),
            ({"memory": 256 * MIB}, "memory must be a multiple of 128M, and 512M at least: not 256M"),
            ({"sockets": 2, "variant": "re7p"}, "two sockets are for variants bare-metal and re6p, not re7p"),
            ({"nodes": 0}, "one node, one CPU"),
            ({"debian": 11}, "the lab has Debian 12 and 13, not 11"),
            ({"variant": "cxl", "debian": 12}, "variant cxl needs Debian 13, not 12"),
        ],
    )
    def test_shapes_that_cannot_be(self, lab: Lab, shape: dict[str, Any], message: str) -> None:
        with pytest.raises(LabError, match=message):
            lab.up(**shape)
        assert not lab.directory.exists() or not lab.nodes

    def test_a_process_that_took_the_number_is_not_ours(self, lab: Lab) -> None:
        node = lab.up(nodes=1, pmem=GIB)[0]
        (node.directory / "pid").write_text(f"{os.getpid()}\n")
        assert node.pid == 0
        node.power_cut()

    def test_no_such_node(self, lab: Lab) -> None:
        with pytest.raises(
            LabError, match="the lab has no node lab-9; it has: none: `oeprov lab up` makes them"
        ):
            lab.node("lab-9")

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_broken_state_is_said(self, lab: Lab, text: str) -> None:
        lab.directory.mkdir()
        (lab.directory / "lab.json").write_text(text)
        with pytest.raises(LabError, match=r"lab\.json cannot be read"):
            _ = lab.nodes


class TestPrograms:
    def test_the_line_that_installs_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        there = {"apt-get", "ssh", "ssh-keygen", "dpkg-deb", "mke2fs"}
        monkeypatch.setattr(programs.shutil, "which", lambda name, **_: name if name in there else None)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        wanted = "apt-utils fdisk mmdebstrap qemu-system-x86 qemu-utils"
        with pytest.raises(LabError, match=f"run: sudo apt-get install -y --no-install-recommends {wanted}$"):
            programs.require(install=True)

    def test_a_failure_is_its_last_line(self) -> None:
        with pytest.raises(LabError, match=r"^sh failed: the reason$"):
            programs.run(["sh", "-c", "echo noise; echo more >&2; echo the reason >&2; exit 3"])


class StandIn:
    """The stand-in for ipmctl, on a made-up node."""

    def __init__(self, root: Path, sockets: int = 2) -> None:
        self.root = root
        for number in range(sockets):
            (root / f"sys/bus/nd/devices/region{number}").mkdir(parents=True)
            (root / f"sys/bus/nd/devices/region{number}/size").write_text(f"{GIB}\n")
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemTotal:        1572864 kB\n")
        (root / "etc").mkdir()
        self.boot(1)

    def boot(self, number: int) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{number}\n")

    def fail(self, how: str) -> None:
        (self.root / "etc/ipmctl-lab.conf").write_text(how + "\n")

    def run(self, line: str, expect: int = 0) -> str:
        program = share.node_package().parent / "lab/ipmctl.py"
        environment = {**os.environ, "IPMCTL_LAB_ROOT": str(self.root)}
        done = subprocess.run(
            [sys.executable, str(program), *line.split()], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (expect, ""), done.stdout
        return done.stdout

    def resources(self) -> dict[str, int]:
        return node_ipmctl.parse_memory_resources(self.run("show -memoryresources"))

    def goals(self) -> list[str]:
        return node_ipmctl.parse_goals(self.run("show -goal"))


@pytest.fixture
def standin(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


class TestIpmctlStandIn:
    """It is read by the parsers that read the real tool."""

    def test_it_says_what_it_is(self, standin: StandIn) -> None:
        assert "stand-in" in standin.run("help")

    def test_version_is_as_the_real_one_prints_it(self, standin: StandIn) -> None:
        """Output of Debian's ipmctl 03.00.00.0468-1."""
        title = "Intel(R) Optane(TM) Persistent Memory Command Line Interface"
        assert standin.run("version") == f"{title} Version 03.00.00.0468-1\n"
        assert node_ipmctl.parse_version(standin.run("version")) == "03.00.00.0468"
        assert standin.run("version -o nvmxml") == (
            '<?xml version="1.0"?>\n <SoftwareList>\n  <Software>\n'
            f"   <Component>{title}</Component>\n   <Version>03.00.00.0468-1</Version>\n"
            "  </Software>\n </SoftwareList>\n"
        )

    def test_modules_come_with_app_direct_applied(self, standin: StandIn) -> None:
        found = standin.resources()
        assert (found["AppDirect"], found["Volatile"]) == (2 * GIB, 0)
        assert found["Physical"] == pytest.approx(2 * GIB + 4 * MIB, rel=0.001)
        assert standin.goals() == []
        assert node_ipmctl.parse_sockets(standin.run("show -d SocketID -dimm")) == [0, 1]

    def test_a_goal_waits_for_a_boot(self, standin: StandIn) -> None:
        assert "A reboot is required" in standin.run("create -f -goal memorymode=100")
        assert standin.goals() == ["memorymode", "memorymode"]
        assert standin.resources()["Volatile"] == 0
        standin.boot(2)
        assert standin.goals() == []
        assert (standin.resources()["Volatile"], standin.resources()["AppDirect"]) == (2 * GIB, 0)
        standin.run("create -f -goal PersistentMemoryType=AppDirect")
        assert standin.goals() == ["appdirect", "appdirect"]
        standin.boot(3)
        assert standin.resources()["AppDirect"] == 2 * GIB

    def test_goals_of_one_socket(self, standin: StandIn) -> None:
        standin.run("create -f -goal -socket 1 memorymode=100")
        assert standin.goals() == ["memorymode"]
        standin.boot(2)
        assert (standin.resources()["Volatile"], standin.resources()["AppDirect"]) == (GIB, GIB)

    def test_goals_as_xml(self, standin: StandIn) -> None:
        text = standin.run("create -u B -o nvmxml -force -goal -socket 0 MemoryMode=25")
        assert f"   <MemorySize>{GIB // 4} B</MemorySize>\n" in text
        assert f"   <AppDirect1Size>{GIB * 3 // 4} B</AppDirect1Size>\n" in text

    def test_a_goal_can_be_deleted(self, standin: StandIn) -> None:
        standin.run("create -f -goal memorymode=100")
        standin.run("delete -goal")
        assert standin.goals() == []
        assert "Error 122" in standin.run("delete -goal")

    def test_a_goal_without_force_asks_for_confirmation(self, standin: StandIn) -> None:
        assert standin.run("create -goal memorymode=100", expect=1).endswith(
            "Do you want to continue? [y/n] \n"
        )
        assert standin.goals() == []

    def test_namespaces_stand_in_the_way(self, standin: StandIn) -> None:
        namespace = standin.root / "sys/bus/nd/devices/namespace0.0"
        namespace.mkdir()
        (namespace / "nstype").write_text("5\n")
        (namespace / "size").write_text(f"{GIB}\n")
        assert "Error 124 - Namespaces exist" in standin.run("create -f -goal memorymode=100", expect=124)
        assert standin.goals() == []
        (namespace / "size").write_text("0\n")
        standin.run("create -f -goal memorymode=100")

    def test_the_version_that_never_applies_goals(self, standin: StandIn) -> None:
        standin.fail("never-applies")
        assert node_ipmctl.parse_version(standin.run("version")) == node_ipmctl.BROKEN
        standin.run("create -f -goal memorymode=100")
        standin.boot(2)
        assert standin.resources()["Volatile"] == 0
        assert standin.goals() == ["memorymode", "memorymode"]

    def test_firmware_fixed_to_1lm(self, standin: StandIn) -> None:
        standin.fail("fixed-1lm")
        standin.run("create -f -goal memorymode=100")
        standin.boot(2)
        found = standin.resources()
        assert (found["Volatile"], found["AppDirect"]) == (0, 0)
        assert found["Inaccessible"] >= 2 * GIB

    def test_error_18_wants_delete_pcd(self, standin: StandIn) -> None:
        standin.fail("error-18")
        assert "Error 18 - " in standin.run("create -f -goal memorymode=100", expect=18)
        assert standin.run("delete -f -pcd").count("Success") == 2
        standin.run("create -f -goal memorymode=100")
        standin.boot(2)
        assert standin.resources()["Volatile"] == 2 * GIB

    def test_without_modules(self, tmp_path: Path) -> None:
        """What the real tool says on a machine without modules."""
        text = StandIn(tmp_path, sockets=0).run("show -memoryresources", expect=1)
        assert text == "Initialization failed. No PMem modules in the system.\n"

    def test_an_unknown_ipmctl_option_is_refused(self, standin: StandIn) -> None:
        assert "Invalid or unexpected token -bogus" in standin.run("show -bogus", expect=201)
