import io
import json
import os
import re
import stat
from datetime import datetime
from pathlib import Path

import pytest
from fake_processes import make_job
from rich.console import Console

from provision.cli.views import jobs as views
from provision.cli.views.training import TrainingView, describe
from provision.cluster.errors import TrainingError
from provision.cluster.training_settings import TrainingSettings
from provision.jobs import fetching, logview, observing, store
from provision.jobs.metrics import MetricsTail, summary
from provision.jobs.placement import training_words
from provision.jobs.store import JobState, ProcessState
from provision.node import process


def write(path: Path, *events: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def running(job: store.Job, **changes: object) -> None:
    me = os.getpid()
    started = process.start_time(me)
    item = ProcessState(
        name="server-0",
        role="parameter_server",
        host="localhost",
        pid=me,
        started=started,
        endpoint="127.0.0.1:7001",
    )
    state = JobState(phase="running", supervisor_pid=me, supervisor_started=started, processes=[item])
    job.write_state(state.model_copy(update=changes))


def test_token_is_for_its_owner_only_and_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert stat.S_IMODE(job.token_file.stat().st_mode) == 0o600
    token = job.token_file.read_text()
    assert len(token.strip()) == 64
    job.make()
    assert job.token_file.read_text() == token
    assert token.strip() not in job.job_file.read_text()


def test_two_jobs_in_one_second(tmp_path: Path) -> None:
    now = datetime(2026, 11, 21, 12, 15)
    names = [store.create(tmp_path, "deepfm", now).id for _ in range(3)]
    assert names == ["deepfm-20261121-121500", "deepfm-20261121-121500-2", "deepfm-20261121-121500-3"]


def test_jobs_are_found_by_id_and_default_to_the_last(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no job in .* yet"):
        store.find(tmp_path, None)
    with pytest.raises(TrainingError, match=r"no job nonsense in .* yet: start one with `oeprov launch"):
        store.find(tmp_path, "nonsense")
    first, second = make_job(tmp_path), make_job(tmp_path)
    os.utime(first.job_file, ns=(1, 1))
    assert store.find(tmp_path, None).id == second.id
    assert store.find(tmp_path, first.id).id == first.id
    listed = rf"\(last jobs: {first.id}, {second.id}\); `oeprov jobs` lists them$"
    with pytest.raises(TrainingError, match=f"^no job nonsense in .*{listed}"):
        store.find(tmp_path, "nonsense")
    with pytest.raises(TrainingError, match="no job"):
        store.find(tmp_path, "../jobs/" + first.id)


def named(state_dir: Path, name: str, day: int) -> store.Job:
    job = store.create(state_dir, name, datetime(2026, 11, day, 12, 15))
    job.write_spec(make_job(state_dir / "other").spec().model_copy(update={"id": job.id}))
    os.utime(job.job_file, ns=(day, day))
    return job


def test_a_job_is_found_by_its_name_or_the_beginning_of_its_id(tmp_path: Path) -> None:
    one, other, third = named(tmp_path, "j1", 1), named(tmp_path, "j10", 2), named(tmp_path, "wdl-x", 3)
    assert store.find(tmp_path, "j1").id == one.id  # not the beginning of j10 too
    assert store.find(tmp_path, "j10").id == other.id
    assert store.find(tmp_path, "wdl-x-2026").id == third.id
    assert store.find(tmp_path, "w").id == third.id
    assert one.name == "j1"
    with pytest.raises(TrainingError, match=f"^j is 2 jobs: {one.id}, {other.id}; give more letters"):
        store.find(tmp_path, "j")
    again = named(tmp_path, "j1", 4)
    with pytest.raises(TrainingError, match=f"^j1 is 2 jobs: {one.id}, {again.id}; "):
        store.find(tmp_path, "j1")
    assert store.find(tmp_path, again.id).id == again.id
    with pytest.raises(TrainingError, match=r"^no job wdlx in .*; did you mean wdl-x\? \(last jobs: j1-"):
        store.find(tmp_path, "wdlx")


def test_fetch_has_nothing_to_do_where_the_worker_was_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path)
    assert fetching.fetch(job) == 0
    words = f"the worker of job {job.id} is on this machine: all it has written is in {job.run_dir}\n"
    assert capsys.readouterr().out == words, "in one line, however narrow the terminal"


def test_an_empty_name_is_no_name(tmp_path: Path) -> None:
    """``oeprov stop "$JOB"`` with an empty variable must not stop whatever runs."""
    make_job(tmp_path)
    with pytest.raises(TrainingError, match="the job's name is empty; `oeprov jobs` lists"):
        store.find(tmp_path, "")


def test_job_file_that_was_tampered_with(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.job_file.write_text(job.job_file.read_text().replace('"cluster"', '"clutter"'))
    with pytest.raises(TrainingError, match=r"job\.json: cluster: is missing"):
        job.spec()


def test_one_hostile_job_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    good, odd, half = named(tmp_path, "good", 1), named(tmp_path, "odd", 2), named(tmp_path, "half", 3)
    write(good.metrics_file, {"event": "step", "step": 7, "loss": 0.5})
    write(
        odd.metrics_file,
        {"event": "step", "step": "seven", "loss": [], "samples_per_s": {}},
        {"event": "checkpoint", "step": "x", "path": 5},
        {"event": "eval", "loss": "low"},
        {"event": "export", "path": ["x"]},
    )
    running(odd)
    odd.job_file.write_bytes(b"\xff\xfe{")
    odd.state_file.write_text(odd.state_file.read_text().replace('"pid": ', '"pid": -'))
    half.job_file.unlink()
    assert views.status(tmp_path) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{good.id} +interrupted +7/", shown)
    assert f"{odd.id}: {odd.job_file}: is not JSON" in shown
    assert f"{half.id}: it has no job.json: its launch is not that far yet, or was killed" in shown
    assert views.status(tmp_path, as_json=True) == 0
    found = {item["job"]: item for item in json.loads(capsys.readouterr().out)["jobs"]}
    assert [found[job.id]["state"] for job in (good, odd, half)] == [
        "interrupted",
        "unreadable",
        "unreadable",
    ]
    with pytest.raises(TrainingError, match=f"job {half.id}: it has no job.json"):
        store.find(tmp_path, "half")
    odd.job_file.write_text(good.job_file.read_text())
    assert observing.report(odd)["step"] is None
    odd.state_file.write_text("[")
    assert odd.state().message.startswith(f"{odd.state_file}: is not JSON")


def test_a_constant_label_is_named() -> None:
    event = {"event": "eval", "rows": 300, "auc": 0.5, "accuracy": 1.0, "loss": 0.05}
    assert describe(event).endswith("held-out part of 300 rows: AUC 0.5000, accuracy 1.0000, loss 0.0500")
    said = describe({**event, "only_label": 0})
    assert "loss 0.0500; the label is always 0, so AUC says nothing; is it the right column?" in said


def test_state_of_a_supervisor_that_is_gone(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    running(job)
    assert job.state().phase == "running"
    running(job, supervisor_started=1)
    assert job.state().phase == "interrupted"
    running(job, supervisor_started=1, phase="done")
    assert job.state().phase == "done"


def test_only_published_checkpoints_count(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assert job.checkpoint() is None
    for name in ("step-0000000900", "step-0000001000", ".tmp-step-0000001100", "step-0000001200"):
        (job.run_dir / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-0000000900", "step-0000001000"):
        (job.run_dir / "checkpoints" / name / "manifest.json").touch()
    assert job.checkpoint() == (1000, job.run_dir / "checkpoints" / "step-0000001000")


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"event": "old"})
    tail = MetricsTail(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep": 1}\nnot json\n[]\n{"event": "end"}\n')
    assert tail.read() == [{"event": "step", "step": 1}, {"event": "end"}]
    assert tail.read() == []
    path.write_text('{"event": "new"}\n')
    assert tail.read() == [{"event": "new"}]


def test_summary_of_a_long_run_reads_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"event": "start", "steps": 20000})
    write(path, *({"event": "step", "step": step, "loss": 0.5, "pad": "x" * 60} for step in range(1, 12001)))
    assert path.stat().st_size > 3 * (1 << 18)
    found = summary(path)
    assert (found.step, found.steps, found.loss) == (12000, 20000, 0.5)


def test_steps_beyond_the_estimate_are_counted(tmp_path: Path) -> None:
    """The trainer tells its steps at the start, estimated from a file's bytes."""
    path = tmp_path / "metrics.jsonl"
    output = io.StringIO()
    events: list[dict[str, object]] = [
        {"event": "start", "steps": 17},
        {"event": "step", "step": 16},
        {"event": "step", "step": 18},
    ]
    with TrainingView(Console(file=output), clock=lambda: 0.0) as view:
        for event, steps in zip(events, (17, 17, 18), strict=True):
            write(path, event)
            view.event(event)
            assert summary(path).steps == steps
    assert "step 18/18" in output.getvalue()
    for estimate in (17, 19):
        write(path, {"event": "start", "steps": estimate}, {"event": "step", "step": 18})
        write(path, {"event": "trained", "step": 18})
        assert (summary(path).step, summary(path).steps) == (18, 18)


def test_summary_of_a_resumed_run_forgets_the_earlier_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"event": "start", "steps": 10}, {"event": "error", "message": "lost"})
    assert summary(path).error == "lost"
    write(path, {"event": "start", "steps": 10}, {"event": "step", "step": 4, "auc": 0.6})
    found = summary(path)
    assert (found.error, found.step, found.auc, found.eval) == (None, 4, 0.6, None)
    assert summary(tmp_path / "missing.jsonl").step is None


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert views.status(tmp_path) == 0
    assert "no jobs in" in capsys.readouterr().out
    job = make_job(tmp_path)
    running(job)
    step = {"event": "step", "step": 3, "loss": 0.51, "auc": 0.71, "samples_per_s": 91234.0, "eta_s": 61}
    write(job.metrics_file, {"event": "start", "steps": 8}, step)
    write(
        job.server_metrics("server-0"), {"tables": [{"name": "C1", "rows": 1000}, {"name": "C2", "rows": 24}]}
    )
    assert views.status(tmp_path) == 0
    shown = capsys.readouterr().out
    for words in (job.id, "running", "3/8", "0.5100", "0.7100", "91,234", "1:01", "127.0.0.1:7001", "1,024"):
        assert words in shown
    assert views.status(tmp_path, as_json=True) == 0
    (report,) = json.loads(capsys.readouterr().out)["jobs"]
    assert report["rows"] == {"C1": 1000, "C2": 24}
    assert report["processes"][0]["memory_bytes"] > 1 << 20


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    with pytest.raises(TrainingError, match="has no logs yet"):
        logview.logs(store.find(tmp_path, None))
    job.log("server-0").write_text("ready\n")
    job.log("worker-0").write_text("".join(f"line {number}\n" for number in range(5000)))
    logview.logs(store.find(tmp_path, None), lines=2)
    assert capsys.readouterr().out == "server-0 | ready\nworker-0 | line 4998\nworker-0 | line 4999\n"
    logview.logs(store.find(tmp_path, None), process="worker-0", lines=1)
    assert capsys.readouterr().out == "line 4999\n"
    logview.logs(store.find(tmp_path, None), process="worker-0", lines=0)
    assert capsys.readouterr().out == ""
    with pytest.raises(TrainingError, match="no log of process 'worker'; there are: server-0, worker-0"):
        logview.logs(store.find(tmp_path, None), process="worker")


