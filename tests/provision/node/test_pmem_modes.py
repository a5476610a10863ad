"""Every way between the modes on a simulated host, with reboots, power cuts and things of other people."""

import errno
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pmem_host import Content, Host, Ns, PowerCut, carry_out, converge, look

from provision.node import content, daxctl, numa, owned, tiering
from provision.node.apply import apply
from provision.node.command import CommandError
from provision.node.state import FileSystem, FstabEntry, KernelState, Namespace, Region, State
from provision.node.step import Desired, Step


def re6p(root: Path, **more: object) -> Host:
    return Host(str(root), labels=False, **more)  # type: ignore[arg-type]


def labelled(root: Path, **more: object) -> Host:
    return Host(str(root), **{"spaces": {0: Ns(), 1: None}, **more})  # type: ignore[arg-type]


def metal(root: Path, **more: object) -> Host:
    return Host(str(root), spaces={}, **more)  # type: ignore[arg-type]


def re7p(root: Path) -> Host:
    return Host(str(root), labels=False, spaces={}, memmap_platform=True)


PLATFORMS: dict[str, tuple[Callable[[Path], Host], str, tuple[str, ...]]] = {
    "re6p": (re6p, "re6p", ("fsdax", "system-ram", "tiered")),
    "labelled": (labelled, "re6p", ("fsdax", "system-ram")),
    "metal": (metal, "bare_metal_pmem", ("memory", "fsdax", "system-ram", "tiered")),
    "re7p": (re7p, "re7p", ("fsdax", "system-ram", "tiered")),
}
WAYS = [
    (platform, first, second)
    for platform, (_, _, modes) in PLATFORMS.items()
    for first, second in itertools.permutations(modes, 2)
]


def wanted(platform: str, mode: str) -> Desired:
    kind = PLATFORMS[platform][1]
    return Desired(kind=kind, pmem_mode=mode, pmem_memmap="2G!16G" if kind == "re7p" else "")


def everything_of_ours(host: Host) -> list[str]:
    """Names of what would be lost: what our own rows lie on."""
    return [
        f"pmem{number}/{space.content.type}/{space.content.uuid}"
        for number, space in host.spaces.items()
        if space and space.content
    ]


def assert_mode(host: Host, platform: str, mode: str) -> None:
    """What a user would look at, and nothing that is left over from another mode."""
    fstab = host.read("/etc/fstab")
    assert fstab.startswith("# /etc/fstab\nUUID=root /\text4 errors=remount-ro 0 1\n")
    spaces = [space for space in host.spaces.values() if space]
    assert [line.split()[1] for line in fstab.splitlines()[2:]] == (
        [f"/mnt/pmem{number}" for number in range(len(spaces))] if mode == "fsdax" else []
    )
    assert host.exists(daxctl.UNIT) == (mode in ("system-ram", "tiered") and platform != "re7p")
    is_tiered = mode == "tiered"
    assert (host.exists(tiering.UNIT), host.exists(tiering.ENABLED)) == (is_tiered, is_tiered)
    assert host.read(tiering.DEMOTION).strip() == ("true" if is_tiered else "false")
    assert host.read(tiering.BALANCING).strip() == ("2" if is_tiered else "1")
    assert host.exists(numa.ENVIRONMENT) == (mode == "system-ram")
    if mode == "fsdax":
        assert host.mounts == [(f"pmem{number}", f"/mnt/pmem{number}") for number in host.spaces]
        assert all(space.mode == "fsdax" and space.content for space in spaces)
    elif mode == "memory":
        assert host.modules == "memorymode"
        assert not spaces
    elif platform != "re7p":
        assert spaces
        assert all(space.kmem and space.online and space.movable for space in spaces)
        nodes = ",".join(str(host.target_nodes[number]) for number in host.spaces)
        assert is_tiered or host.read(numa.ENVIRONMENT) == f"MEMKIND_DAX_KMEM_NODES={nodes}\n"
    else:
        assert is_tiered or host.read(numa.ENVIRONMENT) == "MEMKIND_DAX_KMEM_NODES=1\n"
    assert not [word for word in owned.observe(host) if word.startswith("making:")]
    if mode == "fsdax":
        assert not [word for word in owned.observe(host) if word.startswith("vacant:")]


