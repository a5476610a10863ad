"""The trainer with its data in an object store, and its checkpoints, export and report uploaded there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import job_scripts
import numpy as np
import pytest
from job_scripts import run, start, write
from object_store import BUCKET, DENIED, KEY, SECRET, SLOW_DOWN, ObjectStore, Stall
from test_train import train
from training_runs import DATA, SMALL, ServerProcess, events, losses, wait_for

from oe_runtime import checkpoint
from oe_runtime.checkpoint.remote import RemoteCheckpoints
from oe_runtime.data import generate
from oe_runtime.errors import ServingError
from oe_runtime.serving import Model
from oe_runtime.support import remote_files

pytestmark = pytest.mark.usefixtures("keep_determinism")
URL = f"s3://{BUCKET}/runs/first"


@pytest.fixture
def keep_determinism() -> object:
    """See test_train."""
    yield
    if "tensorflow" in sys.modules:
        from tensorflow.python.util import _pywrap_determinism

        _pywrap_determinism.enable(False)


@pytest.fixture
def store(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(remote_files, "_ATTEMPTS", 1)
    return object_store


def uploaded(store: ObjectStore) -> list[str]:
    """The names of published checkpoints."""
    return [key.split("/")[3] for key in store.objects() if key.endswith("/manifest.json")]


def test_data_and_checkpoints_in_a_store(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.tsv.gz"
    generate.main(["--rows", "4000", "--max-cardinality", "300", "--out", str(rows)])
    store.put("days/rows.tsv.gz", rows.read_bytes())
    data = ["--data", f"s3://{BUCKET}/days"]
    assert train(tmp_path / "whole", "--epochs", "2", "--checkpoint-steps", "2", data=data) == 0

    upload = ("--upload-to", URL, "--checkpoint-steps", "2", "--keep-checkpoints", "2")
    export = ("--export", str(tmp_path / "exported"))
    assert train(tmp_path / "one", "--steps", "9", *upload, *export, data=data) == 0
    assert uploaded(store)[-1] == "step-0000000009"
    assert len(uploaded(store)) <= 2
    last = tmp_path / "one/checkpoints/step-0000000009"
    for file in last.iterdir():
        assert store.objects()[f"runs/first/checkpoints/{last.name}/{file.name}"] == file.read_bytes()
    assert events(tmp_path / "one", "upload")[-1]["path"] == f"{URL}/checkpoints/step-0000000009"
    for name in ("report.html", "config.json", "metrics.jsonl"):
        assert store.objects()[f"runs/first/{name}"] == (tmp_path / "one" / name).read_bytes()
    assert "runs/first/export/saved_model.pb" in store.objects()
    assert not (tmp_path / "one/.uploads").exists()

    # Go on elsewhere, where no file of the run is.
    capsys.readouterr()
    assert train(tmp_path / "two", "--epochs", "2", *upload, "--resume", data=data) == 0
    assert f"fetched checkpoint {URL}/checkpoints/step-0000000009" in capsys.readouterr().out
    assert uploaded(store)[-1] == "step-0000000018"
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "two") == {step: whole[step] for step in range(10, 19)}
    said = capsys.readouterr()
    written = [said.out.encode(), said.err.encode(), *store.objects().values()]
    written += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    for text in written:
        assert SECRET.encode() not in text
        assert KEY.encode() not in text

    # Served from there, without a local file: the run with its checkpoints, and its export.
    with Model.load(URL) as model, Model.load(f"{URL}/export") as exported:
        assert model.version == 18
        assert {tensor.name for tensor in model.inputs} == {tensor.name for tensor in exported.inputs}
        inputs = {
            tensor.name: np.zeros([2 if size is None else size for size in tensor.shape], tensor.dtype)
            for tensor in model.inputs
        }
        assert model.predict(inputs).keys() == exported.predict(inputs).keys()
    with pytest.raises(ServingError, match="export/variables: there is neither a model to serve nor a run"):
        Model.load(f"{URL}/export/variables")


def test_a_script_uploads_and_goes_on_elsewhere(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, job_scripts.ARRAYS)
    upload = ("--upload-to", URL, "--checkpoint-steps", "7")
    assert run(script, tmp_path / "whole", "--checkpoint-steps", "7") == 0
    assert run(script, tmp_path / "one", *upload, arguments=["33"]) == 130
    stopped = events(tmp_path / "one", "interrupted")[0]["step"]
    assert uploaded(store)[-1] == f"step-{stopped:010}"
    capsys.readouterr()
    assert run(script, tmp_path / "two", *upload, "--resume") == 0
    assert f"fetched checkpoint {URL}/checkpoints/step-{stopped:010}" in capsys.readouterr().out
    assert uploaded(store)[-1] == "step-0000000060"
    assert "runs/first/report.html" in store.objects()
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "two") == {step: whole[step] for step in whole if step > stopped}


def test_increments_are_uploaded_with_their_bases(store: ObjectStore, tmp_path: Path) -> None:
    flags = ("--checkpoint-steps", "2", "--checkpoint-increments", "9", "--keep-checkpoints", "1")
    assert train(tmp_path / "one", "--steps", "6", *flags, "--upload-to", URL) == 0
    shutil.rmtree(tmp_path / "one/checkpoints")
    # A base that is missing there is uploaded again; so is what it holds.
    assert train(tmp_path / "two", "--steps", "8", *flags, "--upload-to", URL, "--resume") == 0
    found = checkpoint.latest(tmp_path / "two/checkpoints")
    assert found is not None
    names = [path.name for path in checkpoint.chain(found.path)]
    assert set(names) <= set(uploaded(store))


def test_training_goes_on_without_the_store(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--checkpoint-steps", "4", "--upload-to", URL)
    store.fault = lambda method, path, _: SLOW_DOWN if method != "GET" and ".oet" in path else None
    assert train(tmp_path / "run", "--steps", "9", *flags) == 1
    said = capsys.readouterr()
    assert "warning: cannot upload checkpoint step-0000000004: s3://" in said.out
    assert f"error: the last checkpoint is not in {URL}/checkpoints: s3://" in said.err
    assert "the store is overloaded" in said.err
    assert events(tmp_path / "run", "step")[-1]["step"] == 9
    assert uploaded(store) == []

    store.fault = None
    assert train(tmp_path / "run", "--steps", "9", *flags, "--resume") == 0
    assert uploaded(store) == ["step-0000000009"]


@pytest.mark.parametrize("url", [URL, "s3://no-such-bucket/run"])
def test_a_place_that_cannot_be_written(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    if url == URL:
        store.fault = lambda *_: DENIED
    assert train(tmp_path / "run", "--upload-to", url) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --upload-to: cannot write s3://")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_place_of_another_run(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put("runs/first/checkpoints/step-0000000003/manifest.json", b"{}")
    assert train(tmp_path / "run", "--upload-to", URL) == 1
    assert f"{URL} already holds the checkpoints of a run; go on with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--upload-to", "/mnt/share"), "--upload-to /mnt/share is no URL of a store"),
        (("--upload-to", "s3://a:secret-key@b/c"), "--upload-to: s3://b/c: the URL has credentials in it"),
        (("--upload-bandwidth", "3"), "--upload-bandwidth goes with --upload-to"),
    ],
)
def test_flags_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path / "run", *flags)
    said = capsys.readouterr().err
    assert words in said
    assert "secret-key" not in said


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_upload_publishes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    stalled: list[str] = []

    def fault(method: str, path: str, _: str) -> Stall | None:
        has_begun = any("step-0000000004/" in key for key in store.objects())
        if method != "GET" and "step-0000000004/" in path and has_begun:
            stalled.append(path)
            return Stall(600)
        return None

    store.fault = fault
    flags = [
        "--in-process",
        "--upload-to",
        URL,
        "--checkpoint-steps",
        "4",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "oe_runtime.train", *DATA, *SMALL, *flags, "--epochs", "2"]
    with subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: stalled, process)
        process.kill()
    assert any("step-0000000004/" in key for key in store.objects())
    assert uploaded(store) == []
    store.fault = None
    assert (
        train(tmp_path / "run", "--epochs", "2", "--checkpoint-steps", "4", "--upload-to", URL, "--resume")
        == 0
    )
    assert uploaded(store)[-1] == "step-0000000018"
    names = {key.split("/")[3] for key in store.objects() if "/step-" in key and not key.endswith("/")}
    assert names == set(uploaded(store))
    assert not (tmp_path / "run/.uploads").exists()


@pytest.mark.process
@pytest.mark.slow
def test_a_server_that_is_lost_in_an_upload(store: ObjectStore, tmp_path: Path) -> None:
    """The script's process starts anew in the middle of it; then each checkpoint there is whole."""
    stalled: list[str] = []

    def fault(method: str, path: str, _: str) -> Stall | None:
        if method != "GET" and not stalled and "step-0000000015/" in path:
            stalled.append(path)
            return Stall(600)
        return None

    store.fault = fault
    script = write(tmp_path, job_scripts.ARRAYS.replace("epochs=3", "epochs=20"))
    server = ServerProcess(tmp_path / "server")
    flags = ("--servers", server.endpoint, "--upload-to", URL, "--checkpoint-steps", "15")
    process = start(script, tmp_path / "run", *flags)
    try:
        wait_for(lambda: stalled and max(losses(tmp_path / "run"), default=0) > 20, process)
        server.kill()
        server.start_again()
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert events(tmp_path / "run", "server_back")
    assert uploaded(store)[-1] == "step-0000000400"
    names = {key.split("/")[3] for key in store.objects() if "/step-" in key and not key.endswith("/")}
    assert names == set(uploaded(store))
    there = RemoteCheckpoints(remote_files.RemotePath(f"{URL}/checkpoints"))
    for name in names:
        assert checkpoint.verify(there.fetch(name, tmp_path / "back")).step == int(name[5:])


def test_a_bug_in_an_upload_is_no_endless_wait(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(RemoteCheckpoints, "upload", fail)
    assert train(tmp_path / "run", "--steps", "2", "--upload-to", URL) == 1
    assert "the last checkpoint is not in" in (said := capsys.readouterr().err)
    assert "ZeroDivisionError: of the test" in said
