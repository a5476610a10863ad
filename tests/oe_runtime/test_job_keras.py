"""A Keras script as a job: its course, stops and resumes, whatever its data."""

from __future__ import annotations

from pathlib import Path

import job_scripts
import pytest
from job_scripts import figures, losses, run, write
from training_runs import events

SCRIPTS = {"arrays": job_scripts.ARRAYS, "dataset": job_scripts.DATASET, "parts": job_scripts.PARTS}


@pytest.mark.parametrize("data", SCRIPTS)
def test_a_run_that_stops_in_the_middle_has_the_losses_of_one_that_does_not(
    data: str, tmp_path: Path
) -> None:
    script = write(tmp_path, SCRIPTS[data])
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
    if data != "parts":
        assert figures(run_dir) == figures(whole)
    assert events(run_dir, "end")[0]["steps"] == 60
    # A run that is complete trains nothing more.
    assert run(script, run_dir, "--resume") == 0
    assert len(losses(run_dir)) == 60
