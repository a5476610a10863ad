"""A job's user that attacks root: what root does on paths of the job never reaches anything else.

Root is this process; the attacker is another user, in a process of its own. docs/design/threat-model.md lists
the acts.
"""

import base64
import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from provision.jobs.backends import units
from provision.jobs.backends.units import Place
from provision.node import files, job, jobfiles, jobscript, process, removal
from provision.node.command import CommandError, Result, System

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root and another user are needed: run as root")

USER = 54321  # the job's user; it needs no entry in passwd
JOB = "j-20261128-101500"
DIRECTORY = f"/var/lib/oeprov/jobs/{JOB}"
POOLS = f"/mnt/pmem0/oeprov/{JOB}"
SERVER, WORKER = f"oeprov-{JOB}-server-0.service", f"oeprov-{JOB}-worker-0.service"
SECRET = "only-root-reads-this"
FOLDERS = ("ready", "metrics", "logs", "run", "checkpoints", "script")
LEAVES = ("ready/server-0.json", "metrics/server-0.json", "metrics/worker-0.json", "run/metrics.jsonl")
LEAVES += ("run/report.html", "token", "script.digest", "adapter.py", "adapter.py.oeprov-new", "units.json")


def as_user(attack: Callable[[], object], *, wait: bool = True) -> int:
    """Run a function as the job's user in a process of its own; its pid."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            attack()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if wait:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pid


class Host(System):
    """A root directory in which systemd does nothing, but a server is ready at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.top = root
        self.ran: list[str] = []
        self.ready: object = {"pid": 1, "host": "10.0.0.1", "port": 7011, "storage": "dram", "is_pmem": False}

    def which(self, name: str) -> str:
        return "/usr/bin/" + name

    def run(self, argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        self.ran.append(" ".join(argv))
        if argv[:2] == ["systemctl", "start"]:
            path = self.top / DIRECTORY[1:] / "ready/server-0.json"
            text = json.dumps(self.ready)
            with contextlib.suppress(AssertionError):  # the attack may have left no such directory
                as_user(lambda: path.write_text(text))
        if argv[:2] == ["systemctl", "show"]:
            shown = [f"Id={name}\nActiveState=inactive\nMainPID=0\n" for name in argv if "oeprov-" in name]
            return Result(argv, 0, "\n".join(shown), "")
        return Result(argv, 0, "", "")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(jobfiles, "ensure_user", lambda system, name: (USER, USER))
    monkeypatch.setattr(os, "umask", lambda mask: mask)  # of an errand's own process
    # Others cannot enter tmp_path.
    top = Path(tempfile.mkdtemp(prefix="hostile-", dir="/var/tmp"))
    top.chmod(0o755)
    for name in ("etc/systemd/system", "mnt/pmem0", "run", "srv/victim", "var/lib"):
        (top / name).mkdir(parents=True)
    (top / "etc/systemd/system/victim.service").write_text("[Service]\nExecStart=/bin/true\n")
    victim = top / "srv/victim"
    for name in [*FOLDERS, "export", "step-1", "server-0", "worker-0", "python3.11/site-packages"]:
        (victim / name).mkdir(parents=True)
    names = {path.rpartition("/")[2] for path in LEAVES} | {"server-0/x", "export/x", "oeprov-runtime.pth"}
    for name in sorted(names):
        (victim / name).write_text(json.dumps({"secret": SECRET, "event": SECRET}) + "\n")
    for path in [victim, *victim.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("root waits for ever"))
    signal.alarm(120)
    try:
        yield Host(top)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        subprocess.run(["/bin/rm", "-rf", top], check=True)  # whatever its depth


def fingerprint(host: Host) -> dict[str, object]:
    """All that an attack could change beside the job's own files."""
    found: dict[str, object] = {}
    paths = [host.top / "srv/victim", *(host.top / "srv/victim").rglob("*")]
    for path in [*paths, host.top / "etc/systemd/system/victim.service", host.top / "srv", host.top / "mnt"]:
        seen = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[str(path)] = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_size, content)
    return found


SCRIPT = io.BytesIO()
with tarfile.open(fileobj=SCRIPT, mode="w") as packed:
    info = tarfile.TarInfo("train.py")
    info.size = 9
    packed.addfile(info, io.BytesIO(b"print(1)\n"))
