"""Servers that are lost in training: killed at any moment, back at the same address, and the run goes on."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from server_processes import CuttingProxy
from test_train import keep_determinism, one_error, train  # noqa: F401
from training_runs import ServerProcess, events, losses

from oe_runtime import Client, TableSpec
from oe_runtime.checkpoint import latest
from oe_runtime.errors import ServerLost, WorkerLost
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.run.script import _Script

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("keep_determinism")]

STEPS = 45
DATA = ["--data", "generate:100000000:1", "--holdout", "0"]
POOL = ("pmem_libpmem", "--storage-recover", "--storage-checkpoints", "3")


class Servers:
    """Two servers, each of which can be killed and started again at its address."""

    def __init__(self, directory: Path, storage: str, *flags: str) -> None:
        self.running = [
            ServerProcess(directory / f"server-{index}", index, 2, storage, *flags) for index in range(2)
        ]
        self.where = ("--servers", ",".join(server.endpoint for server in self.running))

    def kill(self, index: int) -> None:
        self.running[index].kill()

    def start_again(self, index: int) -> None:
        self.running[index].start_again()

    def end(self) -> None:
        for server in self.running:
            server.stop()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(*storage: str) -> Servers:
        made.append(Servers(tmp_path / f"servers-{len(made)}", *storage))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(run_dir, "--steps", str(STEPS), "--checkpoint-steps", "5", data=DATA) == 0
    return run_dir


def rows_of(run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Keys and weights of every table in the latest checkpoint, which has files."""
    found = latest(run_dir / "checkpoints")
    assert found is not None
    tables = {entry["table"]: TableSpec.from_json(entry["spec"]) for entry in found.manifest["tables"]}
    rows = {}
    with Client.in_process() as client:
        numbers = {name: client.create_table(spec) for name, spec in tables.items()}
        client.restore(found.path)
        for name, number in numbers.items():
            keys, weights = client.export_rows(number)
            order = np.argsort(keys)
            rows[name] = (keys[order], weights[order])
    return rows


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    assert losses(run_dir) == losses(undisturbed)
    ours, theirs = rows_of(run_dir), rows_of(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, (keys, weights) in ours.items():
        np.testing.assert_array_equal(keys, theirs[name][0])
        np.testing.assert_array_equal(weights, theirs[name][1])


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does `work` in another thread; what it raises is raised at the end."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield
        future.result()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class KillAndBack:
    """Kills a server at a random moment after each of `steps`, in that order, and starts it again a moment
    later; the next one only when training has come back from the last. A run that is faster waits for that.
    """

    def __init__(self, servers: Servers, steps: list[int], moments: random.Random) -> None:
        self._servers = servers
        self._steps = steps
        self._moments = moments
        self._pool = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None
        self._wait_at = 0

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """What the trainer says."""
        if kind == "server_back":
            assert self._work is not None
            self._work.result()
            self._work = None
        elif kind == "step" and self._work is not None and values["step"] == self._wait_at:
            self._work.result()
        elif kind == "step" and self._work is None and self._steps and values["step"] >= self._steps[0]:
            self._steps.pop(0)
            self._wait_at = values["step"] + 5
            self._work = self._pool.submit(self._kill, self._moments.uniform(0, 0.02))

    def _kill(self, delay: float) -> None:
        time.sleep(delay)
        index = self._moments.randrange(2)
        self._servers.kill(index)
        time.sleep(self._moments.uniform(0, 0.5))
        self._servers.start_again(index)

    def end(self) -> None:
        """Wait for what was begun."""
        self._pool.shutdown()


@pytest.mark.parametrize("storage", [POOL, ("dram",)], ids=["pool", "files"])
def test_servers_killed_three_times_change_nothing(
    storage: tuple[str, ...],
    servers: Callable[..., Servers],
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, run_dir = servers(*storage), tmp_path / "run"
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"random moments of seed {seed}")
    moments = random.Random(seed)  # noqa: S311
    kills = KillAndBack(
        two, [third * STEPS // 4 + moments.randrange(STEPS // 4) for third in range(3)], moments
    )
    write = RunDirectory.event

    def event(self: RunDirectory, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        kills.event(kind, values)

    monkeypatch.setattr(RunDirectory, "event", event)
    arguments = ("--steps", str(STEPS), "--checkpoint-steps", "5")
    assert train(run_dir, *arguments, where=two.where, data=DATA) == 0
    kills.end()
    assert len(events(run_dir, "server_gone")) == len(steps_back(run_dir)) == 3
    gone = [event["endpoint"] for event in events(run_dir, "server_gone")]
    assert all(endpoint in two.where[1] for endpoint in gone)
    kinds = [event["rows"] for event in events(run_dir, "checkpoint")]
    assert set(kinds[:-1]) == {"pool" if storage[0] == "pmem_libpmem" else "files"}
    assert kinds[-1] == "files", "what a finished run leaves needs no server"
    assert_same(run_dir, undisturbed)


@pytest.mark.parametrize("queue", [(), ("--workqueue",)], ids=["plain", "queue"])
def test_broken_connections_cost_no_step(
    queue: tuple[str, ...],
    servers: Callable[..., Servers],
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are reset in pulls and pushes; nothing is lost, nothing is pushed twice, nobody goes back."""
    proxies = [CuttingProxy(server.endpoint) for server in servers("dram").running]
    write = RunDirectory.event
    sizes = random.Random(1)  # noqa: S311

    def event(self: RunDirectory, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        if kind == "step":
            proxies[values["step"] % 2].cut_after(sizes.randrange(1 << sizes.randrange(8, 18)))

    monkeypatch.setattr(RunDirectory, "event", event)
    run_dir = tmp_path / "run"
    where = ("--servers", ",".join(proxy.endpoint for proxy in proxies))
    arguments = ("--steps", str(STEPS), "--checkpoint-steps", "5", *queue)
    try:
        assert train(run_dir, *arguments, where=where, data=DATA) == 0
    finally:
        for proxy in proxies:
            proxy.close()
    assert min(proxy.cuts for proxy in proxies) > 5
    assert events(run_dir, "server_gone") == []
    assert [event["step"] for event in events(run_dir, "step")] == list(range(1, STEPS + 1))
    if not queue:
        assert_same(run_dir, undisturbed)


def test_a_worker_of_a_queue_goes_back_with_its_queue(
    servers: Callable[..., Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, run_dir = servers("dram"), tmp_path / "run"
    kills = KillAndBack(two, [5], random.Random(1))  # noqa: S311
    write = RunDirectory.event

    def event(self: RunDirectory, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        kills.event(kind, values)

    arguments = ("--checkpoint-steps", "3", "--no-eval")
    assert train(tmp_path / "one", *arguments) == 0
    monkeypatch.setattr(RunDirectory, "event", event)
    assert train(run_dir, *arguments, "--workqueue", where=two.where) == 0
    kills.end()
    assert len(steps_back(run_dir)) == 1
    found = losses(run_dir)
    assert list(found) == list(losses(tmp_path / "one"))
    for step, (loss, _) in losses(tmp_path / "one").items():
        assert found[step][0] == pytest.approx(loss, rel=2e-4), step


def test_servers_lost_after_the_last_step_do_not_fail_the_run(
    servers: Callable[..., Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the evaluation they are waited for; the export then has its rows from the checkpoint's files."""
    two, run_dir = servers("dram"), tmp_path / "run"
    arguments = ("--steps", "6", "--checkpoint-increments", "2", "--checkpoint-steps", "4")
    plain = tmp_path / "plain"
    assert train(tmp_path / "one", *arguments, "--export", str(plain)) == 0
    write = RunDirectory.event

    def event(self: RunDirectory, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        if kind == "trained" and not events(run_dir, "server_gone"):
            two.kill(1)
            two.start_again(1)
        elif kind == "eval":
            two.kill(0)

    monkeypatch.setattr(RunDirectory, "event", event)
    export = run_dir / "export"
    assert train(run_dir, *arguments, "--export", str(export), where=two.where) == 0
    kinds = [one["event"] for one in events(run_dir) if one["event"] not in ("servers", "tables")]
    assert kinds[-6:] == ["server_gone", "server_back", "trained", "eval", "export", "end"]
    (mine,), (other,) = events(run_dir, "eval"), events(tmp_path / "one", "eval")
    assert mine["auc"] == pytest.approx(other["auc"], rel=1e-5)
    assert scores(export) == pytest.approx(scores(plain), rel=1e-5)


def scores(export: Path) -> list[float]:
    """What an exported model says of a hundred rows."""
    import tensorflow as tf

    serve = tf.saved_model.load(str(export)).signatures["serving_default"]
    random_ids = np.random.default_rng(1)
    given = {}
    for name, spec in serve.structured_input_signature[1].items():
        shape = (100, *spec.shape[1:])
        values = random_ids.integers(0, 2, shape) if spec.dtype.is_integer else random_ids.random(shape)
        given[name] = tf.cast(values, spec.dtype)
    return [float(score) for score in next(iter(serve(**given).values())).numpy().ravel()]


def steps_back(run_dir: Path) -> list[int]:
    return [event["step"] for event in events(run_dir, "server_back")]


def test_a_run_that_was_lost_at_its_first_checkpoint_starts_again(
    servers: Callable[..., Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod on Kubernetes does, which resumes only where a checkpoint lies; the pools have one."""
    two, run_dir = servers(*POOL), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_publish", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            train(run_dir, "--steps", "2", where=two.where, data=DATA)
    assert latest(run_dir / "checkpoints") is None
    assert train(run_dir, "--steps", "2", where=two.where, data=DATA) == 0
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [0, 2]


def test_resume_from_pools(
    servers: Callable[..., Servers],
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two, run_dir = servers(*POOL), tmp_path / "run"
    arguments = ("--checkpoint-steps", "5", "--server-wait", "0")

    def kill_one() -> None:
        # Durable soon after its step: how soon is the disk's affair.
        until(lambda: any(event["step"] >= 10 for event in events(run_dir, "checkpoint")))
        two.kill(1)

    with meanwhile(kill_one):
        assert train(run_dir, *arguments, "--steps", str(STEPS), where=two.where, data=DATA) == 1
    newest = latest(run_dir / "checkpoints")
    assert newest is not None
    assert newest.step >= 10
    assert newest.manifest["tables"] == []
    assert list(newest.manifest["files"]) == ["dense.npz"], "no file has rows"
    pool = newest.manifest["pool"]
    assert (pool["checkpoint"], pool["servers"], pool["storage"]) == (newest.step, 2, "pmem_libpmem")
    two.start_again(1)

    # Another run does not begin with these rows.
    capsys.readouterr()
    assert train(tmp_path / "other", "--steps", "5", where=two.where, data=DATA) == 1
    assert "trained rows of table" in one_error(capsys)

    more = ("--resume", "--steps", str(STEPS), "--export-checkpoints", "8")
    assert train(run_dir, *arguments, *more, where=two.where, data=DATA) == 0
    assert [event["step"] for event in events(run_dir, "resume")] == [newest.step]
    in_files = [event["step"] for event in events(run_dir, "checkpoint") if event["rows"] == "files"]
    assert in_files == [40, STEPS], "every eighth, and the last"
    assert_same(run_dir, undisturbed)


@pytest.mark.parametrize("known", [ServerLost("h:1", "h:1 is lost"), None])
def test_a_worker_that_another_left_for_a_lost_server_goes_back_too(
    known: Exception | None, tmp_path: Path
) -> None:
    """The other one ends its connections, and this one may notice that before the loss."""
    program = tmp_path / "train.py"
    program.write_text("from oe_runtime.errors import WorkerLost\nraise WorkerLost('worker 0 was lost')\n")

    def stats() -> None:
        if known is not None:
            raise known

    session: Any = SimpleNamespace(
        options=SimpleNamespace(arguments=[], workers=[], rank=0, size=2),
        stop=SimpleNamespace(forget=lambda: None),
        connected=SimpleNamespace(stats=stats),
        workers=2,
    )
    with pytest.raises(WorkerLost if known is None else ServerLost):
        _Script(program, session)._execute()