@pytest.mark.parametrize(("platform", "first", "second"), WAYS)
def test_from_any_mode_to_any_other(platform: str, first: str, second: str, tmp_path: Path) -> None:
    host = PLATFORMS[platform][0](tmp_path)
    converge(host, wanted(platform, first), [])
    assert_mode(host, platform, first)
    host.boot()
    assert_mode(host, platform, first)
    converge(host, wanted(platform, second), everything_of_ours(host))
    assert_mode(host, platform, second)
    host.boot()
    assert_mode(host, platform, second)
    # Nothing is left to do after a boot, and doing it again does nothing.
    state, part = look(host, wanted(platform, second))
    assert (part.before, part.after, part.reboot_why, part.problems) == ([], [], "", [])
    assert not state.trouble


@pytest.mark.parametrize(("platform", "first", "second"), WAYS)
def test_power_may_go_at_any_moment(platform: str, first: str, second: str, tmp_path: Path) -> None:
    for cut in itertools.count():
        host = PLATFORMS[platform][0](tmp_path / str(cut))
        converge(host, wanted(platform, first), [])
        consent = everything_of_ours(host)
        host.cut_at = host.events + cut
        try:
            converge(host, wanted(platform, second), consent)
        except PowerCut:
            host.cut_at = -1
            host.boot()
            # No more consent than was given for what was there at first: the rest is ours and empty.
            converge(host, wanted(platform, second), consent)
            assert_mode(host, platform, second)
        else:
            break
    assert cut > 6


@pytest.mark.parametrize("platform", PLATFORMS)
def test_power_may_go_at_any_moment_of_the_first_time(platform: str, tmp_path: Path) -> None:
    for mode in PLATFORMS[platform][2]:
        for cut in itertools.count():
            host = PLATFORMS[platform][0](tmp_path / mode / str(cut))
            host.cut_at = cut
            try:
                converge(host, wanted(platform, mode), [])
            except PowerCut:
                host.cut_at = -1
                host.boot()
                converge(host, wanted(platform, mode), [])
                assert_mode(host, platform, mode)
            else:
                break
        assert cut > 2


def steps_of(host: Host, desired: Desired) -> list[Step]:
    _, part = look(host, desired)
    return part.before + part.after


@pytest.mark.parametrize("mode", ["fsdax", "system-ram"])
def test_foreign_namespaces_and_file_systems_are_named_and_kept(mode: str, tmp_path: Path) -> None:
    theirs = Content("ext4", "theirs")
    host = re6p(tmp_path, spaces={0: Ns("fsdax", uuid="n", content=theirs)})
    host.mounts = [("pmem0", "/srv/db")]
    host.render()
    steps = steps_of(host, wanted("re6p", mode))
    assert {name for step in steps for name in step.destroys} == {"pmem0/ext4/theirs"}
    with pytest.raises(AssertionError, match="destroys"):
        carry_out(host, steps, [])
    assert host.spaces[0] is not None
    assert host.spaces[0].content == theirs


@pytest.mark.parametrize("mode", ["fsdax", "system-ram"])
def test_a_devdax_namespace_of_others_counts_as_data(mode: str, tmp_path: Path) -> None:
    host = re6p(tmp_path, spaces={0: Ns("devdax", uuid="theirs")})
    steps = steps_of(host, wanted("re6p", mode))
    assert [step.destroys for step in steps if step.destroys] == [["namespace0.0/theirs"]]


