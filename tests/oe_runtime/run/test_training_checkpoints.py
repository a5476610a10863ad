"""When the trainer publishes checkpoints whose rows are in pools, and how many losses of servers it takes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oe_runtime.checkpoint import published
from oe_runtime.errors import CheckpointError, ServerLost
from oe_runtime.keras import dense
from oe_runtime.keras.job_state import KerasState
from oe_runtime.run import checkpoints as module
from oe_runtime.run.checkpoints import Checkpoints, RunCheckpoint, Unpublished
from oe_runtime.run.lost_server import MOST_LOSSES, ServerRecovery
from oe_runtime.run.options import Options, parse
from oe_runtime.run.position import Position
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.stopping import StopRequest


class Pools:
    """A client of two servers, whose checkpoints become durable when a test says so."""

    servers = 2

    def __init__(self, **changed: Any) -> None:
        self.durable: list[int] = []
        self.recovered: list[int] = []
        self.restored: list[str] = []
        self.gone = False
        self.versions = [7, 7]
        self.rows = [3, 4]
        self.server = {
            "storage_checkpoints": 3,
            "storage_recovers": True,
            "storage": "pmem_libpmem",
            **changed,
        }

    def stats(self) -> dict[str, Any]:
        tables = [{"version": v, "rows": r} for v, r in zip(self.versions, self.rows, strict=True)]
        return {"servers": [{**self.server, "index": i, "tables": {"C1": t}} for i, t in enumerate(tables)]}

    def checkpoint(self, batch: int, *, wait: bool) -> None:
        if wait:
            self.durable.append(batch)

    def checkpoints(self) -> list[int]:
        return self.durable

    def recover(self, batch: int) -> None:
        self.recovered.append(batch)

    def save(
        self, path: Path, *, since: Path | None, contents: dict[str, bytes] | None
    ) -> list[dict[str, Any]]:
        assert contents is not None
        contents["rows"] = b"rows" if since is None else f"rows since {since.name}".encode()
        return [{"file": "rows"}]

    def save_later(self, thread: Executor, work: Callable[[Any], Any]) -> Future[Any]:
        return thread.submit(work, self.save)

    def restore(self, *paths: Path) -> None:
        self.restored += [path.name for path in paths]

    def reconnect(self) -> None:
        if self.gone:
            raise ServerLost("b:2", "no parameter server answers at b:2; is it running?")


class Model:
    """Its weights are the step."""

    tables = ("C1",)
    step = 0


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.0)
    monkeypatch.setattr(dense, "values", lambda model: {"step": np.array(model.step)})
    monkeypatch.setattr(dense, "load", lambda model, path, _: setattr(model, "step", step_in(path)))


def step_in(path: Path) -> int:
    with np.load(path / "dense.npz") as file:
        return int(file["step"])


def options(run_dir: Path, *more: str) -> Options:
    return parse(["--data", "generate:10", "--servers", "a:1,b:2", "--run-dir", str(run_dir), *more])


def made(run_dir: Path, client: Any, *more: str) -> tuple[Checkpoints, Model]:
    model = Model()
    return Checkpoints(options(run_dir, *more), KerasState(model), client), model


def names(run_dir: Path) -> list[str]:
    return [path.name for path in published(run_dir / "checkpoints")]


def test_published_when_all_servers_have_it_with_the_weights_of_its_step(tmp_path: Path) -> None:
    client = Pools()
    saver, model = made(tmp_path, client)
    model.step = 5
    assert saver.take(Position(5, 0, 5)) is None
    model.step = 6
    assert saver.settle() is None
    assert names(tmp_path) == []
    client.durable = [5]
    saved = saver.settle()
    assert saved is not None
    assert step_in(saved.path) == 5
    assert saver.settle() is None
    assert saved.pool == {"checkpoint": 5, "servers": 2, "storage": "pmem_libpmem", "rows": {"C1": 7}}
    # The next one is not durable when a third is due: that waits for both.
    model.step = 10
    assert saver.take(Position(10, 0, 10)) is None
    model.step = 15
    assert saver.take(Position(15, 0, 15)) is not None
    assert names(tmp_path) == ["step-0000000005", "step-0000000015"]
    model.step = 99
    back, lost = saver.roll_back()
    assert (back.position, lost, client.recovered, model.step) == (Position(15, 0, 15), "", [15], 15)


def test_what_is_not_durable_everywhere_when_a_server_is_lost_is_dropped(tmp_path: Path) -> None:
    client = Pools()
    saver, model = made(tmp_path, client)
    saver.take_now(Position())
    assert saver.take(Position(5, 0, 5)) is None
    back, _ = saver.roll_back()
    assert back.position.step == 0
    client.durable.append(5)
    assert saver.settle() is None
    assert names(tmp_path) == ["step-0000000000"]
    # One that has just become durable everywhere is worth having.
    model.step = 5
    assert saver.take(Position(5, 0, 5)) is None
    back, _ = saver.roll_back()
    assert (back.position.step, client.recovered) == (5, [0, 5])


def test_servers_that_are_not_those_of_the_manifest(tmp_path: Path) -> None:
    client = Pools()
    saver, _ = made(tmp_path, client)
    saver.take_now(Position(5, 0, 5))
    client.rows = [3, 5]
    with pytest.raises(CheckpointError, match=r"is of another run: table C1 has 8 rows there, .* says 7"):
        saver.roll_back()
    client.servers = 3
    with pytest.raises(
        CheckpointError, match="in the storage of 2 servers, but there are 3 now, and no older"
    ):
        saver.roll_back()
    client.servers, client.durable = 2, [1, 2]
    with pytest.raises(CheckpointError, match=r"have lost it \(checkpoints that all have: 1, 2\)"):
        saver.roll_back()
    assert names(tmp_path) == ["step-0000000005"]


def test_pools_that_are_lost_lead_back_to_the_newest_files(tmp_path: Path) -> None:
    client = Pools()
    saver, model = made(tmp_path, client, "--keep-checkpoints", "2")
    for step in (5, 10, 15, 20):
        model.step = step
        (saver.take_files if step == 10 else saver.take_now)(Position(step, 0, step))
    kept = ["step-0000000010", "step-0000000015", "step-0000000020"]
    assert names(tmp_path) == kept, "the newest files stay when they are older than what is kept"
    client.durable = []
    back, lost = saver.roll_back()
    assert (back.position.step, client.restored, model.step) == (10, kept[:1], 10)
    assert "step-0000000020 has its rows in the storage of 2 servers, which have lost it" in lost
    assert lost.endswith("going back to " + str(back.path))
    damaged = back.path / "rows"
    damaged.write_text("r")
    with pytest.raises(CheckpointError, match="rows is damaged"):
        saver.roll_back()


def test_a_step_taken_again_removes_its_old_directory(tmp_path: Path) -> None:
    """Between its mark and its publication the old directory of that step would name the new rows."""
    client = Pools()
    saver, _ = made(tmp_path, client)
    saver.take_now(Position(5, 0, 5))
    saver.take_now(Position(10, 0, 10))
    saver.take(Position(5, 0, 5))
    assert names(tmp_path) == []


def test_a_stop_right_after_a_checkpoint_that_is_not_durable_yet_writes_files(tmp_path: Path) -> None:
    """Pools take no number twice; of a work queue the next step need not be of this worker."""
    client = Pools()
    saver, _ = made(tmp_path, client)
    assert saver.take(Position(5, 0, 5)) is None
    saved = saver.take_now(Position(5, 0, 5))
    assert (saved.pool, saved.path.name, client.durable) == (None, "step-0000000005", [])
    assert saver.settle() is None


def test_servers_that_had_different_pushes_are_no_checkpoint(tmp_path: Path) -> None:
    client = Pools()
    saver, _ = made(tmp_path, client)
    client.versions = [7, 8]
    with pytest.raises(RunError, match="have not had the same pushes"):
        saver.take(Position(5, 0, 5))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"storage_checkpoints": 0, "storage": "dram"}, "server 0 (a:1) has storage dram, which keeps no"),
        ({"storage_checkpoints": 1}, "server 0 (a:1) keeps one checkpoint only"),
        ({"storage_recovers": False}, "server 0 (a:1) was started without --storage-recover"),
    ],
)
def test_checkpoints_in_pools_that_servers_cannot_make_are_refused(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    assert not made(tmp_path, Pools(**changed))[0].in_pools
    with pytest.raises(RunError) as caught:
        made(tmp_path, Pools(**changed), "--checkpoint-rows", "pool")
    assert why in str(caught.value)
    assert made(tmp_path, Pools())[0].in_pools
    assert not made(tmp_path, Pools(), "--checkpoint-rows", "files")[0].in_pools


class Quiet:
    """A run directory, a view and a loop that take note of nothing."""

    def __init__(self, saved: RunCheckpoint) -> None:
        self.saved = saved
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def test_repeated_losses_without_progress_end_the_run(tmp_path: Path) -> None:
    client: Any = Pools()
    saver, _ = made(tmp_path, client)
    loop: Any = Quiet(saver.take_now(Position(5, 0, 5)))
    lost = ServerLost("b:2", "parameter server b:2: the connection broke; look at its log")

    def waits(*flags: str) -> ServerRecovery:
        stop = StopRequest(with_parent=False)
        return ServerRecovery(options(tmp_path, *flags), client, saver, loop, loop, stop, Ranks())

    waiter = waits()
    for _ in range(MOST_LOSSES):
        assert waiter.recover(lost, loop).step == 5
    assert loop.said[0] == (
        "server 1 at b:2 is gone; waiting up to 300 s for it to come back "
        "(parameter server b:2: the connection broke)"
    )
    assert loop.said[1].startswith("server 1 at b:2 is back after ")
    with pytest.raises(ServerLost, match=f"connection broke; that was loss {MOST_LOSSES + 1} of a server"):
        waiter.recover(lost, loop)
    # As workers other than worker 0, whose loop never hears of a checkpoint.
    for step in range(10, 10 + 2 * MOST_LOSSES):
        saver.take_now(Position(step, 0, step))
        assert waiter.recover(lost, loop).step == step
    client.gone = True
    hasty = waits("--server-wait", "1")
    with pytest.raises(ServerLost, match="server 1 at b:2 did not come back within 1 s"):
        hasty.recover(lost, loop)
    impatient = waits("--server-wait", "0")
    with pytest.raises(ServerLost, match="look at its log"):
        impatient.recover(lost, loop)


def test_increments_follow_each_checkpoint_with_all_rows(tmp_path: Path) -> None:
    client = Pools()
    more = ("--checkpoint-rows", "files", "--checkpoint-increments", "2", "--keep-checkpoints", "1")
    saver, model = made(tmp_path, client, *more)

    def rows(step: int) -> str:
        model.step = step
        assert saver.take(Position(step, 0, step)) is None
        model.step = 0  # training goes on
        saved = saver.settle(wait=True)
        assert saved is not None
        assert step_in(saved.path) == step
        return (saved.path / "rows").read_text()

    assert rows(5) == "rows"
    assert rows(10) == "rows since step-0000000005"
    assert rows(15) == "rows since step-0000000010"
    assert [name[-2:] for name in names(tmp_path)] == ["05", "10", "15"], "what the newest builds on is kept"
    assert saver.roll_back()[0].position.step == 15
    assert [name[-2:] for name in client.restored] == ["05", "10", "15"]
    assert rows(20) == "rows"
    assert [name[-2:] for name in names(tmp_path)] == ["20"]
    assert rows(25) == "rows since step-0000000020"

    resumed, model = made(tmp_path, client, *more)
    resumed.roll_back()
    saver = resumed
    assert rows(30) == "rows since step-0000000025"
    # A base that is gone or damaged is noticed before anything is restored.
    for path in published(tmp_path / "checkpoints")[:1]:
        (path / "rows").write_text("r")
    with pytest.raises(CheckpointError, match="step-0000000020/rows is damaged"):
        module._verify(published(tmp_path / "checkpoints")[-1])
    module.checkpoint.remove_from(tmp_path / "checkpoints", 0)
    assert rows(35) == "rows"


def test_rows_in_pools_in_between_make_no_increment_wrong(tmp_path: Path) -> None:
    client = Pools()
    saver, model = made(tmp_path, client, "--checkpoint-increments", "9", "--keep-checkpoints", "1")
    saver.take_files(Position(5, 0, 5))
    saver.take_now(Position(10, 0, 10))
    assert [name[-2:] for name in names(tmp_path)] == ["05", "10"]
    model.step = 15
    saved = saver.take_files(Position(15, 0, 15))
    assert (saved.path / "rows").read_text() == "rows since step-0000000005"
    saver.take_now(Position(20, 0, 20))
    assert [name[-2:] for name in names(tmp_path)] == ["05", "15", "20"]
    saver.roll_back()
    assert client.recovered == [20], "the servers' rows are no longer those of a save"
    saved = saver.take_files(Position(25, 0, 25))
    assert (saved.path / "rows").read_text() == "rows"


def test_a_run_waits_for_what_is_published_beside_it(tmp_path: Path) -> None:
    saver, _ = made(tmp_path, Pools(), "--checkpoint-rows", "files")
    saver.take_now(Position(5, 0, 5))
    other = os.open(tmp_path / "checkpoints", os.O_RDONLY)  # `oeprov reshard`
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [other]).start()
    saver.take_now(Position(10, 0, 10))
    assert names(tmp_path) == ["step-0000000005", "step-0000000010"]


def test_training_goes_on_while_files_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--checkpoint-rows", "files", "--checkpoint-increments", "9")
    saver, model = made(tmp_path, Pools(), *more)
    may_sync = threading.Event()
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (may_sync.wait(60), sync(descriptor)))
    model.step = 5
    assert saver.take(Position(5, 0, 5)) is None
    model.step = 6
    assert saver.settle() is None
    assert names(tmp_path) == []
    may_sync.set()
    saved = saver.settle(wait=True)
    assert saved is not None
    assert (saved.position.step, step_in(saved.path), names(tmp_path)) == (5, 5, ["step-0000000005"])
    assert saver.settle() is None
    # One that is asked for at once, as for a stop, does not take the same step twice.
    model.step = 10
    saver.take(Position(10, 0, 10))
    assert saver.take_now(Position(10, 0, 10)).path.name == "step-0000000010"
    saver.take(Position(15, 0, 15))
    assert saver.roll_back()[0].position.step == 15


def test_files_that_could_not_be_published_are_named_by_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, model = made(tmp_path, Pools(), "--checkpoint-rows", "files", "--checkpoint-increments", "9")
    saver.take_now(Position(5, 0, 5))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        saver.take(Position(10, 0, 10))
        with pytest.raises(Unpublished, match=r"cannot write the checkpoint .*No space left") as caught:
            saver.settle(wait=True)
        assert caught.value.step == 10
        saver.take(Position(15, 0, 15))
        pending: Any = saver._pending
        assert isinstance(pending.path.exception(60), CheckpointError)
    model.step = 20
    assert (saver.take_now(Position(20, 0, 20)).path / "rows").read_text() == "rows since step-0000000005"
    assert names(tmp_path) == ["step-0000000005", "step-0000000020"]
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


def fail(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
