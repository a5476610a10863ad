"""The command line: exit codes, help that teaches, JSON that parses, and one line for every mistake."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import pydantic
import pytest
import yaml
from fake_processes import make_job

from oe_runtime.support import interrupt
from provision import __main__ as program
from provision.cli import main as cli
from provision.cluster import share
from provision.cluster.errors import Interrupted

COMMANDS = [
    ["plan"],
    ["bootstrap"],
    ["history"],
    ["pmem-mode"],
    ["launch-training"],
    ["status"],
    ["logs"],
    ["stop"],
    ["resume"],
    ["scale"],
    ["drain"],
    ["undrain"],
    ["jobs"],
    ["jobs", "rm"],
    ["jobs", "prune"],
    ["fetch"],
    ["serve-export"],
    ["inventory"],
    ["inventory", "check"],
    ["inventory", "show"],
    ["inventory", "schema"],
    ["lab"],
    ["lab", "up"],
    ["lab", "down"],
    ["lab", "list"],
    ["lab", "ssh"],
    ["lab", "power-cut"],
    ["lab", "start"],
]


class Run:
    """What one command line gave."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def error(self) -> str:
        """The one line on standard error of a failed command that printed nothing else."""
        assert self.code == 1
        assert self.out == ""
        assert self.err.count("\n") == 1
        assert self.err.startswith("error: ")
        return self.err.removeprefix("error: ").strip()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("OEPROV_INVENTORY", raising=False)
    monkeypatch.setenv("OEPROV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Run:
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call


SAMPLE, LOCAL = str(share.inventory("sample")), str(share.inventory("local"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_says_what_and_shows_examples(run, command: list[str]) -> None:  # type: ignore[no-untyped-def]
    found = run(*command, "--help")
    assert found.code == 0
    assert "Usage: oeprov " + " ".join(command) in found.out
    if command != ["inventory"]:
        assert "Example" in found.out
        assert "oeprov " + " ".join(command) in found.out.split("Example")[1]


def test_help_of_the_whole_names_every_command(run) -> None:  # type: ignore[no-untyped-def]
    found = run("--help")
    for command in COMMANDS:
        assert command[0] in found.out


def test_version(run) -> None:  # type: ignore[no-untyped-def]
    assert re.fullmatch(r"oeprov \d+\.\d+\.\d+\n", run("--version").out)


def test_plan_offline_shows_every_host_and_exits_with_2(run) -> None:  # type: ignore[no-untyped-def]
    found = run("plan", "-i", SAMPLE, "--offline")
    assert found.code == 2
    for name in ("re6p-1", "re6p-2", "re7p-1", "metal-1", "cxl-1", "gpu-[1-2]", "cpu-1"):
        assert name in found.out
    assert "memmap=1008G!257G" in found.out
    assert "is lost in a stop" in found.out
    assert "4 of which reboot" in found.out


def test_plan_of_one_host_alone(run) -> None:  # type: ignore[no-untyped-def]
    found = run("plan", "-i", SAMPLE, "--offline", "--host", "gpu-2")
    assert found.code == 2
    assert "gpu-2: 6 steps" in found.out
    assert "re6p" not in found.out
    only = json.loads(run("plan", "-i", SAMPLE, "--offline", "--host", "gpu-2", "--json").out)
    assert (list(only["hosts"]), only["turns"]) == (["gpu-2"], [["gpu-2"]])
    words = run("plan", "-i", SAMPLE, "--offline", "--host", "gpu-3").error()
    assert "--host gpu-3: " in words
    assert "has no such host, or --limit leaves it out; did you mean gpu-" in words
    hidden = run("plan", "-i", SAMPLE, "--offline", "--limit", "workers", "--host", "re7p-1").error()
    assert "--limit leaves it out" in hidden


def test_plan_offline_for_the_systems_that_hosts_run(run) -> None:  # type: ignore[no-untyped-def]
    words = ("plan", "-i", SAMPLE, "--offline", "--limit", "re6p-1,re7p-1,gpu-1")
    systems = ("--system", "centos-7.8", "--system", "re7p-1=alinux-3", "--system", "gpu-1=ubuntu-24.04")
    found = run(*words, *systems)
    assert found.code == 1
    said = " ".join(found.out.split())
    assert "re6p-1: not observed: planned from a freshly installed host of this kind (centos 7.8)" in said
    assert "kernel_source elrepo-lt: its kernels for centos 7.8 are archived and come from" in said
    assert "rh-python38" in said
    assert "re7p-1: not observed: planned from a freshly installed host of this kind (alinux 3)" in said
    assert "kernel_source elrepo-lt" in said
    assert "gpu-1: not observed: planned from a freshly installed host of this kind (ubuntu 24.04)" in said
    assert "there is no host x" in run(*words, "--system", "x=centos-7").error()
    assert "--system is for --offline" in run("plan", "-i", SAMPLE, "--system", "centos-7").error()


def test_plan_shows_exact_commands_when_asked(run) -> None:  # type: ignore[no-untyped-def]
    found = run("plan", "-i", SAMPLE, "--offline", "--limit", "re7p-1", "--commands")
    assert "grubby --update-kernel=ALL '--args=memmap=1008G!257G'" in found.out
    assert "mkfs.ext4 -q -b 4096 -U <new> /dev/pmem0" in found.out


def test_plan_json_is_one_document(run) -> None:  # type: ignore[no-untyped-def]
    found = run("plan", "-i", SAMPLE, "--offline", "--json")
    document = json.loads(found.out)
    assert (found.code, found.err, document["changes"]) == (2, "", True)
    steps = document["hosts"]["re7p-1"]["steps"]
    assert [step["id"] for step in steps if step["reboots"]] == ["reboot"]
    assert all(set(step) >= {"what", "why", "destroys", "reboots", "commands"} for step in steps)


def test_plan_says_what_is_out_of_reach_and_exits_with_1(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = Path(SAMPLE).read_text().replace("pmem_max_movable_ratio: 6", "pmem_max_movable_ratio: 4")
    (tmp_path / "inventory.yml").write_text(text)
    found = run("plan", "--offline", "--limit", "re6p-2")
    assert found.code == 1
    assert "pmem_max_movable_ratio" in found.out


def test_plan_of_this_machine(run) -> None:  # type: ignore[no-untyped-def]
    found = run("plan", "-i", LOCAL, "--json")
    document = json.loads(found.out)
    steps = [step["id"] for step in document["hosts"]["localhost"]["steps"]]
    assert found.code in (1, 2)
    assert "directory" in steps


def test_plan_of_a_host_that_is_down(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "inventory.yml").write_text(
        "all:\n  children:\n    parameter_servers: {hosts: {a: {oeprov_kind: cpu, ansible_host: 127.0.0.1, "
        "ansible_port: 1}}}\n    workers: {hosts: {a: }}\n"
    )
    found = run("plan")
    assert found.code == 1
    assert "a: 127.0.0.1 port 1 refuses connections" in found.out
    found = run("plan", "--json")
    assert "refuses connections" in json.loads(found.out)["hosts"]["a"]["unreachable"]


def test_the_inventory_may_come_from_the_environment(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OEPROV_INVENTORY", LOCAL)
    assert run("inventory", "check").code == 0


def test_inventory_show(run) -> None:  # type: ignore[no-untyped-def]
    found = run("inventory", "show", "-i", SAMPLE)
    assert found.code == 0
    for piece in ("re7p-1", "192.0.2.13:22", "fsdax", "tensorflow-gpu", "deepfm", "dim 16"):
        assert piece in found.out
    document = json.loads(run("inventory", "show", "-i", SAMPLE, "--json", "--limit", "gpu-2").out)
    assert list(document["hosts"]) == ["gpu-2"]
    assert document["hosts"]["gpu-2"]["address"] == "192.0.2.22"


def test_inventory_schema_is_json(run) -> None:  # type: ignore[no-untyped-def]
    assert json.loads(run("inventory", "schema").out)["definitions"]["variables"]["properties"]["pmem_mode"]


def test_inventory_check_lists_all_problems(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = (
        Path(LOCAL).read_text().replace("training_model", "training_modle").replace("pmem_size", "pmem_sice")
    )
    (tmp_path / "inventory.yml").write_text(text)
    found = run("inventory", "check")
    assert (found.code, found.err.count("error: ")) == (1, 2)
    found = run("inventory", "check", "--json")
    assert len(json.loads(found.out)["problems"]) == 2


def test_inventory_check_lists_servers_that_a_launch_would_refuse(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    hosts = {
        "a": {"oeprov_kind": "cpu", "parameter_server_storage": "dram_ssd"},
        "b": {"oeprov_kind": "cpu", "parameter_server_storage": "pmem_libpmem"},
        "c": {"oeprov_kind": "cpu", "parameter_server_storage": "pmem_memkind"},
        "d": {"oeprov_kind": "cpu", "parameter_server_count": 2, "parameter_server_port": 65535},
        "e": {"oeprov_kind": "re6p", "pmem_mode": "fsdax", "parameter_server_storage": "dram_pmem"},
        "f": {"oeprov_kind": "re6p", "pmem_mode": "fsdax", "ansible_connection": "local"},
        # Launched on hosts that `oeprov pmem-mode` has put in that mode.
        "g": {"oeprov_kind": "re6p", "pmem_mode": "system-ram", "parameter_server_storage": "pmem_libpmem"},
    }
    groups = {"parameter_servers": {"hosts": hosts}, "workers": {"hosts": {"w": {"oeprov_kind": "cpu"}}}}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    found = run("inventory", "check")
    assert found.code == 1
    said = [line.partition("inventory.yml: ")[2] for line in found.err.splitlines()]
    assert [line.partition(";")[0] for line in said] == [
        "host a: storage dram_ssd needs a drive, and ssd_devices names none",
        "host b: storage pmem_libpmem needs pmem_mode fsdax, found none, or a drive in ssd_devices",
        "host c: storage pmem_memkind needs memory nodes without CPUs (pmem_mode system-ram), found none",
        "host d: parameter_server_port 65535: 2 servers need ports beyond 65535",
        "host f is of kind re6p with ansible_connection local: its memory is used by systemd units, so reach "
        "it over ssh (ansible_connection: ssh)",
    ]
    files = {"training_script": "nix/train.py", "training_schema": "nix.yml"}
    hosts = {"a": {"oeprov_kind": "cpu"}}
    groups["parameter_servers"]["hosts"] = hosts
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump({"all": {"children": groups, "vars": files}}))
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/ps9.yml").write_text("{}")
    (tmp_path / "beside").symlink_to("/proc/self/mem")  # a file that root cannot read either
    found = run("inventory", "check")
    assert found.code == 1
    for piece in (
        "training_script: there is no file nix/train.py on this machine",
        "training_schema: cannot read nix.yml: No such file",
        "host_vars/ps9.yml: the inventory has no host ps9; rename the file, or remove it",
    ):
        assert piece in found.err
    (tmp_path / "host_vars/ps9.yml").unlink()
    # Kubernetes has rules of its own.
    everywhere = {"kubernetes_server_image": "registry.example/oeprov-server:1"}
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump({"all": {"children": groups, "vars": everywhere}}))
    assert run("inventory", "check").code == 0


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["plan"], "inventory.yml: no such inventory; name one with -i FILE"),
        (["bootstrap", "-i", "nope.yml"], "nope.yml: no such inventory"),
        (["pmem-mode", "fsdx", "-i", LOCAL], "did you mean fsdax?"),
        (["pmem-mode", "-i", LOCAL], "Missing argument 'MODE'; see `oeprov pmem-mode --help`"),
        (["pmem-mode", "memory", "-i", SAMPLE, "--limit", "re6p-1"], "re6p is a guest"),
        (["pmem-mode", "fsdax", "-i", LOCAL], "kind local is this machine"),
        (["plan", "-i", LOCAL, "--limit", "remotehost"], "is no host or group"),
        (["plan", "-i", LOCAL, "--limit", "q*"], "--limit 'q*' is no host or group"),
        (["plan", "--offlin"], "No such option: --offlin"),
        (["plam"], "No such command 'plam'"),
        (["launch-training", "-i", "nope.yml"], "nope.yml: no such inventory"),
        (["launch-training", "my-job", "-i", LOCAL], "is for --resume only"),
        (["launch-training", "-i", LOCAL, "--dim", "wide"], "--dim: found 'wide'; expected a whole"),
        (["launch-training", "-i", LOCAL, "--dim", "0"], "--dim: found '0'; allowed: at least 1"),
        (["stop", "no-such-job"], "no-such-job"),
        (["logs", "no-such-job"], "no-such-job"),
        (["status", "no-such-job"], "no-such-job"),
    ],
    ids=lambda value: "-".join(value).replace("/", "_")[-40:] if isinstance(value, list) else None,
)
def test_a_mistake_gives_one_line_and_exit_1(run, arguments: list[str], piece: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert piece in run(*arguments).error()
    assert not (tmp_path / "state").exists()


def test_an_inventory_that_may_not_be_read_is_said(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "inventory.yml"
    path.write_text("all:\n")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read everything")
    assert "inventory.yml" in run("plan").error()


def test_status_of_one_cluster(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first, second = (make_job(tmp_path / "state") for _ in range(2))
    spec = second.spec()
    second.write_spec(spec.model_copy(update={"cluster": "ads"}))
    for name in (spec.cluster, "ads", "empty"):
        document = yaml.safe_load(Path(LOCAL).read_text())
        document["all"].setdefault("vars", {})["oeprov_cluster"] = name
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(document))

    def shown(*words: str) -> list[str]:
        return [item["job"] for item in json.loads(run("status", "--json", *words).out)["jobs"]]

    assert shown() == [first.id, second.id]
    assert shown("-i", f"{tmp_path}/{spec.cluster}.yml") == [first.id]
    assert shown("-i", f"{tmp_path}/ads.yml") == shown("-i", f"{tmp_path}/ads.yml", second.id) == [second.id]
    assert "no jobs of cluster empty in" in run("status", "-i", f"{tmp_path}/empty.yml").out
    said = run("status", "-i", f"{tmp_path}/ads.yml", first.id).error()
    assert said == f"job {first.id} belongs to cluster {spec.cluster}, not to ads; leave out -i"


STATE_COMMANDS = [
    ["plan", "-i", LOCAL],
    ["bootstrap", "-i", LOCAL, "--yes"],
    ["pmem-mode", "directory", "-i", LOCAL],
    ["rollback", "kernel", "-i", LOCAL],
    ["destroy", "-i", LOCAL],
    ["doctor", "-i", LOCAL],
    ["launch-training", "-i", LOCAL],
    ["resume"],
    ["status"],
    ["logs"],
    ["stop"],
    ["scale", "--servers", "2"],
    ["drain", "localhost", "-i", LOCAL],
    ["undrain", "localhost", "-i", LOCAL],
    ["report", "-i", LOCAL],
    ["dashboard", "-i", LOCAL],
    ["serve-export"],
    ["monitoring", "-i", LOCAL],
    ["manifests", "-i", LOCAL],
    ["inventory", "check", "-i", LOCAL],
    ["jobs"],
    ["fetch"],
    ["lab", "list"],
    ["lab", "up"],
]


@pytest.mark.parametrize("below", ["", "/deeper/still"])
@pytest.mark.parametrize("command", STATE_COMMANDS, ids=" ".join)
def test_a_state_directory_that_is_a_file(run, tmp_path: Path, command: list[str], below: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("rows of somebody\n")
    said = run(*command, "--state-dir", f"{tmp_path}/file{below}").error()
    assert said == (
        f"state directory {tmp_path}/file{below}: {tmp_path}/file is not a directory; choose another with "
        "--state-dir or OEPROV_STATE_DIR"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["bootstrap", "-i", LOCAL, "--yes"],
        ["pmem-mode", "directory", "-i", LOCAL],
        ["launch-training", "-i", LOCAL],
    ],
    ids=" ".join,
)
def test_a_state_directory_that_cannot_be_written(run, tmp_path: Path, command: list[str]) -> None:  # type: ignore[no-untyped-def]
    place = "/proc/oeprov"  # where root cannot make one either
    said = run(*command, "--state-dir", place).error()
    assert said.startswith(f"state directory {place}: cannot be written: ")
    assert said.endswith("; choose another with --state-dir or OEPROV_STATE_DIR")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_output_file_that_cannot_be_written_is_an_error(
    run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:  # type: ignore[no-untyped-def]
    def broken(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), "/somewhere/journal.jsonl")

    monkeypatch.setattr("provision.converge.planning.plan", broken)
    assert run("plan", "-i", LOCAL).error() == f"/somewhere/journal.jsonl: {os.strerror(number)}"


def test_ctrl_c_is_130(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("provision.converge.planning.plan", interrupted)
    found = run("plan", "-i", LOCAL)
    assert (found.code, found.out) == (130, "")
    assert "Traceback" not in found.err


def test_a_launch_that_is_stopped_early_is_130(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def stopped(*_: object, **__: object) -> int:
        raise Interrupted("stopped before training began; nothing was started")

    monkeypatch.setattr("provision.jobs.launching.launch", stopped)
    found = run("launch-training", "-i", LOCAL)
    assert (found.code, found.out) == (130, "")
    assert found.err == "error: stopped before training began; nothing was started\n"


class _Interrupted:
    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def _import() -> int:
    type("Column", (), {"style": _Interrupted()})
    return 0


def test_ctrl_c_while_a_class_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 raises a RuntimeError there."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which the program replaces
    monkeypatch.setattr(cli, "run", _import)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130
    assert interrupt.run(_import) == 130
    monkeypatch.setattr(cli, "run", lambda: [].pop())
    with pytest.raises(IndexError):
        program.main()


def test_ctrl_c_while_pydantic_builds_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises a SchemaError, without the interrupt as its cause."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def build() -> int:
        with monkeypatch.context() as patched:
            patched.setattr(re, "compile", interrupted)
            text = Annotated[str, pydantic.Field(pattern="a")]
            pydantic.TypeAdapter(text, config=pydantic.ConfigDict(regex_engine="python-re"))
        return 0

    monkeypatch.setattr(cli, "run", build)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 130


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["checkpoint", "inspect", "."]], ids=" ".join)
def test_ctrl_c_at_any_time_has_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    """Also while it is imported, and its child with it, as from a terminal."""
    program = [sys.executable, "-X", "importtime", "-m", "provision", *arguments]
    ends = []
    for number in range(6):
        with subprocess.Popen(
            program,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(share.root())},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            # Before our first line there is Python alone, for some tens of milliseconds.
            assert any("typer" in line for line in process.stderr)
            time.sleep(number * 0.15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            said = process.stderr.read()
        assert "Traceback" not in said
        assert "KeyboardInterrupt" not in said
        ends.append(process.returncode)
    # Ended by the signal itself in its last instant, as on a busy machine: a shell says 130 then too.
    assert ends[0] in (130, -signal.SIGINT)
    assert set(ends) <= {130, 0, 1, -signal.SIGINT}  # the later ones may be done before


@pytest.mark.process
def test_ctrl_c_that_an_extension_module_swallows_ends_the_command(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import signal
import time

from provision.__main__ import main
from provision.cli import main as cli


class Swallows:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def run():
    Swallows()
    time.sleep(60)
    return 0


cli.run = run
main()
"""
    )
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(share.root())},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.process
def test_ctrl_c_while_the_childs_python_starts_has_no_traceback(tmp_path: Path) -> None:
    def interrupted() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as `oeprov checkpoint` does
        os.kill(os.getpid(), signal.SIGINT)

    program = [sys.executable, "-m", "oe_runtime.checkpoint", "inspect", "."]
    done = subprocess.run(
        program, cwd=tmp_path, preexec_fn=interrupted, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (
            ["stop", ""],
            "an argument is empty: the one after stop; is a variable of your command line not set?",
        ),
        (["destroy", "--limit", "", "--yes"], "an argument is empty: the one after --limit; "),
        (["", "x"], "an argument is empty: the first one; "),
        (["resume", "--epochs", "0"], "--epochs: found '0'; allowed: at least 1;"),
        (["jobs", "prune", "--keep", "-1"], "--keep: found '-1'; allowed: at least 0;"),
        (["jobs", "prune", "--older-than", "3x"], "--older-than: found '3x'; expected a number and m, h"),
        (["serve-export", "--port", "70000"], "--port: found '70000'; allowed: at most 65535;"),
        (["logs", "-n", "-3"], "--lines: found '-3'; allowed: at least 0; see `oeprov logs --help`"),
        (["lab", "up", "--nodes", "x"], "--nodes: found 'x'; expected a whole number; see `oeprov lab up "),
        (["rollback", "krnel"], "what: found 'krnel'; allowed: 'kernel', 'pmem-mode'; see"),
        (["cost", "--rows", "1", "--epoch-hours", "no"], "--epoch-hours: found 'no'; expected a number;"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_an_empty_or_impossible_argument_is_a_mistake(run, arguments: list[str], piece: str) -> None:  # type: ignore[no-untyped-def]
    assert piece in run(*arguments).error()


def test_the_installed_program_runs(tmp_path: Path) -> None:
    """Entry point, exit code and a reader that goes away, in a process of its own."""
    program = [sys.executable, "-m", "provision.cli"]
    environment = {**os.environ, "PYTHONPATH": str(share.root()), "OEPROV_STATE_DIR": str(tmp_path / "s")}
    done = subprocess.run(
        [*program, "plan"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: inventory.yml: no such inventory")
    assert done.stdout == ""
    reader = f"'{sys.executable}' -m provision.cli inventory schema | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", reader],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("{", "")