@pytest.mark.parametrize("space", [Ns(data="theirs"), Ns("fsdax", uuid="n", raw_uuid="r", data="theirs")])
@pytest.mark.parametrize("mode", ["fsdax", "system-ram"])
def test_data_without_a_signature_is_named_and_stays(space: Ns, mode: str, tmp_path: Path) -> None:
    """Pitfall 24: a raw database, or plain dm-crypt, looks like an empty device to blkid."""
    for cut in itertools.count():
        make = labelled if space.raw_uuid else re6p
        host = make(tmp_path / str(cut), spaces={0: replace(space)})
        desired = wanted("re6p", mode)
        steps = steps_of(host, desired)
        lost = {name for step in steps for name in step.destroys}
        assert len(lost) == 1
        assert re.fullmatch(r"pmem0/data/[0-9a-f]{16}", min(lost))
        with pytest.raises(AssertionError, match="destroys"):
            carry_out(host, steps, [])
        assert host.spaces[0] == space
        # Agreed to once, it is not asked for again, whenever the power goes.
        host.cut_at = host.events + cut
        try:
            converge(host, desired, [*lost])
        except PowerCut:
            host.cut_at = -1
            host.boot()
            converge(host, desired, [*lost])
            assert_mode(host, "re6p", mode)
        else:
            break
    assert cut > 6


def test_zeros_need_no_consent_beside_a_file_system_of_ours(tmp_path: Path) -> None:
    host = labelled(tmp_path)
    host.spaces = {0: Ns("fsdax", uuid="n", raw_uuid="r")}
    host.render()
    converge(host, wanted("labelled", "fsdax"), [])
    host.spaces[1] = Ns("fsdax", uuid="m", raw_uuid="q")
    host.render()
    converge(host, wanted("labelled", "fsdax"), [])
    assert_mode(host, "labelled", "fsdax")


def test_our_rows_are_no_empty_device_when_their_superblock_is_gone(tmp_path: Path) -> None:
    """Pitfall 23."""
    host = re6p(tmp_path)
    converge(host, wanted("re6p", "fsdax"), [])
    host.mounts, host.spaces[0].content = [], None  # type: ignore[union-attr]
    for data in ("rows", ""):
        host.spaces[0].data = data  # type: ignore[union-attr]
        host.render()
        steps = steps_of(host, wanted("re6p", "fsdax"))
        assert [step.destroys[0][:11] for step in steps if step.destroys] == ["pmem0/data/"]
        assert steps[0].why.startswith("/etc/fstab names UUID=")


@pytest.mark.parametrize("mode", ["fsdax", "system-ram"])
def test_media_errors_stop_what_would_write_over_them(mode: str, tmp_path: Path) -> None:
    """Pitfall 23: blkid finds no signature on a device that cannot be read, and says nothing."""
    theirs = Content("ext4", "theirs")
    host = re6p(tmp_path, spaces={0: Ns("fsdax", uuid="n", content=theirs, error=errno.EIO)})
    _, part = look(host, wanted("re6p", mode))
    assert len(part.problems) == 1
    assert part.problems[0].startswith("/dev/pmem0 cannot be read at byte 0: Input/output error; its content")
    with pytest.raises(CommandError, match="/dev/pmem0 cannot be read"):
        carry_out(host, part.after, ["pmem0/unreadable/no-uuid"])
    host.spaces[0].error, host.spaces[0].bad_blocks = 0, 8  # type: ignore[union-attr]
    host.render()
    _, part = look(host, wanted("re6p", mode))
    assert [line[:50] for line in part.problems] == ["/dev/pmem0 has 8 blocks of 512 bytes that cannot b"]
    with pytest.raises(CommandError, match="has 8 blocks of 512 bytes"):
        carry_out(host, part.after, ["pmem0/ext4/theirs"])
    assert host.spaces[0].content == theirs  # type: ignore[union-attr]


