"""``oeprov servers``: parameter servers alone on this machine, with real servers and a real client."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_training_launch import INVENTORY

from oe_runtime.client import Client
from provision.cli import main
from provision.hosts.survey import ClusterSurvey
from provision.jobs import launching, servers, store
from provision.node import process

MORE = "parameter_server_count: 2\n      parameter_server_storage: dram"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey())
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    (tmp_path / "inventory.yml").write_text(INVENTORY.format(kind="local", more=MORE))
    yield tmp_path
    for job in store.all_jobs(tmp_path / "state"):
        if job.state().supervised:
            servers.down(tmp_path / "state", job.id)


def oeprov(*words: str) -> int:
    return main.run(["servers", *words, "--state-dir", "state"])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert oeprov(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def connect(found: dict[str, Any]) -> Client:
    token = Path(found["token_file"]).read_text().strip()
    return Client(found["endpoints"], token=token, tls=found["tls"])


@pytest.mark.process
def test_up_use_down(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "up", "-i", "inventory.yml", "--name", "mine")
    assert found["state"] == "running"
    assert len(found["endpoints"]) == 2
    assert os.stat(found["token_file"]).st_mode & 0o777 == 0o600
    connect(found).close()

    # A killed server comes back at its address.
    victim = found["processes"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        now = told(capsys, "status", "mine")
        if now["processes"][0]["pid"] != victim and now["processes"][0]["alive"]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert now["endpoints"] == found["endpoints"]

    assert oeprov("status") == 0
    shown = capsys.readouterr().out
    assert f"endpoints   {','.join(found['endpoints'])}" in shown
    assert f"token file  {found['token_file']}" in shown
    states = store.find(cluster / "state", "mine").state().processes
    assert oeprov("down") == 0
    assert "parameter servers are down" in capsys.readouterr().out
    assert not any(process.alive(item.pid, item.started) for item in states)
    assert told(capsys, "status")["state"] == "done"
    assert oeprov("down") == 0
    assert "is not running: it is done" in capsys.readouterr().out

    assert main.run(["resume", "mine", "--state-dir", "state"]) == 1
    assert "are parameter servers alone" in capsys.readouterr().err


def test_refusals(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oeprov("status") == 1
    assert "no parameter servers in state/jobs; start some: oeprov servers up" in capsys.readouterr().err
    for words, said in (
        (("--storage", "pmem"), "--storage: found 'pmem'; allowed: dram"),
        (("--servers", "65"), "allowed: at most 64"),
        (("--name", "../x"), "--name: found '../x'"),
    ):
        assert oeprov("up", "-i", "inventory.yml", *words) == 1
        assert said in capsys.readouterr().err
    assert store.all_jobs(cluster / "state") == []
