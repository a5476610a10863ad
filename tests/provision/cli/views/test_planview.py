"""Plans as people read them; planviews/*.txt is what they see."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from provision.cli.views import plan as planview
from provision.cluster.errors import HostError
from provision.converge.outlook import Outlook
from provision.node.step import Desired, Plan, Step, note_left

GOLDEN = Path(__file__).with_name("planviews")
TURNS = "turns (9): 700 hosts (no disturbance), re6p-001, 15 hosts, …; a failed host stops the later turns"
OUTLOOK = Outlook(8, 3000.0, 240.0, is_assumed=False)

PACKAGES = Step(
    "packages",
    "install libpmem, ndctl, daxctl, numactl, e2fsprogs, python3.11",
    "training and its tools need them and they are not installed",
    role="runtime",
    preparing=True,
)
MOUNT = Step("mount-pmem0", "mount pmem0 at /mnt/pmem0 with DAX", "it is not mounted")


def reboot(release: str) -> Step:
    why = f"{release} runs and the kernel changes (an unhealthy boot returns to the old kernel)"
    return Step("reboot", "boot the new kernel once on trial", why, reboots=True, action="reboot")


def make_fs(size: int, lost: str = "") -> Step:
    why = "pmem_filesystem is ext4" if lost else "the device is empty"
    return Step("mkfs-pmem0", f"make ext4 on pmem0 ({size} GiB)", why, destroys=[lost] if lost else [])


def fleet(count: int) -> list[Plan]:
    """A tenth serves: sizes, kernels and one file system differ; three hosts are half done, one is stuck."""
    servers = [f"re6p-{number:03}" for number in range(1, count // 10 + 1)]
    plans = []
    for number, name in enumerate(servers):
        steps = [
            PACKAGES,
            reboot("4.18.0-477.el8" if number % 9 == 4 else "4.18.0-553.el8"),
            make_fs(504 if number < 2 else 1008 + number % 7, f"pmem0/xfs/u-{number}" if number < 2 else ""),
            MOUNT,
        ]
        plans.append(Plan(name, steps, notes=["namespace0.0 has no label: its size cannot change"]))
    plans[5] = plans[5]._replace(problems=["pmem_size 2048 GiB: the module has 1008 GiB; set at most that"])
    plans[7:10] = [plan._replace(steps=[MOUNT]) for plan in plans[7:10]]
    workers = [f"w-{number:04}" for number in range(1, count - len(servers) + 1)]
    plans += [Plan(name, [PACKAGES]) for name in workers[:-100]]
    return plans + [Plan(name) for name in workers[-100:]]  # there already


def shown(plans: list[Plan], width: int, turns: str = TURNS, outlook: Outlook | None = OUTLOOK) -> list[str]:
    out = io.StringIO()
    planview.show(Console(file=out, width=width), plans, turns, outlook)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", ["fleet", "host"])
def test_plan_reads_as_recorded(name: str, width: int) -> None:
    plans = fleet(1000)
    if name == "host":
        lines = shown(plans[:1], width, "", Outlook(1, 300.0, 300.0, is_assumed=True))
    else:
        lines = shown(plans, width)
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{name}-{width}.txt").read_text()


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_of_a_block_is_wider_than_the_screen(width: int) -> None:
    lines = shown(fleet(1000), width)
    assert max(len(line) for line in lines[: lines.index(TURNS)]) <= width


def test_a_thousand_hosts_take_one_screen_and_ten_thousand_no_more() -> None:
    thousand, ten_thousand = shown(fleet(1000), 80), shown(fleet(10_000), 80)
    assert len(thousand) <= 45
    assert len(ten_thousand) <= len(thousand) + 3  # longer numbers and names may wrap
    alike = shown([Plan(f"re6p-{number:04}", fleet(100)[0].steps) for number in range(1000)], 80)
    assert len(alike) <= 20


def test_what_destroys_and_reboots_comes_first_and_is_counted() -> None:
    lines = shown(fleet(1000), 200)
    assert lines[0] == "destroys  2 objects on 2 hosts"
    assert "re6p-001: pmem0/xfs/u-0" in lines[1]
    assert lines[3].startswith(
        "reboots   97 hosts in 8 turns, about 50 min (4 min per reboot, as before): re6p-["
    )
    quiet = shown([Plan("w", [PACKAGES])], 80, "", None)
    assert quiet[:2] == ["destroys  nothing", "reboots   no host"]


def test_many_lost_objects_are_counted_in_full_and_listed_in_part() -> None:
    plans = [Plan(f"re6p-{number:03}", [make_fs(8, f"pmem0/xfs/u-{number}")]) for number in range(1, 97)]
    lines = shown(plans, 80, "", None)
    assert lines[0] == "destroys  96 objects on 96 hosts"
    assert lines[10].strip() == "re6p-010: pmem0/xfs/u-10"
    assert lines[11].strip() == "and 86 more objects: see --host NAME or --json"
    (mark,) = [line for line in lines if "✗" in line]
    assert mark.strip() == "✗ destroys 96 objects, named above"


def test_hosts_that_do_two_steps_the_other_way_round_are_shown() -> None:
    ways = [[PACKAGES, MOUNT], [MOUNT, PACKAGES]]
    block = planview.Block([Plan(f"h{number}", ways[number % 2]) for number in range(4)])
    assert {name: len(found) for name, found in block.steps().items()} == {"packages": 4, "mount-pmem0": 4}


def test_every_step_of_every_host_is_in_its_block() -> None:
    """Also where plans are so many kinds that blocks have hosts with different steps."""
    names = [f"s{number}" for number in range(12)]
    plans = [
        Plan(
            f"h{number:03}",
            [Step(name, f"do {name}", "why") for place, name in enumerate(names) if number >> place & 1],
        )
        for number in range(1, 800)
    ]
    found = planview.blocks(plans)
    assert len(found) <= 8
    assert sorted(host for block in found for host in block.hosts) == [plan.host for plan in plans]
    there = {(host, step.id) for block in found for steps in block.steps().values() for host, step in steps}
    assert there == {(plan.host, step.id) for plan in plans for step in plan.steps}
    assert all(list(block.steps()) == sorted(block.steps(), key=names.index) for block in found)
    lines = shown(plans, 80, "", None)
    assert len(lines) < 400
    assert any("→ only " in line for line in lines)


def test_markup_in_names_is_text() -> None:
    odd = Step("odd", "write [red]x[/] to /a[b]", "it says [bold]no[/]", destroys=["[dim]data[/]"])
    text = "\n".join(shown([Plan("h", [odd], notes=["[u]note[/]"])], 200, "[i]turns[/]", None))
    for words in (
        "write [red]x[/] to /a[b]",
        "it says [bold]no[/]",
        "[dim]data[/]",
        "[u]note[/]",
        "[i]turns[/]",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("texts", "common"),
    [
        (["make it"], "make it"),
        (["pmem0 (504 GiB)", "pmem0 (1008 GiB)"], "pmem0 (… GiB)"),
        (["4.18.0-477.el8 runs", "4.18.0-553.el8 runs"], "4.18.0-….el8 runs"),
        (["u a1-b2-c3 x", "u d4-e5-f6 x"], "u … x"),
        (["install a, b, c now", "install a now"], "install a… now"),
        (["one", "two words"], "…"),
        (["a b", "a"], "a…"),
    ],
)
def test_what_texts_have_in_common(texts: list[str], common: str) -> None:
    assert planview._common(texts) == common


def test_flags_of_consent_are_printed_whole() -> None:
    """Several jobs on one host: each has a flag of its own to copy."""
    jobs = [f"t2026112{number}-101500" for number in range(6)]
    desired = Desired(host="one")
    notes = [note_left(desired, f"job {job} (rows in /mnt/pmem0/oeprov)", [f"job/{job}"]) for job in jobs]
    lines = shown([Plan("one", notes=notes)], 400)
    for job in jobs:
        assert any(line.endswith(f"to lose that too, add: --consent one:job/{job}") for line in lines)
    assert not any("…" in line for line in lines[1:])
    step = Step("fs", "make ext4", "it is wanted", destroys=["pmem0/ext4/u"])
    assert Plan("one", [step], notes=notes).consentable == [
        "one:pmem0/ext4/u",
        *(f"one:job/{job}" for job in jobs),
    ]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([1008, 1008, 504, 504], ["→ only a, b", "→ only c, d"]),
        ([1008, 1008, 1008, 504], ["→ 3 of 4 hosts", "→ only d"]),
        ([1, 1, 2, 2, 3], ["→ only a, b", "→ only c, d", "→ only e"]),
    ],
)
def test_forms_of_a_step_name_their_hosts(sizes: list[int], named: list[str]) -> None:
    plans = [Plan(name, [make_fs(size)]) for name, size in zip("abcde", sizes, strict=False)]
    found = [line.strip() for line in shown(plans, 200) if "→" in line]
    assert [line.split(" (")[0] for line in found] == [
        words.replace("a, b", "a,b").replace("c, d", "c,d") for words in named
    ]


def test_commands_and_lost_hosts_are_folded() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    step = Step("x", "make it", "why", commands=[["mkfs.ext4", "/dev/a b"], ["use", "<uuid>"]])
    planview.show_commands(console, [Plan(f"h{number}", [step]) for number in range(1, 501)])
    lost = [HostError(f"h{number}", f"10.0.0.{number} refuses connections") for number in range(1, 11)]
    planview.show_lost(console, [*lost, HostError("g1", "has no python3"), HostError("g2", "has no python3")])
    planview.show_lost(console, lost[:2])
    assert out.getvalue().splitlines() == [
        "h[1-500] (500 hosts): make it",
        "    mkfs.ext4 '/dev/a b'",
        "    use <uuid>",
        "✗ h[1-10] (10 hosts): 10.0.0.… refuses connections",
        "✗ g[1-2] (2 hosts): has no python3",
        "✗ h1: 10.0.0.1 refuses connections",
        "✗ h2: 10.0.0.2 refuses connections",
    ]
