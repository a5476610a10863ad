import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from provision.cluster.errors import ConvergeError
from provision.hosts import runs
from provision.hosts.journal import Journal, cluster_lock, private_files

REPOSITORY = Path(__file__).parents[3]


def entries(journal: Journal) -> list[tuple[str, str]]:
    return [(entry["event"], entry.get("step", "")) for entry in journal.read()]


def test_entries_are_read_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state" / "journal.jsonl", "bootstrap-1")
    journal.write("run", cluster="local")
    journal.begin("localhost", "directory", "make /data")
    journal.end("localhost", "directory", ok=True)
    journal.write("finished", outcome="ok")
    assert entries(journal) == [("run", ""), ("begin", "directory"), ("end", "directory"), ("finished", "")]
    assert all(entry["run"] == "bootstrap-1" and entry["time"] for entry in journal.read())
    assert runs.interrupted(journal, "local") == []


def test_a_step_without_an_end_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, "bootstrap-1")
    first.write("run", cluster="local")
    first.begin("localhost", "packages", "install libpmem1")
    first.end("localhost", "packages", ok=True)
    first.begin("localhost", "runtime", "install tensorflow")
    ((run, host, step),) = runs.interrupted(Journal(path, "bootstrap-2"), "local")
    assert (run.id, host, step.step) == ("bootstrap-1", "localhost", "runtime")
    assert step.what == "install tensorflow"
    assert runs.interrupted(first, "another") == []


def test_the_next_run_of_the_cluster_settles_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, "bootstrap-1")
    first.write("run", cluster="local")
    first.begin("localhost", "runtime", "install tensorflow")
    other = Journal(path, "bootstrap-2")
    other.write("run", cluster="another")
    other.write("finished", outcome="ok")
    assert [step.step for _, _, step in runs.interrupted(other, "local")] == ["runtime"], (
        "another cluster settles nothing"
    )
    second = Journal(path, "bootstrap-3")
    second.write("run", cluster="local")
    second.write("finished", outcome="ok")
    assert runs.interrupted(second, "local") == []


def test_runs_of_two_clusters_in_one_second_are_two(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    one, two = (Journal(path, "bootstrap-1", cluster) for cluster in ("one", "two"))
    for cluster, journal in {"one": one, "two": two}.items():
        journal.write("run", cluster=cluster, hosts=["a"])
        journal.begin("a", "runtime", f"install for {cluster}")
    two.end("a", "runtime", ok=True)
    two.write("finished", outcome="ok")
    ((run, _, step),) = runs.interrupted(one, "one")
    assert (run.cluster, step.what) == ("one", "install for one")
    assert runs.interrupted(two, "two") == []
    assert (runs.unsettled(one, "one"), runs.unsettled(two, "two")) == ({"a": "bootstrap-1"}, {})
    known = runs.read(tmp_path)
    with pytest.raises(ConvergeError, match=r"2 clusters; say which: one/bootstrap-1 or two/bootstrap-1"):
        runs.choose(known, "bootstrap-1", tmp_path)
    assert runs.choose(known, "two/bootstrap-1", tmp_path).outcome == "ok"


def test_hosts_whose_change_did_not_end_well_are_known_until_they_are_seen_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def run(name: str, hosts: list[str], failed: list[str] | None = None, cluster: str = "c") -> Journal:
        journal = Journal(path, name)
        journal.write("run", cluster=cluster, hosts=hosts)
        for host in hosts:
            journal.begin(host, "reboot", "reboot")
            journal.end(host, "reboot", ok=True)
        if failed is not None:
            journal.write("finished", outcome="failed" if failed else "ok", failed=failed)
        return journal

    run("r1", ["a", "b"], failed=["b"])
    run("other", ["a"], failed=["a"], cluster="another")
    assert runs.unsettled(Journal(path, ""), "c") == {"b": "r1"}
    run("r2", ["a"], failed=[])
    assert runs.unsettled(Journal(path, ""), "c") == {"b": "r1"}
    run("r3", ["a", "c"])  # killed
    assert runs.unsettled(Journal(path, ""), "c") == {"b": "r1", "a": "r3", "c": "r3"}
    run("r4", ["a", "b", "c"], failed=[])
    assert runs.unsettled(Journal(path, ""), "c") == {}


def test_a_line_that_a_crash_cut_off_spoils_neither_neighbour(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, "bootstrap-1")
    journal.begin("localhost", "directory", "make /data")
    with path.open("a") as file:
        file.write('{"event": "end", "ho')
    journal.begin("localhost", "runtime", "install tensorflow")
    assert entries(journal) == [("begin", "directory"), ("begin", "runtime")]
    assert json.loads(path.read_text().splitlines()[-1])["step"] == "runtime"


def test_two_runs_refuse_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from provision.hosts.journal import cluster_lock\n"
        "with cluster_lock(Path(sys.argv[1]), 'local'):\n    print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        refused = pytest.raises(ConvergeError, match=f"cluster local is being changed by pid {other.pid} ")
        with refused, cluster_lock(tmp_path, "local"):
            pytest.fail("the lock was given twice")
        with cluster_lock(tmp_path, "another"):
            pass
    finally:
        other.kill()
        other.wait()
    with cluster_lock(tmp_path, "local"):  # the kernel dropped the lock of the killed process
        assert f"pid {os.getpid()}" in (tmp_path / "lock-local").read_text()
    assert not (tmp_path / "lock-local").exists()


def test_a_lock_whose_file_its_holder_removes_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was opened while the last holder had it, and locked after that one had removed it."""
    real, removed = fcntl.flock, []

    def flock(file: TextIO, how: int) -> None:
        if not removed:
            (tmp_path / "lock-local").unlink()
            removed.append(file)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cluster_lock(tmp_path, "local"):
        assert f"pid {os.getpid()}" in (tmp_path / "lock-local").read_text()
        with pytest.raises(ConvergeError), cluster_lock(tmp_path, "local"):
            pytest.fail("the lock was given twice")


@pytest.mark.parametrize("cluster", ["..", ".", ""])  # `-i ..` and `-i .` name clusters so
def test_a_lock_removes_nothing_but_its_cluster_s_private_files(tmp_path: Path, cluster: str) -> None:
    state_dir = tmp_path / "state"
    others = state_dir / "jobs/1/job.json", private_files(state_dir, "another") / "env"
    for path in others:
        path.parent.mkdir(parents=True)
        path.touch()
    with cluster_lock(state_dir, cluster):
        pass
    assert all(path.exists() for path in others)