def test_dram_content_of_a_new_memmap_range_needs_no_consent(tmp_path: Path) -> None:
    """re7p: after the first boot with memmap=, what DRAM held lies there; of a range of others, who knows."""
    host = re7p(tmp_path)
    desired = wanted("re7p", "fsdax")
    _, part = look(host, desired)
    assert [step.id for step in part.before] == ["range-vacant"]
    host.boot(part.add_arguments)
    others = [step for step in steps_of(host, desired) if step.destroys]
    assert [step.destroys[0][:11] for step in others] == ["pmem0/data/"], "that step was not done"
    carry_out(host, part.before, [])
    assert not [step for step in steps_of(host, desired) if step.destroys]
    # The fresh plan of the first run goes on after the boot, and its last step looks again.
    carry_out(host, part.after, [])
    assert_mode(host, "re7p", "fsdax")


def test_a_stop_of_the_instance_takes_what_was_there(tmp_path: Path) -> None:
    """Pitfall 2: memory is zero then, and all else is data, as after a reboot, which keeps it."""
    host = re7p(tmp_path)
    desired = wanted("re7p", "fsdax")
    converge(host, desired, [])
    host.spaces = {0: Ns("fsdax", data="rows behind a damaged superblock")}
    host.boot()
    (step,) = [step for step in steps_of(host, desired) if step.destroys]
    assert "no file system is recognised there" in step.why
    with pytest.raises(CommandError, match="which appeared after the plan was made"):
        carry_out(host, [step._replace(destroys=[], args={**step.args, "lose": []})], [])
    host.spaces = {0: Ns("fsdax")}
    host.boot()
    steps = steps_of(host, desired)
    assert "was lost in a stop of the instance" in steps[0].why
    converge(host, desired, [])
    assert_mode(host, "re7p", "fsdax")


def test_a_stop_explains_a_device_of_ours_only_and_only_of_memmap(tmp_path: Path) -> None:
    """Pitfall 24: one device of ours that is gone says nothing of another one."""
    entry = FstabEntry("UUID=ours", "/mnt/pmem0", "ext4", ["dax", "nofail"])
    spaces = [Namespace(f"namespace{n}.0", "fsdax", blockdev=f"pmem{n}", region=f"region{n}") for n in (0, 1)]
    zeros = [FileSystem(f"pmem{n}", sample="zero") for n in (0, 1)]
    state = State(
        regions=[Region(f"region{n}", bus="e820") for n in (0, 1)],
        namespaces=spaces,
        filesystems=zeros,
        fstab=[entry],
        owned=["ours"],
        kernel=KernelState(cmdline=["memmap=1G!4G"]),
    )
    assert [content.lost_with_power(state, item) for item in zeros] == ["ours", ""]
    others = [
        state._replace(namespaces=[spaces[0], spaces[1]._replace(enabled=False)]),
        state._replace(filesystems=[zeros[0], FileSystem("pmem1", "unreadable", error="bad media")]),
        state._replace(kernel=KernelState(cmdline=["memmap=1G$4G"])),
        state._replace(regions=[Region("region0"), Region("region1")]),
        state._replace(owned=[]),
    ]
    assert [content.lost_with_power(other, zeros[0]) for other in others] == [""] * len(others)
    assert not any(content.why_data(other, zeros[0]) == "" for other in others)


