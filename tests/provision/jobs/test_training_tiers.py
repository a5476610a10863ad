"""Each storage on the hosts that can have it: command lines, units, and refusals that say what to run."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_processes import make_job
from test_plan_cases import inputs

from provision.cli.views.training import JobTerminal
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.jobs import jobspec, launching, placement, readiness
from provision.jobs.placement import Placement
from provision.jobs.request import LaunchOptions, Request
from provision.node import numa
from provision.node.plan import make_plan
from provision.node.state import DaxDevice, Mount, Namespace, NumaNode, Region, State
from provision.node.step import Plan, Step

GIB = 1 << 30
INVENTORY = """\
all:
  vars: {{oeprov_cluster: tiers, training_data: generate:800}}
  children:
    parameter_servers: {{hosts: {{pm-1: }}}}
    workers: {{hosts: {{controller: }}}}
  hosts:
    pm-1: {{ansible_host: 192.0.2.1, oeprov_kind: {kind}, pmem_mode: {mode}, {more}}}
    controller: {{ansible_connection: local, oeprov_kind: local, pmem_mode: none}}
"""
DRAM = NumaNode(id=0, size=64 * GIB, free=60 * GIB, cpus=[0, 1, 2, 3], distances=[10, 20])
FAR = NumaNode(id=2, size=256 * GIB, free=256 * GIB, cpus=[], distances=[20, 10])
FSDAX = State(numa=[DRAM], mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", [])])
SYSTEM_RAM = State(numa=[DRAM, FAR], dax=[DaxDevice(chardev="dax0.0")])


def inventory(tmp_path: Path, mode: str, more: str = "", kind: str = "bare_metal_pmem") -> Inventory:
    path = tmp_path / "inventory.yml"
    path.write_text(INVENTORY.format(mode=mode, more=more or "gpu_driver: keep", kind=kind))
    return load(path, state_dir=tmp_path)


def place(found: Inventory, state: State, tmp_path: Path, **options: object) -> Placement:
    wanted = jobspec.request(found, LaunchOptions(**options))  # type: ignore[arg-type]
    found = readiness.needed(found, wanted)
    return placement.place(make_job(tmp_path), found, {"pm-1": state}, wanted)


def flags(placed: Placement) -> dict[str, str]:
    argv = placed.processes[0].argv
    return dict(itertools.pairwise(argv))


def unit(placed: Placement) -> str:
    return str(placed.units["pm-1"][0]["text"])


def test_dram_pmem_is_a_pool_with_a_cache(tmp_path: Path) -> None:
    found = inventory(tmp_path, "fsdax", "parameter_server_count: 2, parameter_server_storage: dram_pmem")
    placed = place(found, FSDAX, tmp_path)
    given = flags(placed)
    assert given["--storage"] == "dram_pmem"
    assert int(given["--storage-cache"]) == 8 * GIB, "a quarter of the DRAM for two servers"
    assert given["--storage-path"] == placed.processes[0].pools
    assert placed.processes[0].pools.startswith("/mnt/pmem0/oeprov/")
    assert "--storage-recover" in placed.processes[0].argv
    assert "After=mnt-pmem0.mount" in unit(placed)


def test_a_gpu_host_does_not_train_on_its_cpu(tmp_path: Path) -> None:
    text = INVENTORY.format(mode="fsdax", more="gpu_driver: keep", kind="bare_metal_pmem")
    text = (
        text.replace("{controller: }", "{gpu-1: }")
        + "    gpu-1: {ansible_host: 192.0.2.2, oeprov_kind: gpu}\n"
    )
    for setting, device in ((None, "gpu"), ("cpu", "cpu")):
        path = tmp_path / "inventory.yml"
        more = "" if setting is None else f", training_device: {setting}"
        path.write_text(text.replace("generate:800", "generate:800" + more))
        worker = place(load(path, state_dir=tmp_path), FSDAX, tmp_path).processes[-1]
        assert dict(itertools.pairwise(worker.argv))["--device"] == device
    assert "--device" not in place(inventory(tmp_path, "fsdax"), FSDAX, tmp_path).processes[-1].argv


def test_size_of_the_cache(tmp_path: Path) -> None:
    found = inventory(tmp_path, "fsdax", "parameter_server_storage_cache: 3G")
    assert "--storage-cache" not in flags(place(found, FSDAX, tmp_path)), "pmem_libpmem has none"
    assert flags(place(found, FSDAX, tmp_path, storage="dram_pmem"))["--storage-cache"] == str(3 * GIB)
    options = LaunchOptions(storage="dram_pmem", storage_cache="512M")
    wanted = jobspec.request(found, options)
    spec = jobspec.build(
        make_job(tmp_path),
        found,
        placement.place(make_job(tmp_path), found, {"pm-1": FSDAX}, wanted),
        wanted,
        jobspec.datetime(2026, 11, 22),
    )
    assert Request.from_job(spec).storage_cache == 512 << 20, "for those who resume it"
    earlier = spec.model_copy(
        update={"settings": {key: value for key, value in spec.settings.items() if key != "storage_cache"}}
    )
    assert Request.from_job(earlier).storage_cache == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"storage_cache": "5G"},
            "--storage-cache goes with --storage dram_pmem or dram_ssd; the storage here is pmem_lib",
        ),
        (
            {"storage": "dram_pmem", "storage_cache": "5GB"},
            "--storage-cache: found '5GB'; expected a size such",
        ),
        ({"storage": "pmem"}, "allowed: dram, pmem_libpmem, dram_pmem, dram_ssd, pmem_memkind"),
    ],
)
def test_refused_options(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(TrainingError) as caught:
        place(inventory(tmp_path, "fsdax"), FSDAX, tmp_path, **options)
    assert words in str(caught.value)


def test_memkind_takes_the_nodes_of_the_host(tmp_path: Path) -> None:
    placed = place(inventory(tmp_path, "system-ram"), SYSTEM_RAM, tmp_path, storage="pmem_memkind")
    given = flags(placed)
    assert given["--storage"] == "pmem_memkind"
    assert int(given["--storage-size"]) == 240 * GIB, "below the node's size: who touches more is killed"
    assert "--storage-path" not in given
    assert "--storage-recover" not in placed.processes[0].argv
    text = unit(placed)
    assert "EnvironmentFile=/etc/oeprov/memory.env" in text
    assert "daxdev-reconfigure@dax0.0.service" in text
    (start,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    assert start.startswith("ExecStart=/opt/oeprov/venv/bin/python "), "its indexes stay in DRAM"
    assert "numactl --membind" in text, "it waits until the memory is online"
    dram = unit(place(inventory(tmp_path, "system-ram"), SYSTEM_RAM, tmp_path))
    assert "ExecStart=/usr/bin/numactl --membind=" in dram, "dram there is all on the node"


@pytest.mark.parametrize(
    ("kind", "mode", "storage", "words"),
    [
        ("cpu", "none", "pmem_memkind", "found none; use --storage dram"),
        (
            "cpu",
            "none",
            "pmem_libpmem",
            "needs pmem_mode fsdax, found none, or a drive in ssd_devices; use --storage dram",
        ),
    ],
)
def test_a_host_that_cannot(tmp_path: Path, kind: str, mode: str, storage: str, words: str) -> None:
    found = inventory(tmp_path, mode, kind=kind)
    with pytest.raises(TrainingError) as caught:
        place(found, SYSTEM_RAM, tmp_path, storage=storage)
    assert str(caught.value).startswith("host pm-1: ")
    assert str(caught.value).endswith(words)


def test_memory_node_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        place(inventory(tmp_path, "system-ram"), State(numa=[DRAM]), tmp_path, storage="pmem_memkind")
    assert str(caught.value).endswith("it has none; run: oeprov pmem-mode system-ram --limit pm-1")


SOCKETS = [
    NumaNode(id=0, size=64 * GIB, cpus=[0, 1, 2, 3, 8, 9], distances=[10, 21]),
    NumaNode(id=1, size=64 * GIB, cpus=[4, 5, 6, 7, 10, 11], distances=[21, 10]),
]
TWO_POOLS = State(
    numa=SOCKETS,
    regions=[Region("region0", numa_node=0), Region("region1", numa_node=1)],
    namespaces=[
        Namespace("namespace0.0", "fsdax", blockdev="pmem0", region="region0", numa_node=0),
        Namespace("namespace1.0", "fsdax", blockdev="pmem1", region="region1"),
    ],
    mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4"), Mount("/dev/pmem1p1", "/mnt/pmem1", "ext4")],
)
# Each socket's modules are a node without CPUs.
FAR_OF_BOTH = State(
    numa=[
        SOCKETS[0]._replace(distances=[10, 21, 17, 28]),
        SOCKETS[1]._replace(distances=[21, 10, 28, 17]),
        NumaNode(id=2, size=256 * GIB, distances=[17, 28, 10, 28]),
        NumaNode(id=3, size=256 * GIB, distances=[28, 17, 28, 10]),
    ],
    dax=[DaxDevice("dax0.0", target_node=2), DaxDevice("dax1.0", target_node=3)],
)


def bound(placed: Placement) -> list[tuple[str, str, str]]:
    """Of each server: CPUs, the unit's line, threads."""
    servers = [item for item in placed.processes if item.role == "parameter_server"]
    lines = [
        "".join(line for line in unit["text"].splitlines() if line.startswith("CPUAffinity="))
        for unit in placed.units["pm-1"]
    ]
    threads = [dict(itertools.pairwise(item.argv))["--threads"] for item in servers]
    return list(zip([item.cpus for item in servers], lines, threads, strict=True))


