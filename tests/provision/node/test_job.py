"""What a host says of a job's units, from canned answers."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from provision.node import environments, job, jobfiles, numa, port, systemd
from provision.node.command import CommandError, Result, System
from provision.node.systemd import Unit

SHOW = """\
Id=oeprov-j-server-0.service
ActiveState=active
SubState=running
MainPID=812
Result=success
ExecMainCode=0
ExecMainStatus=0
NRestarts=0

Id=oeprov-j-server-1.service
ActiveState=failed
SubState=failed
MainPID=0
Result=signal
ExecMainCode=2
ExecMainStatus=9
NRestarts=2
"""


class Canned(System):
    """A root directory and answers by command."""

    def __init__(self, root: Path, answers: dict[str, str] | None = None) -> None:
        super().__init__(str(root))
        self.answers = answers or {}
        self.ran: list[str] = []

    def which(self, name: str) -> str:
        return "/usr/bin/" + name

    def run(self, argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        line = " ".join(argv)
        self.ran.append(line)
        for words, out in self.answers.items():
            if words in line:
                return Result(argv, 0, out, "")
        return Result(argv, 0, "", "")


def test_units_of_systemctl_show() -> None:
    first, second = systemd.parse_show(SHOW)
    assert first == Unit("oeprov-j-server-0.service", "active", 812, 0, "success", 0)
    assert first.up
    assert second == Unit("oeprov-j-server-1.service", "failed", 0, 2, "signal", -9)
    assert not second.up
    assert Unit("x", "activating", 0, 0, "exit-code", 1).failing, "systemd waits to start it again"
    assert not Unit("x", "activating", 0, 0, "success", 0).failing


def test_units_of_one_job_are_not_those_of_another(tmp_path: Path) -> None:
    directory = tmp_path / "etc" / "systemd" / "system"
    directory.mkdir(parents=True)
    for name in (
        "oeprov-a-20261121-server-0.service",
        "oeprov-a-20261121-server-10.service",
        "oeprov-a-20261121-worker-0.service",
        "oeprov-a-20261121-2-server-0.service",
        "oeprov-system-ram.service",
        "oeprov-a-20261121-server-0.service.d",
    ):
        (directory / name).touch()
    system = Canned(tmp_path)
    assert systemd.ours(system, "a-20261121") == [
        "oeprov-a-20261121-server-0.service",
        "oeprov-a-20261121-server-10.service",
        "oeprov-a-20261121-worker-0.service",
    ]
    assert len(systemd.ours(system)) == 4


@pytest.mark.parametrize(
    ("unit", "own", "manager", "words"),
    [
        (
            Unit("u", "failed", result="exit-code", exit_code=1),
            "note: x\nerror: port 1 is taken\nbye",
            "",
            "it ended with exit status 1: port 1 is taken",
        ),
        (Unit("u", "failed", result="signal", exit_code=-9), "listens", "", "it was killed by signal 9"),
        (
            Unit("u", "failed", result="oom-kill", exit_code=-9),
            "",
            "",
            "it was killed by signal 9 (the host ran out of memory)",
        ),
        (
            Unit("u", "active", pid=5, restarts=1, result="success"),
            "error: old\nlistens",
            "u: Main process exited, code=killed, status=6/ABRT\n",
            "its process ended (code=killed, status=6/ABRT): old",
        ),
        (
            Unit("u", "failed", result="exit-code"),
            "error: memory nodes 1 are not online",
            "",
            "it could not be started: memory nodes 1 are not online",
        ),
        (Unit("u", "failed", result="start-limit-hit"), "", "", "systemd says start-limit-hit"),
        (Unit("u", "inactive", result="success"), "server 0 of 1 ended", "", "it ended: server 0 of 1 ended"),
    ],
)
def test_how_a_unit_ended(tmp_path: Path, unit: Unit, own: str, manager: str, words: str) -> None:
    system = Canned(tmp_path, {"_SYSTEMD_UNIT=u": own, "-u u": manager})
    assert systemd.how_it_ended(system, unit) == words


def test_the_last_line_of_a_job_is_plain_text() -> None:
    """It ends in messages on the operator's terminal."""
    assert (
        systemd.last_words(["error: \x1b[31mno\x1b[0m \x1b]52;c;cm0=\x07data\tleft"])
        == "no ?]52;c;cm0=?data left"
    )