ARCHIVE = SCRIPT.getvalue()
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()


def start(host: Host, *, fresh: bool) -> object:
    place = Place("pmem_libpmem", f"{POOLS}/server-0", "")
    server = units.server_unit(JOB, "server-0", ["python", "--port", "0", "-x"], place)
    common = {"mount": "", "needs": [], "address": "", "port": 0, "files": {"adapter.py": "print(1)\n"}}
    scratch = f"{DIRECTORY}/checkpoints/server-0"
    more = [
        {"name": "server-0", "role": "parameter_server", "unit": SERVER, "text": server, "fresh": fresh}
        | {"directories": [scratch, place.path]},
        {"name": "worker-0", "role": "worker", "unit": WORKER, "directories": [], "script": DIGEST}
        | {"text": units.worker_unit(JOB, "worker-0", ["python"], {}, seconds=1), "forget_events": fresh},
    ]
    args = {"directory": DIRECTORY, "user": "oeprov", "token": "t" * 32, "seconds": 0}
    return job.start(host, {**args, "units": [{**common, **item} for item in more]})


def deliver(host: Host) -> object:
    archive = base64.b64encode(zlib.compress(ARCHIVE)).decode()
    return jobscript.deliver(host, {"digest": DIGEST, "archive": archive, "environment": {}, "user": ""})


def fetch(host: Host) -> object:
    """What ``oeprov fetch`` receives."""
    output = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        patched.setattr(files, "System", lambda: host)
        with contextlib.suppress(SystemExit):
            files.main({"top": DIRECTORY + "/run", "names": ["export", "report.html", "checkpoints"]})
    return output.buffer.getvalue().decode()  # type: ignore[attr-defined]


def destroy(host: Host) -> object:
    removal.ACTIONS["remove_units"](host, {"directory": DIRECTORY})
    args = {"paths": [POOLS, DIRECTORY], "parents": ["/mnt/pmem0/oeprov"]}
    return removal.ACTIONS["remove_paths"](host, args)


SERVERS = [{"name": "server-0", "unit": SERVER, "pools": f"{POOLS}/server-0"}]
ACTS: dict[str, Callable[[Host], object]] = {
    "start": lambda host: start(host, fresh=True),
    "resume": lambda host: start(host, fresh=False),
    "stop": lambda host: job.stop(host, {"directory": DIRECTORY}),
    "observe": lambda host: job.observe(host, {"directory": DIRECTORY, "offset": 0}),
    "remove_pools": lambda host: job.remove_pools(host, {"directory": DIRECTORY, "servers": SERVERS}),
    "remove": lambda host: job.remove(host, {"directory": DIRECTORY, "servers": SERVERS}),
    "destroy": destroy,
    "fetch": fetch,
}


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file or directory."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".old"))
    else:
        path.unlink(missing_ok=True)
    make(path)


def link_folders(top: Path, victim: Path) -> None:
    for name in FOLDERS:
        replace(top / DIRECTORY[1:] / name, lambda path: path.symlink_to(victim))
    replace(top / POOLS[1:] / "server-0", lambda path: path.symlink_to(victim))


def link_leaves(top: Path, victim: Path) -> None:
    for name in LEAVES:
        replace(top / DIRECTORY[1:] / name, lambda path: path.symlink_to(victim / path.name))
    run = top / DIRECTORY[1:] / "run"
    (run / "export").symlink_to(victim / "export")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-1").symlink_to(victim / "step-1")
    (run / "checkpoints" / "x").symlink_to(victim / "token")
    (top / DIRECTORY[1:] / "checkpoints/server-0").rmdir()
    (top / DIRECTORY[1:] / "checkpoints/server-0").symlink_to(victim)


def pipes(top: Path, victim: Path) -> None:
    for name in LEAVES:
        replace(top / DIRECTORY[1:] / name, os.mkfifo)
    (top / DIRECTORY[1:] / "run/export").mkdir()
    os.mkfifo(top / DIRECTORY[1:] / "run/export/x")


def directories(top: Path, victim: Path) -> None:
    for name in LEAVES:
        replace(top / DIRECTORY[1:] / name, lambda path: (path / "x").mkdir(parents=True))