def test_servers_run_beside_their_persistent_memory(tmp_path: Path) -> None:
    found = inventory(tmp_path, "fsdax", "parameter_server_count: 3")
    assert bound(place(found, TWO_POOLS, tmp_path)) == [
        ("0-3,8-9", "CPUAffinity=0 1 2 3 8 9", "3"),
        ("4-7,10-11", "CPUAffinity=4 5 6 7 10 11", "6"),
        ("0-3,8-9", "CPUAffinity=0 1 2 3 8 9", "3"),
    ]
    found = inventory(tmp_path, "fsdax", "parameter_server_count: 3, parameter_server_cpus: all")
    assert bound(place(found, TWO_POOLS, tmp_path)) == [("", "", "4")] * 3


def test_memory_nodes_of_one_socket(tmp_path: Path) -> None:
    one = FAR_OF_BOTH._replace(numa=FAR_OF_BOTH.numa[:2] + FAR_OF_BOTH.numa[3:])
    one = one._replace(
        numa=[node._replace(distances=node.distances[:2] + node.distances[3:]) for node in one.numa]
    )
    for storage in ("dram", "pmem_memkind"):
        placed = place(inventory(tmp_path, "system-ram"), one, tmp_path, storage=storage)
        assert bound(placed) == [("4-7,10-11", "CPUAffinity=4 5 6 7 10 11", "6")]
    # Its memory is on both sockets, so nowhere is nearer.
    placed = place(inventory(tmp_path, "system-ram"), FAR_OF_BOTH, tmp_path)
    assert bound(placed) == [("", "", "12")]


