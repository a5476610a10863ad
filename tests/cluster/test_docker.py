"""Training in containers of a real docker; ``make test-kubernetes`` runs this."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_script
import pytest
import real_docker
import yaml
from kube_cluster import until
from real_docker import Docker

REPOSITORY = Path(__file__).parents[2]
ROWS = REPOSITORY / "tests" / "oe_runtime" / "data" / "criteo_200.tsv"

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(real_docker.why_not()), reason=real_docker.why_not() or "never"),
]


class User:
    """Runs `oeprov` in a directory with an inventory."""

    def __init__(self, docker: Docker, directory: Path) -> None:
        self.docker, self.directory = docker, directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OEPROV_")},
            "DOCKER_HOST": docker.host,
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "300",
        }
        (directory / ".oeprov" / "pmem0").mkdir(parents=True)  # as bootstrap makes it
        host = {"ansible_connection": "local", "oeprov_kind": "local"}
        groups = {name: {"hosts": {"localhost": None}} for name in ("parameter_servers", "workers")}
        found = {
            "vars": {"parameter_server_storage": "dram", "training_checkpoint_steps": 20},
            "children": groups,
            "hosts": {"localhost": host},
        }
        (directory / "inventory.yml").write_text(yaml.safe_dump({"all": found}))

    def oeprov(self, *words: str) -> str:
        """What a command says that must work."""
        done = subprocess.run(
            [sys.executable, "-m", "provision.cli", *words],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout}{self.news()}"
        return done.stdout

    def launch(self, *words: str) -> str:
        return self.oeprov("launch-training", "-i", "inventory.yml", "--on", "docker", *words)

    def job(self, name: str) -> Path:
        """The directory of the youngest job of a name."""
        return max((self.directory / ".oeprov" / "jobs").glob(f"{name}-*"))

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """What the workers of a job reported."""
        file = self.job(name) / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [item for item in map(json.loads, lines) if item.get("event") == kind]

    def steps(self, name: str) -> int:
        """The last step that a job's first worker reported; the job must not have failed."""
        phase = json.loads((self.job(name) / "state.json").read_text())["phase"]
        assert phase != "failed", self.news()
        return max((item["step"] for item in self.events(name, "step")), default=0)

    def log(self, name: str, process: str) -> str:
        """All that a process of a job said."""
        return (self.job(name) / "logs" / f"{process}.log").read_text()

    def news(self) -> str:
        """The ends of all logs, for a test that fails."""
        files = sorted(self.directory.glob(".oeprov/jobs/*/logs/*.log"))
        return "".join(f"\n{file}:\n{file.read_text()[-2000:]}" for file in files)


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with Docker(tmp_path_factory.mktemp("docker") / "daemon") as docker:
        yield User(docker, tmp_path_factory.mktemp("user") / "home")


def test_a_script_goes_on_without_a_lost_worker_is_stopped_and_resumed(user: User) -> None:
    program = own_script.write(user.directory / "mine")
    path = user.directory / "inventory.yml"
    inventory = yaml.safe_load(path.read_text())
    inventory["all"]["vars"]["training_on_worker_lost"] = "continue"
    path.write_text(yaml.safe_dump(inventory))

    user.launch("--script", str(program), "--workers", "2", "--detach", "--", "100000", "$(RUN)")
    until(lambda: user.steps("train_mine") > 40, 300, user.news)
    for rank in ("0", "1"):
        told = f"told ['{rank}', '2', '{rank}', '2'] ['100000', '$(RUN)'] False"
        assert told in user.log("train_mine", f"worker-{rank}")
    assert (program.parent / "written.txt").exists(), "the script runs in place"

    job = user.job("train_mine")
    (lost,) = user.docker.containers(f"oeprov.job={job.name}", "oeprov.process=worker-1")
    user.docker.kill(lost)
    # The one that is left is the only one on its host from now on.
    told = "told ['0', '1', '0', '1'] ['100000', '$(RUN)'] True"
    until(lambda: told in user.log("train_mine", "worker-0"), 300, user.news)
    begun = len(user.events("train_mine", "step"))
    until(lambda: len(user.events("train_mine", "step")) > begun + 2, 300, user.news)
    user.oeprov("stop")
    assert user.docker.containers() == []
    stopped = user.events("train_mine", "interrupted")[-1]["step"]

    epochs = stopped // own_script.STEPS + 2
    user.oeprov("resume", "--", str(epochs))
    assert f"told ['1', '2', '1', '2'] ['{epochs}'] True" in user.log("train_mine", "worker-1")
    assert user.events("train_mine", "resume")[-1]["step"] == stopped
    assert (
        user.steps("train_mine") <= epochs * own_script.STEPS == user.events("train_mine", "end")[-1]["steps"]
    )
    assert user.docker.containers() == []


def test_evaluation_data_that_lie_apart_are_seen(user: User) -> None:
    places = [user.directory / name / "rows.tsv" for name in ("train", "eval")]
    for place in places:
        place.parent.mkdir()
        place.write_bytes(ROWS.read_bytes())
    sizes = ("--model", "wdl", "--dim", "4", "--batch-size", "50", "--steps", "8")
    user.launch("--name", "apart", *sizes, "--data", "train/*.tsv", "--eval-data", "eval/rows.tsv")
    (found,) = user.events("apart", "eval")
    assert found["rows"] == len(ROWS.read_bytes().splitlines())
    assert user.docker.containers() == []
