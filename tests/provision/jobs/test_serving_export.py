"""TensorFlow Serving: its commands by a stand-in for docker, its answers by a small server on loopback."""

import json
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_processes import make_job
from recorded import Programs
from test_backends import on_kubernetes, over_ssh

from provision.cli import main as cli
from provision.cluster.errors import TrainingError
from provision.jobs import serving, store
from provision.jobs.store import Job

DOCKER = """\
if sys.argv[1] in ("image", "manifest") and sys.argv[3] != "tensorflow/serving:latest":
    sys.exit("manifest unknown")
if sys.argv[1] == "ps" and not os.path.exists(LOG + ".ended"):
    print("0123456789ab")
"""


class TensorFlowServing(BaseHTTPRequestHandler):
    states: ClassVar[list[str]] = ["AVAILABLE"]

    def do_GET(self) -> None:
        inputs = {
            "C1": {"dtype": "DT_INT64", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "1"}]}},
            "I1": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}, {"size": "2"}]}},
        }
        found: dict[str, Any] = {"signature_def": {"signature_def": {"serving_default": {"inputs": inputs}}}}
        if self.path == "/v1/models/wdl":
            state = self.states[0] if len(self.states) == 1 else self.states.pop(0)
            code = "OK" if state != "END" else "NOT_FOUND"
            self.say({"model_version_status": [{"state": state, "status": {"error_code": code}}]})
        elif self.path == "/v1/models/wdl/metadata":
            self.say({"metadata": found})

    def do_POST(self) -> None:
        assert self.path == "/v1/models/wdl:predict"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body == {"inputs": {"C1": [[0]], "I1": [[0.0, 0.0]]}}
        self.say({"outputs": [[0.25]]})

    def say(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(TensorFlowServing, "states", ["LOADING", "AVAILABLE"])
    server = HTTPServer(("127.0.0.1", 0), TensorFlowServing)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path / "bin")
    found.add("docker", DOCKER)
    monkeypatch.setenv("PATH", f"{found.directory}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = make_job(tmp_path / "state")
    spec = found.spec()
    found.write_spec(spec.model_copy(update={"settings": {"model": "wdl"}}))
    export = found.run_dir / "export" / "3"
    export.mkdir(parents=True)
    (export / "saved_model.pb").touch()
    found.metrics_file.write_text(json.dumps({"event": "export", "path": str(export)}) + "\n")
    return found


def run(job: Job, *words: str) -> int:
    return cli.run(["serve-export", job.id, "--state-dir", str(job.directory.parents[1]), *words])


def test_started_asked_and_stopped(
    job: Job, docker: Programs, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job, "--port", str(port)) == 0
    (started,) = [words for words in docker.calls() if words[1] == "run"]
    assert started[1:] == [
        "run",
        "--detach",
        "--rm",
        f"--name=oeprov-serving-{job.id}",
        f"--publish=127.0.0.1:{port - 1}:8500",
        f"--publish=127.0.0.1:{port}:8501",
        f"--volume={job.run_dir}/export/3:/models/wdl/3:ro",
        "--env=MODEL_NAME=wdl",
        "tensorflow/serving:latest",
    ]
    out = capsys.readouterr().out
    assert '{"outputs": [[0.25]]}' in out
    assert 'curl -d \'{"inputs": {' in out
    assert run(job, "--stop") == 0
    assert docker.calls()[-1] == ["docker", "stop", f"oeprov-serving-{job.id}"]


def test_printed_only(job: Job, docker: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job, "--print") == 0
    assert capsys.readouterr().out.startswith("docker run --detach --rm --name=oeprov-serving-")
    assert docker.calls() == []


def test_missing_image(job: Job, docker: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job, "--image", "site/none") == 1
    assert "neither this machine nor the registry has it (manifest unknown)" in capsys.readouterr().err
    assert "run" not in [words[1] for words in docker.calls()]


@pytest.mark.parametrize("why", ["cannot load", "ended before"])
def test_a_model_that_is_not_loaded_leaves_nothing(job: Job, docker: Programs, port: int, why: str) -> None:
    TensorFlowServing.states = ["END"] if why == "cannot load" else ["LOADING"]
    if why == "ended before":
        Path(f"{docker.log}.ended").touch()
    with pytest.raises(TrainingError, match=why):
        serving.serve(serving.find(job.directory.parents[1], job.id, port=port))
    assert docker.calls()[-1][1] == "stop"


def test_a_job_without_export(job: Job) -> None:
    job.metrics_file.write_text("")
    with pytest.raises(TrainingError, match="has no export; jobs export at their end, with --export"):
        serving.find(job.directory.parents[1], job.id)


def test_an_export_elsewhere_is_named_with_its_place(tmp_path: Path) -> None:
    """Only of a job whose events do not come here; else they say that there is none."""
    job = on_kubernetes(tmp_path / "one")
    with pytest.raises(TrainingError, match=r"it is in claim data: /shared/oeprov/pods/run/export; serve it"):
        serving.find(tmp_path / "one", job.id)
    job = over_ssh(tmp_path / "two")
    job.metrics_file.write_text('{"event": "end"}\n')
    with pytest.raises(
        TrainingError, match=r"has no export; jobs export at their end, with --export .*mpi\)$"
    ):
        serving.find(tmp_path / "two", job.id)


def test_the_last_export_is_served_whatever_ran_since(job: Job) -> None:
    state_dir = job.directory.parents[1]
    later = store.create(state_dir, "wdl", datetime(2026, 11, 22))
    later.job_file.write_text(job.job_file.read_text())
    assert store.all_jobs(state_dir)[-1].id == later.id
    assert str(job.directory) in str(serving.find(state_dir, None).export)