ALL_NODES = "EnvironmentFile=/etc/oeprov/memory.env"
ONE_EACH = ["Environment=MEMKIND_DAX_KMEM_NODES=2", "Environment=MEMKIND_DAX_KMEM_NODES=3"]


def memory_of(placed: Placement) -> list[str]:
    """Of each server, the line of its unit that names its memory nodes."""
    return [
        "".join(line for line in unit["text"].splitlines() if line in (ALL_NODES, *ONE_EACH))
        for unit in placed.units["pm-1"]
    ]


CPUS_EACH = [
    ("0-3,8-9", "CPUAffinity=0 1 2 3 8 9", "6"),
    ("4-7,10-11", "CPUAffinity=4 5 6 7 10 11", "6"),
]


@pytest.mark.parametrize("storage", ["dram", "pmem_memkind"])
def test_servers_share_the_memory_nodes_of_two_sockets(tmp_path: Path, storage: str) -> None:
    two = inventory(tmp_path, "system-ram", "parameter_server_count: 2")
    placed = place(two, FAR_OF_BOTH, tmp_path, storage=storage)
    assert (memory_of(placed), bound(placed)) == (ONE_EACH, CPUS_EACH)
    if storage == "pmem_memkind":
        sizes = [item.argv[item.argv.index("--storage-size") + 1] for item in placed.processes[:2]]
        assert sizes == [str(240 * GIB)] * 2
    four = inventory(tmp_path, "system-ram", "parameter_server_count: 4")
    assert memory_of(place(four, FAR_OF_BOTH, tmp_path, storage=storage)) == ONE_EACH * 2