def test_memory_by_node() -> None:
    text = (
        "55d0 default file=/usr/bin/python3 mapped=3 N0=3 kernelpagesize_kB=4\n"
        "7f00 bind:1 anon=513 dirty=513 active=0 N0=1 N1=512 kernelpagesize_kB=4\n"
        "7f80 bind:1 anon=2 N1=2 kernelpagesize_kB=2048\n"
        "7ff0 default stack\n"
    )
    assert numa.parse_numa_maps(text) == {0: 4 * 4096, 1: 512 * 4096 + 2 * 2048 * 1024}


def test_port_that_is_taken_and_by_whom() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert port.blocked("127.0.0.1", number) == "Address already in use"
        assert port.blocked("0.0.0.0", number) == "Address already in use"  # noqa: S104
        assert f"(pid {os.getpid()}" in port.holder(System(), number)
    assert port.blocked("127.0.0.1", number) == ""
    assert port.holder(System(), number) == ""
    assert port.blocked("192.0.2.1", 7000) == "the host has no such address"


@pytest.mark.parametrize(
    ("unit", "advice"),
    [
        ("oeprov-mine-worker-1.service", None),  # `start` ends it
        ("oeprov-mine-server-0.service", "oeprov stop mine, or"),
        ("oeprov-other-1-worker-0.service", "oeprov stop other-1, or"),
        ("sshd.service", "free it, or"),
    ],
)
def test_ports_of_workers_are_free_or_their_holder_is_named(
    unit: str, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "unit_of", lambda *_: unit)
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - as TensorFlow does
        number = taken.getsockname()[1]
        workers = [{"name": f"worker-{rank}", "port": 0} for rank in range(8)]
        wanted = {"directory": "/var/lib/oeprov/jobs/mine", "workers": workers}
        assert len({*job.worker_ports(System(), wanted)["ports"], number}) == 9
        wanted["workers"] = [{"name": "worker-0", "port": number}]
        if advice is None:
            assert job.worker_ports(System(), wanted) == {"ports": [number]}
        else:
            said = rf"worker-0: port {number} on .* cannot be used: .*{unit}\) listens there; {advice}"
            with pytest.raises(CommandError, match=f"{said} choose another worker_port"):
                job.worker_ports(System(), wanted)
    assert job.worker_ports(System(), wanted) == {"ports": [number]}


def test_stop_without_a_job_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "var" / "lib" / "oeprov" / "jobs" / "j").mkdir(parents=True)
    keep = tmp_path / "var" / "lib" / "oeprov" / "jobs" / "j" / "mine"
    keep.touch()
    system = Canned(tmp_path)
    done = job.stop(system, {"directory": "/var/lib/oeprov/jobs/j"})
    assert done == {"stopped": {}, "rows": {}, "removed": False}
    assert keep.exists(), "a directory that holds no record of a job is somebody else's"
    assert system.ran == []


def test_stop_keeps_a_run_with_its_checkpoints(tmp_path: Path) -> None:
    directory = tmp_path / "var" / "lib" / "oeprov" / "jobs" / "j"
    checkpoint = directory / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (directory / "token").touch()
    job.stop(Canned(tmp_path), {"directory": "/var/lib/oeprov/jobs/j"})
    assert checkpoint.is_dir()