def test_logs_do_not_garble_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x00\x1b]0;title\x07b \x1b[1m8/8\x1b[0m"
    make_job(tmp_path).log("worker-0").write_text(text + "\n")
    logview.logs(store.find(tmp_path, None))
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    logview.logs(store.find(tmp_path, None))
    assert capsys.readouterr().out == "a\ufffd\ufffd]0;title\ufffdb \x1b[1m8/8\x1b[0m\n"


def test_follow_ends_with_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    running(job, phase="done")
    job.log("worker-0").write_text("first\nlast line without an end")
    logview.logs(store.find(tmp_path, None), follow=True)
    assert capsys.readouterr().out == "first\nlast line without an end\n"


def test_plain_progress(tmp_path: Path) -> None:
    out, now = io.StringIO(), [100.0]
    console = Console(file=out, width=200)
    with TrainingView(console, clock=lambda: now[0]) as view:
        view.event({"event": "start", "steps": 100, "rows": 4000, "model": "deepfm"})
        for step in (1, 2, 3):
            view.event(
                {"event": "step", "step": step, "loss": 0.5, "auc": None, "samples_per_s": 1000, "eta_s": 90}
            )
            now[0] += 1.5
        view.event({"event": "checkpoint", "step": 3, "path": "p", "seconds": 0.25})
        view.event(
            {"event": "step", "step": 100, "loss": 0.25, "auc": 0.75, "samples_per_s": 1000, "eta_s": 0}
        )
        view.event({"event": "something new"})
    lines = out.getvalue().splitlines()
    assert lines == [
        "✓ training deepfm on 4,000 rows, 100 steps",
        "  step 1/100  1,000 samples/s  loss 0.5000  AUC –  ETA 1:30",
        "  step 3/100  1,000 samples/s  loss 0.5000  AUC –  ETA 1:30",
        "✓ checkpoint at step 3 (0.2 s)",
        "  step 100/100  1,000 samples/s  loss 0.2500  AUC 0.7500  ETA 0:00",
    ]


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with TrainingView(console) as view:
        view.event({"event": "start", "steps": 8, "model": "wdl"})
        view.event({"event": "step", "step": 4, "loss": 0.5, "auc": 0.7, "samples_per_s": 1000, "eta_s": 9})
    assert "training wdl" in out.getvalue()
    assert "4/8" in out.getvalue()
    assert "AUC 0.7000" in out.getvalue()


def test_the_rows_of_an_export_are_only_asked_for_with_one() -> None:
    for export in (True, False):
        settings = TrainingSettings(data="generate:1000", export=export, export_rows="int8")
        words = training_words(settings, Path("run"))
        assert ("--export" in words, "--export-rows" in words) == (export, export)