@pytest.mark.parametrize(
    "action", ["make_filesystem", "create_namespace", "destroy_namespace", "give_up_data"]
)
def test_data_written_after_the_plan_is_not_destroyed(action: str, tmp_path: Path) -> None:
    """Every action that destroys looks again at what is there."""
    host = re6p(tmp_path, spaces={0: Ns("fsdax", uuid="n")})
    kinds: dict[str, dict[str, Any]] = {
        "make_filesystem": {
            "device": "pmem0",
            "type": "ext4",
            "block_size": 4096,
            "reflink": True,
            "lose": [],
        },
        "create_namespace": {"namespace": "namespace0.0", "mode": "devdax", "map": "mem", "lose": []},
        "destroy_namespace": {"namespace": "namespace0.0", "lose": []},
        "give_up_data": {"namespaces": ["namespace0.0"], "lose": []},
    }
    args = kinds[action]
    step = Step("id", "what", "why", action=action, args=args)
    host.spaces[0].data = "theirs"  # type: ignore[union-attr]
    with pytest.raises(
        CommandError, match=r"pmem0 holds data \w{16}, which appeared after the plan was made"
    ):
        apply(step, host)
    assert host.spaces[0] == Ns("fsdax", uuid="n", data="theirs")
    host.spaces[0] = Ns("fsdax", uuid="n", content=Content("xfs", "new"))
    with pytest.raises(CommandError, match="pmem0 holds xfs new, which appeared after the plan was made"):
        apply(step, host)
    assert host.spaces[0] == Ns("fsdax", uuid="n", content=Content("xfs", "new"))
    host.mounts = [("pmem0", "/srv")]
    host.render()
    with pytest.raises(CommandError, match="pmem0 is mounted at /srv: unmount it first"):
        apply(step._replace(args={**args, "lose": ["pmem0/xfs/new"]}), host)
    assert host.spaces[0] == Ns("fsdax", uuid="n", content=Content("xfs", "new"))


def test_a_busy_mount_names_its_processes(tmp_path: Path) -> None:
    host = re6p(tmp_path)
    desired = wanted("re6p", "fsdax")
    converge(host, desired, [])
    host.files["/proc/812/comm"] = "python3\n"
    host.links["/proc/812/fd/3"] = "/mnt/pmem0/rows"
    host.busy = ("/mnt/pmem0",)
    state, part = look(host, wanted("re6p", "system-ram"))
    assert state.users == {"/mnt/pmem0": ["812 python3"]}
    assert part.problems == [
        "/mnt/pmem0 is in use and cannot be unmounted: process 812 (python3); stop it first"
    ]
    with pytest.raises(
        CommandError, match=r"pmem0 cannot be unmounted from /mnt/pmem0: process 812 \(python3\)"
    ):
        carry_out(host, part.before + part.after, everything_of_ours(host))
    assert host.mounts == [("pmem0", "/mnt/pmem0")]


def test_users_of_a_mount_that_stays_are_not_looked_up(tmp_path: Path) -> None:
    host = re6p(tmp_path)
    desired = wanted("re6p", "fsdax")
    converge(host, desired, [])
    host.files["/proc/812/comm"] = "python3\n"
    host.links["/proc/812/cwd"] = "/mnt/pmem0"
    state, part = look(host, desired)
    assert (state.users, part.problems) == ({}, [])


def test_a_running_job_is_named_before_its_memory_goes(tmp_path: Path) -> None:
    host = re6p(tmp_path)
    desired = wanted("re6p", "fsdax")
    converge(host, desired, [])
    host.files["/etc/systemd/system/oeprov-ctr-1-server-0.service"] = ""
    host.units = "Id=oeprov-ctr-1-server-0.service\nActiveState=active\n"
    state, part = look(host, wanted("re6p", "system-ram"))
    assert state.jobs == ["ctr-1"]
    assert [line for line in part.problems if "oeprov stop ctr-1" in line]
    # What only looks, or changes what a job does not use, is free to go on.
    assert look(host, desired)[1].problems == []
    host.units = "Id=oeprov-ctr-1-server-0.service\nActiveState=failed\n"
    assert look(host, wanted("re6p", "system-ram"))[1].problems == []


def test_a_mount_without_dax_is_taken_back(tmp_path: Path) -> None:
    """Pitfall 21: 'DAX unsupported by block device. Turning off DAX.' still mounts."""
    host = re6p(tmp_path, turns_dax_off=True)
    _, part = look(host, wanted("re6p", "fsdax"))
    with pytest.raises(CommandError, match=r"mounted at /mnt/pmem0 without DAX .* unmounted again"):
        carry_out(host, part.after, [])
    assert host.mounts == []


