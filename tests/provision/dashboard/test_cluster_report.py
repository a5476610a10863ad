"""The report about a cluster: one file, all that is known, and no secret."""

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job

from provision.cli import main as cli
from provision.cluster.errors import HostError
from provision.cluster.inventory import Inventory
from provision.converge import assumed_state
from provision.dashboard import report
from provision.inventory.loader import load
from provision.node.plan import make_plan

INVENTORY = """\
all:
  vars:
    oeprov_cluster: ads
    runtime_index: https://me:pass-of-index@pypi.example/simple
    training_data: generate:100
  children:
    parameter_servers:
      hosts:
        cxl-1: {oeprov_kind: cxl, ansible_host: 192.0.2.11}
        cxl-2: {oeprov_kind: cxl, ansible_host: 192.0.2.12}
    workers:
      hosts: {gpu-1: {oeprov_kind: gpu, ansible_host: 192.0.2.13}}
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    found = load(tmp_path / "inventory.yml", state_dir=tmp_path)
    states: dict[str, Any] = {name: assumed_state.state(host.desired()) for name, host in found.hosts.items()}
    states["cxl-2"] = HostError("cxl-2", "192.0.2.12 port 22 refuses <connections>")
    monkeypatch.setattr("provision.hosts.observe.observe", lambda _: states)
    return found


def write(directory: Path, inventory: Inventory, runs: int = 3) -> str:
    output = directory / "out.html"
    words = ["-i", str(inventory.path), "--state-dir", str(directory), "--runs", str(runs)]
    code = cli.run(["report", *words, "--output", str(output)])
    assert code == 1, "a host could not be seen"
    return output.read_text()


class _Balanced(HTMLParser):
    """Every element that is opened is closed, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta", "path", "circle", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "circle"):
            assert self.open.pop() == tag


def test_hosts_plan_and_jobs(tmp_path: Path, inventory: Inventory) -> None:
    job = make_job(tmp_path)
    events = [
        {"event": "start", "steps": 40, "data": "https://me:pass-of-data@example/x.tsv"},
        *(
            {"event": "step", "step": step, "loss": 1 / step, "samples_per_s": 1000.0}
            for step in (10, 20, 30)
        ),
        {"event": "error", "message": f"what is {job.token_file.read_text().strip()}?"},
    ]
    job.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    page = write(tmp_path, inventory)
    checker = _Balanced()
    checker.feed(page)
    assert checker.open == []
    assert "192.0.2.12 port 22 refuses &lt;connections&gt;" in page
    wanted = make_plan(
        assumed_state.state(inventory.hosts["cxl-1"].desired()), inventory.hosts["cxl-1"].desired()
    )
    assert len(wanted.steps) > 3
    for step in wanted.steps:
        assert escape(step.what).replace("&#x27;", "&#39;") in page
    assert page.count("<figure>") == 2, "curves of loss and throughput, as the trainer draws them"
    assert f" · {job.id}</h3>" in page
    for secret in (job.token_file.read_text().strip(), "pass-of"):
        assert secret not in page
    assert "https://…@example/x.tsv" in page
    assert len(re.findall("<h1", page)) == 1


def test_without_jobs(tmp_path: Path, inventory: Inventory) -> None:
    page = write(tmp_path, inventory)
    assert "There are no jobs yet." in page
    assert "<figure>" not in page


def test_a_job_that_has_not_begun_has_no_curves(tmp_path: Path, inventory: Inventory) -> None:
    job = make_job(tmp_path)
    job.metrics_file.write_text("")
    assert report.run_page(job) is None
    assert job.id in write(tmp_path, inventory)


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, inventory: Inventory, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "none" / "x.html"
    assert cli.run(["report", "-i", str(inventory.path), "--output", str(output), "--runs", "0"]) == 1
    assert capsys.readouterr().err == f"error: {output}: cannot be written: No such file or directory\n"
