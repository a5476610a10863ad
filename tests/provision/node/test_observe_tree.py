"""Observation on a tree of files, as a node has them."""

from pathlib import Path

import pytest

from provision.node import bootloader, kernel, numa, systemd
from provision.node.command import NOT_FOUND, TIMED_OUT, System
from provision.node.observe import observe, observe_os
from provision.node.state import Bootloader, OsInfo, decode, encode
from provision.node.step import Desired

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(str(root))


def test_numa_nodes_and_ranges(tmp_path: Path) -> None:
    node = "/sys/devices/system/node"
    system = write(
        tmp_path,
        {
            f"{node}/node0/meminfo": "Node 0 MemTotal: 1048576 kB\nNode 0 MemFree: 1024 kB\n",
            f"{node}/node0/cpulist": "0-1\n",
            f"{node}/node0/distance": "10 17\n",
            f"{node}/node1/meminfo": "Node 1 MemTotal: 2097152 kB\nNode 1 MemFree: 2097152 kB\n",
            f"{node}/node1/cpulist": "\n",
            f"{node}/node1/distance": "17 10\n",
            f"{node}/node1/memory8/state": "online\n",
            f"{node}/node1/memory9/state": "online\n",
            "/sys/devices/system/memory/block_size_bytes": "8000000\n",
            "/sys/devices/system/memory/auto_online_blocks": "online_movable\n",
            "/sys/firmware/memmap/0/start": "0x100000\n",
            "/sys/firmware/memmap/0/end": "0xbfffffff\n",
            "/sys/firmware/memmap/0/type": "System RAM\n",
            "/sys/firmware/memmap/1/start": "0xc0000000\n",
            "/sys/firmware/memmap/1/end": "0xcfffffff\n",
            "/sys/firmware/memmap/1/type": "Reserved\n",
        },
    )
    nodes = numa.observe_nodes(system)
    assert [(item.id, item.size, item.cpus) for item in nodes] == [(0, GIB, [0, 1]), (1, 2 * GIB, [])]
    assert nodes[1].distances == [17, 10]
    assert numa.observe_policy(system).auto_online == "online_movable"
    ranges = [(item.start, item.end, item.node, item.source) for item in numa.observe_ranges(system, "")]
    assert ranges == [(0x100000, 3 * GIB, -1, "firmware"), (GIB, GIB + (256 << 20), 1, "blocks")]


def test_nodes_without_cpus_are_told_apart(tmp_path: Path) -> None:
    node = "/sys/devices/system/node"
    ram = {"start": "0x0", "end": "0x27fffffff", "type": "System RAM"}  # 10 GiB
    files = {f"/sys/firmware/memmap/0/{name}": f"{text}\n" for name, text in ram.items()}
    files["/sys/devices/system/memory/block_size_bytes"] = "40000000\n"  # 1 GiB
    for number, (cpus, blocks) in enumerate(
        [("0-1", (0, 1)), ("", (8, 9)), ("", (5,)), ("", (9, 10)), ("", ())]
    ):
        files[f"{node}/node{number}/cpulist"] = cpus + "\n"
        files[f"{node}/node{number}/meminfo"] = f"Node {number} MemTotal: {len(blocks) * 1048576} kB\n"
        files |= {f"{node}/node{number}/memory{block}/state": "online\n" for block in blocks}
    files |= {f"{node}/node2/cpu6/online": "0\n", f"{node}/node0/cpu0/online": "1\n"}
    files[f"{node}/node1/access0/initiators/read_bandwidth"] = "30000\n"
    system = write(tmp_path, files)
    nodes = numa.observe_nodes(system)
    found = [(item.offline_cpus, item.origin, item.bandwidth) for item in numa.tell_apart(system, nodes)]
    assert found == [
        (False, "firmware", 0),
        (False, "firmware", 30000),
        (True, "firmware", 0),
        (False, "driver", 0),
        (False, "", 0),
    ]
    assert numa.tell_apart(system, nodes[:1]) == nodes[:1], "nothing is read where there is nothing to tell"


def test_kernels(tmp_path: Path) -> None:
    system = write(
        tmp_path,
        {
            "/proc/sys/kernel/osrelease": "6.1.0-9-amd64\n",
            "/proc/cmdline": "root=/dev/vda1 memmap=1G!4G\n",
            "/boot/vmlinuz-6.1.0-28-amd64": "",
            "/boot/vmlinuz-6.1.0-9-amd64": "",
            "/boot/vmlinuz-0-rescue-1234": "",
            "/boot/config-6.1.0-28-amd64": "CONFIG_FS_DAX=y\n",
            "/boot/initrd.img-6.1.0-28-amd64": "",
            "/boot/vmlinuz-6.1.0-29-amd64": "",  # half installed: without an initial ramdisk
        },
    )
    found = kernel.observe(system, OsInfo(), Desired(), Bootloader())
    assert found.running == "6.1.0-9-amd64"
    assert found.installed == ["6.1.0-9-amd64", "6.1.0-28-amd64"]
    assert found.cmdline == ["root=/dev/vda1", "memmap=1G!4G"]
    assert found.config == {"6.1.0-28-amd64": {"CONFIG_FS_DAX": "y"}}


def test_grub(tmp_path: Path) -> None:
    assert bootloader.observe(System(str(tmp_path))).kind == ""
    system = write(
        tmp_path,
        {
            "/etc/default/grub": 'GRUB_DEFAULT=saved\nGRUB_CMDLINE_LINUX="a b"\n',
            "/boot/grub2/grub.cfg": "",
            "/boot/loader/entries/x.conf": "",
        },
    )
    found = bootloader.observe(system)
    assert (found.cmdline, found.saved_default, found.bls) == ("a b", True, True)
    assert (found.mkconfig, found.config_path) == ("grub2-mkconfig", "/boot/grub2/grub.cfg")


def test_derivatives_count_as_what_they_are_like(tmp_path: Path) -> None:
    system = write(
        tmp_path, {"/etc/os-release": 'ID=almalinux\nID_LIKE="rhel centos fedora"\nVERSION_ID=9.4\n'}
    )
    assert observe_os(system).family == "rhel"
    system = write(tmp_path, {"/etc/os-release": "ID=arch\n"})
    assert observe_os(system).family == "other"


def test_this_machine_can_be_looked_at_as_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "is_booted", lambda system: True)  # also in a container
    for kind, mode in (
        ("re7p", "fsdax"),
        ("bare_metal_pmem", "memory"),
        ("cxl", "system-ram"),
        ("gpu", "none"),
    ):
        state = observe(System(), Desired(kind=kind, pmem_mode=mode))
        assert state.kernel.running
        assert state.numa or not Path("/sys/devices/system/node/node0").exists()
        assert decode(type(state), encode(state)) == state


def test_commands_never_raise() -> None:
    system = System()
    assert system.run(["no-such-program-here"]).code == NOT_FOUND
    assert "is not installed" in system.run(["no-such-program-here"]).explain()
    assert system.run(["sleep", "30"], timeout=0.05).code == TIMED_OUT
    failed = system.run(["sh", "-c", "echo first; echo second >&2; exit 3"])
    assert failed.code == 3
    assert failed.explain().endswith("failed with exit status 3: second")
