"""The trainer with several workers: losses of one, ends agreed by all, another number of them at --resume."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rendezvous import rendezvous
from server_processes import free_endpoints
from test_train import keep_determinism, train  # noqa: F401
from training_runs import SMALL, ServerProcess, events, losses, wait_for

from oe_runtime.client import Client
from oe_runtime.data import Split, open_source
from oe_runtime.errors import ServerLost, WorkerLost
from oe_runtime.run.options import parse
from oe_runtime.run.shared_input import LostInPush, SharedInput
from oe_runtime.run.stopping import StopRequest
from oe_runtime.shared_values import SharedValues
from oe_runtime.support.horovod import Started, exchange

ENDLESS = ["--data", "generate:100000000:1", "--holdout", "0"]
EVERY = ["--checkpoint-steps", "5"]


def start(run_dir: Path, count: int, server: ServerProcess, *flags: str) -> list[subprocess.Popen[str]]:
    """Start the workers; each but the first has a run directory of its own, as on another host."""
    command = [sys.executable, "-m", "oe_runtime.train", *ENDLESS, *SMALL, *EVERY]
    command += ["--servers", server.endpoint, "--workers", free_endpoints(count), *flags]
    pipe = subprocess.PIPE
    # The trainer's own choice of what TensorFlow says, not that of the tests here.
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--run-dir", str(own_directory(run_dir, rank))],
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]


def own_directory(run_dir: Path, rank: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}-{rank}") if rank else run_dir


@pytest.mark.process
def test_two_and_four_workers_have_the_losses_of_one_whoever_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    server, fresh = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "fresh")
    another = ServerProcess(tmp_path / "another")
    workers = start(run_dir, 2, server)
    try:
        wait_for(lambda: 6 in losses(run_dir), workers[0])
        workers[1].send_signal(signal.SIGTERM)
        said = [worker.communicate(timeout=60) for worker in workers]
        assert [worker.returncode for worker in workers] == [130, 130]
        assert [err for _, err in said] == ["", ""]
        stopped = events(run_dir, "interrupted")[0]
        reached = stopped["step"]
        assert stopped["step"] == max(losses(run_dir))
        assert stopped["path"].endswith(f"step-{stopped['step']:010d}")

        workers = start(run_dir, 2, fresh, "--resume")
        for times in (1, 2):
            wait_for(lambda: max(losses(run_dir)) >= reached + 6, workers[0])  # noqa: B023
            fresh.kill()
            fresh.start_again()
            wait_for(lambda: len(events(run_dir, "server_back")) == times, workers[0])  # noqa: B023
            reached = max(losses(run_dir))
        wait_for(lambda: max(losses(run_dir)) >= reached + 6, workers[0])
        workers[1].kill()
        _, error = workers[0].communicate(timeout=60)
        assert workers[0].returncode == 3
        assert len(error.splitlines()) == 1, error
        last = max(e["step"] for e in events(run_dir, "checkpoint"))
        for part in ("error: worker 1 (127.0.0.1:", "was lost", f"step-{last:010d}", "--resume"):
            assert part in error

        workers = start(run_dir, 4, another, "--resume", "--steps", str(last + 3))
        said = [worker.communicate(timeout=120) for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * 4, said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        for each in (server, fresh, another):
            each.stop()
    assert train(run_dir, *EVERY, "--resume", "--steps", str(last + 6), data=ENDLESS) == 0
    assert [e["step"] for e in events(run_dir, "resume")] == [stopped["step"], last, last + 3]
    assert train(tmp_path / "one", *EVERY, "--steps", str(last + 6), data=ENDLESS) == 0
    found, expected = losses(run_dir), losses(tmp_path / "one")
    for step, (loss, auc) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=2e-4), step
        assert found[step][1] == pytest.approx(auc, abs=2e-3), step


@pytest.mark.process
@pytest.mark.parametrize("storage", ["dram", "dram_ssd"])
def test_a_work_queue_has_the_losses_of_a_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """With one worker and one file the steps are the same; its dense weights are on the server."""
    announced = []
    read_ahead = Client.read_ahead

    def spy(client: Client, *pulls: Any) -> None:
        announced.append(client)
        read_ahead(client, *pulls)

    monkeypatch.setattr(Client, "read_ahead", spy)
    excerpt = Path(__file__).parents[1] / "data" / "criteo_200.tsv"
    (tmp_path / "rows.tsv").write_bytes(excerpt.read_bytes() * 16)
    data = ["--data", str(tmp_path / "rows.tsv")]
    more = ["--optimizer", "adam", "--checkpoint-steps", "2", "--epochs", "1"]
    assert train(tmp_path / "one", *more, data=data) == 0
    cache = [] if storage == "dram" else ["--storage-cache", "1M"]
    first, fresh = (ServerProcess(tmp_path / name, 0, 1, storage, *cache) for name in ("server", "fresh"))
    run_dir = tmp_path / "run"
    try:
        for server, flags in ((first, ["--steps", "5"]), (fresh, ["--resume"])):
            where = ("--servers", server.endpoint, "--workqueue")
            assert train(run_dir, *more, *flags, where=where, data=data) == 0
        assert train(run_dir, *more, "--resume", where=("--servers", fresh.endpoint), data=data) == 1
    finally:
        first.stop()
        fresh.stop()
    found, expected = losses(run_dir), losses(tmp_path / "one")
    assert len(expected) == 8
    # At each of the first 5 steps and the first of the last 3 the batch after the next one. Nothing waits for
    # the announcements of the last two steps of a run.
    assert 3 <= len(announced) <= 6 if storage == "dram_ssd" else not announced
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [2, 4, 5, 6, 8], "the last one once, too"
    for step, (loss, _) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=2e-4), step
    for kind in ("loss", "auc"):
        assert events(run_dir, "eval")[-1][kind] == pytest.approx(
            events(tmp_path / "one", "eval")[0][kind], rel=1e-3
        )


@pytest.mark.process
def test_workers_of_a_queue_go_back_together_and_on_without_one(tmp_path: Path) -> None:
    """A stop, then a lost server, a lost worker, the server again; each row counts once all the same."""
    excerpt = (Path(__file__).parents[1] / "data" / "criteo_200.tsv").read_bytes()
    for number in range(4):
        (tmp_path / f"part-{number}.tsv").write_bytes(excerpt * 2)
    run_dir = tmp_path / "run"
    lost, other = ServerProcess(tmp_path / "lost", 0, 2), ServerProcess(tmp_path / "other", 1, 2)
    flags = ["--workqueue", "--on-worker-lost", "continue", "--staleness", "8", "--worker-wait", "60"]
    flags += ["--servers", f"{lost.endpoint},{other.endpoint}", "--data", str(tmp_path / "part-*.tsv")]
    flags += ["--holdout", "0.1", "--batch-size", "20", "--epochs", "2", "--checkpoint-steps", "50"]
    workers = start(run_dir, 2, lost, *flags)

    def lose_the_server(times: int) -> None:
        lost.kill()
        lost.start_again()
        wait_for(lambda: len(events(run_dir, "server_back")) == times, workers[0])
        reached = max(losses(run_dir))
        wait_for(lambda: max(losses(run_dir)) > reached, workers[0])

    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 4, workers[0])
        workers[0].send_signal(signal.SIGTERM)
        said = [worker.communicate(timeout=60) for worker in workers]
        assert [worker.returncode for worker in workers] == [130, 130], said
        workers = start(run_dir, 2, lost, *flags, "--resume")
        wait_for(lambda: max(losses(run_dir)) > events(run_dir, "interrupted")[0]["step"] + 4, workers[0])
        lose_the_server(1)
        assert workers[1].poll() is None
        workers[1].kill()
        lose_the_server(2)
        output, error = workers[0].communicate(timeout=120)
        assert workers[0].returncode == 0, error
        assert error == ""
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        lost.stop()
        other.stop()
    batches = 4 * 2 * (2 * 180 // 20)
    assert events(run_dir, "checkpoint")[-1]["step"] == batches
    assert events(run_dir, "eval")[0]["rows"] == 4 * 40
    assert "server 0 at 127.0.0.1:" in output
    assert not own_directory(run_dir, 1).exists(), "worker 1 needs nothing of worker 0's directory"


@pytest.mark.process
def test_workers_of_a_queue_have_each_row_once(tmp_path: Path) -> None:
    excerpt = Path(__file__).parents[1] / "data" / "criteo_200.tsv"
    for number in range(3):
        (tmp_path / f"part-{number}.tsv").write_bytes(excerpt.read_bytes())
    flags = ["--data", str(tmp_path), "--servers", "a:1", "--workqueue", "--batch-size", "50"]
    options = parse([*flags, "--run-dir", str(tmp_path / "run"), "--epochs", "2"])
    source, split = open_source(options.data), Split(0.1)
    server = ServerProcess(tmp_path / "server")

    def shared(rank: int) -> SharedInput:
        values = SharedValues([server.endpoint])
        return SharedInput(replace(options, rank=rank), source, split, stop, values)

    with StopRequest(with_parent=False) as stop:
        workers = [shared(rank) for rank in range(2)]
        workers[0].begin(None)
        counts = [0, 0]
        turns = [worker.work(1) for worker in workers]
        state: dict[str, Any] = {}
        for turn in range(7):
            work, batch, done, _ = next(turns[turn % 2])
            workers[turn % 2].hold()
            counts[turn % 2] += batch.rows
            assert workers[turn % 2].report(work, done) == turn + 1
        with workers[0].paused_queue() as found:
            state = found
        for worker in workers:
            worker.close()
        assert [sum(batch.rows for batch in workers[0].read_held_out())] == [60]
        one = shared(0)
        one.begin(state)
        for work, batch, done, _ in one.work(1):
            counts[0] += batch.rows
            one.hold()
            one.report(work, done)
        assert sum(counts) == 2 * 3 * 180
        one.begin(state)
        one.stop_all()
        assert next(one.work(1), None) is None
        assert stop.reason == "another worker was asked to"
        one.close()
    server.stop()


Two = tuple[SharedInput, SharedInput, list[SharedValues]]
TARGET = {"path": "checkpoint"}


@contextlib.contextmanager
def two_inputs(tmp_path: Path, *flags: str) -> Iterator[Two]:
    """Two workers' ends of a queue that has begun, and their connections."""
    excerpt = Path(__file__).parents[1] / "data" / "criteo_200.tsv"
    (tmp_path / "rows.tsv").write_bytes(excerpt.read_bytes())
    words = ["--data", str(tmp_path / "rows.tsv"), "--servers", "a:1", "--workqueue", "--batch-size", "50"]
    words += ["--run-dir", str(tmp_path / "run"), "--workers", "a:1,b:2", "--rank", "0", *flags]
    options = parse(words)
    source, split = open_source(options.data), Split(0.1)
    server = ServerProcess(tmp_path / "server")
    ends = [SharedValues([server.endpoint]) for _ in range(2)]
    with StopRequest(with_parent=False) as stop, ThreadPoolExecutor(1) as pool:
        one, two = (
            SharedInput(replace(options, rank=rank), source, split, stop, values)
            for rank, values in enumerate(ends)
        )
        begun = pool.submit(two.await_begin)
        assert one.await_others() == []
        one.begin(None, TARGET, b"weights")
        assert begun.result(60) == (TARGET, b"weights")
        try:
            yield one, two, ends
        finally:
            for values in ends:
                values.close()
            server.stop()


