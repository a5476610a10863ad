"""The same ids have the same answer or refusal in an export, with rows of checkpoints and at servers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from serve_process import Serving
from server_processes import Servers

import oe_runtime.keras as embed
from oe_runtime import Client, checkpoint

pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")

pytestmark = pytest.mark.process

KINDS = ["export", "checkpoints", "servers"]


def fields():
    """Tables of 80, 9 and 20 rows, the last for ids that the model computes; a dense one of 4."""
    b = keras.Input((1,), dtype="int64", name="b")
    few = keras.Input((2,), dtype="int32", name="few")
    wide = keras.Input((1,), dtype="uint64", name="wide")
    half = keras.Input((1,), dtype="int64", name="half")
    small = keras.Input((1,), dtype="int64", name="small")
    flat = keras.layers.Flatten
    parts = [
        flat()(keras.layers.Embedding(80, 4, name="table_b")(b)),
        flat()(keras.layers.Embedding(9, 4, name="table_few")(few)),
        flat()(keras.layers.Embedding(90, 4, name="table_wide")(wide)),
        flat()(keras.layers.Embedding(20, 4, name="table_half")(half * 2)),
        flat()(keras.layers.Embedding(4, 4, name="table_small")(small)),
    ]
    y = keras.layers.Dense(1, name="click")(keras.layers.Concatenate()(parts))
    return keras.Model([b, few, wide, half, small], y)


def columns(**changed):
    """Three examples."""
    x = {
        "b": np.array([[0], [79], [5]], np.int64),
        "few": np.array([[0, 8], [1, 2], [5, 5]], np.int32),
        "wide": np.array([[0], [89], [5]], np.uint64),
        "half": np.array([[0], [9], [5]], np.int64),
        "small": np.array([[0], [3], [2]], np.int64),
    }
    for name, (place, value) in changed.items():
        x[name][place] = value
    return x


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of requests by kind, and the answers of training."""
    keras.backend.clear_session()
    path = tmp_path_factory.mktemp("ids")
    servers = Servers(path, 2)
    with contextlib.ExitStack() as stack:
        stack.callback(servers.end)
        client = stack.enter_context(Client(servers.endpoints))
        model = embed.distributed_model(fields(), client, sparse_as_dense_size=5)
        model.compile(keras.optimizers.Adagrad(0.5), "mse")
        model.fit(columns(), np.ones((3, 1)), verbose=0)
        export = model.save_as_original_model(path / "export")
        without = model.save_serving_model(path / "without")

        def write(directory):
            model.save_dense(directory)
            return {"tables": client.save(directory)}

        checkpoint.publish(path / "checkpoints", 1, write)
        started = {
            "export": Serving(path, export),
            "checkpoints": Serving(path, without, "--rows", str(path / "checkpoints")),
            "servers": Serving(path, without, "--servers", ",".join(servers.endpoints)),
        }
        for serving in started.values():
            stack.enter_context(serving)
        yield started, model.predict(columns(), verbose=0)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_tables_are_answered_as_in_training(served, kind):
    serving, expected = served[0][kind], served[1]
    status, reply = serving.predict({name: x.tolist() for name, x in columns().items()})
    assert status == 200, reply
    np.testing.assert_allclose(reply["outputs"], expected, atol=1e-5)
    with serving.grpc() as grpc:
        np.testing.assert_allclose(grpc.predict(columns())["output_0"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("b", (2, 0), -1, "input 'b' of example 2: id -1 is not in [0, 80)"),
        ("b", (0, 0), 80, "input 'b' of example 0: id 80 is not in [0, 80)"),
        ("b", (1, 0), -(2**63), "input 'b' of example 1: id -9223372036854775808 is not in [0, 80)"),
        ("b", (1, 0), 2**32 + 3, "input 'b' of example 1: id 4294967299 is not in [0, 80)"),
        ("few", (1, 1), -9, "input 'few' of example 1: id -9 is not in [0, 9)"),
        ("few", (2, 0), 9, "input 'few' of example 2: id 9 is not in [0, 9)"),
        ("wide", (1, 0), 2**32 + 3, "input 'wide' of example 1: id 4294967299 is not in [0, 90)"),
        ("wide", (1, 0), 2**64 - 1, "input 'wide' of example 1: id 18446744073709551615 is not in [0, 90)"),
        # 20 is no value of an input, and 2 * 10 is nobody else's.
        ("half", (1, 0), 10, "an id that the model computes: id 20 is not in [0, 20)"),
        ("small", (1, 0), 4, "input 'small' of example 1: id 4 is not in [0, 4)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_of_a_table_are_refused_by_the_input_s_name(served, kind, name, place, value, message):
    serving = served[0][kind]
    x = columns(**{name: (place, value)})
    status, reply = serving.predict({name: column.tolist() for name, column in x.items()})
    assert (status, reply) == (400, {"error": message})
    with serving.grpc() as grpc:
        said = grpc.refusal(grpc.prediction.Predict, grpc.request(x))
    assert said == ("INVALID_ARGUMENT", message)
    assert "Traceback" not in serving.errors.read_text()
