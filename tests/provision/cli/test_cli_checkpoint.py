"""``oeprov checkpoint`` and ``oeprov reshard`` run the runtime's tool and say what it says."""

import shutil
from pathlib import Path

import pytest
from fake_processes import make_job

from provision.cli import main as cli

SAMPLE = Path(__file__).parents[2] / "oe_runtime/data/formats/table-1-pool-1/checkpoints/step-0000000003"


@pytest.mark.process
def test_commands_reach_the_tool(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["checkpoint", "inspect", str(SAMPLE)]) == 0
    assert "wide/emb" in capfd.readouterr().out
    assert cli.run(["reshard", str(SAMPLE), "--servers", "3", "--output", str(tmp_path)]) == 0
    new = tmp_path / SAMPLE.name
    assert capfd.readouterr().out == f"wrote {new}\n"
    assert cli.run(["checkpoint", "diff", str(SAMPLE), str(new), "--json"]) == 0
    (new / "dense.bin").write_bytes(b"")
    assert cli.run(["checkpoint", "verify", str(new)]) == 1
    assert "dense.bin is damaged" in capfd.readouterr().out
    assert cli.run(["checkpoint", "inspect", str(tmp_path / "-x")]) == 1
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.process
def test_a_url_reaches_the_tool_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["checkpoint", "inspect", "ftp://host//x"]) == 2
    assert "ftp://host//x: ftp:// is not one of s3://, oss://" in capfd.readouterr().err


@pytest.mark.process
def test_a_job_stands_for_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state_dir = tmp_path / "state"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OEPROV_STATE_DIR", str(state_dir))
    job = make_job(state_dir)
    assert cli.run(["checkpoint", "inspect", "fake"]) == 1
    assert f"job {job.id} has no checkpoint yet in {job.run_dir}/checkpoints" in capfd.readouterr().err
    shutil.copytree(SAMPLE, job.run_dir / "checkpoints" / SAMPLE.name)
    assert cli.run(["checkpoint", "inspect", "fake"]) == 0
    assert SAMPLE.name in capfd.readouterr().out
    assert cli.run(["checkpoint", "diff", "fake", str(SAMPLE)]) == 0
    assert cli.run(["checkpoint", "verify", "fale"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: fale: there is no such file or directory, and no job fale in ")
    assert "did you mean fake?" in err
    Path("fake").symlink_to(SAMPLE)  # a path is a path first
    assert cli.run(["checkpoint", "inspect", "fake"]) == 0
    assert "wide/emb" in capfd.readouterr().out