def forge(top: Path, victim: Path) -> None:
    """`units.json` of an earlier version, with what root did by it."""
    item = {"name": "worker-9", "role": "worker", "unit": "victim.service", "mount": ""}
    other = {"name": "server-0", "role": "parameter_server", "unit": SERVER, "mount": ""}
    # Its check was a text in the path: /…/JOB/….
    (top / DIRECTORY[1:] / "out").symlink_to(victim)
    records = [{**item, "directories": []}, {**other, "directories": [f"{DIRECTORY}/out/server-0"]}]
    replace(top / DIRECTORY[1:] / "units.json", lambda path: path.write_text(json.dumps(records)))


def deep(top: Path, victim: Path) -> None:
    os.chdir(top / DIRECTORY[1:] / "run")
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")


ATTACKS = (link_folders, link_leaves, pipes, directories, forge, deep)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("act", ACTS)
def test_acts_of_root_stay_in_the_job(host: Host, act: str, attack: Callable[[Path, Path], None]) -> None:
    deliver(host)
    start(host, fresh=True)
    before = fingerprint(host)
    os.chown(host.top / POOLS[1:], USER, USER)  # as earlier versions made it
    as_user(lambda: attack(host.top, host.top / "srv/victim"))
    host.ran.clear()
    answer: object = ""
    try:
        answer = ACTS[act](host)
    except CommandError as error:
        answer = str(error)
    assert fingerprint(host) == before
    assert SECRET not in str(answer)
    assert not [line for line in host.ran if "victim" in line]


@pytest.mark.parametrize("act", ACTS)
def test_hard_links_are_not_read_or_changed(host: Host, act: str) -> None:
    """As a system without fs.protected_hardlinks lets its users make them."""
    deliver(host)
    start(host, fresh=True)
    before = fingerprint(host)
    for name in [*LEAVES, "run/export-x"]:
        path = host.top / DIRECTORY[1:] / name
        path.unlink(missing_ok=True)
        path.hardlink_to(host.top / "srv/victim" / ("token" if name == "run/export-x" else path.name))
    with contextlib.suppress(CommandError):
        assert SECRET not in str(ACTS[act](host))
    assert fingerprint(host) == before


def swap(top: Path, victim: Path) -> None:
    """Swap directories and links to the victim for as long as it takes."""
    folders = [top / DIRECTORY[1:] / name for name in FOLDERS] + [top / POOLS[1:] / "server-0"]
    folders += [top / DIRECTORY[1:] / "checkpoints/server-0", top / DIRECTORY[1:] / "run/export"]
    while True:
        for path in folders:
            away = path.with_name("." + path.name)
            with contextlib.suppress(OSError):
                path.rename(away)
                path.symlink_to(victim)
            with contextlib.suppress(OSError):
                path.unlink()
                away.rename(path)
            with contextlib.suppress(OSError):
                (path / "x").mkdir(parents=True)


@pytest.mark.parametrize("act", ACTS)
def test_names_that_are_swapped_meanwhile_lead_nowhere_else(host: Host, act: str) -> None:
    deliver(host)
    start(host, fresh=True)
    before = fingerprint(host)
    os.chown(host.top / POOLS[1:], USER, USER)  # as earlier versions made it
    pid = as_user(lambda: swap(host.top, host.top / "srv/victim"), wait=False)
    try:
        for _ in range(40):
            with contextlib.suppress(CommandError, OSError):
                assert SECRET not in str(ACTS[act](host))
            if act in ("stop", "remove", "destroy"):  # for the next turn
                with contextlib.suppress(CommandError, OSError):
                    start(host, fresh=False)
        assert fingerprint(host) == before
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_job_of_an_earlier_version_is_stopped_and_cleaned_by_its_units(host: Host) -> None:
    """Its record in its directory is never read; its unit's file names its directories."""
    start_before = {"name": "server-0", "role": "parameter_server", "unit": SERVER, "mount": "/mnt/pmem0"}
    deliver(host)
    start(host, fresh=True)
    rows = host.top / POOLS[1:] / "server-0/oe-1-super.pool"
    as_user(rows.touch)
    (host.top / DIRECTORY[1:] / "units.json").write_text(json.dumps([{**start_before, "directories": []}]))
    job.stop(host, {"directory": DIRECTORY, "role": "parameter_server", "keep_pools": True})
    assert rows.exists()
    start(host, fresh=False)
    found = job.stop(host, {"directory": DIRECTORY})
    assert sorted(found["stopped"]) == ["server-0", "worker-0"]
    assert found["removed"]
    assert not (host.top / POOLS[1:]).exists()
    assert os.listdir(host.top / "etc/systemd/system") == ["victim.service"]


