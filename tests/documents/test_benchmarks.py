"""Each benchmark has a short form that `make bench-quick` runs, and a page."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_documents import names_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quick

    yield quick
    for name in ("quick", "processes", "reporting"):
        sys.modules.pop(name)


def test_benchmarks_import_names_that_exist() -> None:
    """Without running them, so that `make test` tells whoever renames something."""
    found = 0
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("oe_runtime", "provision")):
                assert {item.name for item in node.names} <= names_in(str(node.module)), (path, node.module)
                found += 1
    assert found > 20


def test_each_benchmark_of_the_page_has_a_short_form(quick) -> None:
    page = (ROOT / "docs/evidence/benchmarks.md").read_text()
    named = set(re.findall(r"^\|.*\| `python benchmarks/([^`]*)`", page, re.M))
    assert len(named) > 15
    short = [one.command for one in quick.QUICK.values()]
    assert [name for name in named if not any(one.split(" --")[0] == name for one in short)] == []


def test_each_short_form_says_which_rows_have_figures(quick) -> None:
    for name, one in quick.QUICK.items():
        assert one.rows or one.needs == ("virtual nodes",), name
        assert set(one.needs) <= quick.NEEDS.keys(), name


INTERRUPTED = """
import subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
import quick

ended = subprocess.Popen(["true"], start_new_session=True)
ended.wait()


class Running(set):  # the first one's group is no more, and the last one begins after all were killed
    def __iter__(self):
        yield ended.pid
        yield from super().__iter__()
        interrupted.set()


def words(command, directory):
    if command == "late":
        interrupted.wait()
        time.sleep(0.2)
    return ["sh", "-c", "sleep 1000 & echo begun >&9; wait"]


interrupted = threading.Event()
real = subprocess.Popen
quick.subprocess.Popen = lambda *words, **more: real(*words, **more, pass_fds=[9])
quick._RUNNING, quick.words = Running(), words
quick.QUICK = {name: quick.Quick(name, ("x",)) for name in ("one", "two", "late")}
sys.argv[1:] = ["--jobs", "3"]
sys.exit(quick.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_what_all_benchmarks_have_started(number: signal.Signals) -> None:
    words = [
        "sh",
        "-c",
        'exec "$@" 9>&1 >&2',
        "sh",
        sys.executable,
        "-c",
        INTERRUPTED,
        str(ROOT / "benchmarks"),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == [b"begun\n"] * 2
        process.send_signal(number)
        out, err = process.communicate(timeout=60)  # at its end nobody can write any more
    assert (process.returncode, out.replace(b"begun\n", b""), err) == (130, b"", b"")


def test_a_benchmark_over_its_time_takes_its_servers_along(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", 0)
    words = ["sh", "-c", "sleep 1000 & echo begun; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"begun\n"
        assert quick._ended(process) is None
        assert process.stdout.read() == b""  # the end of the file comes when nobody can write any more


@pytest.mark.parametrize(
    ("line", "is_figure"),
    [
        ("| ours, TCP | 3.25 |", True),
        ("│ loopback │ 9 │ ours, TCP │ 11.51 │", True),
        ("| ours, TCP | - |", False),
        ("| ours, TCP 9 | |", False),
        ("| ours | 3.25 |", False),
        ("ours, TCP: 3.25", False),
    ],
)
def test_a_figure_stands_in_a_row_of_a_table_beside_its_name(quick, line: str, is_figure: bool) -> None:
    assert quick.without_figures(f"# A title\n{line}\n", ["ours, TCP"]) == (
        [] if is_figure else ["ours, TCP"]
    )


def test_a_benchmark_that_fails_is_named_with_what_it_said(quick) -> None:
    failing = quick.Quick("ssd/memory_drive.py 1 no-such-program", ("dram",))
    said = quick.run("ssd/memory_drive", failing, fetch=False)
    assert said.startswith("FAILED   ssd/memory_drive: it ended with status 2")
    assert "COMMAND: found 'no-such-program'; give a program to run" in said


def test_a_benchmark_without_figures_fails(quick) -> None:
    said = quick.run("transports", quick.Quick("transports.py --help", ("asio",)), fetch=False)
    assert said.startswith("FAILED   transports: no figures for asio")


def test_what_is_missing_is_said(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quick.NEEDS, "fio", lambda: "fio is not installed")
    said = quick.run("ssd/device", quick.QUICK["ssd/device"], fetch=False)
    assert said == "not run  ssd/device: fio is not installed"
