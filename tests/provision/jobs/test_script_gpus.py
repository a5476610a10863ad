"""One worker of a script per GPU, and who sees which GPU; hosts are canned, no GPU is needed."""

from pathlib import Path
from typing import Any

import pytest
from test_plan_cases import inputs
from test_plan_cases import load as load_case

from provision.cluster.inventory import Inventory
from provision.inventory.loader import load
from provision.jobs import gpus, jobspec, placement, store
from provision.jobs.request import LaunchOptions, Request
from provision.node.state import State

CASE = Path(__file__).parents[1] / "node" / "cases" / "gpu-h200-converged.json"
TEXT = """\
all:
  vars: {oeprov_cluster: c, MORE}
  children:
    parameter_servers: {hosts: {one: }}
    workers: {hosts: {one: , two: }}
  hosts:
    one: {ansible_host: 192.0.2.7, oeprov_kind: gpu}
    two: {ansible_host: 192.0.2.8, oeprov_kind: cpu}
"""


def recorded(count: int) -> State:
    """A real host's state, with so many GPUs."""
    state, _ = inputs(load_case(CASE))
    assert len(state.gpu.devices) == 1
    addresses = [f"0000:00:{number:02x}.0" for number in range(7, 7 + count)]
    return state._replace(gpu=state.gpu._replace(devices=addresses))


def settled(directory: Path, more: str = "", **options: Any) -> tuple[Inventory, Request]:
    script = directory / "train.py"
    script.touch()
    path = directory / "inventory.yml"
    path.write_text(TEXT.replace("MORE", more))
    found = load(path, state_dir=directory)
    return found, jobspec.request(found, LaunchOptions(**{"script": str(script), **options}))


def workers(
    directory: Path, count: int, more: str = "", **options: Any
) -> list[tuple[str, str, str | None, str]]:
    """Host, local rank, visible GPUs and local size of every worker."""
    found, wanted = settled(directory, more, **options)
    job = store.create(directory, "mine", jobspec.datetime(2026, 11, 23))
    placed = placement.place(job, found, {"one": recorded(count)}, wanted)
    return [
        (
            item.host,
            item.environment.get("LOCAL_RANK", ""),
            item.environment.get(gpus.VISIBLE),
            item.environment.get("LOCAL_WORLD_SIZE", ""),
        )
        for item in placed.processes
        if item.role == "worker"
    ]


def test_one_worker_per_gpu(tmp_path: Path) -> None:
    assert workers(tmp_path, 4) == [
        ("one", "0", "0", "4"),
        ("one", "1", "1", "4"),
        ("one", "2", "2", "4"),
        ("one", "3", "3", "4"),
        ("two", "0", None, "1"),
    ]


@pytest.mark.parametrize(
    ("more", "options", "visible"),
    [
        ("worker_count: 1", {}, [None]),
        ("worker_count: 2", {}, ["0,1", "2,3"]),
        ("", {"workers": 3}, ["0", "1", "2,3"]),
        ("", {"workers": 6}, ["0", "1", "2", "3", "0", "1"]),
        ("training_device: cpu", {}, ["-1"]),
        ("runtime_extra: torch", {}, [None] * 4),
        ("worker_environment: {CUDA_VISIBLE_DEVICES: '2'}", {}, ["2"]),
    ],
)
def test_what_excludes_it(tmp_path: Path, more: str, options: dict[str, int], visible: list[str]) -> None:
    found = [item[2] for item in workers(tmp_path, 4, more, **options) if item[0] == "one"]
    assert found == visible


def test_every_worker_has_an_endpoint_and_memory_grows(tmp_path: Path) -> None:
    found, wanted = settled(tmp_path)
    job = store.create(tmp_path, "mine", jobspec.datetime(2026, 11, 23))
    placed = placement.place(job, found, {"one": recorded(2)}, wanted)
    specs = [item for item in placed.processes if item.role == "worker"]
    endpoints = "192.0.2.7:0,192.0.2.7:0,192.0.2.8:0"
    assert [spec.argv[spec.argv.index("--workers") + 1] for spec in specs] == [endpoints] * 3
    assert [spec.environment.get("TF_FORCE_GPU_ALLOW_GROWTH") for spec in specs] == ["true", "true", None]


def test_built_in_models_keep_their_one_worker(tmp_path: Path) -> None:
    found, _ = settled(tmp_path)
    wanted = jobspec.request(found, LaunchOptions(data="generate:800"))
    job = store.create(tmp_path, "mine", jobspec.datetime(2026, 11, 23))
    placed = placement.place(job, found, {"one": recorded(4)}, wanted)
    specs = [item for item in placed.processes if item.role == "worker"]
    assert [(spec.host, spec.environment) for spec in specs] == [("one", {}), ("two", {})]
    assert gpus.note(found.hosts["one"], recorded(4), wanted) == ""


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        ("", {}, "one: 4 workers, one per GPU; worker_count: 1 for one worker with all of them"),
        ("worker_count: 1", {}, "one: 1 worker with 4 GPUs (worker_count: 1); unset: one worker per GPU"),
        ("", {"workers": 6}, "one: 6 workers share 4 GPUs (--workers: 6)"),
        ("training_device: cpu", {}, ""),
        ("runtime_extra: torch", {}, "each sees all and chooses by LOCAL_RANK (runtime_extra torch)"),
        ("worker_environment: {CUDA_VISIBLE_DEVICES: '2'}", {}, "with what worker_environment CUDA_VIS"),
    ],
)
def test_the_plan_says_how_gpus_are_shared_out(
    tmp_path: Path, more: str, options: dict[str, int], words: str
) -> None:
    found, wanted = settled(tmp_path, more, **options)
    note = gpus.note(found.hosts["one"], recorded(4), wanted)
    assert words in note
    assert bool(note) == bool(words)
    assert gpus.note(found.hosts["two"], replace_gpus(recorded(4)), wanted) == ""


def replace_gpus(state: State) -> State:
    return state._replace(gpu=state.gpu._replace(devices=[]))
