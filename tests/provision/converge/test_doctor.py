"""What ``oeprov doctor`` says, from case files: ``doctor/*.json`` say state, health + desired → findings.

``base``, ``state`` and ``desired`` are those of plan cases; packages and runtime are there. ``says`` has
a piece of each finding and of what to do about it, in order.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from recorded import write_program
from test_plan_cases import inputs

from provision.cli.main import run
from provision.cluster import share
from provision.cluster.inventory import Host
from provision.converge import doctor
from provision.converge.diagnosis import Finding, _drives, diagnose, wear_of
from provision.hosts.fanout import Cut
from provision.node import health, port, wear
from provision.node.command import System
from provision.node.health import Health
from provision.node.plan import make_plan
from provision.node.state import Drive, State, decode, encode
from provision.node.wear import Wear

CASES = sorted(Path(__file__).parent.joinpath("doctor").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_findings_of_each_case_file(path: Path) -> None:
    case: dict[str, Any] = json.loads(path.read_text())
    state, desired = inputs(case)
    seen = decode(Health, case.get("health", {}))
    found = diagnose(state, desired, make_plan(state, desired), seen, case.get("skew", 0.0))
    assert len(found) == len(case["says"]), found
    for finding, (what, do) in zip(found, case["says"], strict=True):
        assert what in finding.what
        assert do in finding.do


def test_health_is_read_from_the_kernels_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal:  1048576 kB\nHugePages_Total:  16\nHugepagesize:  2048 kB\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "/sys/bus/nd/devices/nmem0/nfit/flags": "not_armed\n",
        "/sys/bus/nd/devices/nmem1/nfit/flags": "\n",
        "/sys/bus/nd/devices/region0/badblocks": "8 4\n100 12\n",
        "/sys/bus/nd/devices/region1/badblocks": "",
    }
    for name, text in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(port, "holder", lambda system, number: "redis (pid 7)" if number == 7700 else "")
    unit = "oeprov-deepfm-1-server-0.service"
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    for name in (unit, "oeprov-deepfm-1-server-1.service", "oeprov-deepfm-1-worker-0.service"):
        (tmp_path / "etc/systemd/system" / name).write_text("")
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(
        f"#!/bin/sh\nprintf 'Id={unit}\\nActiveState=failed\\nExecMainCode=2\\nExecMainStatus=9\\n\\n'\n"
        "printf 'Id=oeprov-deepfm-1-server-1.service\\nActiveState=active\\n'\n"
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    found = health.observe_health(System(str(tmp_path)), [7700, 7701], [], ["/", "/boot/not/there"])
    free, size = found.disks.pop("/")
    assert 0 <= free <= size
    assert found._replace(time=0.0) == Health(
        memory=1 << 30,
        huge_pages=32 << 20,
        transparent="never",
        ports={"7700": "redis (pid 7)"},
        modules=["nmem0", "nmem1"],
        flags={"nmem0": "not_armed"},
        bad_blocks={"region0": 16},
        servers={unit: "it was killed by signal 9"},
    )
    assert decode(Health, json.loads(json.dumps(encode(found)))) == found


def test_the_command_says_what_is_wrong_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["doctor", "-i", str(share.inventory("local")), "--state-dir", str(tmp_path), "--json"]
    assert run(argv) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["wrong"] is True
    assert f"make {tmp_path}/pmem0" in said["hosts"]["localhost"][-1]["what"]
    assert list(tmp_path.iterdir()) == []


def test_hosts_with_the_same_findings_are_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worn = ["drive nvme0n1: 3 % of its rated writes used"]

    def examine(host: Host, cut: Cut, *, reached: bool) -> doctor.Examined:
        wrong = [Finding("no mount", "run oeprov bootstrap")] if host.name < "h03" else []
        return doctor.Examined(wrong, worn if host.name == "h08" else [])

    monkeypatch.setattr(doctor, "examine", examine)
    path = tmp_path / "inventory.yml"
    names = [f"h{number:02}" for number in range(1, 9)]
    hosts = "".join(f"        {name}: {{oeprov_kind: cpu, ansible_host: {name}}}\n" for name in names)
    path.write_text(
        f"all:\n  children:\n    parameter_servers:\n      hosts:\n{hosts}"
        "    workers:\n      hosts:\n        h01:\n"
    )
    assert run(["doctor", "-i", str(path), "--state-dir", str(tmp_path / "state")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "✗ h[01-02] (2 hosts): 1 problem(s)",
        "  - no mount",
        "    → run oeprov bootstrap",
        "✓ h[03-07] (5 hosts): nothing wrong",
        "✓ h08: nothing wrong",
        "  drive nvme0n1: 3 % of its rated writes used",
    ]


# Of nvme-cli 2.3 and 1.16, in short.
SMART = {
    "critical_warning": 5,
    "temperature": 341,
    "avail_spare": 4,
    "spare_thresh": 10,
    "percent_used": 103,
    "data_units_written": 2000000,
    "media_errors": 7,
}
WEAR = Wear("nvme0n1", "", 5, 103, 4, 10, 68, 1_024_000_000_000, 7)


def test_wear_is_read_from_nvme_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = {**SMART, "critical_warning": {"value": 5, "available_spare": 1}, "data_units_written": "2000000"}
    newer["percentage_used"] = newer.pop("percent_used")
    assert wear.parse("nvme0n1", SMART) == wear.parse("nvme0n1", newer) == WEAR
    state = State(drives=[Drive("/dev/disk/by-id/a", "nvme0n1"), Drive("/b", "sda"), Drive("/data")])
    program = tmp_path / "nvme"
    write_program(program, f"print({json.dumps(SMART)!r})")
    monkeypatch.setenv("PATH", str(program.parent))
    assert wear.observe(System(), state) == [WEAR]
    write_program(program, "print('[]')")
    assert "something else than expected" in wear.observe(System(), state)[0].error
    program.unlink()
    assert wear.observe(System(), state)[0].error.endswith("is not installed")


def test_wear_is_shown_and_judged() -> None:
    seen = Health(drives=[WEAR, Wear("nvme1n1", "`nvme` is not installed")])
    assert decode(Health, json.loads(json.dumps(encode(seen)))) == seen
    assert wear_of(seen) == [
        "drive nvme0n1: 103 % of its rated writes used (953.7 GiB written), 4 % of its spare blocks left "
        "(warns below 10 %), 68 °C"
    ]
    said = [finding.what for finding in _drives(seen)]
    assert said == [
        "drive nvme0n1 warns: few spare blocks are left, it is no longer reliable",
        "drive nvme0n1 has used 103 % of the writes that it is rated for",
        "drive nvme0n1 could not read or write 7 time(s)",
        "the wear of drive nvme1n1 is not known: `nvme` is not installed",
    ]
    healthy = WEAR._replace(warnings=0, used=79, media_errors=0)
    assert list(_drives(Health(drives=[healthy]))) == []
