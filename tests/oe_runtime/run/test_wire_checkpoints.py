"""Checkpoints of servers that cannot see the worker's disk: the same training, whoever dies or is full."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_processes import Relay, Server
from test_client import equal
from test_client import train as train_tables
from test_train import keep_determinism, train  # noqa: F401
from test_train_processes import ENDLESS, start
from training_runs import ServerProcess, events, losses

from oe_runtime import CheckpointError, Client, SpecError, checkpoint

pytestmark = pytest.mark.process

SAVE, READ_FILE = 5, 11  # operations of the protocol (core/wire/frame.h)


def wire_server(directory: Path, index: int = 0, count: int = 1) -> ServerProcess:
    return ServerProcess(directory, index, count, "dram", "--checkpoint-dir", str(directory / "own"))


def copies(*directories: Path) -> list[str]:
    """The table files that servers hold for a transfer."""
    return sorted(p.name for directory in directories for p in (directory / "own" / "transfer").iterdir())


def wait_until_gone(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while copies(directory):
        assert time.monotonic() < deadline, copies(directory)
        time.sleep(0.02)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_fetch_and_resumed_onto_one_and_three(tmp_path: Path) -> None:
    homes = [tmp_path / "server-0", tmp_path / "server-1"]
    servers = [wire_server(home, i, 2) for i, home in enumerate(homes)]
    saves = reads = 0

    def die_in_the_third_save(op: int) -> None:
        nonlocal saves, reads
        saves += op == SAVE
        reads += saves == 3 and op == READ_FILE
        if reads == 3:
            servers[1].process.kill()

    relay = Relay(servers[1].endpoint, die_in_the_third_save)
    run_dir = tmp_path / "run"
    endpoints = f"{servers[0].endpoint},{relay.endpoint}"
    worker = start(
        run_dir,
        *("--servers", endpoints, "--checkpoint-transfer", "wire", "--checkpoint-steps", "5"),
        *("--server-wait", "0"),
    )
    try:
        _, error = worker.communicate(timeout=120)
        assert reads == 3
        assert worker.returncode == 1
        assert len(error.splitlines()) == 1, error
        for part in ("error: ", relay.endpoint, "step-0000000005", "--resume"):
            assert part in error
        assert [e["step"] for e in events(run_dir, "checkpoint")] == [0, 5]
        # Nothing half-published on the worker, nothing kept on the server that lives.
        names = sorted(os.listdir(run_dir / "checkpoints"))
        assert names == ["step-0000000000", "step-0000000005"]
        checkpoint.verify(run_dir / "checkpoints" / "step-0000000005")
        wait_until_gone(homes[0])
    finally:
        worker.kill()
        relay.close()
        for server in servers:
            server.stop()
    # The one that was killed left its copies; its successor removes them.
    assert copies(homes[1])
    successor = wire_server(homes[1])
    try:
        assert copies(homes[1]) == []
    finally:
        successor.stop()

    undisturbed = tmp_path / "undisturbed"
    assert train(undisturbed, "--steps", "11", "--checkpoint-steps", "5", data=ENDLESS) == 0
    expected = losses(undisturbed)
    for count in (1, 3):
        again = tmp_path / f"again-{count}"
        shutil.copytree(run_dir, again)
        homes = [tmp_path / f"fresh-{count}-{i}" for i in range(count)]
        servers = [wire_server(home, i, count) for i, home in enumerate(homes)]
        where = ("--servers", ",".join(s.endpoint for s in servers), "--checkpoint-transfer", "wire")
        try:
            assert train(again, "--resume", "--steps", "9", where=where, data=ENDLESS) == 0
            assert copies(*homes) == []
        finally:
            for server in servers:
                server.stop()
        assert [e["step"] for e in events(again, "resume")] == [5]
        # Step 10 is the first run's last word, said before the save that failed.
        assert losses(again) == {step: expected[step] for step in range(1, 11)}
    # Both ways to move files make the same checkpoints: this one goes on in one process.
    assert train(again, "--resume", "--steps", "11", data=ENDLESS) == 0
    assert losses(again) == expected


def test_a_server_without_a_directory_is_named_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(tmp_path / "server")
    where = ("--servers", server.endpoint, "--checkpoint-transfer", "wire")
    try:
        assert train(tmp_path / "run", where=where, data=ENDLESS) == 1
    finally:
        server.stop()
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert server.endpoint in error
    assert "--checkpoint-dir" in error
    assert not (tmp_path / "run").exists()


def test_wire_goes_with_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", "--checkpoint-transfer", "wire")
    assert ended.value.code == 2
    assert "--checkpoint-transfer goes with --servers" in capsys.readouterr().err
    with pytest.raises(SpecError, match="'pigeon'; known are shared, wire"):
        Client(["127.0.0.1:1"], checkpoint_transfer="pigeon")


@contextlib.contextmanager
def largest_file(pid: int, size: int) -> Iterator[None]:
    """A disk that is full for a process, as far as it can tell: files end at `size` bytes."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_full_disks_leave_nothing_behind(tmp_path: Path) -> None:
    homes = [tmp_path / "home-0", tmp_path / "home-1"]
    servers = [
        Server(home, "--checkpoint-dir", str(home / "own"), index=index, count=2)
        for index, home in enumerate(homes)
    ]
    victim = servers[1]
    saved = tmp_path / "saved"
    saved.mkdir()
    try:
        with Client([server.endpoint for server in servers], checkpoint_transfer="wire") as client:
            train_tables(client, 1)
            with (
                largest_file(victim.process.pid, 5000),
                pytest.raises(CheckpointError, match=rf"home-1/own/.*too large.*{victim.endpoint}"),
            ):
                client.save(saved)
            assert os.listdir(saved) == copies(*homes) == []
            with (
                largest_file(os.getpid(), 5000),
                pytest.raises(CheckpointError, match=r"cannot write .*/saved/.*too large"),
            ):
                client.save(saved)
            assert os.listdir(saved) == copies(*homes) == []
            client.save(saved)
            wanted = train_tables(client, 2)
            before = [table["version"] for table in client.stats()["servers"][1]["tables"].values()]
            with (
                largest_file(victim.process.pid, 5000),
                pytest.raises(CheckpointError, match=rf"home-1/own/.*too large.*{victim.endpoint}"),
            ):
                client.restore(saved)
            # No table of any server has changed.
            for held in client.stats()["servers"]:
                assert [table["version"] for table in held["tables"].values()] == before
            assert copies(*homes) == []
            client.restore(saved)
            assert equal(train_tables(client, 2), wanted)
    finally:
        for server in servers:
            server.end()
