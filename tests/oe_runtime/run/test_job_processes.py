"""Scripts of jobs in processes of their own: servers that are lost, workers, signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import job_scripts
import pytest
from job_scripts import figures, losses, run, start, write
from server_processes import free_endpoints
from training_runs import ServerProcess, events, wait_for

from oe_runtime import checkpoint

pytestmark = pytest.mark.process

LONG = job_scripts.ARRAYS.replace("epochs=3", "epochs=30")


def test_a_run_goes_back_when_its_server_is_killed(tmp_path: Path) -> None:
    """The process starts anew, so that its data are where the checkpoint was."""
    script = write(tmp_path, LONG)
    every = ("--checkpoint-steps", "15")
    run_dir = tmp_path / "run"
    server = ServerProcess(tmp_path / "server")
    process = start(script, run_dir, "--servers", server.endpoint, *every)
    try:
        for times in (1, 2):
            after = max(losses(run_dir), default=0) + 20
            wait_for(lambda: max(losses(run_dir), default=0) > after, process)  # noqa: B023
            server.kill()
            server.start_again()
            wait_for(lambda: len(events(run_dir, "server_back")) == times, process)  # noqa: B023
        said, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "is back after" in said
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert run(script, tmp_path / "whole", *every) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert figures(run_dir) == figures(tmp_path / "whole")
    found = checkpoint.latest(run_dir / "checkpoints")
    assert found is not None
    assert found.step == 600


def test_a_stop_is_heard_outside_of_training_too(tmp_path: Path) -> None:
    text = "import time, pathlib\npathlib.Path('here').touch()\ntime.sleep(600)\n"
    process = start(write(tmp_path, text), tmp_path / "run")
    try:
        wait_for((tmp_path / "here").exists, process)
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "")
    assert "stopped (SIGTERM) before the first step; there is nothing to resume" in said
    assert [e["event"] for e in events(tmp_path / "run")] == ["start", "interrupted"]


WORKERS = (
    job_scripts.KERAS
    + """
part = slice(job.rank * 25, (job.rank + 1) * 25) if job.workers == 2 else slice(None)
import os, time
import tensorflow as tf

mine = features.reshape(20, 50, 2)[:, part].reshape(-1, 2), labels.reshape(20, 50)[:, part].reshape(-1)
data = tf.data.Dataset.from_tensor_slices(mine).batch(50 // job.workers).repeat(3)


class Rows(keras.metrics.Sum):
    def update_state(self, labels, predictions, sample_weight=None):
        return super().update_state(keras.ops.ones_like(labels))


model.compile(model.optimizer, "binary_crossentropy", metrics=["AUC", Rows(name="rows")])
say = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: print("epoch", epoch, "has", int(logs["rows"]), "rows", flush=True)
)


class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = str(int(self.model.optimizer.iterations))
        while step in os.environ.get("WAIT_IN", "").split() and not os.path.exists("go-on-" + step):
            time.sleep(0.01)


callbacks = [Wait(), *callbacks]
model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, say])
"""
).replace("Dropout(0.2)", "Dropout(0.0)")


def start_workers(
    script: Path, run_dir: Path, server: ServerProcess, *flags: str, waits: str = ""
) -> list[Any]:
    """`waits`: steps in which they wait until `tell_to_go_on`."""
    workers, environment = free_endpoints(2), {**os.environ, "WAIT_IN": waits}
    more = ("--servers", server.endpoint, "--workers", workers, "--checkpoint-steps", "15", *flags)
    return [start(script, run_dir, *more, "--rank", str(rank), env=environment) for rank in range(2)]


def tell_to_go_on(script: Path, step: int) -> None:
    (script.parent / f"go-on-{step}").touch()


def test_two_workers_have_the_losses_of_one_whoever_is_lost(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, WORKERS), tmp_path / "run"
    server, another = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "another")
    workers = start_workers(script, run_dir, server, waits="22 50")
    try:
        wait_for(lambda: max(losses(run_dir), default=0) >= 21, workers[0])
        server.kill()
        tell_to_go_on(script, 22)
        server.start_again()
        wait_for(lambda: len(events(run_dir, "server_back")) == 1, workers[0])
        wait_for(lambda: max(losses(run_dir)) >= 49, workers[0])
        workers[1].send_signal(signal.SIGTERM)
        tell_to_go_on(script, 50)
        said = [worker.communicate(timeout=60) for worker in workers]
        assert [worker.returncode for worker in workers] == [130, 130], said
        assert 50 <= events(run_dir, "interrupted")[0]["step"] < 52

        workers = start_workers(script, run_dir, another, "--resume", waits="80")
        wait_for(lambda: max(losses(run_dir)) >= 79, workers[0])
        workers[1].kill()
        tell_to_go_on(script, 80)
        (told, error), (follower, _) = (worker.communicate(timeout=60) for worker in workers)
        assert workers[0].returncode == 3, error
        for text in (told, follower):
            assert "epoch 0 has 1500 rows" in text, "also those before the checkpoint"
        assert "error: worker 1 (127.0.0.1:" in error
        assert "--resume" in error
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        for one in (server, another):
            one.stop()
    assert run(script, run_dir, "--checkpoint-steps", "15", "--resume") == 0
    assert run(script, tmp_path / "one", "--checkpoint-steps", "15") == 0
    found, expected = losses(run_dir), losses(tmp_path / "one")
    assert found.keys() == expected.keys()
    for step, (loss, _) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-3), step


def test_an_epoch_has_the_figures_of_all_workers_after_a_stop_too(tmp_path: Path) -> None:
    """Each worker goes on with the sums of its own part of the data."""
    script, run_dir = (
        write(tmp_path, WORKERS.replace("keras.ops.ones_like(labels)", "labels")),
        tmp_path / "run",
    )
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(script, run_dir, server, waits="22")
    try:
        wait_for(lambda: max(losses(run_dir), default=0) >= 21, workers[0])
        workers[1].send_signal(signal.SIGTERM)
        tell_to_go_on(script, 22)
        said = [worker.communicate(timeout=120) for worker in workers]
        assert [worker.returncode for worker in workers] == [130, 130], said
        assert 0 < events(run_dir, "interrupted")[0]["step"] < 60
        workers = start_workers(script, run_dir, server, "--resume")
        said = [worker.communicate(timeout=120) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
    assert run(script, tmp_path / "one") == 0
    found, expected = figures(run_dir), figures(tmp_path / "one")
    assert found.keys() == expected.keys() == {0, 1}
    for epoch, whole in expected.items():
        assert found[epoch]["loss"] == pytest.approx(whole["loss"], rel=1e-4)
        assert 2 * found[epoch]["rows"] == whole["rows"]


def test_two_workers_go_on_from_one_fit_to_the_next(tmp_path: Path) -> None:
    """Only worker 0 knows of the checkpoints that it has taken since the start."""
    script = write(tmp_path, WORKERS + "model.fit(data, epochs=1, verbose=0, callbacks=callbacks)\n")
    server = ServerProcess(tmp_path / "server")
    # Should they wait for each other, they give up after 30 s.
    workers = start_workers(script, tmp_path / "run", server, "--worker-wait", "30")
    try:
        said = [worker.communicate(timeout=180) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert max(losses(tmp_path / "run")) == 180


ELSEWHERE = (
    """