class Starting(Canned):
    """`systemctl start` has the server ready at once, on port 7011."""

    def run(self, argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        if argv[:2] == ["systemctl", "start"]:
            ready = {
                "pid": os.getpid(),
                "host": "10.0.0.1",
                "port": 7011,
                "storage": "dram",
                "is_pmem": False,
            }
            self.write("/var/lib/oeprov/jobs/j/ready/server-0.json", json.dumps(ready))
        return super().run(argv, timeout, environment)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows that a stopped job has left on the host."""
    monkeypatch.setattr(jobfiles, "ensure_user", lambda system, name: (os.getuid(), os.getgid()))
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    found = tmp_path / "mnt/pmem0/oeprov/j/server-0/oe-1-super.pool"
    found.parent.mkdir(parents=True)
    found.touch()
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    return found


def start_of_a_server(*, fresh: bool) -> dict[str, object]:
    """What ``job.start`` is told."""
    item = {
        "name": "server-0",
        "role": "parameter_server",
        "unit": "oeprov-j-server-0.service",
        "text": "ExecStart=python -m oe_runtime.server --host 10.0.0.1 --port 0 --metrics-port 0 --index 0\n",
        "directories": ["/mnt/pmem0/oeprov/j/server-0"],
        "mount": "",
        "needs": [],
        "address": "10.0.0.1",
        "port": 0,
        "fresh": fresh,
    }
    return {"directory": "/var/lib/oeprov/jobs/j", "user": "", "token": "t", "seconds": 5, "units": [item]}


@pytest.mark.parametrize("how", ["fails", "is-late", "is-stopped"])
def test_a_server_that_does_not_start_again_keeps_its_rows(tmp_path: Path, pool: Path, how: str) -> None:
    """A resumed job has its rows in the pool and nowhere else."""
    answer = SHOW.split("\n\n")[0]
    if how == "fails":
        answer = answer.replace("=active", "=failed").replace("Result=success", "Result=exit-code")
    if how == "is-stopped":
        (tmp_path / "run").mkdir()
        (tmp_path / job.STOPPING.lstrip("/")).write_text("j")
    system = Canned(tmp_path, {"systemctl show": answer, "systemctl stop": ""})
    ended = {"systemctl show": answer.replace("ActiveState=active", "ActiveState=inactive")}
    stopping = system.run

    def run(argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        if argv[:2] == ["systemctl", "stop"]:
            system.answers = ended
        return stopping(argv, timeout, environment)

    system.run = run  # type: ignore[method-assign]
    with pytest.raises(CommandError, match="server-0"):
        job._start(system, {**start_of_a_server(fresh=False), "seconds": 0})
    assert pool.exists()


def test_a_server_keeps_its_port_and_rows_when_it_is_started_again(tmp_path: Path, pool: Path) -> None:
    args = start_of_a_server(fresh=False)
    system = Starting(tmp_path)
    (server,) = job.start(system, args)["servers"]
    assert server["port"] == 7011
    text = (tmp_path / "etc/systemd/system/oeprov-j-server-0.service").read_text()
    assert " --host 10.0.0.1 --port 7011 --metrics-port 0 --index 0\n" in text
    assert system.ran[-1] == "systemctl daemon-reload", "systemd has the port before it could need it"
    assert pool.exists()

    args["units"][0]["fresh"] = True  # the playbook once more: the token says that it is the same job
    job.start(system, args)
    assert pool.exists()

    unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
    unit.write_text("ReadWritePaths=/var/lib/oeprov/jobs/j -/mnt/pmem0/oeprov/j/server-0\n")
    stopped = job.stop(system, {"directory": "/var/lib/oeprov/jobs/j", "keep_pools": True})["stopped"]
    assert stopped["server-0"]["rows"] == "/mnt/pmem0/oeprov/j/server-0"
    assert pool.exists()
    assert not unit.exists()


def test_a_directory_without_rows_goes_with_its_server(tmp_path: Path, pool: Path) -> None:
    """A server that ends in an orderly way removes the tables that have no checkpoint."""
    system = Starting(tmp_path)
    job.start(system, start_of_a_server(fresh=False))
    pool.unlink()
    (pool.parent / "counts").mkdir()
    unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
    unit.write_text("ReadWritePaths=/var/lib/oeprov/jobs/j -/mnt/pmem0/oeprov/j/server-0\n")
    stopped = job.stop(system, {"directory": "/var/lib/oeprov/jobs/j", "keep_pools": True})["stopped"]
    assert stopped["server-0"]["rows"] == ""
    assert not pool.parent.parent.exists()


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("what", ["rows", "no file system", "nothing"])
def test_a_stop_tells_of_rows_that_may_be_left(tmp_path: Path, pool: Path, what: str, *, units: bool) -> None:
    """Also where units are gone, and where the file system with the rows was not mounted after a boot."""
    place = "/mnt/pmem0/oeprov/j/server-0"
    if units:
        job.start(Starting(tmp_path), start_of_a_server(fresh=False))
        unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
        unit.write_text(f"ReadWritePaths=/var/lib/oeprov/jobs/j -{place}\n")
    if what != "rows":
        shutil.rmtree(tmp_path / ("mnt/pmem0/oeprov" if what == "no file system" else "mnt/pmem0/oeprov/j"))
    args = {"directory": "/var/lib/oeprov/jobs/j", "keep_pools": True, "pools": {"server-0": place}}
    done = job.stop(Canned(tmp_path), args)
    found = done["stopped"]["server-0"]["rows"] if units else done["rows"].get("server-0", "")
    assert found == ("" if what == "nothing" else place)
    assert pool.exists() == (what == "rows")


@pytest.mark.parametrize("what", ["rows", "rows and a token", "a token"])
def test_a_new_job_never_touches_one_of_the_same_id(tmp_path: Path, pool: Path, what: str) -> None:
    """Two controllers may launch jobs of one name in one second."""
    system, args = Starting(tmp_path), start_of_a_server(fresh=True)
    place = "/mnt/pmem0/oeprov/j/server-0"
    words = f"{place} belongs to another job .* holds rows of tables C1; launch this one again"
    pool.write_bytes(b"OEPOOLS\0" + bytes(24) + b'{"server":0,"table":{"dim":4,"name":"C1"}}' + bytes(99))
    if what != "rows":
        system.write("/var/lib/oeprov/jobs/j/token", "another\n")
        words = "/var/lib/oeprov/jobs/j belongs to another job .*; launch this one again"
    if what == "a token":
        pool.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CommandError, match=words):
        job.start(system, args)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert system.ran == ["systemctl is-system-running"], "its units were not stopped either"


def test_a_stop_leaves_a_job_with_another_token_alone(tmp_path: Path, pool: Path) -> None:
    """A launch that was refused elsewhere must not end the other controller's job."""
    job.start(Starting(tmp_path), start_of_a_server(fresh=False))
    unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
    unit.write_text("ReadWritePaths=/var/lib/oeprov/jobs/j -/mnt/pmem0/oeprov/j/server-0\n")
    args, system = {"directory": "/var/lib/oeprov/jobs/j", "keep_pools": False}, Canned(tmp_path)
    with pytest.raises(CommandError, match=r"belongs to another job .*; that one was left alone"):
        job.stop(system, {**args, "token": "another"})
    assert (system.ran, unit.exists(), pool.exists()) == ([], True, True)
    job.stop(system, args)  # by a role of Ansible, which knows no token
    assert (unit.exists(), pool.exists()) == (False, False)


def test_a_stop_with_the_job_s_token_ends_it(tmp_path: Path, pool: Path) -> None:
    """Also where its directory has no token any more."""
    unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
    for has_token in (True, False):
        job.start(Starting(tmp_path), start_of_a_server(fresh=False))
        if not has_token:
            (tmp_path / "var/lib/oeprov/jobs/j/token").unlink()
        job.stop(Canned(tmp_path), {"directory": "/var/lib/oeprov/jobs/j", "token": "t"})
        assert not unit.exists()


def test_a_refusal_names_some_tables_by_the_beginnings_of_their_names(tmp_path: Path, pool: Path) -> None:
    """The job's user writes them, and the refusal ends on the terminal of another one."""
    for number in range(20):
        table = json.dumps({"table": {"name": f"C{number:02d}" + "x" * 5000}})
        (pool.parent / f"oe-{number}-super.pool").write_bytes(b"OEPOOLS\0" + bytes(24) + table.encode())
    said = jobfiles.foreign_rows(System(str(tmp_path)), "j", "/mnt/pmem0/oeprov/j/server-0")
    names = ", ".join(f"C{number:02d}" + "x" * 77 for number in range(8))
    assert f"holds rows of tables {names} and 12 more; launch" in said


def test_a_server_runs_from_the_environment_to_which_the_link_leads(tmp_path: Path, pool: Path) -> None:
    """Also when it is started again after another one was installed."""
    system, args = Starting(tmp_path), start_of_a_server(fresh=False)
    for item in args["units"]:
        item["text"] = item["text"].replace("=python", "=/opt/oeprov/venv/bin/python")
        item["needs"] = ["/opt/oeprov/venv/bin/python"]
    for name in ("first", "second"):
        place = environments.begin(system, "/opt/oeprov/venv", name)
        system.write(place + "/bin/python", "")
        environments.switch(system, "/opt/oeprov/venv", place)
        job.start(system, args)
        text = (tmp_path / "etc/systemd/system/oeprov-j-server-0.service").read_text()
        assert "ExecStart=/opt/oeprov/venv.d/first/bin/python -m" in text
    job.stop(system, {"directory": "/var/lib/oeprov/jobs/j"})
    assert environments.old(system, "/opt/oeprov/venv") == []


def test_data_is_looked_at_as_the_user_of_jobs_also_on_a_host_that_never_had_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(jobfiles, "ensure_user", lambda system, name: made.append(name))
    system = Canned(tmp_path)
    assert job.check_data(system, {"user": "oeprov", "argv": ["true"], "seconds": 1}) == {"problem": ""}
    assert made == ["oeprov"]
    assert system.ran == ["runuser -u oeprov -- true"]


def test_scratch_of_others_is_never_removed(tmp_path: Path) -> None:
    """Only directories named after the process, below one named after the job, go with a unit."""
    for path in ("mnt/pmem0/oeprov/j/server-0", "mnt/pmem0/oeprov/k/server-0", "srv/data"):
        (tmp_path / path).mkdir(parents=True)
    directories = [
        f"/{path}" for path in ("mnt/pmem0/oeprov/j/server-0", "mnt/pmem0/oeprov/k/server-0", "srv/data")
    ]
    unit = tmp_path / "etc/systemd/system/oeprov-j-server-0.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("ReadWritePaths=" + " ".join(directories))
    job.stop(Canned(tmp_path), {"directory": "/var/lib/oeprov/jobs/j"})
    assert not (tmp_path / "mnt/pmem0/oeprov/j").exists()
    assert (tmp_path / "mnt/pmem0/oeprov/k/server-0").is_dir()
    assert (tmp_path / "srv/data").is_dir()
    assert not unit.exists()


def test_pools_of_servers_that_a_job_no_longer_has(tmp_path: Path) -> None:
    for path in ("j/server-0", "j/server-1", "k/server-1"):
        (tmp_path / "mnt/pmem0/oeprov" / path).mkdir(parents=True)
    servers = [
        {"name": "server-1", "unit": "oeprov-j-server-1.service", "pools": f"/mnt/pmem0/oeprov/{path}"}
        for path in ("j/server-1", "k/server-1", "j/server-0")
    ]
    args = {"directory": "/var/lib/oeprov/jobs/j", "servers": servers}
    for _ in range(2):
        job.remove_pools(Canned(tmp_path), args)
        left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("server-*"))
        assert left == ["mnt/pmem0/oeprov/j/server-0", "mnt/pmem0/oeprov/k/server-1"]
    running = SHOW.split("\n\n")[0].replace("server-0", "server-1")
    with pytest.raises(CommandError, match="server-1 still runs"):
        job.remove_pools(Canned(tmp_path, {"systemctl show": running}), args)


