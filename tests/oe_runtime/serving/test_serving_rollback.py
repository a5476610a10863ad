"""Serving a kept step: `Model.pin`, and `python -m oe_runtime.serve --step-file` while requests go on."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from serve_process import Serving
from serving_models import Training, batch

from oe_runtime.errors import CheckpointError, ServingError
from oe_runtime.serving import Model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory, exported model, and what each kept step answers; step 300 is an increment on 200."""
    directory = tmp_path_factory.mktemp("run")
    x, _ = batch(20)
    answers = {}
    with Training(directory) as training:
        for step, base in ((100, None), (200, None), (300, 200)):
            training.fit(seed=step)
            training.publish(step, base=base)
            answers[step] = training.predict(x)
        yield directory, training.export(), x, answers


def test_a_pinned_step_is_served_until_it_is_unpinned(run):
    directory, export, x, answers = run
    with Model.load(export, directory / "checkpoints") as model:

        def is_step(step):
            assert model.version == step
            np.testing.assert_allclose(model.predict(x)["output_0"], answers[step], atol=1e-6)

        is_step(300)
        for step in (100, 300, 200, 300, 100):
            assert model.pin(step)
            assert not model.refresh(), "a pinned model follows nothing"
            is_step(step)
        with pytest.raises(CheckpointError, match=r"step 250 is not kept in .*: it has 100, 200, 300"):
            model.pin(250)
        assert not model.refresh(), "the earlier pin stays"
        is_step(100)
        assert model.pin(None)
        is_step(300)
    with Model.load(export, directory / "checkpoints", step=200) as model:
        assert model.version == 200


def test_what_has_no_steps_is_refused(run, tmp_path):
    directory, export, _, _ = run
    with pytest.raises(CheckpointError, match="has no step 7: it is step 300"):
        Model.load(export, directory / "checkpoints" / "step-0000000300", step=7)
    bad = tmp_path / "step"
    bad.write_text("newest")
    command = [sys.executable, "-m", "oe_runtime.serve", str(export), "--step-file", str(bad)]
    for more, said in (
        ([], "found 'newest'; it must have one step, such as 1000"),
        (["--servers", "localhost:1"], "--step-file does not go with --servers"),
        (["--version-label", ""], "no request could name the version label '': it is empty"),
    ):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
    with contextlib.closing(Model(None, None, None, None)) as model, pytest.raises(ServingError):
        model.pin(1)


@pytest.mark.process
def test_a_step_file_changes_the_step_without_losing_a_request(run, tmp_path):
    directory, export, x, answers = run
    inputs = {name: array.tolist() for name, array in x.items()}
    step_file = tmp_path / "step"
    step_file.write_text("200\n")
    flags = ("--rows", str(directory), "--step-file", str(step_file), "--refresh-seconds", "0.2")
    with Serving(tmp_path, export, *flags) as serving:

        def facts():
            return json.loads(serving._ready.read_text())

        def wait_for(**wanted):
            deadline = time.monotonic() + 60
            while not wanted.items() <= facts().items():
                assert time.monotonic() < deadline, facts()
                time.sleep(0.01)

        ended, seen = threading.Event(), []

        def ask():
            while not ended.is_set():
                seen.append(serving.predict(inputs))

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        try:
            wait_for(version=200, step=200, problem="")
            for text, version in (("100", 100), ("", 300), ("200", 200)):
                step_file.write_text(text)
                wait_for(version=version, step=int(text or 0) or None)
            marks = {path.parent.name: path.read_text() for path in directory.glob("checkpoints/*/pinned-*")}
            assert marks == dict.fromkeys(["step-0000000100", "step-0000000200"], f"{step_file}\n")
            step_file.write_text("9")
            wait_for(version=200, step=9)
            assert "step 9 is not kept" in facts()["problem"]
        finally:
            ended.set()
            for thread in asking:
                thread.join()
    assert {status for status, _ in seen} == {200}
    for _, reply in seen:
        near = [np.allclose(reply["outputs"], wanted, atol=1e-5) for wanted in answers.values()]
        assert any(near), "an answer is of one step"


@pytest.mark.process
def test_it_ends_with_its_parent(run):
    directory, export, _, _ = run
    command = [sys.executable, "-m", "oe_runtime.serve", str(export), "--rows", str(directory)]
    command += ["--port", "0", "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert "serving" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 0
