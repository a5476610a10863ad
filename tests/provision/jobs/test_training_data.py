"""Data that cannot be trained on is refused where it is read, before anything is started."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oe_runtime.data import check as check_program
from provision.cluster import share
from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import errands
from provision.inventory.loader import load
from provision.jobs import data, jobspec
from provision.jobs.flavors import oe_runtime
from provision.jobs.request import LaunchOptions
from provision.node import job, jobfiles
from provision.node.command import Result, System

EXCERPT = Path(__file__).parents[2] / "oe_runtime" / "data" / "criteo_200.tsv"
LOCAL = """\
all:
  vars: {{oeprov_cluster: test, training_data: {data}}}
  children:
    parameter_servers: {{hosts: {{localhost: }}}}
    workers: {{hosts: {{localhost: }}}}
  hosts:
    localhost: {{ansible_connection: local, oeprov_kind: local}}
"""
HOSTS = """\
all:
  vars: {{oeprov_cluster: test, training_data: {data}, training_max_bad_rows: 7{more}}}
  children:
    parameter_servers: {{hosts: {{s: }}}}
    workers: {{hosts: {{a: , b: }}}}
  hosts:
    s: {{ansible_host: 192.0.2.1, oeprov_kind: cpu}}
    a: {{ansible_host: 192.0.2.2, oeprov_kind: cpu}}
    b: {{ansible_host: 192.0.2.3, oeprov_kind: cpu, runtime_venv: /srv/venv}}