def test_servers_that_cannot_share_evenly_have_all_memory_nodes(tmp_path: Path) -> None:
    """A server whose node is full is killed."""
    uneven = FAR_OF_BOTH._replace(numa=[*FAR_OF_BOTH.numa[:3], FAR_OF_BOTH.numa[3]._replace(size=GIB)])
    one_entered = FAR_OF_BOTH._replace(files={numa.ENVIRONMENT: numa.environment_text([3])})
    for more, state in (
        ("parameter_server_count: 1", FAR_OF_BOTH),
        ("parameter_server_count: 3", FAR_OF_BOTH),
        ("parameter_server_count: 2", uneven),
        ("parameter_server_count: 2", one_entered),
        ("parameter_server_count: 2, parameter_server_cpus: all", FAR_OF_BOTH),
    ):
        placed = place(inventory(tmp_path, "system-ram", more), state, tmp_path)
        assert set(memory_of(placed)) == {ALL_NODES}


@pytest.mark.parametrize(
    "state",
    [
        TWO_POOLS._replace(numa=SOCKETS[:1]),
        TWO_POOLS._replace(namespaces=[]),
        TWO_POOLS._replace(namespaces=[Namespace("namespace0.0", blockdev="pmem0")], regions=[]),
    ],
)
def test_nothing_is_bound_where_no_node_is_known_to_be_nearer(tmp_path: Path, state: State) -> None:
    ((cpus, line, _),) = bound(place(inventory(tmp_path, "fsdax"), state, tmp_path))
    assert (cpus, line) == ("", "")


def test_dram_is_not_bound(tmp_path: Path) -> None:
    placed = place(inventory(tmp_path, "fsdax"), TWO_POOLS, tmp_path, storage="dram")
    assert bound(placed) == [("", "", "12")]


def test_servers_on_tiered_memory_are_bound_to_nothing(tmp_path: Path) -> None:
    """The kernel moves their pages; they wait for the memory, which their rows may need."""
    placed = place(inventory(tmp_path, "tiered"), FAR_OF_BOTH, tmp_path)
    assert bound(placed) == [("", "", "12")]
    (unit,) = [item["text"] for item in placed.units["pm-1"]]
    assert "numactl" not in unit
    assert "memory.env" not in unit
    assert "After=oeprov-system-ram.service oeprov-tiering.service" in unit


def test_lists_of_numbers() -> None:
    for text in ("", "0", "0-2,8", "1,3,5-6"):
        assert numa.list_text(numa.parse_list(text)) == text