def test_all_of_a_job_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for path in ("mnt/pmem0/oeprov/j/server-0", "mnt/pmem0/oeprov/k/server-0"):
        (tmp_path / path).mkdir(parents=True)
    for name in ("j", "k"):
        (tmp_path / f"var/lib/oeprov/jobs/{name}/run/checkpoints/step-1").mkdir(parents=True)
    servers = [
        {"name": "server-0", "unit": "oeprov-j-server-0.service", "pools": "/mnt/pmem0/oeprov/j/server-0"},
        {"name": "worker-0", "unit": "oeprov-j-worker-0.service", "pools": ""},
    ]
    args = {"directory": "/var/lib/oeprov/jobs/j", "servers": servers}
    running = SHOW.split("\n\n")[0].replace("server-0", "worker-0")
    with pytest.raises(CommandError, match="worker-0 still runs"):
        job.remove(Canned(tmp_path, {"systemctl show": running}), args)
    assert (tmp_path / "mnt/pmem0/oeprov/j/server-0").is_dir()
    for _ in range(2):
        job.remove(Canned(tmp_path), args)
        assert [path.name for path in (tmp_path / "var/lib/oeprov/jobs").iterdir()] == ["k"]
        assert [path.name for path in (tmp_path / "mnt/pmem0/oeprov").iterdir()] == ["k"]
    for directory in ("/var/lib/oeprov/jobs/", "/var/lib/oeprov", "/etc/x"):
        with pytest.raises(CommandError, match="is no job's directory"):
            job.remove(Canned(tmp_path), {"directory": directory, "servers": []})


def test_a_unit_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    system = Canned(tmp_path, {"systemctl show": SHOW.split("\n\n")[0]})
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/oeprov-j-server-0.service").touch()
    with pytest.raises(CommandError, match=r"did not end: oeprov-j-server-0\.service"):
        job.stop(system, {"directory": "/var/lib/oeprov/jobs/j"})