import json, os
import oe_runtime.job as job
import oe_runtime.keras as embed
import tensorflow as tf

place = json.loads(os.environ["TF_CONFIG"])
assert place["task"] == {"type": "worker", "index": job.rank}
assert os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"] == place["cluster"]["worker"][0]
for kind in ("RANK", "HOROVOD_RANK", "LOCAL_RANK", "HOROVOD_LOCAL_RANK"):
    assert os.environ[kind] == str(job.rank), kind
for kind in ("WORLD_SIZE", "HOROVOD_SIZE", "LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"):
    assert os.environ[kind] == "2", kind
embed.flags.num_workers = int(os.environ["HOROVOD_SIZE"])  # as OpenEmbedding's programs do
"""
    + job_scripts.KERAS.replace("(model, job.client())", "(model)")
    + """
part = slice(job.rank, None, job.workers)
model.fit(features[part], labels[part], batch_size=250, verbose=0, callbacks=callbacks)
assert model.client is job.client()
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    embed.distributed_model(keras.Sequential([keras.Input((2,)), keras.layers.Embedding(99, 2)]))
"""
)


def test_workers_find_their_places_as_programs_of_other_launchers_do(tmp_path: Path) -> None:
    """And the tables of models without a client are on the job's servers."""
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(write(tmp_path, ELSEWHERE), tmp_path / "run", server)
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1], said
    for _, error in said:
        assert "distributed_model does not work inside a MultiWorkerMirroredStrategy over 2 repl" in error
    assert len(losses(tmp_path / "run")) == 2


def test_a_strategy_before_the_workers_have_met(tmp_path: Path) -> None:
    text = "import tensorflow as tf\ntf.distribute.MultiWorkerMirroredStrategy()\n" + job_scripts.ARRAYS
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(write(tmp_path, text), tmp_path / "run", server)
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1], said
    assert all("MultiWorkerMirroredStrategy was made before the workers of" in error for _, error in said)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "Dense(8",
            "Dense(8 + job.rank",
            "model/dense/bias is [9, 'float32'] in worker 1 and [8, 'flo",
        ),
        (
            '"relu"',
            '["relu", "tanh"][job.rank]',
            "layer 3 (Dense) activation is tanh in worker 1 and relu",
        ),
    ],
)
def test_workers_with_different_models(old: str, new: str, message: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(write(tmp_path, job_scripts.ARRAYS.replace(old, new)), tmp_path / "run", server)
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1], said
    assert all(f": the workers' models differ: {message}" in error for _, error in said), said
    assert losses(tmp_path / "run") == {}


def test_workers_with_the_same_batches_and_with_more_batches(tmp_path: Path) -> None:
    """The first is a warning; the second, where nobody knows the numbers, ends the job with the epoch."""
    text = job_scripts.KERAS + (
        "import tensorflow as tf\n"
        "data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(50).take(5 + job.rank)\n"
        "data = data.filter(lambda *_: True)\n"  # its size is unknown
        "model.fit(data, epochs=2, verbose=0, callbacks=callbacks)\n"
    )
    text = text.replace("Dropout(0.2)", "Dropout(0.0)")
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(write(tmp_path, text), tmp_path / "run", server)
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1], said
    for out, error in said:
        assert out.count("warning: all 2 workers seem to train on the same batches") == 1
        assert "the workers have different numbers of batches: 1 of 2 have ended an epoch" in error
    assert max(losses(tmp_path / "run")) == 5