def test_a_firmware_that_takes_no_goal_is_said_once(tmp_path: Path) -> None:
    """Pitfall 20 (#121): the goal is accepted, and after the boot the capacity is Inaccessible."""
    host = metal(tmp_path, firmware_fixed=True)
    desired = wanted("metal", "memory")
    _, part = look(host, desired)
    carry_out(host, part.before, [])
    host.boot()
    _, part = look(host, desired)
    assert len(part.problems) == 1
    assert "memorymode=100 was set before the last boot and had no effect: 4 GiB of 4 GiB" in part.problems[0]
    # The way out that it names.
    host.firmware_fixed = False
    owned.change(host, [], owned.observe(host))
    converge(host, desired, [])
    assert_mode(host, "metal", "memory")


def test_a_goal_for_memory_mode_that_waits_is_taken_back(tmp_path: Path) -> None:
    host = metal(tmp_path)
    converge(host, wanted("metal", "fsdax"), [])
    host.goals = "memorymode"
    _, part = look(host, wanted("metal", "fsdax"))
    assert [step.id for step in part.before + part.after] == ["dimm-goal-forget"]
    converge(host, wanted("metal", "fsdax"), [])
    host.boot()
    assert_mode(host, "metal", "fsdax")


@pytest.mark.parametrize(("target", "words"), [(-1, "has no target node"), (0, "would join node 0")])
def test_a_device_without_a_node_of_its_own_is_refused(target: int, words: str, tmp_path: Path) -> None:
    """Pitfall 14, which may show only once the namespace is a device."""
    host = re6p(tmp_path, target_nodes={0: target})
    _, part = look(host, wanted("re6p", "system-ram"))
    with pytest.raises(CommandError, match=words):
        carry_out(host, part.after, [])
    assert not host.spaces[0].kmem  # type: ignore[union-attr]
    _, part = look(host, wanted("re6p", "system-ram"))
    assert words in part.problems[0]


def test_the_policy_is_set_before_the_memory_comes(tmp_path: Path) -> None:
    """Pitfall 12."""
    host = re6p(tmp_path, policy="online")
    host.policy = "online"
    host.render()
    _, part = look(host, wanted("re6p", "system-ram"))
    assert part.add_arguments == ["memhp_default_state=offline"]
    steps = part.before + part.after
    assert steps[0].id == "hotplug-policy"
    with pytest.raises(CommandError, match="the kernel would bring the memory online by itself"):
        carry_out(host, steps[1:], [])
    converge(host, wanted("re6p", "system-ram"), [])
    assert host.policy == "offline"


def test_all_other_lines_of_fstab_stay_byte_for_byte(tmp_path: Path) -> None:
    host = re6p(tmp_path)
    mine = "#\tmine \n\nUUID=root / ext4 defaults 0 1\n/dev/old  /mnt/pmem0 ext4 defaults 0 0\n\n  tail"
    host.files["/etc/fstab"] = mine
    converge(host, wanted("re6p", "fsdax"), [])
    identity = host.spaces[0].content.uuid  # type: ignore[union-attr]
    ours = f"UUID={identity} /mnt/pmem0 ext4 dax,nofail,x-systemd.device-timeout=90s 0 0"
    assert host.files["/etc/fstab"] == mine.replace("/dev/old  /mnt/pmem0 ext4 defaults 0 0", ours)
    converge(host, wanted("re6p", "system-ram"), everything_of_ours(host))
    assert host.files["/etc/fstab"] == mine.replace("/dev/old  /mnt/pmem0 ext4 defaults 0 0\n", "")


def test_every_step_changes_nothing_the_second_time(tmp_path: Path) -> None:
    for platform, (make, _, modes) in PLATFORMS.items():
        for mode in modes:
            host = make(tmp_path / platform / mode)
            for _ in range(2):
                _, part = look(host, wanted(platform, mode))
                carry_out(host, part.before, [])
                assert not any(carry_out(host, part.before, []))
                if part.reboot_why:
                    host.boot(part.add_arguments, part.remove_arguments)
                    continue
                carry_out(host, part.after, [])
                assert not any(carry_out(host, part.after, []))