@pytest.mark.process
def test_a_worker_that_alone_was_cut_off_takes_all_back(tmp_path: Path) -> None:
    """Its host was unreachable: the servers and the other worker have not noticed."""
    with two_inputs(tmp_path) as (one, two, _), ThreadPoolExecutor(1) as pool:
        assert not one.is_losing()
        work, *_ = next(two.work(1))
        two.hold()  # in its push
        begun = pool.submit(two.await_begin)
        while not one.is_losing():
            assert not begun.done()
        with pytest.raises(ServerLost, match="another worker has lost a server"):
            one.raise_losses()
        assert one.await_others() == []
        with one.between_steps():
            one.begin(None, TARGET, b"weights")
        assert begun.result(60) == (TARGET, b"weights")
        assert next(one.work(1))[0] == work


@pytest.mark.process
@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize("way", ["was lost", "failed"])
def test_no_checkpoint_has_a_torn_push(way: str, policy: str, tmp_path: Path) -> None:
    """Some servers may have it; all go back, or the job ends."""
    error = WorkerLost if policy == "stop" else LostInPush
    with two_inputs(tmp_path, "--on-worker-lost", policy) as (one, two, ends):
        two.hold()
        if way == "was lost":
            ends[1].close()
        else:
            with pytest.raises(ZeroDivisionError), two.sharing_losses():
                _ = 1 // 0  # of the program's own
        with pytest.raises(error, match=f"^worker 1 {way} in its push$"), one.paused_queue():
            pass
        with pytest.raises(error, match=f"^worker 1 {way} in its push$"):
            one.raise_losses()
        if (way, policy) == ("was lost", "continue"):  # who goes back is not kept from it
            assert one.await_others() == [1]
            with one.between_steps():
                one.begin(None, TARGET, b"weights")
            one.raise_losses()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank", "0"], "--rank goes with --workers"),
        (["--workers", "a:1,b:2"], "--workers needs --rank"),
        (["--workers", "a:1,b:2", "--rank", "2"], "--rank 2: --workers names 2, so it is 0 to 1"),
        (["--workers", "a:1,a:1", "--rank", "0"], "--workers: an endpoint is named twice"),
        (["--workers", "a:1,b", "--rank", "0"], "--workers: 'b' is not HOST:PORT"),
        (["--staleness", "2"], "--staleness 2: without --workqueue it is 0 or 1"),
        (["--staleness", "1", "--no-pipeline"], "--staleness 1 is a part of the pipeline"),
        (["--staleness", "1", "--workers", "a:1,b:2", "--rank", "0"], "2 workers train together"),
        (["--on-worker-lost", "continue"], "goes with --workqueue"),
        (["--workqueue", "--optimizer", "ftrl"], "ftrl does not go with --workqueue"),
    ],
)
def test_workers_that_cannot_be_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--data", "generate:100", "--servers", "c:3", "--run-dir", "run", *flags])
    assert message in capsys.readouterr().err


def test_workers_of_horovodrun_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--data", "generate:100", "--servers", "c:3", "--run-dir", "run"]
    places = []
    with rendezvous(3) as processes:
        for variables in processes:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            options = parse(flags)
            places.append(Started(options.rank, options.size, options.rendezvous))
        assert [place.rank for place in places] == [0, 1, 2]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda place: exchange(place, 20), places))
        with pytest.raises(WorkerLost, match="workers 3 did not come"):
            exchange(places[0]._replace(size=4), 1)
    assert len(set(found[0])) == 3
    assert found[0] == found[1] == found[2]
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(SystemExit):
        parse(flags)


def test_launchers_say_the_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "generate:100", "--servers", "c:3", "--run-dir", "run", "--workers", "a:1,b:2"]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert parse(flags).rank == 1
    assert parse([*flags, "--rank", "0"]).rank == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        parse(flags)
    assert "--workers names 2 workers, but the launcher has started 3 processes" in capsys.readouterr().err
