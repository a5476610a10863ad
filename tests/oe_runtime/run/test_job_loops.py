"""Loops of one's own as jobs: PyTorch, and a GradientTape."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import job_scripts
import pytest
from job_scripts import losses, run, start, write
from training_runs import ServerProcess, events, wait_for

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="needs PyTorch")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("TORCH", marks=needs_torch),
        pytest.param("TORCH_TWO_OPTIMIZERS", marks=needs_torch),
        "TAPE",
    ],
)
def test_a_loop_that_stops_in_the_middle_has_the_losses_of_one_that_does_not(
    kind: str, tmp_path: Path
) -> None:
    script = write(tmp_path, getattr(job_scripts, kind))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    every = ("--checkpoint-steps", "7")
    assert run(script, whole, *every) == 0
    assert max(losses(whole)) == 60
    stops = ("9", "20", "33")
    codes = [run(script, run_dir, *every, arguments=stops)]
    codes += [run(script, run_dir, *every, "--resume", arguments=stops) for _ in range(3)]
    assert codes == [130, 130, 130, 0]
    resumed = [e["step"] for e in events(run_dir, "resume")]
    assert resumed == [e["step"] for e in events(run_dir, "interrupted")]
    assert all(step - stop in (0, 1) for step, stop in zip(resumed, (9, 20, 33), strict=True))
    assert losses(run_dir) == losses(whole)
    assert events(run_dir, "end")[0]["steps"] == 60


@pytest.mark.process
@needs_torch
def test_a_pytorch_loop_goes_back_when_its_server_is_killed(tmp_path: Path) -> None:
    """In a process without TensorFlow."""
    more = "import sys\nassert not {'tensorflow', 'keras'} & set(sys.modules)\n"
    script = write(tmp_path, job_scripts.TORCH.replace("epochs(3)", "epochs(30)") + more)
    every, run_dir = ("--checkpoint-steps", "15"), tmp_path / "run"
    server = ServerProcess(tmp_path / "server")
    process = start(script, run_dir, "--servers", server.endpoint, *every)
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 20, process)
        server.kill()
        server.start_again()
        said, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "is back after" in said
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert run(write(tmp_path, script.read_text().replace(more, "")), tmp_path / "whole", *every) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


@needs_torch
def test_mistakes_in_a_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "no-step": (job_scripts.TORCH.replace("job.step(loss=loss)", "pass"), "without job.step(loss=…)"),
        "outside": (job_scripts.TORCH + "job.step(loss=1)\n", "job.step() belongs into a loop of `with job."),
        "unbound": (
            job_scripts.TORCH.replace("optimizer = embed.distributed_optimizer(", "optimizer = (").replace(
                "0.01), model)", "0.01))"
            ),
            "layer 'c1' has no table yet: give the model to distributed_model, and its optimizer",
        ),
        "keras": (job_scripts.TORCH.replace("job.training(model, ", "job.training([], "), "not a list"),
        "another": (
            job_scripts.TORCH_TWO_OPTIMIZERS.replace("[rows, optimizer]", "rows"),
            "the model is trained by another Adam than job.training was given",
        ),
        "twice": (
            job_scripts.TORCH_TWO_OPTIMIZERS.replace("[rows, optimizer]", "[rows, optimizer, rows]"),
            "job.training was given an optimizer twice",
        ),
        "none": (
            job_scripts.TORCH.replace("(model, optimizer, scheduler=scheduler)", "(model, [])"),
            "job.training was given no optimizer",
        ),
    }
    for name, (text, message) in cases.items():
        assert run(write(tmp_path / name, text), tmp_path / name / "run") == 1
        assert message in capsys.readouterr().err, name


@needs_torch
def test_a_checkpoint_of_other_optimizers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    both = job_scripts.TORCH_TWO_OPTIMIZERS
    assert run(write(tmp_path, both), run_dir, arguments=["9"]) == 130
    assert run(write(tmp_path, both.replace("[rows, optimizer]", "rows")), run_dir, "--resume") == 1
    assert (
        "the training had 2 optimizers, this one has 1: give job.training as many" in capsys.readouterr().err
    )