def test_a_unit_names_its_directories_whatever_their_names(host: Host) -> None:
    path = f'/mnt/a "b" 100%/oeprov/{JOB}/server-0'
    text = units.server_unit(JOB, "server-0", ["python"], Place("pmem_libpmem", path, ""))
    (host.top / "etc/systemd/system" / SERVER).write_text(text)
    (item,) = jobfiles.recorded(host, DIRECTORY)
    assert item["directories"] == [f"{DIRECTORY}/checkpoints/server-0", path]


@pytest.mark.parametrize(
    "ready",
    [
        {"port": "7011\nExecStartPre=+/bin/touch /pwned"},
        {"port": 0},
        {"port": 70000},
        {"port": True},
        {"pid": "../../../srv/victim"},
        {"host": "x\rExecStartPre=+/bin/touch /pwned"},
        {"storage": "[red]"},
    ],
    ids=str,
)
def test_a_ready_file_puts_nothing_into_units(host: Host, ready: dict[str, object]) -> None:
    deliver(host)
    assert isinstance(host.ready, dict)
    host.ready = {**host.ready, **ready}
    text = ""
    with pytest.raises(CommandError, match="server-0"):
        start(host, fresh=True)
    for path in (host.top / "etc/systemd/system").glob("oeprov-*"):
        text += path.read_text()
    assert "pwned" not in text


def test_no_word_ends_a_line_of_a_unit() -> None:
    for sign in "\n\r":
        text = units.worker_unit(
            JOB, "worker-0", [f"x{sign}ExecStartPre=+/bin/y"], {"A": f"b{sign}User=root"}, seconds=1
        )
        lines = re.split(r"[\n\r]", text)
        assert not [line for line in lines if line.startswith(("ExecStartPre", "User=root"))]