"""


def check(tmp_path: Path, text: str, name: str, more: str = "") -> None:
    path = tmp_path / "inventory.yml"
    path.write_text(text.format(data=name, more=more))
    found: Inventory = load(path, state_dir=tmp_path / "state")
    data.check(found, jobspec.request(found, LaunchOptions()))


def test_every_file_of_this_machine_is_looked_at(tmp_path: Path) -> None:
    rows = EXCERPT.read_bytes()
    (tmp_path / "days").mkdir()
    for number in range(3):
        (tmp_path / "days" / f"day_{number}.gz").write_bytes(gzip.compress(rows))
    check(tmp_path, LOCAL, str(tmp_path / "days"))
    narrow = b"\n".join(line.rpartition(b"\t")[0] for line in rows.splitlines())
    (tmp_path / "days" / "day_2.gz").write_bytes(gzip.compress(narrow))
    with pytest.raises(TrainingError) as caught:
        check(tmp_path, LOCAL, str(tmp_path / "days"))
    found = f"--data: {tmp_path}/days/day_2.gz line 1: found 39 columns, expected 40; nothing was started"
    assert str(caught.value) == found


def test_every_worker_host_is_asked_once_and_the_first_that_cannot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}
    problem = ""

    def run(host: Host, name: str, args: dict[str, object], timeout: int) -> dict[str, object]:
        assert (name, args["user"], host.name in asked) == ("check_data", "oeprov", False)
        asked[host.name] = list(args["argv"])  # type: ignore[call-overload]
        return {"problem": problem if host.name == "b" else ""}

    monkeypatch.setattr(errands, "run", run)
    check(tmp_path, HOSTS, "/srv/day.tsv")
    words = ["-m", "oe_runtime.data.check", "--max-bad-rows", "7", "--", "/srv/day.tsv"]
    assert asked == {"a": ["/opt/oeprov/venv/bin/python", *words], "b": ["/srv/venv/bin/python", *words]}

    asked.clear()
    problem = "error: there is no file or directory /srv/day.tsv"
    with pytest.raises(TrainingError, match=r"^host b: --data: there is no file or directory /srv/day"):
        check(tmp_path, HOSTS, "/srv/day.tsv")
    with pytest.raises(TrainingError, match="workers on host a run with a private /tmp and cannot see it"):
        check(tmp_path, HOSTS, "/tmp/day.tsv")
    with pytest.raises(TrainingError, match=r"^--eval-data: /var/tmp/eval.tsv: workers on host a"):
        check(tmp_path, HOSTS, "/srv/day.tsv", ", training_eval_data: /var/tmp/eval.tsv")

    def lost(host: Host, *_: object) -> dict[str, object]:
        raise HostError(host.name, "the connection broke")

    monkeypatch.setattr(errands, "run", lost)
    with pytest.raises(TrainingError, match=r"^host a: --data: the connection broke"):
        check(tmp_path, HOSTS, "/srv/day.tsv")
    check(tmp_path, HOSTS, "generate:100")


@pytest.mark.parametrize("reader", ["worker", "script"])
@pytest.mark.parametrize(
    ("setting", "flag"), [("training_data", "--data"), ("training_eval_data", "--eval-data")]
)
def test_a_relative_path_on_another_host_is_named_by_its_flag(
    tmp_path: Path, reader: str, setting: str, flag: str
) -> None:
    program, names = tmp_path / "train.py", {"training_data": "/srv/day.tsv", setting: "days/day.tsv"}
    program.touch()
    more = f", training_eval_data: {names.get('training_eval_data', '/srv/eval.tsv')}"
    if reader == "script":
        more += f", training_script: {program}"
    path = tmp_path / "inventory.yml"
    path.write_text(HOSTS.format(data=names["training_data"], more=more))
    found = load(path, state_dir=tmp_path / "state")
    with pytest.raises(TrainingError) as caught:
        oe_runtime.check_data(found, jobspec.request(found, LaunchOptions()))
    expected = f"{flag}: days/day.tsv: the {reader} reads it on host a: give its whole path there"
    assert str(caught.value) == expected


def test_all_files_of_a_script_are_looked_for(tmp_path: Path) -> None:
    """Its evaluation data too, and also where only these are files."""
    program, rows = tmp_path / "train.py", tmp_path / "rows"
    program.touch()
    rows.mkdir()
    local = LOCAL.replace(
        "training_data: {data}}}", f"training_script: {program}, training_data: {{data}}{{more}}}}}}"
    )

    def said(name: str, eval_data: str) -> str:
        try:
            check(tmp_path, local, name, f", training_eval_data: '{eval_data}'")
        except TrainingError as error:
            return str(error)
        return ""

    for data_ in (str(rows), "generate:100", "s3://clicks/day", "''"):
        assert said(data_, str(rows)) == ""
        missing = f"--eval-data: no file matches {rows}/*.tsv; nothing was started"
        assert said(data_, f"{rows}/*.tsv") == missing
    assert (
        said(f"{rows}/none", str(rows))
        == f"--data: {rows}/none: No such file or directory; nothing was started"
    )


def test_generated_rows_have_no_other_rows_for_the_evaluation(tmp_path: Path) -> None:
    local = LOCAL.replace("training_data: {data}}}", "training_data: {data}{more}}}")
    with pytest.raises(TrainingError, match=r"^--eval-data /x.tsv: generate:100 has a signal of its own"):
        check(tmp_path, local, "generate:100", ", training_eval_data: /x.tsv")


def test_the_program_runs_as_the_user_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether this machine has the account must not matter.
    monkeypatch.setattr(jobfiles, "ensure_user", lambda system, name: (os.getuid(), os.getgid()))

    class Host(System):
        def run(self, argv: list[str], timeout: float = 60, environment: object = None) -> Result:
            assert argv == ["runuser", "-u", "oeprov", "--", "/venv/bin/python", "-m", "x"]
            return results.pop(0)

    args = {"user": "oeprov", "argv": ["/venv/bin/python", "-m", "x"], "seconds": 300}
    results = [
        Result([], 0, "", ""),
        Result([], 1, "", "a warning\nerror: /d.tsv is empty\n"),
        Result(["runuser"], 1, "", "No module named oe_runtime.data.check\n"),
    ]
    said = [job.check_data(Host(str(tmp_path)), args)["problem"] for _ in range(3)]
    assert said[:2] == ["", "error: /d.tsv is empty"]
    assert said[2].endswith("failed with exit status 1: No module named oe_runtime.data.check")


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({"day.csv": ",label,I1\n"}, ["header", "day.csv", "HINT", "label", "I1"], ""),
        (
            {"day.csv": "0,1\n"},
            ["header", "day.csv", "HINT", "label"],
            "day.csv: its first line does not name column label; HINT",
        ),
        ({"day.csv": ""}, ["header", "day.csv", "HINT", "label"], "day.csv is empty"),
        ({}, ["header", "day.csv", "HINT", "label"], "day.csv: No such file or directory"),
        ({"meta": "{}"}, ["records", ".", "HINT"], ""),
        (
            {},
            ["records", ".", "HINT"],
            ".: neither a .csv nor a directory of TFRecords with a file `meta`; HINT",
        ),
        ({}, ["records", "x", "HINT"], "x: No such file or directory"),
        ({}, ["any", "x", "HINT"], "x: No such file or directory"),
        ({"train.csv": "1,2\n", "eval.csv": "0,1\n"}, ["tables", ".", "2", "train.csv", "eval.csv"], ""),
        (
            {"train.csv": "1,2\n"},
            ["tables", ".", "2", "train.csv", "eval.csv"],
            ". has no eval.csv; DeepRec's scripts read train.csv and eval.csv",
        ),
        (
            {"train.csv": "1,2\n", "eval.csv": "0,1,2\n"},
            ["tables", ".", "2", "train.csv", "eval.csv"],
            "./eval.csv has 3 comma-separated columns in its first line, expected 2",
        ),
    ],
)
def test_data_for_scripts_of_others(
    tmp_path: Path, files: dict[str, str], words: list[str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = (share.node_package() / "datafiles.py").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", text, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == ((1, f"error: {said}\n") if said else (0, ""))


def test_containers_have_the_tensorflow_that_this_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TFRecord files are opened here and read in the image; a host's workers use the Python that is asked."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    file = tmp_path / "days" / "part-0.tfrecord"
    file.parent.mkdir()
    file.write_bytes(b"records")
    rows = tmp_path / "days" / "part-1.tsv"
    rows.write_bytes(EXCERPT.read_bytes())
    path = tmp_path / "inventory.yml"
    path.write_text(LOCAL.format(data=file.parent))
    inventory = load(path, state_dir=tmp_path / "state")

    def said(on: str | None) -> str:
        wanted = jobspec.request(inventory, LaunchOptions(on=on))
        program, _, _, *words = oe_runtime.data_check(inventory.hosts["localhost"], wanted)
        assert program == sys.executable
        status = check_program.main(words)
        words_ = capsys.readouterr().err
        assert bool(status) == bool(words_)
        return words_

    assert said("docker") == said("podman") == ""
    assert said(None) == f"error: {file} is a TFRecord file, which TensorFlow reads: pip install tensorflow\n"
    rows.write_bytes(EXCERPT.read_bytes() + b"1\t2\n")
    assert "part-1.tsv line 201: found 2 columns" in said("docker")
    rows.unlink()
    file.write_bytes(b"")
    assert said("docker").startswith(f"error: {file} is empty")
    file.with_suffix(".tfrecord.gz").write_bytes(b"plain")
    file.unlink()
    assert "is not a gzip file, as its name says" in said("docker")


def test_flavors_of_others_name_their_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(_host: Host, _name: str, args: dict[str, object], _timeout: int) -> dict[str, object]:
        argv = list(args["argv"])  # type: ignore[call-overload]
        asked.append([*argv[:3], *argv[4:]])
        return {"problem": ""}

    monkeypatch.setattr(errands, "run", run)
    check(tmp_path, HOSTS, "/srv/day.csv", ", runtime_flavor: openembedding, training_model: wdl")
    one = HOSTS.replace("workers: {{hosts: {{a: , b: }}}}", "workers: {{hosts: {{a: }}}}")
    check(tmp_path, one, "/srv/days", ", runtime_flavor: deeprec, training_model: wdl")
    first, _, third = asked
    assert first[:5] == ["/opt/oeprov/openembedding/bin/python", "-I", "-c", "header", "/srv/day.csv"]
    assert first[6:8] == ["label", "I1"]
    assert third[3:] == ["tables", "/srv/days", "40", "train.csv", "eval.csv"]


def test_a_schema_travels_as_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(host: Host, name: str, args: dict[str, list[str]], timeout: int) -> dict[str, object]:
        asked.append(args["argv"])
        return {"problem": ""}

    monkeypatch.setattr(errands, "run", run)
    schema = tmp_path / "schema.yml"
    schema.write_text("label: click\ncategories: {site: 50}\nignored: '*'\n")
    text = '{"label":"click","categories":{"site":50},"ignored":"*"}'
    check(tmp_path, HOSTS, "/srv/day.tsv", f", training_schema: {schema}, training_label: bought")
    for words in asked:
        assert words[words.index("--schema") + 1] == text
        assert words[words.index("--label") + 1] == "bought"
    asked.clear()
    check(tmp_path, HOSTS, "/srv/day.tsv", ", training_schema: avazu")
    assert [words[words.index("--schema") + 1] for words in asked] == ["avazu", "avazu"]
    assert oe_runtime.schema_text(text) == text
    for content, said in (
        ("label: [", "schema.yml line 1: "),
        ("- label", "schema.yml is no mapping of label, numbers"),
        (None, "schema.yml: No such file or directory"),
    ):
        if content is None:
            schema.unlink()
        else:
            schema.write_text(content)
        with pytest.raises(TrainingError, match=r"^--schema: ") as caught:
            check(tmp_path, HOSTS, "/srv/day.tsv", f", training_schema: {schema}")
        assert said in str(caught.value)
    with pytest.raises(TrainingError, match="--schema: generate:100 makes rows of Criteo's columns"):
        check(tmp_path, HOSTS, "generate:100", ", training_schema: avazu")


def test_a_local_job_reads_any_columns(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("click,site\n1,a\n0,b\n")
    flags = ", training_label: click, training_categories: 'site:50'"
    local = LOCAL.replace("training_data: {data}}}", "training_data: {data}{more}}}")
    check(tmp_path, local, str(rows), flags)
    with pytest.raises(TrainingError, match="lacks the column sites; did you mean for sites: site"):
        check(tmp_path, local, str(rows), ", training_label: click, training_categories: 'sites:50'")
