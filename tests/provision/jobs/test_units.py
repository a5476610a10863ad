"""The text of units: what systemd makes of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from provision.jobs.backends import units
from provision.jobs.backends.units import Place

ARGV = ["/opt/oeprov/venv/bin/python", "-m", "oe_runtime.server", "--storage", "dram"]
FSDAX = Place("pmem_libpmem", "/mnt/pmem0/oeprov/j/server-0", "/mnt/pmem0")
BOUND = Place(bound=True, devices=("dax0.0", "dax1.0"))


def keys(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def test_server_comes_back_but_not_for_ever() -> None:
    unit = keys(units.server_unit("j", "server-0", ARGV, Place()))
    assert unit["WantedBy"] == ["multi-user.target"]
    assert unit["Restart"] == ["on-failure"]
    # Five starts, five seconds apart at least, are fewer than what ten minutes would hold: it ends.
    assert int(unit["StartLimitIntervalSec"][0]) > int(unit["StartLimitBurst"][0]) * 5
    assert unit["ExecStart"] == [" ".join(ARGV)]
    assert unit["User"] == ["oeprov"]
    assert unit["KillSignal"] == ["SIGTERM"]
    assert "RequiresMountsFor" not in unit
    assert "EnvironmentFile" not in unit


def test_fsdax_waits_for_its_mount_and_writes_nowhere_else() -> None:
    unit = keys(units.server_unit("j", "server-0", ARGV, FSDAX))
    assert "mnt-pmem0.mount" in unit["After"]
    assert unit["ExecStartPre"] == ["+/usr/bin/systemctl start mnt-pmem0.mount"], "as root, and again later"
    assert unit["TimeoutStartSec"] == ["0"], (
        "the wait in fstab is as long, and would be cut off a moment before it ends"
    )
    assert "RequiresMountsFor" not in unit, "a device that comes late would leave the server down for good"
    assert unit["ProtectSystem"] == ["strict"]
    # Without the dash, systemd could not even run ExecStartPre where the mount is not there yet.
    assert unit["ReadWritePaths"] == ["/var/lib/oeprov/jobs/j -/mnt/pmem0/oeprov/j/server-0"]


def test_names_of_mount_units() -> None:
    assert units.mount_unit("/mnt/pmem0") == "mnt-pmem0.mount"
    assert units.mount_unit("/srv/my-pmem é/0") == r"srv-my\x2dpmem\x20\xc3\xa9-0.mount"
    text = units.server_unit("j", "server-0", ARGV, Place("pmem_libpmem", "/srv/a-b0/x", "/srv/a-b0"))
    assert 'start "srv-a\\\\x2db0.mount"' in text, "systemd reads one backslash"


def test_system_ram_is_bound_to_the_nodes_that_were_found() -> None:
    unit = keys(units.server_unit("j", "server-0", ARGV, BOUND))
    assert unit["EnvironmentFile"] == ["/etc/oeprov/memory.env"], "without a dash: no file, no start"
    (start,) = unit["ExecStart"]
    assert start.startswith(
        "/usr/bin/numactl --membind=${MEMKIND_DAX_KMEM_NODES} /opt/oeprov/venv/bin/python"
    )
    bringers = "oeprov-system-ram.service daxdev-reconfigure@dax0.0.service daxdev-reconfigure@dax1.0.service"
    assert bringers in unit["After"]


def waiting(tmp_path: Path, numactl: str) -> subprocess.CompletedProcess[str]:
    """What ExecStartPre does on a host with such a numactl; systemd's quoting taken off."""
    (line,) = keys(units.server_unit("j", "server-0", ARGV, BOUND))["ExecStartPre"]
    script = line.removeprefix('/bin/sh -c "').removesuffix('"').replace('\\"', '"').replace("$$", "$")
    program = tmp_path / "numactl"
    program.write_text(f"#!/bin/sh\n{numactl}\n")
    program.chmod(0o755)
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    (tmp_path / "sleep").chmod(0o755)
    return subprocess.run(
        ["sh", "-c", script.replace("/usr/bin/numactl", str(program))],
        env={"MEMKIND_DAX_KMEM_NODES": "2,3", "PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_start_waits_for_memory_that_comes_late(tmp_path: Path) -> None:
    numactl = f'echo "$@" >>{tmp_path}/calls; [ "$(wc -l <{tmp_path}/calls)" -ge 3 ]'
    done = waiting(tmp_path, numactl)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "calls").read_text().splitlines() == ["--membind=2,3 true"] * 3


def test_memory_that_never_comes_is_said(tmp_path: Path) -> None:
    done = waiting(tmp_path, "exit 1")
    assert done.returncode == 1
    assert done.stderr == "error: memory nodes 2,3 are not online\n"


def test_worker_runs_once_and_has_time_for_its_checkpoint() -> None:
    text = units.worker_unit("j", "worker-0", ARGV, {"A": "b c%d"}, seconds=600)
    unit = keys(text)
    assert "Restart" not in unit
    assert "WantedBy" not in unit
    assert unit["TimeoutStopSec"] == ["600"]
    assert unit["SuccessExitStatus"] == ["130"]
    assert '"A=b c%%d"' in unit["Environment"]


@pytest.mark.parametrize(
    ("word", "command", "quoted"),
    [
        ("plain/word-1.2", True, "plain/word-1.2"),
        ("", True, '""'),
        ("two words", True, '"two words"'),
        ('a"b', True, '"a\\"b"'),
        ("back\\slash", True, '"back\\\\slash"'),
        ("50%", True, "50%%"),
        ("$HOME", True, "$$HOME"),
        ("$HOME", False, "$HOME"),
        ("a;b", True, '"a;b"'),
        ("line\nbreak", True, '"line\\nbreak"'),
    ],
)
def test_quoting(word: str, command: bool, quoted: str) -> None:
    assert units.quote(word, command=command) == quoted


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    argv = ["/bin/ls", "two words", "50%", "$HOME", 'a"b']
    texts = {
        "server-0": units.server_unit("j", "server-0", argv, Place()),
        "server-1": units.server_unit("j", "server-1", argv, FSDAX),
        "server-2": units.server_unit("j", "server-2", argv, BOUND).replace(units.NUMACTL, "/bin/ls"),
        "worker-0": units.worker_unit("j", "worker-0", argv, {"A": "b c%d"}, seconds=600),
    }
    paths = []
    for name, text in texts.items():
        path = tmp_path / f"oeprov-j-{name}.service"
        path.write_text(text)
        paths.append(str(path))
    done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True)
    found = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "oeprov-" in line]
    assert (done.returncode, found) == (0, [])
