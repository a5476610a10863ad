"""``oeprov checkpoint`` and ``oeprov reshard`` run the runtime's tool and say what it says."""

from pathlib import Path

import pytest

from provision import cli

SAMPLE = Path(__file__).parents[1] / "oe_runtime/data/formats/table-1-pool-1/checkpoints/step-0000000003"


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
