"""A training script of the user's own: what is refused beside it, and what its worker is told."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_training_launch import inventory, planned

from provision.cli import main
from provision.cli.views.training import TrainingView
from provision.cluster.errors import TrainingError
from provision.cluster.training_settings import MODEL_SETTINGS, ROW_SETTINGS, TrainingSettings
from provision.jobs import jobspec, later_end, metrics, script, store, worker_group
from provision.jobs.request import LAUNCH_FLAGS, LaunchOptions, Request
from provision.jobs.store import Job, JobSpec, JobState, ProcessSpec
from provision.node import datafiles


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    return tmp_path / "state"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "train-me.py"
    path.parent.mkdir()
    path.write_text("print('hello')\n")
    return path


def job_of(state_dir: Path, options: LaunchOptions, more: str = "") -> tuple[Job, JobSpec]:
    job = store.create(state_dir, "mine", jobspec.datetime(2026, 11, 23))
    spec = planned(inventory(state_dir, more), job, options)
    job.write_spec(spec)
    return job, spec


def worker(spec: JobSpec) -> ProcessSpec:
    return next(item for item in spec.processes if item.role == "worker")


class TestSettings:
    def test_each_is_the_job_s_or_the_script_s(self) -> None:
        """A setting that is added must be said to be one or the other."""
        assert len(MODEL_SETTINGS) == len(set(MODEL_SETTINGS))
        assert set(TrainingSettings.model_fields) - set(MODEL_SETTINGS) == {
            "script", "script_arguments", "data", "device", "tls", "checkpoint_steps", "checkpoint_minutes",
            "keep_checkpoints", "checkpoint_rows", "export_checkpoints", "checkpoint_increments",
            "server_wait", "worker_wait", "on_worker_lost", "restarts", "upload_to", "upload_bandwidth",
            "pipeline", "staleness", "micro_batch", "workqueue", "timeline", "eval_data", "eval_every",
            *ROW_SETTINGS,
        }  # fmt: skip
        assert set(MODEL_SETTINGS) < set(TrainingSettings.model_fields)

    @pytest.mark.parametrize("name", [name for name in MODEL_SETTINGS if name in LAUNCH_FLAGS])
    def test_flags_beside_it_are_refused_by_name(self, state_dir: Path, program: Path, name: str) -> None:
        value = {"model": "wdl", "optimizer": "sgd"}.get(name, 3)
        flag = "--" + name.replace("_", "-")
        with pytest.raises(TrainingError, match=f"^{flag}: with --script .* the script decides that"):
            jobspec.request(inventory(state_dir), LaunchOptions({name: value}, script=str(program)))

    def test_variables_beside_it_are_refused_by_name(self, state_dir: Path, program: Path) -> None:
        more = "training_dim: 3\n      training_seed: 2"
        with pytest.raises(TrainingError, match="training_dim, training_seed: with script"):
            jobspec.request(inventory(state_dir, more), LaunchOptions(script=str(program)))

    def test_what_says_which_rows_are_read_reaches_it(self, state_dir: Path, program: Path) -> None:
        """For job.batches; the trainer refuses it for a script that reads otherwise."""
        schema = program.parent / "columns.yml"
        schema.write_text("label: clicked\ncategories: {site: 40}\n")
        options = LaunchOptions(
            {"batch_size": 512, "epochs": 2, "schema": str(schema), "eval_data": "0.05", "eval_every": 9},
            script=str(program),
            data="s3://clicks/day",
        )
        argv = worker(job_of(state_dir, options)[1]).argv
        found = {argv[at]: argv[at + 1] for at in range(len(argv) - 1) if argv[at].startswith("--")}
        assert (found["--batch-size"], found["--epochs"], found["--eval-data"]) == ("512", "2", "0.05")
        assert json.loads(found["--schema"]) == {"label": "clicked", "categories": {"site": 40}}
        with pytest.raises(TrainingError, match="--epochs does not go with --follow"):
            jobspec.request(
                inventory(state_dir),
                LaunchOptions({"follow": True, "epochs": 2}, script=str(program), data="/inbox"),
            )

    def test_how_it_is_trained_reaches_it(self, state_dir: Path, program: Path) -> None:
        options = LaunchOptions(
            {"workqueue": True, "workers": 2, "on_worker_lost": "continue"}, script=str(program), data="/rows"
        )
        argv = worker(job_of(state_dir, options, "training_timeline: 9")[1]).argv
        assert "--workqueue" in argv
        found = {argv[at]: argv[at + 1] for at in range(len(argv) - 1) if argv[at].startswith("--")}
        assert (found["--on-worker-lost"], found["--timeline"]) == ("continue", "9")

    def test_arguments_need_a_script(self, state_dir: Path) -> None:
        with pytest.raises(TrainingError, match=r"arguments after --: found --epochs 3; .* add --script"):
            jobspec.request(inventory(state_dir), LaunchOptions(script_arguments=["--epochs", "3"]))
        more = "training_script_arguments: [--epochs, '3']"
        with pytest.raises(TrainingError, match="set training_script too"):
            jobspec.request(inventory(state_dir, more), LaunchOptions())

    def test_of_the_inventory_are_taken(self, state_dir: Path, program: Path) -> None:
        more = f"training_script: {program}\n      training_script_arguments: [--epochs, '3']"
        wanted = jobspec.request(inventory(state_dir, more), LaunchOptions())
        assert (wanted.training.script, wanted.training.script_arguments) == (str(program), ["--epochs", "3"])
        assert wanted.name == "train-me"

    def test_a_script_that_is_not_there(self, state_dir: Path, program: Path) -> None:
        with pytest.raises(TrainingError, match=r"--script: there is no file /nowhere/train.py"):
            jobspec.request(inventory(state_dir), LaunchOptions(script="/nowhere/train.py"))
        with pytest.raises(TrainingError, match="is a directory; name the program in it"):
            jobspec.request(inventory(state_dir), LaunchOptions(script=str(program.parent)))

    def test_flavors_of_others_have_their_own_scripts(self, state_dir: Path, program: Path) -> None:
        found = inventory(state_dir, "runtime_flavor: openembedding")
        with pytest.raises(TrainingError, match="--script: flavor openembedding"):
            jobspec.request(found, LaunchOptions(script=str(program)))


class TestWorker:
    def test_runs_it_in_place_with_its_arguments_at_the_end(self, state_dir: Path, program: Path) -> None:
        words = ["--rank", "{servers}", "--", "--workers", "a"]
        options = LaunchOptions(script=str(program), script_arguments=words, data="s3://clicks/day")
        argv = worker(job_of(state_dir, options)[1]).argv
        assert argv[2:5] == ["oe_runtime.train", "--script", str(program)]
        assert argv[argv.index("--data") + 1] == "s3://clicks/day"
        assert argv[-6:] == ["--", *words]
        of_the_script = {"--" + name.replace("_", "-") for name in MODEL_SETTINGS}
        assert of_the_script & set(argv[: -len(words)]) == set()

    def test_script_s_arguments_stay_as_they_are(self, state_dir: Path, program: Path) -> None:
        words = ["--rank", "7", "--workers", "a,b", "{servers}"]
        options = LaunchOptions(script=str(program), script_arguments=words, workers=2)
        specs = [item for item in job_of(state_dir, options)[1].processes if item.role == "worker"]
        known = {store.SERVERS: "127.0.0.1:7000", store.WORKERS: "127.0.0.1:7500,127.0.0.1:7501"}
        lines = worker_group.commands(specs, specs, known)
        lines = [
            worker_group.with_words(spec, argv, ["--generation", "4", "--resume"])
            for spec, argv in zip(specs, lines, strict=True)
        ]
        for rank, argv in enumerate(lines):
            own, scripts = argv[: -len(words) - 1], argv[-len(words) - 1 :]
            assert scripts == ["--", *words]
            assert own[-3:] == ["--generation", "4", "--resume"]
            assert own[own.index("--rank") + 1] == str(rank)
            assert known[store.SERVERS] in own

    def test_local_ranks_are_of_those_that_are_left(self) -> None:
        def spec(rank: int, host: str, **environment: str) -> ProcessSpec:
            return ProcessSpec(
                name=f"worker-{rank}", role="worker", host=host, argv=[], environment=environment
            )

        specs = [spec(n, "a", LOCAL_RANK=str(n), LOCAL_WORLD_SIZE="3", X="x") for n in range(3)]
        left = [specs[0], specs[2], spec(3, "b", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")]
        found = [worker_group.environment_among(item, left) for item in left]
        assert [(item["LOCAL_RANK"], item["LOCAL_WORLD_SIZE"]) for item in found] == [
            ("0", "2"), ("1", "2"), ("0", "1")
        ]  # fmt: skip
        assert found[1]["X"] == "x"
        built_in = spec(0, "a")
        assert worker_group.environment_among(built_in, [built_in]) == {}

    def test_in_a_container_has_its_directory(self, state_dir: Path, program: Path) -> None:
        options = LaunchOptions(script=str(program), script_arguments=["a"], on="docker", data="s3://x/y")
        argv = worker(job_of(state_dir, options)[1]).argv
        assert f"--volume={program.parent}:{program.parent}" in argv
        assert {"--env=LOCAL_RANK", "--env=LOCAL_WORLD_SIZE"} <= set(argv)  # each start has its own values
        assert argv[-2:] == ["--", "a"]
        assert not any(word.startswith("--volume=s3") for word in argv)

    def test_no_arguments(self, state_dir: Path, program: Path) -> None:
        spec = worker(job_of(state_dir, LaunchOptions(script=str(program)))[1])
        assert "--" not in spec.argv
        assert worker_group.with_words(spec, spec.argv, ["--resume"]) == [*spec.argv, "--resume"]


def test_nothing_has_the_credentials_of_a_store(
    state_dir: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers find them in the environment, or in files of their user; `ps` shows command lines."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    options = LaunchOptions(script=str(program), data="s3://clicks/day", upload_to="s3://models/one")
    job, spec = job_of(state_dir, options)
    written = [path.read_text() for path in state_dir.rglob("*") if path.is_file()]
    assert job.job_file.read_text() in written
    for text in [*written, repr(spec)]:
        assert "of-the-test" not in text


def test_the_job_file_says_nothing_of_what_the_script_decides(state_dir: Path, program: Path) -> None:
    options = LaunchOptions(script=str(program), script_arguments=["--epochs", "3"])
    job, spec = job_of(state_dir, options)
    assert set(MODEL_SETTINGS) & spec.settings.keys() == set()
    again = Request.from_job(job.spec())
    assert (again.training.script, again.training.script_arguments) == (str(program), ["--epochs", "3"])
    _, built_in = job_of(state_dir, LaunchOptions())
    assert {"script", "script_arguments"} & built_in.settings.keys() == set()


def test_progress_has_what_a_script_tells(tmp_path: Path) -> None:
    start = {"event": "start", "model": "train.py", "rows": None, "steps": None}
    step = {
        "event": "step",
        "step": 10,
        "steps": 32,
        "loss": 0.5,
        "auc": None,
        "samples_per_s": 900.0,
        "eta_s": 2,
    }
    out = io.StringIO()
    with TrainingView(Console(file=out, width=200)) as view:
        view.event(start)
        view.event(step)
    assert out.getvalue().splitlines()[-1] == "  step 10/32  900 samples/s  loss 0.5000  ETA 0:02"
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (start, step)))
    assert (metrics.summary(path).step, metrics.summary(path).steps) == (10, 32)


def test_resume_takes_other_arguments(state_dir: Path, program: Path) -> None:
    job, spec = job_of(state_dir, LaunchOptions(script=str(program), script_arguments=["a"]))
    same = script.resumed(job, Request.from_job(spec), None)
    other = script.resumed(job, Request.from_job(spec), ["b"])
    assert (same.training.script_arguments, other.training.script_arguments) == (["a"], ["b"])
    job, spec = job_of(state_dir, LaunchOptions())
    with pytest.raises(TrainingError, match="trains a built-in model"):
        script.resumed(job, Request.from_job(spec), ["b"])


def test_a_script_that_reads_by_job_batches_is_trained_longer(state_dir: Path, program: Path) -> None:
    """Also one that was launched with the default length, if its run has said that it reads so."""
    job, spec = job_of(state_dir, LaunchOptions(script=str(program), data="s3://x/y"))
    wanted = Request.from_job(spec)
    told = [{"event": "start"}, {"event": "step", "step": 7, "epoch": 0}]

    def longer(**end: int) -> Request:
        job.run_dir.mkdir(exist_ok=True)
        job.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in told))
        (job.run_dir / "checkpoints" / "step-0000000007").mkdir(parents=True, exist_ok=True)
        (job.run_dir / "checkpoints" / "step-0000000007" / "manifest.json").touch()
        return later_end.extended(wanted, end, job.id, "oe_runtime", later_end.trained(job))

    job.write_state(JobState.supervised_here(phase="done", processes=[]))
    with pytest.raises(TrainingError, match=r"--epochs 3: the script of job .* decides how long it trains"):
        longer(epochs=3)
    told.insert(1, {"event": "input"})
    assert longer(epochs=3).training.epochs == 3
    assert longer(steps=9).training.steps == 9
    with pytest.raises(TrainingError, match=r"--epochs 1: job .* has trained 1 epoch, 7 steps already"):
        longer(epochs=1)
    told.remove({"event": "input"})
    wanted = replace(wanted, training=wanted.training.model_copy(update={"batch_size": 64}))
    job.write_spec(spec.model_copy(update={"settings": wanted.settings()}))
    assert longer(epochs=3).training.epochs == 3


def test_words_after_the_dashes_are_the_script_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir()
    path = inventory(tmp_path / "state").path
    words = ["launch-training", "-i", str(path), "--state-dir", str(tmp_path), "--", "--help", "JOB"]
    assert main.run(words) == 1
    assert "arguments after --: found --help JOB" in capsys.readouterr().err


def test_data_is_looked_for_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "a[1].bin").write_bytes(b"\0")
    assert datafiles.problem("match", str(tmp_path / "a[1].bin")) == ""
    assert datafiles.problem("match", str(tmp_path / "*.bin")) == ""
    assert datafiles.problem("match", str(tmp_path / "*.txt")) == f"no file matches {tmp_path}/*.txt"
    assert "No such file" in datafiles.problem("match", str(tmp_path / "none"))
    several = [str(tmp_path / name) for name in ("*.bin", "*.txt", "none")]
    assert datafiles.problem("match", *several) == f"no file matches {tmp_path}/*.txt"