def case(name: str) -> State:
    """What the host of a plan case was seen to be."""
    state, _ = inputs(json.loads((Path(__file__).parents[1] / "node" / "cases" / f"{name}.json").read_text()))
    return state._replace(numa=[DRAM, FAR._replace(id=1)])


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[[State], None]:
    """What launch sees of pm-1 from now on; the runtime and a Python for Ansible are there."""

    def arrange(found: State) -> None:
        state = found._replace(os=found.os._replace(own_python="3.11.9"))

        def survey(found: Inventory) -> ClusterSurvey:
            plan = make_plan(state, found.hosts["pm-1"].desired())
            steps = [step for step in plan.steps if step.role != "runtime"]
            return ClusterSurvey(states={"pm-1": state}, plans={"pm-1": plan._replace(steps=steps)})

        monkeypatch.setattr(launching, "survey", survey)

    return arrange


def launch(found: Inventory, tmp_path: Path, **options: object) -> Placement:
    """What would run; the checks of launch first."""
    given = LaunchOptions(**options)  # type: ignore[arg-type]
    return launching.Launch(found, given, tmp_path, JobTerminal()).new()[1]


def test_the_host_decides_and_not_the_inventory(
    tmp_path: Path, see: Callable[[State], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """After `pmem-mode system-ram`, with an inventory that still says fsdax and wants another kernel."""
    see(case("re6p-system-ram-converged"))
    more = "pmem_map: dev, kernel_version: newest, kernel_arguments: [mitigations=off]"
    found = inventory(tmp_path, "fsdax", more, kind="re6p")
    placed = launch(found, tmp_path, storage="pmem_memkind")
    assert flags(placed)["--storage"] == "pmem_memkind"
    assert "EnvironmentFile=/etc/oeprov/memory.env" in unit(placed), "bound to the node that is there"
    said = " ".join(capsys.readouterr().out.split())
    assert f"the job uses system-ram; {tmp_path}/inventory.yml says pmem_mode fsdax, and the next" in said
    assert "numactl" not in unit(launch(found, tmp_path, storage="dram")), "it does not matter"
    with pytest.raises(TrainingError) as caught:
        launch(found, tmp_path)
    assert str(caught.value).startswith("host pm-1 is not ready: ")
    words = (
        "storage pmem_libpmem needs pmem_mode fsdax, found system-ram: use --storage pmem_memkind, or run: "
    )
    assert str(caught.value).endswith(f"{words}oeprov bootstrap -i {tmp_path}/inventory.yml")


def test_a_host_in_the_wrong_mode(tmp_path: Path, see: Callable[[State], None]) -> None:
    see(case("re6p-fsdax-converged"))
    found = inventory(tmp_path, "fsdax", kind="re6p")
    assert flags(launch(found, tmp_path))["--storage"] == "pmem_libpmem"
    with pytest.raises(TrainingError) as caught:
        launch(found, tmp_path, storage="pmem_memkind")
    switch = f"oeprov pmem-mode system-ram -i {tmp_path}/inventory.yml --limit pm-1"
    words = "needs pmem_mode system-ram, found fsdax: use --storage pmem_libpmem, or run: "
    assert str(caught.value).endswith(words + switch)


def test_memory_that_is_right_but_no_runtime(tmp_path: Path, see: Callable[[State], None]) -> None:
    """Bootstrap alone would bring the memory back to the inventory's mode."""
    found = inventory(tmp_path, "fsdax", kind="re6p")
    wanted = jobspec.request(found, LaunchOptions(storage="pmem_memkind"))
    missing = [Step("runtime", "install oeprov", "it is missing", role="runtime")]
    said = readiness.why_not(found, wanted, Plan("pm-1", missing), missing, None)
    switch = f"oeprov pmem-mode system-ram -i {tmp_path}/inventory.yml --limit pm-1 --write-inventory"
    assert said.endswith(f"run: {switch}, then: oeprov bootstrap -i {tmp_path}/inventory.yml")
