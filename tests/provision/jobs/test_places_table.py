"""The table of docs/compatibility.md, by commands: each place does what the table says, or says why not.

What a place can do is asked of it until the place itself is needed, which does not answer here; what it
cannot is refused before, with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from test_kubernetes_manifests import VARIANTS, inventory_file

from provision.cli import main
from provision.cluster.errors import TrainingError
from provision.inventory.loader import load
from provision.jobs import jobspec, launching, placement, store
from provision.jobs.backends import registry
from provision.jobs.backends.kubernetes import api, manifests, plan, record, resuming
from provision.jobs.request import LaunchOptions
from provision.jobs.store import Job, JobState

SILENT = "does not answer today"
COLUMNS = {
    "here": "hosts",
    "ssh": "hosts",
    "docker": "docker",
    "podman": "docker",
    "kubernetes": "kubernetes",
}
HOSTS = """\
all:
  vars: {{oeprov_cluster: test, training_data: "generate:800", parameter_server_storage: dram}}
  children:
    parameter_servers: {{hosts: {{a: }}}}
    workers: {{hosts: {{a: }}}}
  hosts:
    a: {{{how}}}
"""


def table() -> dict[str, dict[str, str]]:
    """Row by row, what each place can."""
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()
    lines = page.partition("| what | `hosts`")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(("hosts", "docker", "kubernetes"), row[1:], strict=True)) for row in cells}


@dataclass
class Place:
    """A place with a job that was stopped at step 3."""

    name: str
    job: Job
    inventory: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def on(self) -> str:
        """Its word after ``--on``."""
        return "hosts" if self.name in ("here", "ssh") else self.name

    def oeprov(self, *words: str) -> str:
        """What a command says that fails."""
        assert main.run([*words, "--state-dir", str(self.job.directory.parents[1])]) == 1
        return " ".join(self.capsys.readouterr().err.split())

    def launch(self, *words: str) -> str:
        """What a launch says there."""
        return self.oeprov("launch-training", "-i", str(self.inventory), "--on", self.on, *words)


def _on_hosts(name: str, directory: Path) -> tuple[Job, Path]:
    path = directory / "inventory.yml"
    how = "ansible_host: 192.0.2.1, oeprov_kind: cpu"
    path.write_text(
        HOSTS.format(how=how if name == "ssh" else "ansible_connection: local, oeprov_kind: local")
    )
    found, job = load(path), store.create(directory / "state", "job", datetime(2026, 11, 21))
    engine = {} if name in ("here", "ssh") else {"on": name}
    wanted = jobspec.request(found, LaunchOptions(**engine))
    placed = placement.place(job, found, {}, wanted)
    job.write_spec(jobspec.build(job, found, placed, wanted, datetime(2026, 11, 21)))
    job.write_state(JobState(phase="interrupted", message="stopped at step 3"))
    events = [{"event": "step", "step": 3}, {"event": "checkpoint", "step": 3, "path": "/r/step-3"}]
    job.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return job, path


def _on_kubernetes(directory: Path) -> tuple[Job, Path]:
    path = inventory_file(directory, VARIANTS["dram"])
    made, job = (
        plan.settle(load(path), LaunchOptions(), "job"),
        store.create(directory / "state", "job", datetime(2026, 11, 21)),
    )
    kept: dict[str, Any] = {"context": "", "namespace": "ads", "claim": "deeprec", "run": "/shared/run"}
    kept |= {"servers": made.servers, "workers": 1, "plan": resuming.kept(made), "phase": "interrupted"}
    record.write(job, record.Record(id=job.id, created="now", **kept))
    (job.directory / record.MANIFESTS).write_text(manifests.text(manifests.build(made)))
    return job, path


@pytest.fixture(params=COLUMNS)
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Place:
    def silent(*_: object, **__: object) -> Any:
        raise TrainingError(SILENT)

    monkeypatch.setattr(launching, "survey", silent)
    monkeypatch.setattr("provision.jobs.backends.containers._ask", silent)
    monkeypatch.setattr("provision.jobs.backends.containers.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("provision.hosts.errands.run", silent)
    monkeypatch.setattr(api.Api, "__init__", silent)
    on = request.param
    job, path = _on_kubernetes(tmp_path) if on == "kubernetes" else _on_hosts(on, tmp_path)
    return Place(on, job, path, capsys)


def trains(place: Place, _: str) -> None:
    script = place.inventory.with_name("train.py")
    script.write_text("from oe_runtime import job\n")
    assert SILENT in place.launch()
    assert SILENT in place.launch("--script", str(script), "--workers", "2", "--", "--more", "1")


def has_flavors(place: Place, cell: str) -> None:
    text = place.inventory.read_text()
    others = [("openembedding", "wdl"), ("deeprec", "wdl")] if place.name != "here" else []
    for flavor, model in others:
        head, middle = ("  vars: {", "") if "  vars: {" in text else ("  vars:\n", "    ")
        setting = f"runtime_flavor: {flavor}" + (", " if not middle else "\n")
        place.inventory.write_text(text.replace(head, f"{head}{middle}{setting}", 1))
        said = place.launch("--model", model)
        assert cell == "yes" or "runs on hosts" in said, said
        assert "--on" not in said or cell != "yes", said


def is_looked_at(place: Place, _: str) -> None:
    backend = registry.backend_of(place.job)
    assert backend.observe(place.job)["state"] in ("interrupted", "unreadable")
    assert not backend.is_running(place.job)
    assert main.run(["jobs", "--state-dir", str(place.job.directory.parents[1])]) == 0
    place.capsys.readouterr()


def resumes(*options: str) -> Callable[[Place, str], None]:
    def check(place: Place, _: str) -> None:
        said = place.oeprov("resume", place.job.id, *options)
        assert SILENT in said, said

    return check


def scales(place: Place, _: str) -> None:
    """A job that runs; and one that does not is refused before anything is asked."""
    words = ["scale", place.job.id, "--servers", "3", "--yes"]
    assert "is not running: it is interrupted; nothing was changed" in place.oeprov(*words)
    if place.name == "kubernetes":
        record.write(place.job, record.read(place.job).model_copy(update={"phase": "running"}))
    else:
        place.job.write_state(JobState.supervised_here(phase="running"))
    said = place.oeprov(*words)
    assert SILENT in said, said


def is_fetched(place: Place, cell: str) -> None:
    results = registry.backend_of(place.job).results(place.job)
    if cell.startswith("no"):
        for words in (("fetch", place.job.id), ("checkpoint", "inspect", place.job.id)):
            assert results in place.oeprov(*words)
    elif place.name == "ssh":
        assert SILENT in place.oeprov("fetch", place.job.id)
    else:
        assert not results, "its files are here"


def is_served(place: Place, cell: str) -> None:
    said = place.oeprov("serve", place.job.id)
    if place.name == "kubernetes":
        assert SILENT in said
        flag = ["--state-dir", str(place.job.directory.parents[1])]
        assert main.run(["serve", place.job.id, "--print", *flag]) == 0
        assert "kind: Deployment" in place.capsys.readouterr().out
        assert "nothing is served in" in place.oeprov("serve", "rollback", "--step", "3")
    elif place.name == "ssh":
        assert SILENT in said
    else:
        assert "has neither a checkpoint with its rows in files nor an export yet" in said


def starts_servers_alone(place: Place, cell: str) -> None:
    assert place.name == "kubernetes" or SILENT in place.oeprov("servers", "up", "-i", str(place.inventory))
    assert cell == "yes" or cell.startswith("no: "), "`servers up` has no --on, and the page says what to use"


CHECKS: dict[str, Callable[[Place, str], None]] = {
    "built-in models and scripts, several workers": trains,
    "flavors other than `oe_runtime`": has_flavors,
    "`status`, `logs`, `stop`, `jobs`, `jobs rm`": is_looked_at,
    "`resume`": resumes(),
    "`resume --epochs`, `--steps`": resumes("--epochs", "9", "--steps", "99"),
    "`resume --workers`": resumes("--workers", "2"),
    "`scale`": scales,
    "`resume --servers`": resumes("--servers", "3"),
    "`fetch`, `serve-export`, `checkpoint JOB`": is_fetched,
    "`serve`, `serve rollback`": is_served,
    "`servers up`": starts_servers_alone,
}
ELSEWHERE = {"metrics for Prometheus"}  # test_server_settings.py goes through the places


def test_each_row_is_tested() -> None:
    assert table().keys() == CHECKS.keys() | ELSEWHERE


@pytest.mark.parametrize("row", CHECKS)
def test_a_place_can_what_the_table_says(place: Place, row: str) -> None:
    CHECKS[row](place, table()[row][COLUMNS[place.name]])
