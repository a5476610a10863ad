"""Actions whose tools fail or lie: the kernel's state is read back, and one line says what was found."""

from pathlib import Path
from typing import Any

import pytest
from pmem_host import Content, Host, Ns, converge, look
from test_pmem_modes import everything_of_ours, wanted

from provision.node import mount, owned
from provision.node.apply import apply
from provision.node.command import CommandError, System
from provision.node.devices import dax_devices as observed_dax
from provision.node.step import Step


def act(host: Host, action: str, **args: Any) -> bool:
    return apply(Step("id", "what", "why", action=action, args=args), host).changed


class Lying(Host):
    """``lies`` are programs that do nothing and say that they did."""

    lies: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
        if argv[0] in self.lies and "--version" not in argv:
            return super().run(["udevadm"])
        done = super().run(argv)
        return done._replace(code=1, err="it says so") if argv[0] in self.failing else done


def lying(root: Path, *programs: str, **more: Any) -> Lying:
    host = Lying(str(root), **{"labels": False, **more})
    host.lies = programs
    return host


def test_a_namespace_that_was_not_created_is_an_error(tmp_path: Path) -> None:
    host = lying(tmp_path, "ndctl")
    with pytest.raises(CommandError, match=r"namespace0\.0 is not in mode fsdax afterwards"):
        act(host, "create_namespace", namespace="namespace0.0", mode="fsdax", map="mem", lose=[])


def test_a_namespace_that_was_made_counts_whatever_the_tool_says(tmp_path: Path) -> None:
    host = lying(tmp_path)
    host.failing = ("ndctl",)
    assert act(host, "create_namespace", namespace="namespace0.0", mode="fsdax", map="mem", lose=[])
    identity = host.spaces[0].uuid  # type: ignore[union-attr]
    assert owned.observe(host) == [identity, f"vacant:pmem0:{identity}"]


def test_a_file_system_that_was_not_made_is_an_error(tmp_path: Path) -> None:
    host = lying(tmp_path, "mkfs.ext4", spaces={0: Ns("fsdax", uuid="n")})
    args = {"type": "ext4", "block_size": 4096, "reflink": True, "lose": []}
    with pytest.raises(CommandError, match=r"mkfs said that it made ext4 .*, but nothing is there"):
        act(host, "make_filesystem", device="pmem0", **args)


def test_a_file_system_with_blocks_of_another_size_is_made_again_only_when_agreed(tmp_path: Path) -> None:
    """Pitfall 21: ext4 with small blocks cannot do DAX, even when it is ours."""
    host = lying(tmp_path, spaces={0: Ns("fsdax", uuid="n", content=Content("ext4", "mine", 1024))})
    owned.change(host, ["mine"], [])
    args = {"device": "pmem0", "type": "ext4", "block_size": 4096, "reflink": True}
    with pytest.raises(CommandError, match="pmem0 holds ext4 mine"):
        act(host, "make_filesystem", lose=[], **args)
    assert act(host, "make_filesystem", lose=["pmem0/ext4/mine"], **args)
    made = host.spaces[0].content  # type: ignore[union-attr]
    assert made is not None
    assert owned.observe(host) == ["vacant:pmem0:n", made.uuid]


def test_offlining_memory_is_retried_and_then_an_error(tmp_path: Path) -> None:
    host = lying(tmp_path)
    converge(host, wanted("re6p", "system-ram"), [])
    host.lies = ("daxctl",)
    with pytest.raises(CommandError, match=r"memory of dax0.0 \(node 1\) does not go offline .*or reboot"):
        act(host, "reconfigure_dax", device="dax0.0", mode="devdax")
    host.lies = ()
    assert act(host, "reconfigure_dax", device="dax0.0", mode="devdax")


def test_memory_in_the_wrong_zone_is_an_error(tmp_path: Path) -> None:
    host = lying(tmp_path)
    converge(host, wanted("re6p", "system-ram"), [])
    host.spaces[0].movable = False  # type: ignore[union-attr]
    host.render()
    host.lies = ("daxctl",)
    with pytest.raises(CommandError, match="15 of 15 blocks are online, not all movable"):
        act(host, "online_dax", device="dax0.0", movable=True)
    host.lies = ()
    assert act(host, "online_dax", device="dax0.0", movable=True)
    assert act(host, "online_dax", device="dax0.0", movable=True) is False


def test_memory_in_use_is_no_namespace_to_be_made_again(tmp_path: Path) -> None:
    """Pitfall 11 (#210): that would strand the node until a reboot."""
    host = lying(tmp_path)
    converge(host, wanted("re6p", "system-ram"), [])
    for action, more in (("create_namespace", {"mode": "fsdax", "map": "mem"}), ("destroy_namespace", {})):
        with pytest.raises(CommandError, match=r"namespace0.0 \(dax0.0\) is in use as system RAM"):
            act(host, action, namespace="namespace0.0", lose=[], **more)


