"""``oeprov servers``: parameter servers alone on this machine, with real servers and a real client."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_training_launch import INVENTORY

from oe_runtime.client import Client
from oe_runtime.spec import TableSpec
from provision.cli import main
from provision.cli.views.training import JobTerminal
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
            servers.down(tmp_path / "state", job.id, screen=JobTerminal())


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


@pytest.mark.process
@pytest.mark.parametrize("storage", ["pmem_libpmem", "dram_pmem", "dram_ssd"])
def test_rows_with_a_checkpoint_stay_until_a_consent_names_their_servers(
    cluster: Path, capsys: pytest.CaptureFixture[str], storage: str
) -> None:
    more = f"parameter_server_storage: {storage}\n      parameter_server_storage_cache: 1M"
    if storage == "dram_ssd":
        more += f"\n      ssd_devices: [{cluster / 'state' / 'pmem0'}]"
    (cluster / "inventory.yml").write_text(INVENTORY.format(kind="local", more=more))
    up = ("up", "-i", "inventory.yml")
    with connect(told(capsys, *up, "--name", "short")) as client:
        client.create_table(TableSpec("e", 2))
        client.assign("e", [1, 2], np.ones((2, 2), np.float32))
    short = store.find(cluster / "state", "short")
    (pools,) = [Path(item.pools) for item in short.spec().processes]
    assert list(pools.iterdir())
    assert oeprov("down") == 0
    assert "stay in" not in capsys.readouterr().out
    assert not pools.parent.exists(), "rows without a checkpoint end with their servers"

    with connect(told(capsys, *up, "--name", "mine")) as client:
        client.create_table(TableSpec("e", 2))
        client.assign("e", [1, 2], np.ones((2, 2), np.float32))
        client.checkpoint(7, wait=True)
    job = store.find(cluster / "state", "mine")
    (pools,) = [Path(item.pools) for item in job.spec().processes]
    assert oeprov("down", "mine") == 0
    shown = capsys.readouterr().out
    assert f"rows that have a checkpoint stay in {pools} here" in shown
    assert f"to start the servers with them: oeprov servers up --resume {job.id} --state-dir state" in shown
    assert f"to lose them: oeprov jobs rm {job.id} --consent {job.id} --state-dir state" in shown

    for words, said in (
        (("jobs", "rm", "mine", "--yes"), f"are only in {pools} here; to lose them, add: --consent {job.id}"),
        (("servers", *up, "--resume", "mine", "--storage", "dram"), "leave out --storage"),
        (("resume", "mine"), f"start them again: oeprov servers up --resume {job.id}"),
    ):
        assert main.run([*words, "--state-dir", "state"]) == 1
        assert said in capsys.readouterr().err
    text = (cluster / "inventory.yml").read_text()
    (cluster / "inventory.yml").write_text(text + "      parameter_server_count: 2\n")
    assert oeprov(*up, "--resume", "mine") == 1
    assert "server-1 on localhost" in (said := capsys.readouterr().err)
    assert "without those rows" in said
    (cluster / "inventory.yml").write_text(text)

    with connect(told(capsys, *up, "--resume", "mine")) as client:
        assert oeprov(*up, "--resume", "mine") == 1
        assert "runs, or may still run; stop it first" in capsys.readouterr().err
        client.create_table(TableSpec("e", 2))
        assert client.checkpoints() == [7]
        assert client.to_arrow("e").num_rows == 2
    assert store.find(cluster / "state", "mine").id == job.id
    assert oeprov("down", "mine") == 0
    assert list(pools.iterdir())
    assert main.run(["jobs", "rm", "mine", "--yes", "--consent", job.id, "--state-dir", "state"]) == 0
    assert not pools.parent.exists()


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
