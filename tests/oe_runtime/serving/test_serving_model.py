"""A served model follows training: full checkpoints, increments, rows that go, weights that change."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import keras
import numpy as np
import pytest
from server_processes import Servers
from serving_models import Training, batch
from training_runs import DATA, SMALL, events

import oe_runtime.keras as embed
from oe_runtime import Client, StorageError, StorageSpec, TableSpec, checkpoint, freshness, train
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.batches import Split, holdout_batches, open_source
from oe_runtime.errors import CheckpointError, ServerLost, SpecError
from oe_runtime.model_description import Description, Tensor
from oe_runtime.serving import InputError, Model, ServingError
from oe_runtime.serving.checkpoints import ServedCheckpoints, ServedRows
from oe_runtime.serving.requests import status
from oe_runtime.serving.versions import Asked, Versions


@pytest.fixture(scope="module")
def one_training(tmp_path_factory):
    keras.backend.clear_session()
    with Training(tmp_path_factory.mktemp("training")) as training:
        yield training, training.export()


@pytest.fixture
def training(one_training, tmp_path):
    """One model, which is not compiled anew for each test."""
    training, _ = one_training
    training.checkpoints = tmp_path / "checkpoints"
    return training


@pytest.fixture
def export(one_training):
    return one_training[1]


def test_predictions_follow_training(training, export, tmp_path, monkeypatch):
    x, _ = batch(64)
    training.fit()
    training.publish(10)
    storage = StorageSpec("dram_pmem", str(tmp_path), cache_bytes=1 << 20)  # other tests have DRAM
    with Model.load(export, training.checkpoints, storage=storage) as model:
        assert model.version == 10
        before = model.predict(x)["output_0"]
        np.testing.assert_allclose(before, training.predict(x), atol=1e-6)
        assert not model.refresh()

        # Only the increments are read from here on.
        restore = Client.restore
        monkeypatch.setattr(Client, "restore", lambda *_: pytest.fail("all rows were loaded"))
        training.fit(seed=1)
        rows = training.rows()
        assert training.evict_all_but(ids=range(20)) > 0
        training.publish(20, base=10)
        assert training.rows() < rows
        assert np.abs(training.predict(x) - before).max() > 1e-3
        np.testing.assert_array_equal(model.predict(x)["output_0"], before)
        assert model.refresh()
        assert (model.version, model.checkpoint.name) == (20, "step-0000000020")
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)
        for step in (30, 40):
            training.fit(seed=step)
            training.publish(step, base=step - 10)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)

        monkeypatch.setattr(Client, "restore", restore)
        training.fit(seed=50)
        training.publish(50)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)
    assert not list(tmp_path.glob("serving-*"))


@pytest.fixture(scope="module")
def opened():
    """The files that this process opens, while the list is set."""
    found = {"files": None}

    def hook(event, arguments):
        if event == "open" and found["files"] is not None:
            found["files"].append(str(arguments[0]))

    sys.addaudithook(hook)  # for the rest of the process
    yield found
    found["files"] = None


def manifests(opened, work):
    """How often `work` opens a manifest."""
    opened["files"] = []
    try:
        work()
        return sum(name.endswith("manifest.json") for name in opened["files"])
    finally:
        opened["files"] = None


def test_polls_and_refreshes_do_not_read_the_chain_again(training, export, opened):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        counts = []
        for step in range(2, 16):
            training.fit(seed=step)
            training.publish(step, base=step - 1)
            counts.append(manifests(opened, lambda: model.refresh()))
            assert model.version == step
            assert manifests(opened, lambda: model.refresh()) == 0, "nothing is new"
        assert len(set(counts)) == 1, counts
        # Newer ones whose rows are not in files are read once.
        checkpoint.publish(training.checkpoints, 20, lambda path: {"pool": {}}, keep=99)
        assert not model.refresh()
        assert manifests(opened, lambda: model.refresh()) == 0
        # Several at a time, and one that was written once more.
        for step in (30, 31):
            training.fit(seed=step)
            training.publish(step, base=15 if step == 30 else 30)
        assert manifests(opened, lambda: model.refresh()) <= 2 * counts[0]
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)


def test_a_watched_directory_is_read_only_after_a_change(training, export, monkeypatch):
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        newest, looks, reads = model._checkpoints.newest, [], []
        stamp = model._checkpoints.stamp
        monkeypatch.setattr(model._checkpoints, "newest", lambda: reads.append(1) or newest())
        monkeypatch.setattr(model._checkpoints, "stamp", lambda: looks.append(1) or stamp())
        model.watch(3600)
        deadline = time.monotonic() + 60
        while len(looks) < 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(reads) == 1, "the first look"
        training.publish(2, base=1)
        while model.version != 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_follower_wakes_when_a_checkpoint_is_published_and_not_in_its_middle(tmp_path):
    directory, seen = tmp_path / "checkpoints", []
    watched = ServedCheckpoints(tmp_path)

    def write(path):
        (path / "rows").write_text("…")
        seen.append(watched.stamp())
        return {}

    first = checkpoint.publish(directory, 1, write)
    before = watched.stamp()
    assert seen[-1] != before
    checkpoint.publish(directory, 2, write)
    after = watched.stamp()
    assert (seen[-1] == before, after != before) == (True, True)
    (tmp_path / "progress.json").write_text("{}")
    shutil.rmtree(first)
    assert watched.stamp() == watched.stamp() == after
    checkpoint.remove_from(directory, 2)
    checkpoint.publish(directory, 2, write)  # training went back
    assert watched.stamp() != after
    # Two changes within one tick of the file system's clock.
    last, tick = watched.stamp(), directory.stat()
    checkpoint.publish(directory, 3, write)
    os.utime(directory, ns=(tick.st_atime_ns, tick.st_mtime_ns))
    assert watched.stamp() != last


def test_one_that_was_away_catches_up_by_the_cheaper_way(training, export, monkeypatch):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        calls: list[tuple[str, list[str]]] = []
        before = 1
        load, apply = ServedRows.load, ServedRows.apply

        def note_load(self, chosen):
            calls.append(("load", [path.name[-2:] for path in chosen.chain]))
            return load(self, chosen)

        def note_apply(self, increments):
            calls.append(("apply", [path.name[-2:] for path in increments]))
            served = int(model.checkpoint.name[-10:]), model.version
            apply(self, increments)
            assert served == (before, before), "status, metrics and requests of a version read it meanwhile"

        monkeypatch.setattr(ServedRows, "load", note_load)
        monkeypatch.setattr(ServedRows, "apply", note_apply)

        def follow(steps, base):
            nonlocal before
            before = model.version
            for step in steps:
                training.fit(seed=step)
                training.publish(step, base=base)
                base = step
            assert model.refresh()
            np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)

        follow(range(2, 8), base=1)
        assert calls == [("apply", ["02", "03", "04", "05", "06", "07"])], "only what changed"
        training.fit(seed=8)
        training.publish(8, base=7)
        follow((9, 10), base=None)
        assert calls[1:] == [("load", ["09", "10"])], "not what the complete one has too"


def test_how_fresh_it_is_goes_to_the_report_of_the_run(training, export, tmp_path, capsys):
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        training.publish(2, base=1)
        assert model.refresh()
        assert list(tmp_path.glob("freshness*")) == [], "of no run"
        (tmp_path / "metrics.jsonl").touch()
        training.publish(3, base=2)
        assert model.refresh()
        training.publish(4, base=3)
        assert model.refresh()
    found = freshness.read(tmp_path)
    assert [line["step"] for line in found] == [3, 4]
    assert all(0 < line["seconds"] <= line["most"] < 60 for line in found)
    (tmp_path / "freshness.jsonl").unlink()
    (tmp_path / "freshness.jsonl").mkdir()
    with Model.load(export, training.checkpoints) as model:
        for step in (5, 6):
            training.publish(step, base=step - 1)
            assert model.refresh()
    said = capsys.readouterr().err
    assert said.count("freshness.jsonl: cannot be written: Is a directory") == 1


def test_an_increment_that_is_removed_meanwhile_leaves_what_there_was(training, export, monkeypatch):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        before = model.predict(x)["output_0"]
        training.fit(seed=2)
        path = training.publish(2, base=1)
        read = model._loaded.read_weights

        def remove(file):
            weights = read(file)
            shutil.rmtree(path)
            return weights

        monkeypatch.setattr(model._loaded, "read_weights", remove)
        with pytest.raises(CheckpointError, match="step-0000000002 has no tables any more"):
            model.refresh()
        assert model.unavailable == ""
        np.testing.assert_array_equal(model.predict(x)["output_0"], before)


def test_a_slow_one_says_how_far_it_is_behind(training, export, monkeypatch):
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        assert (model.freshness, model.seconds_behind, model.slowness) == (None, 0.0, "")
        training.fit(seed=2)
        manifest = training.publish(2, base=1) / "manifest.json"
        before = time.time() - 100
        os.utime(manifest, (before, before))
        said = []

        def read_ahead(self, increments):
            said.append((model.slowness, model.seconds_behind))
            if len(said) == 1:
                raise CheckpointError("not today")

        monkeypatch.setattr(ServedRows, "read_ahead", read_ahead)
        with pytest.raises(CheckpointError, match="not today"):
            model.refresh()
        assert re.fullmatch(r"step 1 is served; step 2 was published 1\d\d s ago", model.slowness)
        (state,) = status(Versions(model), Asked())["model_version_status"]
        assert state["status"]["error_message"] == model.slowness
        assert model.refresh()
        assert all("step 2 was published" in text and seconds >= 100 for text, seconds in said)
        assert (model.freshness or 0) >= 100
        assert (model.seconds_behind, model.slowness) == (0.0, "")


def test_no_request_sees_a_part_of_a_checkpoint(training, export):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    expected = {1: training.predict(x)}
    ended = threading.Event()

    def ask():
        seen = set()
        while not ended.is_set():
            outputs, version = model.predict_versioned(x)
            np.testing.assert_allclose(outputs["output_0"], expected[version], atol=1e-6)
            seen.add(version)
        return seen

    with Model.load(export, training.checkpoints) as model, ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for step in range(2, 6):
                training.fit(seed=step)
                expected[step] = training.predict(x)
                training.publish(step, base=None if step == 4 else step - 1)
                assert model.refresh()
        finally:
            ended.set()
        assert set.union(*(future.result() for future in asking)) >= {5}


def test_a_damaged_increment_leaves_what_there_was(training, export):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    with Model.load(export, training.checkpoints) as model:
        before = model.predict(x)["output_0"]
        training.fit(seed=1)
        path = training.publish(2, base=1)
        wanted = training.predict(x)
        file = next(path.glob("*.oet"))
        good = file.read_bytes()
        file.write_bytes(good[:-30] + bytes(30))
        with pytest.raises(CheckpointError, match=file.name):
            model.refresh()
        np.testing.assert_array_equal(model.predict(x)["output_0"], before)
        assert model.version == 1
        file.write_bytes(good)
        dense = (path / "dense.npz").read_bytes()
        (path / "dense.npz").write_bytes(dense[:100])
        with pytest.raises(ServingError, match=r"dense\.npz: cannot be read"):
            model.refresh()
        np.testing.assert_array_equal(model.predict(x)["output_0"], before)
        (path / "dense.npz").write_bytes(dense)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], wanted, atol=1e-6)


def test_a_run_that_went_back_is_loaded_anew(training, export):
    x, _ = batch(16)
    training.fit()
    training.publish(1)
    training.fit(seed=1)
    training.publish(2, base=1)
    with Model.load(export, training.checkpoints) as model:
        training.client.restore(training.checkpoints / "step-0000000001")
        checkpoint.remove_from(training.checkpoints, 2)
        training.fit(seed=2)
        training.publish(2, base=1)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)


def test_what_cannot_be_loaded(training, export, tmp_path):
    export = shutil.copytree(export, tmp_path / "export")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        Model.load(export, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Model.load(export, export)
    with pytest.raises(ServingError, match="includes no rows"):
        Model.load(export)
    checkpoint.publish(training.checkpoints, 1, lambda path: {"pool": {}})
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* has its rows in files"):
        Model.load(export, training.checkpoints)
    with Client.in_process() as other:
        model = embed.distributed_model(
            keras.Sequential([keras.Input((1,)), embed.Embedding(-1, 2, name="other")]), other
        )
        model.compile("sgd", "mse")
        (tmp_path / "other").mkdir()
        other.save(tmp_path / "other")
    with pytest.raises(ServingError, match="has no table table_a, table_b, which the model needs"):
        Model.load(export, tmp_path / "other")
    training.fit()
    path = training.publish(2)
    with np.load(path / "dense.npz") as file:
        arrays = dict(file)
    for changed, message in (
        ({"model/hidden/bias": np.zeros(9, np.float32)}, r"hidden/bias is float32 of shape \(9,\)"),
        ({"model/hidden/bias": None}, "variable model/hidden/bias .* is missing"),
    ):
        np.savez(path / "dense.npz", **{k: v for k, v in (arrays | changed).items() if v is not None})
        with pytest.raises(ServingError, match=message):
            Model.load(export, path)
    description = export / "oe_runtime.json"
    fields = json.loads(description.read_text())
    for text, message in (("{", "is damaged"), (json.dumps(fields | {"format": 9}), "reads format")):
        description.write_text(text)
        with pytest.raises(ServingError, match=message):
            Model.load(export, path)
    shutil.rmtree(export / "variables")
    with pytest.raises(ServingError, match="TensorFlow cannot load it"):
        Model.load(export, path)


def test_a_refresh_connects_to_lost_servers_again(training, export):
    x, _ = batch(4)

    class Flaky:
        """A client whose servers are lost at first."""

        connected = False

        def __getattr__(self, name):
            return getattr(training.client, name)

        def pull(self, *arguments):
            if not self.connected:
                raise ServerLost("ps0:4400", "server ps0:4400 is gone")
            return training.client.pull(*arguments)

        def reconnect(self):
            self.connected = True

    with Model.load(export, client=Flaky()) as model:
        for _ in range(2):
            with pytest.raises(ServerLost):
                model.predict(x)
        assert not model.refresh()
        assert model.predict(x)["output_0"].shape == (4, 1)


@pytest.mark.process
def test_running_servers_are_only_read(tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        with Client(servers.endpoints) as client:
            training = Training(tmp_path, client)
            export = training.export()
            training.fit()
            with Client(servers.endpoints, read_only=True) as reader:
                x, _ = batch(32, ids=80)  # a quarter of the ids has no row
                training.publish(7)  # the export has dense weights of its time, those of now are there
                with Model.load(export, training.checkpoints, client=reader) as model:
                    for version in (7, 8):
                        rows = training.rows()
                        predicted = model.predict(x)["output_0"]
                        np.testing.assert_allclose(predicted, training.predict(x), atol=1e-6)
                        assert (model.version, training.rows()) == (version, rows)
                        training.fit(seed=2)
                        training.publish(version + 1)
                        assert model.refresh()
                    with pytest.raises(InputError, match=r"80 is not in \[0, 80\)"):
                        model.predict(x | {"b": x["b"] * 0 + 80})
                pulled = reader.pull([np.arange(3)], [(0, 0)])
                with pytest.raises(SpecError, match="this client is read-only"):
                    reader.push(pulled, [np.zeros((3, 4), np.float32)], 0.1)
                with pytest.raises(SpecError, match="this client is read-only"):
                    reader.shutdown()
    finally:
        servers.end()


def test_a_run_is_served_as_it_is(tmp_path):
    """The loss of its held-out rows is the one that the run has found."""
    run = tmp_path / "run"
    flags = [*DATA, *SMALL, "--run-dir", str(run), "--in-process", "--steps", "2", "--model", "dlrm"]
    assert train.main(flags) == 0
    rows = next(holdout_batches(open_source(DATA[1], 300), Split(0.1), 400))
    with Model.load(run) as model:
        assert model.version == 2
        columns = [rows.dense, *(rows.ids[:, i : i + 1] for i in range(26))]
        inputs = {tensor.name: column for tensor, column in zip(model.inputs, columns, strict=True)}
        auc = StreamingAuc()
        auc.update(rows.labels, model.predict(inputs)["output_0"].reshape(-1))
    assert auc.log_loss() == pytest.approx(events(run, "eval")[0]["loss"], rel=1e-5)


def test_a_run_with_columns_of_its_own_is_served(tmp_path):
    data, run = tmp_path / "rows.csv", tmp_path / "run"
    data.write_text("click,price,site\n" + "".join(f"{i % 2},{i}.5,s{i % 7}\n" for i in range(200)))
    flags = ["--data", str(data), "--label", "click", "--numbers", "price:none", "--categories", "site:50"]
    flags += [*SMALL, "--in-process", "--steps", "2", "--run-dir", str(run)]
    assert train.main(flags) == 0
    with Model.load(run) as model:
        found = model.predict({"numbers": np.float32([[2.5]]), "site_id": np.int64([[3]])})
    assert 0 < found["output_0"].item() < 1


def test_a_run_of_an_earlier_version_has_criteo_s_columns(tmp_path):
    run = tmp_path / "run"
    flags = [*DATA, *SMALL, "--run-dir", str(run), "--in-process", "--steps", "2"]
    assert train.main(flags) == 0
    config = json.loads((run / "config.json").read_text())
    del config["schema"]
    (run / "config.json").write_text(json.dumps(config))
    with Model.load(run) as model:
        assert len(model.inputs) == 27


def test_a_run_of_a_script_has_no_model_to_serve(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"script": "train.py", "stock": False}))
    with pytest.raises(ServingError, match=r"is a run of train\.py, which alone makes its model"):
        Model.load(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is not persistent memory")
def test_rows_of_others_are_not_removed(tmp_path):
    """Not even where they lie in the directory that serving makes for itself."""
    spec, place = TableSpec("t", 2), tmp_path / "rows" / "serving-1"
    place.parent.mkdir()
    with Client.in_process(StorageSpec("pmem_libpmem", str(place))) as trained:
        trained.assign(trained.create_table(spec), np.arange(3), np.ones((3, 2), np.float32))
        trained.checkpoint(1, wait=True)
        checkpoint.publish(tmp_path / "saved", 1, lambda path: {"tables": trained.save(path)}, keep=1)
    store = ServedRows([spec], StorageSpec("pmem_libpmem", str(place.parent)), threads=1)
    with pytest.raises(StorageError, match="serving-1 has checkpoints of table 't'"):
        store.load(ServedCheckpoints(tmp_path / "saved").newest())
    with Client.in_process(StorageSpec("pmem_libpmem", str(place), recover=True)) as trained:
        assert trained.to_arrow(trained.create_table(spec)).num_rows == 3


def test_optimizer_state_takes_no_memory(tmp_path):
    spec = TableSpec("t", 16, optimizer={"name": "adam"})
    ids = np.arange(40_000)
    with Client.in_process() as trained:
        table = trained.create_table(spec)
        for step in range(2):
            pulled = trained.pull([ids], [(table, 0)])
            trained.push(pulled, [np.ones((len(ids), 16), np.float32)], 0.1 + step)
        checkpoint.publish(tmp_path, 1, lambda path: {"tables": trained.save(path)}, keep=1)
        rows = trained.pull_rows(table, ids)
        whole = memory(trained)
    store = ServedRows([spec], StorageSpec(), threads=1)
    store.use(store.load(ServedCheckpoints(tmp_path).newest()))
    try:
        np.testing.assert_array_equal(store.client.pull_rows(0, ids), rows)
        # 64 instead of 192 bytes a row, and what the last segment has free.
        assert memory(store.client) < whole * 0.45
        with pytest.raises(SpecError, match="has the weights of its rows only"):
            store.client.push(store.client.pull([ids], [(0, 0)]), [np.ones((len(ids), 16), np.float32)], 0.1)
    finally:
        store.close()


@pytest.mark.parametrize("storage", ["dram", "dram_ssd"])
def test_int8_rows_answer_as_an_export_of_them(storage, training, export, tmp_path):
    x, _ = batch(64, ids=60)
    directory = str(tmp_path) if storage != "dram" else ""
    kept = StorageSpec(storage, directory, cache_bytes=0 if storage == "dram" else 1 << 20)
    training.fit()
    training.publish(10)
    with (
        Model.load(export, training.checkpoints, storage=replace(kept, row_precision="int8")) as model,
        Model.load(export, training.checkpoints, storage=StorageSpec(row_precision="bfloat16")) as half,
    ):

        def check(name):
            path = training.model.save_as_original_model(tmp_path / name, rows="int8")
            with Model.load(path) as of_export:
                wanted = of_export.predict(x)["output_0"]
            np.testing.assert_allclose(model.predict(x)["output_0"], wanted, atol=3e-7)
            trained = training.predict(x)
            assert 1e-6 < np.abs(wanted - trained).max() < 0.02  # reduced, beside noise of 1e-7
            assert 1e-6 < np.abs(half.predict(x)["output_0"] - trained).max() < 0.02

        check("full")
        for step in (20, 30):
            training.fit(seed=step)
            training.publish(step, base=step - 10)
            assert model.refresh()
            assert half.refresh()
            check(f"step-{step}")


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.30), ("bfloat16", 0.49)])
def test_rows_of_fewer_bits_take_less_memory(precision, least, tmp_path):
    spec, ids = TableSpec("t", 32, optimizer={"name": "sgd"}), np.arange(200_000)
    with Client.in_process() as trained:
        table = trained.create_table(spec)
        trained.assign(table, ids, np.random.default_rng(1).random((len(ids), 32), np.float32))
        checkpoint.publish(tmp_path, 1, lambda path: {"tables": trained.save(path)}, keep=1)
        whole = memory(trained)
    store = ServedRows([spec], StorageSpec(row_precision=precision), threads=1)
    store.use(store.load(ServedCheckpoints(tmp_path).newest()))
    try:
        assert least * 0.9 * whole < memory(store.client) < least * 1.1 * whole
    finally:
        store.close()


def test_a_row_that_int8_cannot_hold_is_named_and_the_rows_before_stay(tmp_path):
    spec = TableSpec("t", 2, optimizer={"name": "sgd"}, nonfinite_gradients="pass")
    ids = np.arange(40) - 3
    store = ServedRows([spec], StorageSpec(row_precision="int8"), threads=1)
    found = ServedCheckpoints(tmp_path)
    named = "table 't': the row of key -2 has NaN or a number that rows of int8 cannot hold"
    with Client.in_process() as trained:
        table = trained.create_table(spec)

        def push(value):
            gradients = np.full((len(ids), 2), 0.5, np.float32)
            gradients[1] = value
            trained.push(trained.pull([ids], [(table, 0)]), [gradients], 0.1)

        push(0.5)
        first = checkpoint.publish(tmp_path, 1, lambda path: {"tables": trained.save(path)}, keep=9)
        store.use(store.load(found.newest()))
        before = store.client.pull_rows(0, ids)
        push(np.nan)
        checkpoint.publish(
            tmp_path, 2, lambda path: {"tables": trained.save(path, since=first)}, keep=9, base=first
        )
    newest = found.newest()
    with pytest.raises(CheckpointError, match=named):
        store.read_ahead(newest.chain[1:])
    with pytest.raises(CheckpointError, match=named):
        store.load(newest)
    np.testing.assert_array_equal(store.client.pull_rows(0, ids), before)
    store.close()


def test_a_row_precision_is_for_rows_from_checkpoints(training, export, tmp_path):
    kept = StorageSpec(row_precision="int8")
    with pytest.raises(
        ServingError, match=r"the servers keep their rows; a row precision \(int8\) is for rows"
    ):
        Model.load(export, client=training.client, storage=kept)
    whole = training.model.save_as_original_model(tmp_path / "whole")
    with pytest.raises(ServingError, match="whole includes its rows and keeps them as they are"):
        Model.load(whole, storage=kept)
    training.publish(1)
    with pytest.raises(SpecError, match="'row_precision' must be int8, bfloat16 or empty, not 'int4'"):
        Model.load(export, training.checkpoints, storage=StorageSpec(row_precision="int4"))
    with pytest.raises(SpecError, match="rows that are trained cannot be kept as int8"):
        Client.in_process(kept)


def memory(client):
    """Bytes of rows on all servers."""
    return sum(server["tables"]["t"]["bytes"] for server in client.stats()["servers"])


def test_earlier_versions_read_the_description_of_a_model_without_lists(tmp_path):
    """They refuse fields that they do not know."""
    inputs = [Tensor("ids", "int64", [None, 2]), Tensor("words", "int64", [None], "words.lengths")]
    described = Description(inputs, [Tensor("y", "float32", None)], [], [], [], [])
    described.write(tmp_path / "described.json")
    found = json.loads((tmp_path / "described.json").read_text())
    assert [tensor.keys() - {"name", "dtype", "shape"} for tensor in found["inputs"]] == [set(), {"lengths"}]
    assert Description.read(tmp_path / "described.json") == described