def test_a_device_that_does_not_appear_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provision.node.devices.WAIT", 0.05)
    host = lying(tmp_path)
    with pytest.raises(CommandError, match=r"there is no dax device dax7.0"):
        act(host, "reconfigure_dax", device="dax7.0", mode="system-ram", movable=True)
    with pytest.raises(CommandError, match=r"there is no /dev/pmem7"):
        act(host, "make_filesystem", device="pmem7", type="ext4", block_size=4096, reflink=True, lose=[])


def test_an_entry_needs_the_file_system_that_it_names(tmp_path: Path) -> None:
    host = lying(tmp_path, spaces={0: Ns("fsdax", uuid="n", content=Content("xfs", "x"))})
    before = host.read(mount.FSTAB)
    args = {"where": "/mnt/pmem0", "type": "ext4", "options": ["dax"], "remove": ["/mnt/pmem0"]}
    with pytest.raises(CommandError, match="pmem0 holds xfs, not the ext4"):
        act(host, "edit_fstab", device="pmem0", **args)
    assert host.read(mount.FSTAB) == before


def test_an_fstab_that_could_not_be_kept_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "etc/fstab"
    file.parent.mkdir()
    file.write_bytes(b"# caf\xe9\n/dev/pmem0 /mnt/pmem0 ext4\n")
    host = System(str(tmp_path))
    with pytest.raises(CommandError, match="/etc/fstab is not UTF-8"):
        act(host, "edit_fstab", remove=["/mnt/pmem0"])
    assert file.read_bytes() == b"# caf\xe9\n/dev/pmem0 /mnt/pmem0 ext4\n"


def test_a_new_fstab_entry_reloads_systemd(tmp_path: Path) -> None:
    """Its old mount unit waits for the old device, and would unmount the new one at once."""
    host = lying(tmp_path)
    converge(host, wanted("re6p", "fsdax"), [])
    words = [argv for argv in host.asked if argv[0] in ("systemctl", "mount")]
    assert words[-2:] == [
        ["systemctl", "daemon-reload"],
        ["mount", "-o", "dax", "/dev/pmem0", "/mnt/pmem0"],
    ]


def test_memkind_gets_no_node_with_cpus(tmp_path: Path) -> None:
    """Pitfall 22."""
    host = lying(tmp_path, target_nodes={0: 0}, spaces={0: Ns("devdax", uuid="n", kmem=True)})
    host.spaces[0].kmem = True  # type: ignore[union-attr]
    host.render()
    with pytest.raises(CommandError, match="should be nodes with memory and without CPUs"):
        act(host, "write_memkind_nodes", devices=["dax0.0"])
    converge(host := lying(tmp_path / "good"), wanted("re6p", "system-ram"), [])
    step = Step("id", "what", "why", action="write_memkind_nodes", args={"devices": ["dax0.0"]})
    assert apply(step, host).message == "memory nodes: 1"


def test_udev_waits_while_memory_comes_online(tmp_path: Path) -> None:
    """EL's 40-redhat.rules would bring it online first, on guests as memory that is not movable."""
    host = lying(tmp_path)
    converge(host, wanted("re6p", "system-ram"), [])
    at = host.asked.index(["daxctl", "reconfigure-device", "--mode=system-ram", "dax0.0"])
    assert host.asked[at - 1] == ["udevadm", "control", "--stop-exec-queue"]
    assert host.asked[at + 1] == ["udevadm", "control", "--start-exec-queue"]


def test_signatures_are_wiped_once_their_loss_is_consented(tmp_path: Path) -> None:
    """Else an old file system could reappear, as ours, when the namespace comes back."""
    host = lying(tmp_path)
    converge(host, wanted("re6p", "fsdax"), [])
    lost = everything_of_ours(host)
    converge(host, wanted("re6p", "system-ram"), lost)
    assert ["wipefs", "-q", "-a", "/dev/pmem0"] in host.asked
    assert [word for word in owned.observe(host) if word in lost[0]] == []
    _, part = look(host, wanted("re6p", "fsdax"))
    assert [step.destroys for step in part.after if step.destroys] == []


def test_a_device_that_famfs_has_taken_since_the_plan_stays_as_it_is(tmp_path: Path) -> None:
    """A driver that oeprov does not know is no device free for use (devdax)."""
    host = lying(tmp_path, spaces={0: Ns("devdax", uuid="n")})
    for name in list(host.links):
        if name.endswith("/dax0.0/driver"):
            host.links[name] = "/sys/bus/dax/drivers/fsdev_dax"
    assert [item.mode for item in observed_dax(host)] == ["fsdev_dax"]
    for mode in ("system-ram", "devdax"):
        with pytest.raises(CommandError, match="driver fsdev_dax, which oeprov does not know"):
            act(host, "reconfigure_dax", device="dax0.0", mode=mode, movable=True)
    with pytest.raises(CommandError, match="driver fsdev_dax, which oeprov does not know"):
        act(
            host,
            "create_namespace",
            namespace="namespace0.0",
            mode="fsdax",
            map="mem",
            lose=["all"],
        )
    assert [argv for argv in host.asked if argv[0] in ("daxctl", "ndctl")] == []
