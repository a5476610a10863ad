"""The report of a run: any number of points, marks, bad input, nothing from outside the file."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oe_runtime.freshness import FreshnessLog, read
from oe_runtime.report import main
from oe_runtime.run.charts import binary, condense, plain, si, ticks
from oe_runtime.run.report import render

TIME = "2026-11-22T01:02:03.000+00:00"


def run(directory: Path, *events: dict[str, Any], **config: Any) -> Path:
    lines = [json.dumps({"time": TIME, **event}) for event in events]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "config.json").write_text(json.dumps({"model": "dlrm", **config}))
    return directory


def steps(count: int, every: int = 20) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": i * every, "loss": 0.7 - 0.2 * i / count, "auc": 0.6, "samples_per_s": 1e5}
        for i in range(1, count + 1)
    ]


def servers(step: int, **figures: int) -> dict[str, Any]:
    nothing = dict.fromkeys(("rows", "dram_bytes", "pmem_bytes", "index_bytes"), 0)
    return {"event": "servers", "step": step, "servers": [{**nothing, **figures}]}


def drawings(page: str) -> dict[str, list[ElementTree.Element]]:
    """The drawings by title, wide and narrow."""
    found: dict[str, list[ElementTree.Element]] = {}
    for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        drawing = ElementTree.fromstring(text)  # noqa: S314 - our own
        found.setdefault(drawing.attrib["aria-label"], []).append(drawing)
    return found


@pytest.mark.parametrize("count", [1, 10, 100_000])
def test_any_number_of_points_fits_into_the_drawing(count: int, tmp_path: Path) -> None:
    page = render(run(tmp_path, *steps(count)))
    assert len(page) < 1_000_000
    assert "http" not in page
    assert "<script" not in page
    for title in ("Loss", "AUC", "Throughput"):
        drawing_of_each_size = drawings(page)[title]
        assert len(drawing_of_each_size) == 2
        for drawing in drawing_of_each_size:
            width, height = map(float, drawing.attrib["viewBox"].split()[2:])
            line = next(p for p in drawing if p.get("class") == "line").attrib["d"]
            points = [tuple(map(float, p.split())) for p in line[1:].split("L")]
            assert len(points) == min(count, len(points)) <= 2 * width
            assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
            assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert ("the mean and its shade the range" in page) == (count == 100_000)


def test_what_happened_is_marked_and_listed(tmp_path: Path) -> None:
    page = render(
        run(
            tmp_path,
            {"event": "start", "data": "<b>.tsv", "rows": 4000, "embeddings": "on a:1", "dim": 4},
            *steps(2),
            {"event": "checkpoint", "step": 40, "seconds": 0.1, "rows": "pool"},
            {"event": "server_gone", "endpoint": "a:1", "message": "closed"},
            {"event": "server_back", "endpoint": "a:1", "step": 20, "seconds": 2.5},
            {"event": "went_back", "message": "worker 1 was lost in its push", "step": 20, "seconds": 0.3},
            {"event": "step", "step": 40, "loss": 0.25, "auc": 0.7},
            {"event": "eval", "rows": 400, "loss": 0.4523, "auc": 0.7888},
            {"event": "end", "steps": 40, "seconds": 61.0, "samples_per_s": 88120.3},
            dim=16,
        )
    )
    assert "&lt;b&gt;.tsv (4,000 rows)" in page
    for text in (
        "finished",
        "0.7888",
        "88,120",
        "1:01",
        "a:1 after 2.5 s, from step 20",
        "dim</td><td>16",
        "in its push: in",
    ):
        assert text in page
    loss = drawings(page)["Loss"][0]
    titles = [t.text for t in loss.iter("title")]
    assert titles == ["checkpoint, step 40", "server lost, step 40", "worker lost in its push, step 40"]
    lines = [p for p in loss if p.get("class") == "line"]
    assert len(lines) == 1
    assert lines[0].attrib["d"].count("L") == 1  # step 40 came twice, its last word counts


def test_the_servers_figures(tmp_path: Path) -> None:
    page = render(
        run(
            tmp_path,
            *steps(2),
            servers(20, rows=10, dram_bytes=2**20, pmem_bytes=2**30, cache_hits=50, cache_misses=50),
            servers(40, rows=20, dram_bytes=2**20, pmem_bytes=2**30, cache_hits=140, cache_misses=60),
            {"event": "tables", "tables": {"C1": {"dim": 16, "rows": 12345, "bytes": 3 << 20}}},
        )
    )
    assert set(drawings(page)) == {
        "Loss", "AUC", "Throughput", "Cache hits", "Memory of the servers", "Rows of the tables",
    }  # fmt: skip
    hits = drawings(page)["Cache hits"][0]
    heights = [float(c.attrib["cy"]) for c in hits if c.tag == "circle"]
    axis = {t.text: float(t.attrib["y"]) - 4 for t in hits.iter("text") if t.get("text-anchor") == "end"}
    per_cent = [100 * (axis["0"] - y) / (axis["0"] - axis["100"]) for y in heights]
    assert per_cent == pytest.approx([50, 90], abs=0.5)
    assert "rows in persistent memory or on drives" in page
    assert "indexes" not in page  # there were none
    assert "<strong>52,429</strong><span>bytes per row in DRAM</span>" in page
    assert "<strong>53,687,091</strong><span>bytes per row in persistent memory or on drives</span>" in page
    assert "12,345" in page
    assert "3 MiB" in page


def test_how_fresh_answers_were(tmp_path: Path) -> None:
    assert "Freshness" not in render(run(tmp_path, *steps(3)))
    log = FreshnessLog()
    for step, seconds in ((20, 0.25), (40, 0.5)):
        log.note(tmp_path, step, seconds)
        log.flush()
    with (tmp_path / "freshness.jsonl").open("a") as file:
        file.write('{"step": 40, "seconds": 0.7, "most": 1.5}\n{"step": 60}\n[]\n{"step": 1e999')
    assert read(tmp_path) == [
        {"step": 20, "seconds": 0.25, "most": 0.25},
        {"step": 40, "seconds": 0.6, "most": 1.5},
    ]
    page = render(tmp_path)
    assert len(drawings(page)["Freshness"]) == 2
    assert "mean of the processes that serve" in page


def test_what_drives_read_and_wrote(tmp_path: Path) -> None:
    page = render(
        run(
            tmp_path,
            *steps(3),
            servers(20, drive_read_bytes=20 << 20, drive_written_bytes=10 << 20),
            servers(40, drive_read_bytes=60 << 20, drive_written_bytes=10 << 20),
            servers(60, drive_read_bytes=20 << 20, drive_written_bytes=0),  # the server has restarted
        )
    )
    drives = drawings(page)["Drives"][0]
    heights = [float(c.attrib["cy"]) for c in drives.iter() if c.tag == "circle"]
    axis = {t.text: float(t.attrib["y"]) - 4 for t in drives.iter("text") if t.get("text-anchor") == "end"}
    mib = [2 * (axis["0 B"] - y) / (axis["0 B"] - axis["2 MiB"]) for y in heights]
    assert mib == pytest.approx([1, 2, 1, 0.5, 0, 0], abs=0.02)


def test_a_failed_and_a_running_run(tmp_path: Path) -> None:
    assert "running" in render(run(tmp_path, {"event": "start"}))
    page = render(run(tmp_path, {"event": "start"}, {"event": "error", "message": "the <loss> is nan"}))
    assert "failed" in page
    assert "the &lt;loss&gt; is nan" in page
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert "1 lines of metrics.jsonl could not be read" in render(tmp_path)


@pytest.mark.parametrize(
    ("place", "title"),
    [
        ("jobs/nightly-20261122-101500/run", "dlrm · nightly-20261122-101500"),
        ("jobs/dlrm-20261122-101500/run", "dlrm-20261122-101500"),
        ("runs/third", "dlrm · third"),
    ],
)
def test_the_title_is_the_name_of_the_job(tmp_path: Path, place: str, title: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    page = render(run(tmp_path / place, *steps(2)))
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1>" in page


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot read {tmp_path}/metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 1
    assert "this run has not begun" in capsys.readouterr().err
    assert main([str(run(tmp_path, *steps(3)))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_ticks_are_round_and_enclose_the_values() -> None:
    assert ticks(0.43, 0.69, 6) == pytest.approx([0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7])
    assert ticks(0, 8000, 6) == [0, 2000, 4000, 6000, 8000]
    assert ticks(0, 3 * 2**30, 4, powers_of_two=True) == [0, 2**30, 2 * 2**30, 3 * 2**30]
    assert [plain(t, 0.05) for t in (0.4, 0.45)] == ["0.40", "0.45"]
    assert [si(v) for v in (0, 250, 1500, 2e7)] == ["0", "250", "1.5 k", "20 M"]
    assert [binary(v) for v in (0, 512, 3 << 20, 1.5 * 2**40)] == ["0 B", "512 B", "3 MiB", "1.5 TiB"]


def test_condensed_points_keep_mean_and_range() -> None:
    x, y = np.arange(1.0, 10_001), np.tile([0.0, 4.0, 2.0, 2.0], 2500)
    at, mean, low, high = condense(x, y, 100)
    assert len(at) == 100
    np.testing.assert_allclose(mean, 2, atol=0.05)
    assert set(low) == {0}
    assert set(high) == {4}
    assert condense(x[:200], y[:200], 100)[0] is not None
    assert len(condense(x[:200], y[:200], 100)[0]) == 200
