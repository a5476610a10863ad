"""Answers that the core gives without Python: the same as Model.predict gives, of one checkpoint each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_models import Training, batch
from serving_requests import INFER, Asked, inference

import oe_runtime.keras as embed
from oe_runtime import Client
from oe_runtime.errors import ServerLost, ServingError
from oe_runtime.serving import Model
from oe_runtime.serving.rest import RestServer


def columns(x):
    return {name: array.tolist() for name, array in x.items()}


def rows(x):
    names = list(reversed(x))
    return [{name: x[name][i].tolist() for name in names} for i in range(len(x[names[0]]))]


@pytest.fixture(scope="module", params=["in process", "at servers"])
def trained(request, tmp_path_factory):
    """A server whose rows are in its process or at servers, and its training."""
    with Training(tmp_path_factory.mktemp("model")) as training:
        training.fit()
        training.publish(1)
        client = training.client if request.param == "at servers" else None
        model = Model.load(training.export(), training.checkpoints, client=client)
        with model, Asked(model) as asked:
            yield asked, training


def test_the_core_answers_as_python_does(trained):
    asked, training = trained
    for size in (1, 33):
        x, _ = batch(size, seed=size, ids=10_000)
        x["b"] %= 80
        expected = training.predict(x)
        for body, key in (({"instances": rows(x)}, "predictions"), ({"inputs": columns(x)}, "outputs")):
            reply = asked.core(body)
            np.testing.assert_allclose(reply[key], expected, atol=1e-6)
            status, same = asked.python(body)
            assert (status, reply.keys()) == (200, same.keys())
            np.testing.assert_allclose(reply[key], same[key], rtol=1e-6)


def test_the_core_answers_inferences_as_python_does(trained):
    asked, training = trained
    for size in (1, 33):
        x, _ = batch(size, seed=size)
        body = inference(x, id="7", outputs=[{"name": "output_0"}])
        reply = asked.core(body, INFER)
        status, same = asked.python(body, INFER)
        (found,), (wanted,) = reply.pop("outputs"), same.pop("outputs")
        assert (status, reply) == (200, same)
        np.testing.assert_allclose(found.pop("data"), training.predict(x).reshape(-1), atol=1e-6)
        assert wanted.pop("data")
        assert found == wanted
    assert reply == {"model_name": "m", "model_version": str(asked.model.version), "id": "7"}
    for bad in (
        inference({**x, "b": x["b"] * 0 + 80}),
        inference({**x, "b": x["b"][:5]}),
        {"inputs": []},
        inference(x, outputs=[{"name": "other"}]),
    ):
        found = asked.either(bad, INFER)
        assert found == asked.python(bad, INFER)
        assert (found[0], list(found[1])) == (400, ["error"])


NUMBERS = [0.5, -1, 2e-3]


@pytest.mark.parametrize(
    "body",
    [
        '{"inputs": {"a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 2e-3]]}, "signature_name": ""}',
        '\n{ "signature_name":"serving_default" ,'
        '"instances":[{"numbers":[5E-1,-1.0,0.002],"b":[3],"a":[1,2]}]}\t',
    ],
)
def test_the_core_reads_all_forms_of_numbers(trained, body):
    asked, training = trained
    x = {"a": np.array([[1, 2]]), "b": np.array([[3]]), "numbers": np.array([NUMBERS], np.float32)}
    (found,) = asked.core(body.encode()).values()
    np.testing.assert_allclose(found, training.predict(x), atol=1e-6)


GOOD = {"a": [1, 2], "b": [3], "numbers": NUMBERS}
BAD = [
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 1e39]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 1e999]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, -1%s.0]}]}' % (b"0" * 309), 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 1E-999]}]}', 200),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 01]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 1.]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, +1]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, "1"]}]}', 400),
    (b'{"instances": [{"a": [1, 2.0], "b": [3], "numbers": [0.5, -1, 1]}]}', 400),
    (b'{"instances": [{"a": [1, 9223372036854775808], "b": [3], "numbers": [0.5, -1, 1]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [80], "numbers": [0.5, -1, 1]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [-1], "numbers": [0.5, -1, 1]}]}', 400),
    (b'{"instances": [{"a": [1, 2, 3], "b": [3], "numbers": [0.5, -1, 1]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3]}]}', 400),
    (b'{"instances": [{"a": [1, 2], "b": [3], "numbers": [0.5, -1, 1], "c": 1}]}', 400),
    (b'{"instances": []}', 400),
    (b'{"inputs": {"a": [[1, 2]], "b": [[3], [4]], "numbers": [[0.5, -1, 1]]}}', 400),
    (b'{"inputs": {"a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 1]]}}}', 400),
    (b'{"inputs": {"a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 1]]}', 400),
    (b'{"inputs": {"a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 1]]}, "signature_name": "x"}', 400),
    (b"[" * 100_000, 400),
    (b'{"inputs": ' + b'{"a": ' * 100_000, 400),
    (b'{"inputs": {"a": ' + b"[" * 100_000, 400),
    (b'{"inputs": {"\\u0061": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 1]]}}', 200),
    (b'{"inputs": {"a": [[9, 9]], "a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 1]]}}', 200),
    (b'{"inputs": {"a": [[1, 2]], "b": [[3]], "numbers": [[0.5, -1, 9007199254740993]]}}', 200),
]


@pytest.mark.parametrize(("body", "status"), BAD, ids=range(len(BAD)))
def test_what_the_core_declines_python_answers(trained, body, status):
    asked, _ = trained
    assert asked.core({"instances": [GOOD]})
    found, reply = asked.either(body)
    assert (found, reply) == asked.python(body)
    assert (found, "error" in reply) == (status, status != 200)


@pytest.mark.parametrize("error", [ServerLost("h:1", "h:1 is lost"), ServingError("no answer")])
def test_rows_that_are_not_there_are_not_waited_for_twice(trained, error, monkeypatch):
    asked, _ = trained

    def lead(call):
        raise error

    monkeypatch.setattr(asked.model, "lead", lead)
    monkeypatch.setattr(asked.server, "_post", None)
    assert asked.either({"instances": [GOOD]}) == (503, {"error": str(error)})


def test_one_answer_is_of_one_checkpoint(tmp_path):
    x, _ = batch(8)
    body = {"instances": rows(x)}
    with Training(tmp_path) as training:
        training.fit()
        training.publish(1)
        with Model.load(training.export(), training.checkpoints) as model, Asked(model) as asked:
            expected = [training.predict(x)]
            found, ended = [], threading.Event()

            def ask():
                while not ended.is_set():
                    found.append(asked.either(body)[1]["predictions"])

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for step in range(2, 7):
                training.fit(seed=step)
                training.publish(step, base=step - 1 if step % 2 else None)
                expected.append(training.predict(x))
                assert model.refresh()
                np.testing.assert_allclose(asked.core(body)["predictions"], expected[-1], atol=1e-6)
            ended.set()
            for thread in threads:
                thread.join(60)
    differences = [min(np.abs(np.array(one) - want).max() for want in expected) for one in found]
    assert found
    assert max(differences) < 1e-6


def test_several_outputs_and_types(tmp_path):
    ids = keras.Input((), dtype="int32", name="ids")
    few = keras.layers.Embedding(9, 3, name="nine")(ids)
    one = keras.layers.Dense(1, name="one")(few)
    outputs = {"z": one, 'a"b': few, "whole": keras.ops.cast(ids, "int64")}
    with Client.in_process() as client:
        model = embed.distributed_model(keras.Model(ids, outputs), client)
        model.compile("sgd", "mse")
        inside = model.save_as_original_model(tmp_path / "inside")
    with Model.load(inside) as model, Asked(model) as asked:
        for body in ({"instances": [3, 8]}, {"instances": [{"ids": 3}, {"ids": 8}]}, {"inputs": [3, 8]}):
            reply = asked.core(body)
            status, same = asked.python(body)
            assert (status, reply.keys()) == (200, same.keys())
            (found,), (wanted,) = reply.values(), same.values()
            if isinstance(found, dict):
                found, wanted = [found], [wanted]
            for row, want in zip(found, wanted, strict=True):
                assert row.keys() == want.keys()
                for name, value in row.items():
                    np.testing.assert_allclose(value, want[name], rtol=1e-6)
        status, reply = asked.either({"inputs": [9]})
        assert (status, "id 9 is not in [0, 9)" in reply["error"]) == (400, True)


def test_ids_that_the_model_computes(tmp_path):
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows_of_few = embed.Embedding(-1, 3, name="few")(keras.ops.mod(ids, 5))
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows_of_few))
    x = np.array([[1, 7], [-1, 12]])
    with Client.in_process() as client:
        model = embed.distributed_model(keras.Model(ids, outputs), client)
        model.compile("sgd", "mse")
        model.fit(np.arange(40).reshape(20, 2), np.ones(20), verbose=0)
        with Model.load(model.save_serving_model(tmp_path / "model"), client=client) as served:
            with Asked(served) as asked:
                found = asked.core({"inputs": x.tolist()})["outputs"]
            np.testing.assert_allclose(found, model.predict(x, verbose=0), atol=1e-6)


class Merged:
    """A server that merges requests of eight examples; `ask(bodies)` sends them at the same time."""

    def __init__(self, model, monkeypatch):
        self.calls = []
        lead = model.lead

        def count(call):
            self.calls.append(call)
            lead(call)

        monkeypatch.setattr(model, "lead", count)
        self.asked = Asked(model, max_batch_size=8, batch_timeout_ms=60_000)

    def __enter__(self):
        self.asked.__enter__()
        return self

    def __exit__(self, *error):
        self.asked.__exit__(*error)

    def ask(self, bodies):
        self.calls.clear()
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.asked.either, bodies))


def split(x, *sizes):
    """Requests of so many examples each, in both forms in turns."""
    bodies, at = [], 0
    for i, size in enumerate(sizes):
        part = {name: array[at : at + size] for name, array in x.items()}
        bodies.append({"inputs": columns(part)} if i % 2 else {"instances": rows(part)})
        at += size
    return bodies


def test_requests_that_wait_at_the_same_time_are_computed_together(trained, monkeypatch):
    asked, training = trained
    x, _ = batch(8, seed=4)
    expected = training.predict(x)
    with Merged(asked.model, monkeypatch) as merged:
        for sizes in ([1] * 8, [3, 1, 2, 2], [7, 1]):
            found = merged.ask(split(x, *sizes))
            assert len(merged.calls) == 1
            assert [status for status, _ in found] == [200] * len(sizes)
            values = np.concatenate([next(iter(reply.values())) for _, reply in found])
            np.testing.assert_allclose(values, expected, atol=1e-6)
        assert merged.ask(split(x, 8))[0][0] == 200, "which is alone, and waits for nobody"


def test_inferences_are_computed_with_other_requests(trained, monkeypatch):
    asked, training = trained
    x, _ = batch(8, seed=7)
    parts = [{name: array[i : i + 1] for name, array in x.items()} for i in range(8)]
    with Merged(asked.model, monkeypatch) as merged, ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda i: (
                    merged.asked.either(inference(parts[i], id=str(i)), INFER)
                    if i % 2
                    else merged.asked.either({"inputs": columns(parts[i])})
                ),
                range(8),
            )
        )
        assert len(merged.calls) == 1
    for i, (status, reply) in enumerate(found):
        values = reply["outputs"][0]["data"] if i % 2 else reply["outputs"][0]
        np.testing.assert_allclose(values, training.predict(x)[i], atol=1e-6)
        assert (status, reply.get("id")) == (200, str(i) if i % 2 else None)


def test_a_bad_request_does_not_fail_others_that_are_computed_with_it(trained, monkeypatch):
    asked, training = trained
    x, _ = batch(8, seed=5)
    expected = training.predict(x)
    bodies = split(x, *[1] * 8)
    bodies[3] = {"instances": [{**GOOD, "b": [80]}]}
    with Merged(asked.model, monkeypatch) as merged:
        found = merged.ask(bodies)
    status, reply = found.pop(3)
    assert (status, "id 80 is not in [0, 80)" in reply["error"]) == (400, True)
    assert [status for status, _ in found] == [200] * 7
    values = np.concatenate([next(iter(reply.values())) for _, reply in found])
    np.testing.assert_allclose(values, np.delete(expected, 3, axis=0), atol=1e-6)


def test_rows_that_are_not_there_are_refused_to_all(trained, monkeypatch):
    asked, _ = trained

    def lead(call):
        raise ServerLost("h:1", "h:1 is lost")

    monkeypatch.setattr(asked.model, "lead", lead)
    with Asked(asked.model, max_batch_size=4, batch_timeout_ms=60_000) as lost, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lost.either, [{"instances": [GOOD]}] * 4))
    assert found == [(503, {"error": "h:1 is lost"})] * 4


def test_requests_do_not_wait_longer_than_the_timeout(trained):
    asked, training = trained
    x, _ = batch(40, seed=6)
    for timeout in (0, 1):
        options = {"max_batch_size": 8, "batch_timeout_ms": timeout}
        with Asked(asked.model, **options) as merged, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(merged.either, split(x, *[1, 3] * 10)))
        assert [status for status, _ in found] == [200] * 20
        values = np.concatenate([next(iter(reply.values())) for _, reply in found])
        np.testing.assert_allclose(values, training.predict(x), atol=1e-6)


def test_batches_for_an_input_of_a_fixed_number_of_examples_are_refused(tmp_path):
    @tf.function(input_signature=[tf.TensorSpec([2], name="ids")])
    def double(ids):
        return {"twice": ids * 2}

    tf.saved_model.save(tf.Module(), str(tmp_path), {"serving_default": double})
    with (
        Model.load(tmp_path) as model,
        pytest.raises(ServingError, match="--max-batch-size: input 'ids' of this model takes a fixed number"),
    ):
        RestServer("fixed", model, "127.0.0.1", 0, max_batch_size=4)


def test_a_model_whose_outputs_are_not_by_example_is_not_merged(tmp_path, capfd):
    ids = keras.Input((), dtype="int64", name="ids")
    few = keras.layers.Embedding(9, 3, name="nine")(ids)
    outputs = {"few": few, "most": keras.ops.max(few, axis=0)}
    with Client.in_process() as client:
        model = embed.distributed_model(keras.Model(ids, outputs), client)
        model.compile("sgd", "mse")
        inside = model.save_as_original_model(tmp_path / "inside")
    with Model.load(inside) as model, Asked(model) as alone:
        wanted = [alone.either({"inputs": [i]}) for i in range(4)]
        with Asked(model, max_batch_size=4, batch_timeout_ms=60_000) as merged, ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda i: merged.either({"inputs": [i]}), range(4))) == wanted
            assert merged.either({"inputs": [2]}) == wanted[2], "without waiting for others"
    assert "output most has no row for each example" in capfd.readouterr().err
