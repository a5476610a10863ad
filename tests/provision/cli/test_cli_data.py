"""``oeprov data inspect`` runs the runtime's tool and says what it says."""

from pathlib import Path

import pytest

from provision.cli import main as cli


@pytest.mark.process
def test_inspect_prints_a_schema_or_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "-rows.csv"
    path.write_text("click,site\n" + "0,a\n1,b\n0,c\n" * 20)
    assert cli.run(["data", "inspect", str(path), "--rows", "10"]) == 0
    said = capfd.readouterr().out
    assert "label: click  # 1 in 30.00% of the rows" in said
    assert "-rows.csv: 10 rows, from the beginning." in said
    assert cli.run(["data", "inspect", str(path), "--label", "site"]) == 1
    assert "column site has the values 'a', 'b', 'c'; a label has two" in capfd.readouterr().err
