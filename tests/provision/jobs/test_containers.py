"""Jobs in containers: the commands that engines get, by stand-ins for docker and podman that record them."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from fake_processes import make_environment
from recorded import write_program
from test_training_launch import inventory
from test_training_supervisor import assert_nothing_left, until

from provision.cli import main as cli
from provision.cli.views.training import JobTerminal
from provision.cluster.errors import TrainingError
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey
from provision.jobs import jobspec, launching, placement, store, worker_group
from provision.jobs.backends import containers
from provision.jobs.request import LaunchOptions, Request
from provision.jobs.store import Job
from provision.jobs.supervisor import Supervisor
from provision.node.step import Plan, Step

ENGINE = """\
import json, os, sys
words = sys.argv[1:]
passed = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
with open({log!r}, "a") as log:
    given = ["--env=" + name + "=" + os.environ[name] for name in passed if "=" not in name]
    log.write(json.dumps(words[:1] + given + words[1:]) + "\\n")
if words[0] == "info":
    sys.exit({info})
if words[:2] == ["image", "inspect"]:
    if words[2] in {images}:
        sys.exit(0)
    sys.exit("Error: No such image: " + words[2])
assert words[0] == "run" and "--interactive" in words
begin = words.index("python")
os.execv({process!r}, [{process!r}, *words[begin + 1 :]])
"""


class Engine:
    """A program ``docker`` or ``podman`` that runs the stand-ins for the runtime in place of images."""

    def __init__(self, directory: Path, name: str, worker: str, images: list[str], info: str = "0") -> None:
        self.log = directory / f"{name}.log"
        self.log.touch()
        process = make_environment(directory / "environment", worker=worker) / "bin" / "python"
        program = directory / "bin" / name
        program.parent.mkdir(exist_ok=True)
        values = {"log": str(self.log), "process": str(process)}
        write_program(program, ENGINE.format(**values, images=images, info=info))

    def runs(self) -> list[list[str]]:
        return [words for words in map(json.loads, self.log.read_text().splitlines()) if words[0] == "run"]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    return tmp_path / "state"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def make(
        name: str = "docker",
        worker: str = "good",
        images: tuple[str, ...] = ("oeprov-server", "oeprov-worker"),
        info: str = "0",
    ) -> Engine:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return Engine(tmp_path, name, worker, list(images), info)

    return make


def made(state_dir: Path, options: LaunchOptions, more: str = "") -> Job:
    """A job that is ready for its supervisor."""
    found = inventory(state_dir, more)
    wanted = jobspec.request(found, options)
    now = datetime(2026, 11, 22)
    job = store.create(state_dir, "ctr", now)
    job.write_spec(jobspec.build(job, found, placement.place(job, found, {}, wanted), wanted, now))
    return job


def run(job: Job, *, resume: bool = False, stop: StopRequest | None = None) -> str:
    return Supervisor(job, lambda _: None, stop or StopRequest()).run(resume).phase


@pytest.mark.parametrize("name", containers.ENGINES)
def test_a_job_in_containers(state_dir: Path, engine: Callable[..., Engine], name: str) -> None:
    recorded = engine(name)
    data = state_dir.parent / "day_0.tsv"
    data.touch()
    job = made(state_dir, LaunchOptions(on=name, data=str(data), servers=2))
    assert run(job) == "done"
    assert_nothing_left(job)
    first, second, worker = recorded.runs()
    for words in (first, second, worker):
        assert {"--rm", "--init", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(
            words
        )
        assert f"--user={os.getuid()}:{os.getgid()}" in words
        assert "--network=host" in words
        assert f"--volume={job.directory}:{job.directory}:ro" in words, "job.json has commands"
        mounted = {word for word in words if word.startswith(f"--volume={job.directory}/")}
        folders = ("run",) if words is worker else ("run", "ready", "metrics")
        assert mounted == {f"--volume={job.directory}/{name}:{job.directory}/{name}" for name in folders}
        assert f"--label=oeprov.job={job.id}" in words
        assert not any(word.startswith("--cap-add") for word in words)
    pool = state_dir / "pmem0" / job.id
    assert f"--volume={pool}:{pool}" in first, "pools of other jobs are not there"
    assert f"--volume={data}:{data}:ro" in worker
    assert f"--volume={pool}:{pool}" not in worker
    assert second[second.index("oeprov-server") + 1 :][:3] == ["python", "-m", "oe_runtime.server"]
    assert worker[worker.index("oeprov-worker") + 1 :][:3] == ["python", "-m", "oe_runtime.train"]


def test_data_that_lie_apart_are_mounted_each(state_dir: Path) -> None:
    one, two = state_dir.parent / "one", state_dir.parent / "two"
    for place in (one, two):
        place.mkdir()
        (place / "rows.tsv").touch()
    options = LaunchOptions(on="docker", data=f"{one}/*.tsv", eval_data=f"{two}/rows.tsv")
    argv = made(state_dir, options).spec().processes[-1].argv
    assert {f"--volume={one}:{one}:ro", f"--volume={two}/rows.tsv:{two}/rows.tsv:ro"} <= set(argv)
    # The engines refuse one place twice.
    options = LaunchOptions(on="docker", data=f"{one}/*.tsv", eval_data=f"{one}/e*.tsv")
    argv = made(state_dir, options).spec().processes[-1].argv
    assert [word for word in argv if word.startswith(f"--volume={one}")] == [f"--volume={one}:{one}:ro"]
    job = made(state_dir, LaunchOptions(on="docker", eval_data="0.05"))
    argv = job.spec().processes[-1].argv
    assert [word for word in argv if word.endswith(":ro")] == [f"--volume={job.directory}:{job.directory}:ro"]


def test_evaluation_data_get_their_whole_path(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(state_dir)
    (state_dir / "eval.tsv").touch()
    argv = made(state_dir, LaunchOptions(on="docker", eval_data="eval.tsv")).spec().processes[-1].argv
    assert f"--volume={state_dir}/eval.tsv:{state_dir}/eval.tsv:ro" in argv
    assert argv[argv.index("--eval-data") + 1] == f"{state_dir}/eval.tsv"


def test_data_beside_a_script_are_mounted_with_it(state_dir: Path) -> None:
    script = state_dir.parent / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    options = LaunchOptions(on="docker", script=str(script), data=f"{script.parent}/*.tsv")
    argv = made(state_dir, options).spec().processes[-1].argv
    mounted = [word for word in argv if word.startswith(f"--volume={script.parent}")]
    assert mounted == [f"--volume={script.parent}:{script.parent}"]


def test_a_script_beside_the_state_directory_cannot_change_jobs(state_dir: Path) -> None:
    script = state_dir.parent / "train.py"
    script.touch()
    job = made(state_dir, LaunchOptions(on="docker", script=str(script)))
    argv = job.spec().processes[-1].argv
    mounted = [word for word in argv if word.startswith("--volume=")]
    run = job.run_dir
    assert [word.split(":", 1)[1] for word in mounted] == [
        str(script.parent),
        f"{state_dir}:ro",
        f"{job.directory}:ro",
        str(run),
    ]


def test_local_ranks_are_of_each_start(state_dir: Path, engine: Callable[..., Engine]) -> None:
    """Workers that go on without a lost one are numbered anew, in their containers too."""
    recorded = engine()
    script = state_dir.parent / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    job = made(state_dir, LaunchOptions(on="docker", script=str(script), workers=2))
    assert run(job) == "done"
    workers = [words for words in recorded.runs() if "oe_runtime.train" in words]
    for rank in ("0", "1"):
        (words,) = [words for words in workers if f"--env=LOCAL_RANK={rank}" in words]
        assert "--env=LOCAL_WORLD_SIZE=2" in words
    left = [item for item in job.spec().processes if item.name == "worker-1"]
    assert worker_group.environment_among(left[0], left) == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert not any("LOCAL_RANK=" in word for word in left[0].argv)


def test_stop_and_resume(state_dir: Path, engine: Callable[..., Engine]) -> None:
    recorded = engine(worker="waits")
    job = made(state_dir, LaunchOptions(on="docker"))
    stop = StopRequest()
    phases: list[str] = []
    thread = threading.Thread(target=lambda: phases.append(run(job, stop=stop)))
    thread.start()
    until(job.run_dir / "waiting")
    stop.ask()
    thread.join()
    assert phases == ["interrupted"]
    assert job.checkpoint() is not None
    # `oeprov resume` makes the processes anew from the job's own settings.
    found = inventory(state_dir)
    again = Request.from_job(job.spec())
    assert again.on == "docker"
    job.write_spec(
        jobspec.build(job, found, placement.place(job, found, {}, again), again, datetime(2026, 11, 22))
    )
    assert run(job, resume=True) == "done"
    assert recorded.runs()[-1][-1] == "--resume"
    assert_nothing_left(job)


def test_memory_nodes_need_a_capability(state_dir: Path) -> None:
    job = made(state_dir, LaunchOptions(on="podman"))
    server = job.spec().processes[0]
    plain = server.model_copy(
        update={"argv": ["python", "-m", "oe_runtime.server", "--storage", "pmem_memkind"]}
    )
    found = inventory(state_dir)
    wanted = jobspec.request(found, LaunchOptions(on="podman"))
    assert "--cap-add=SYS_NICE" in containers.wrapped(job, found, wanted, plain).argv


def test_settings_of_the_inventory(state_dir: Path) -> None:
    more = (
        "container_worker_image: registry/w:1\n      container_arguments: [--gpus=all]\n"
        "      worker_environment: {TF_CPP_MIN_LOG_LEVEL: '2'}"
    )
    job = made(state_dir, LaunchOptions(on="docker", storage="dram"), more)
    server, worker = job.spec().processes
    assert "--env=TF_CPP_MIN_LOG_LEVEL=2" in worker.argv
    place = worker.argv.index("registry/w:1")
    assert worker.argv[place - 1] == "--gpus=all"
    assert not any(word.startswith("--volume") and "pmem0" in word for word in server.argv)


class TestRefusals:
    def refused(self, state_dir: Path, words: str, on: str = "docker") -> None:
        with pytest.raises(TrainingError) as caught:
            launching.launch(
                inventory(state_dir), LaunchOptions(on=on), state_dir=state_dir, screen=JobTerminal()
            )
        assert words in str(caught.value)
        assert store.all_jobs(state_dir) == []

    def test_no_engine(self, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        self.refused(state_dir, "--on podman: there is no program podman", "podman")

    def test_engine_that_does_not_answer(self, state_dir: Path, engine: Callable[..., Engine]) -> None:
        engine(info="'Cannot connect to the Docker daemon'")
        self.refused(state_dir, "--on docker: docker info fails: Cannot connect to the Docker daemon")

    def test_no_image(self, state_dir: Path, engine: Callable[..., Engine]) -> None:
        engine(images=("oeprov-server",))
        self.refused(
            state_dir, "container_worker_image: docker has no image oeprov-worker (Error: No such image"
        )

    def test_hosts_over_ssh(self, state_dir: Path) -> None:
        found = inventory(state_dir)
        (host,) = found.hosts.values()
        far = replace(found, hosts={host.name: replace(host, connection="ssh")})
        with pytest.raises(
            TrainingError, match="host localhost is reached over ssh; use an inventory with kind"
        ):
            containers.check(far, "docker")


def test_what_images_have_need_not_be_on_the_host(
    state_dir: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    steps = [Step("runtime", "install tensorflow", "why"), Step("directory", "make /x", "why")]
    monkeypatch.setattr(
        launching, "survey", lambda inventory: ClusterSurvey(plans={"localhost": Plan("localhost", steps)})
    )
    with pytest.raises(TrainingError, match="host localhost is not ready: make /x; run"):
        launching.launch(
            inventory(state_dir), LaunchOptions(on="docker"), state_dir=state_dir, screen=JobTerminal()
        )


@pytest.mark.process
def test_replicas_of_a_job_in_containers(
    state_dir: Path,
    engine: Callable[..., Engine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come back when they are killed, and see the run, their own directory and the files of flags."""
    recorded, more = engine("podman"), "container_arguments: [--gpus=all]"
    script = state_dir.parent / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    source = made(state_dir, LaunchOptions(on="podman", script=str(script), workers=2), more)
    step = source.run_dir / "checkpoints" / "step-0000000002"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"step": 2}')
    tokens, places = state_dir.parent / "tokens", state_dir.parent / "compiled"
    tokens.mkdir()
    (tokens / "token").write_text("secret")
    files = ["--request-token-file", str(tokens / "token"), "--compile-to", str(places)]
    where = ["--state-dir", str(state_dir)]
    assert cli.run(["serve", source.id, "--replicas", "2", "--port", "0", *files, "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    job = Job(state_dir / "jobs" / found["job"])
    assert [item["state"] for item in found["processes"]] == ["runs", "runs"]
    labels = {word for words in recorded.runs() for word in words if "oeprov.process=" in word}
    assert labels == {"--label=oeprov.process=replica-0", "--label=oeprov.process=replica-1"}
    for words in recorded.runs():
        image = words.index("oeprov-worker")
        assert words[image + 1 :][:4] == ["python", "-m", "oe_runtime.serve", str(source.run_dir)]
        assert {"--network=host", "--read-only", "--cap-drop=ALL", "--gpus=all"} <= set(words[:image])
        assert not any("LOCAL_RANK" in word for word in words)
        mounted = [word.removeprefix("--volume=").split(":", 1)[1] for word in words if "--volume=" in word]
        assert sorted(mounted) == sorted(
            [
                f"{job.directory}:ro",
                str(job.directory / "ready"),
                str(source.run_dir),
                f"{tokens}:ro",
                str(places),
            ]
        )
    victim = job.state().processes[0].pid
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while job.ready("replica-0").get("pid", victim) == victim:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert cli.run(["stop", job.id, *where]) == 0
    assert len(recorded.runs()) == 3
    assert_nothing_left(job)

    # What an engine lacks is said before anything is made.
    capsys.readouterr()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.run(["serve", source.id, "--port", "0", *where]) == 1
    assert "--on podman: there is no program podman" in capsys.readouterr().err
    assert len(store.all_jobs(state_dir)) == 2


def test_resume_keeps_the_engine(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory(state_dir)
    path = str(state_dir.parent / "inventory.yml")
    assert (
        cli.run(["launch-training", "--resume", "--on", "docker", "-i", path, "--state-dir", str(state_dir)])
        == 1
    )
    assert "leave out --on" in capsys.readouterr().err