def test_an_environment_is_made_without_its_users_links(host: Host) -> None:
    victim = host.top / "srv/victim"
    place = f"{jobscript.ENVIRONMENTS}/e1"
    plain = host.run

    def run(argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        def links() -> None:
            made = host.top / argv[-1].lstrip("/")
            own = made / "lib/python3.11/site-packages"
            own.mkdir(parents=True)
            (own / "oeprov-runtime.pth").symlink_to(victim / "oeprov-runtime.pth")
            for name in (jobscript.STAMP, jobscript.STAMP + ".oeprov-new"):
                (made / name).symlink_to(victim / "token")
            (made / "asked").symlink_to(victim)

        if "venv" in argv:
            as_user(links)
        return Result(argv, 0, "[]", "") if "-c" in argv else plain(argv, timeout, environment)

    host.run = run  # type: ignore[method-assign]
    host.run_while = lambda argv, *_: Result(argv, 0, "", "")  # type: ignore[method-assign, assignment]
    before = fingerprint(host)
    wanted: dict[str, Any] = {"path": place, "python": "python", "files": {"token": "x"}, "arguments": []}
    with contextlib.suppress(CommandError, OSError):
        jobscript.make_environment(host, {**wanted, "source": "requirements.txt"}, "oeprov")
    assert fingerprint(host) == before


def test_a_job_cannot_hold_the_locks_of_root(host: Host) -> None:
    start_again = [lambda: start(host, fresh=True), lambda: job.stop(host, {"directory": DIRECTORY})]
    deliver(host)
    for act in start_again:
        act()
    lock = host.top / "run/oeprov-job.lock"

    def take() -> None:
        with pytest.raises(PermissionError):
            lock.open()

    as_user(take)


def test_a_state_file_of_a_job_signals_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Role worker's and parameter_server's `stop` signal processes of a launcher here; hosts have none."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "collections"))
    module = importlib.import_module("ansible_collections.oeprov.oeprov.plugins.modules.oeprov_job")
    deliver(host)
    start(host, fresh=True)
    path = host.top / DIRECTORY[1:] / "state.json"
    me = {
        "pid": os.getpid(),
        "started": process.start_time(os.getpid()),
        "role": "worker",
        "name": "worker-0",
    }
    state = {"supervisor_pid": me["pid"], "supervisor_started": me["started"], "processes": [me]}
    as_user(lambda: path.write_text(json.dumps(state)))
    ansible = Mock(params={"role": "worker"}, fail_json=Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        module.running(ansible, str(path))
    assert "belongs to user 54321" in ansible.fail_json.call_args.kwargs["msg"]
    monkeypatch.setattr(module.jobfiles, "HOME", str(host.top / "var/lib/oeprov"))
    assert module.running(ansible, str(path)) == ([], False)
    os.chown(path, 0, 0)
    monkeypatch.setattr(module.jobfiles, "HOME", "/elsewhere")
    assert module.running(ansible, str(path)) == ([me], True), "the launcher's own"


def test_what_a_job_writes_is_read(host: Host) -> None:
    """Without an attack: events, counters and results come from the job's own files."""
    deliver(host)
    start(host, fresh=True)
    top = host.top / DIRECTORY[1:]

    def work() -> None:
        (top / "run/metrics.jsonl").write_text("event 1\nevent 2\n")
        (top / "metrics/worker-0.json").write_text('{"rows": 3}')
        (top / "run/export/1").mkdir(parents=True)
        (top / "run/export/1/model.keras").write_text("weights")
        (top / "run/export/.half").touch()
        (top / "run/export/1/latest").symlink_to("model.keras")

    as_user(work)
    found = job.observe(host, {"directory": DIRECTORY, "offset": 8})
    assert found["events"] == "event 2\n"
    assert found["processes"]["worker-0"]["metrics"] == {"rows": 3}
    received = str(fetch(host))
    assert '{"files": {"export/1/model.keras": 7}, "others": ["export/1/latest"]}' in received
    assert "weights" in received


def test_a_jobs_user_cannot_replace_its_pools_directory(host: Host) -> None:
    """systemd would follow a link there, and make writable what it leads to."""
    deliver(host)
    start(host, fresh=True)
    found = (host.top / POOLS[1:]).stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 0, 0o755)
    assert (host.top / POOLS[1:] / "server-0").stat().st_uid == USER
    assert job.stop(host, {"directory": DIRECTORY})["removed"]
    assert not (host.top / POOLS[1:]).exists()


def test_names_of_a_job_say_nothing_to_a_terminal(host: Host) -> None:
    deliver(host)
    start(host, fresh=True)
    inner = host.top / DIRECTORY[1:] / "run" / "a\x1b]0;b\udcff"

    def attack() -> None:
        os.chdir(inner.parent)
        for _ in range(300):
            os.mkdir(inner.name)
            os.chdir(inner.name)

    as_user(attack)
    with pytest.raises(CommandError, match=r"/run/a\?\]0;b\?.*: is too deep") as caught:
        job.remove(host, {"directory": DIRECTORY, "servers": []})
    assert str(caught.value).isprintable()


def test_a_link_of_roots_own_is_followed(host: Host) -> None:
    """An administrator may have moved /var/lib/oeprov to another disk."""
    (host.top / "srv/big").mkdir()
    (host.top / "var/lib/oeprov").symlink_to("../../srv/big")
    deliver(host)
    start(host, fresh=True)
    assert (host.top / "srv/big/jobs" / JOB / "script/train.py").read_bytes() == b"print(1)\n"
    assert job.stop(host, {"directory": DIRECTORY})["removed"]


def test_removal_stays_in_its_file_system(host: Host) -> None:
    """Data that somebody mounted into a job's directory are not the job's."""
    deliver(host)
    start(host, fresh=True)
    mounted = host.top / DIRECTORY[1:] / "run/data"
    mounted.mkdir()
    (mounted / "rows").touch()
    subprocess.run(["mount", "--bind", "/dev/shm", mounted], check=False)
    if not mounted.is_mount():
        pytest.skip("mounts are not permitted here")
    kept = mounted / f"kept-{os.getpid()}"
    kept.touch()
    try:
        with pytest.raises(CommandError, match="run/data: is another file system; unmount it first"):
            job.remove(host, {"directory": DIRECTORY, "servers": []})
        assert kept.exists()
    finally:
        kept.unlink()
        subprocess.run(["umount", mounted], check=True)
    job.remove(host, {"directory": DIRECTORY, "servers": []})
    assert not (host.top / DIRECTORY[1:]).exists()
