"""The optimizers through pull and push are Keras's over many steps: to 1e-5 in float32, 1e-12 in float64."""

from __future__ import annotations

import os

import numpy as np
import pytest

import oe_runtime._core as _core
from oe_runtime import Client, TableSpec
from oe_runtime.spec import OPTIMIZERS

ROWS, DIM, STEPS = 13, 5, 100
CASES = [
    ("Adagrad", {}, 0.1),
    ("Adagrad", {"initial_accumulator_value": 0.01, "epsilon": 1e-4}, 0.05),
    ("Adam", {}, 0.01),
    ("Adagrad", {"weight_decay": 0.1}, 0.1),
    ("Adadelta", {}, 1.0),
    ("Adadelta", {"rho": 0.8, "epsilon": 1e-4, "weight_decay": 0.01}, 0.7),
    ("Adam", {"beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-5}, 0.02),
    ("Adam", {"amsgrad": True, "beta_2": 0.9}, 0.01),
    ("AdamW", {}, 0.02),
    ("AdamW", {"weight_decay": 0.2, "amsgrad": True, "beta_1": 0.8, "beta_2": 0.9}, 0.02),
    ("Adamax", {}, 0.02),
    ("Adamax", {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-4, "weight_decay": 0.1}, 0.02),
    ("Lion", {}, 0.01),
    ("Lion", {"beta_1": 0.7, "beta_2": 0.8, "weight_decay": 0.1}, 0.01),
    ("Nadam", {}, 0.01),
    ("Nadam", {"beta_1": 0.99, "beta_2": 0.95, "epsilon": 1e-5, "weight_decay": 0.1}, 0.02),
    ("RMSprop", {}, 0.01),
    ("RMSprop", {"rho": 0.8, "momentum": 0.9, "epsilon": 1e-4}, 0.005),
    ("RMSprop", {"centered": True}, 0.01),
    ("RMSprop", {"centered": True, "momentum": 0.5, "weight_decay": 0.1}, 0.005),
    ("SGD", {}, 0.05),
    ("SGD", {"momentum": 0.9}, 0.02),
    ("SGD", {"momentum": 0.9, "nesterov": True}, 0.02),
    ("SGD", {"momentum": 0.5, "weight_decay": 0.2}, 0.02),
    ("Ftrl", {}, 0.1),
    (
        "Ftrl",
        {
            "learning_rate_power": -0.4,
            "initial_accumulator_value": 0.2,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.01,
            "beta": 0.1,
        },
        0.1,
    ),
    ("AdamAsync", {}, 0.01),
    ("AdamAsync", {"beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-5, "weight_decay": 0.1}, 0.02),
    ("AdagradDecay", {}, 0.1),
    ("AdagradDecay", {"accumulator_decay_step": 7, "accumulator_decay_rate": 0.5}, 0.1),
    ("RowWiseAdagrad", {}, 0.1),
    ("RowWiseAdagrad", {"initial_accumulator_value": 0.1, "epsilon": 1e-3, "weight_decay": 0.1}, 0.05),
    ("Radam", {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-5, "weight_decay": 0.1}, 0.02),
]
# The options that Keras's classes do not have, each with a rule of every kind.
OPTIONS = [
    ("SGD", {"torch": True, "momentum": 0.9, "dampening": 0.5, "coupled_weight_decay": 0.1}, 0.02),
    ("Adam", {"torch": True, "maximize": True, "amsgrad": True}, 0.01),
    ("Adagrad", {"torch": True, "learning_rate_decay": 0.1}, 0.1),
    ("Nadam", {"torch": True, "momentum_decay": 0.004, "coupled_weight_decay": 0.1}, 0.01),
    ("RMSprop", {"torch": True, "momentum": 0.9, "centered": True}, 0.005),
    ("Adamax", {"torch": True, "epsilon": 1e-3}, 0.01),
    ("AdagradDecay", {"coupled_weight_decay": 0.1, "maximize": True}, 0.1),
    ("Ftrl", {"coupled_weight_decay": 0.1}, 0.1),
]
NAMES = {name.replace("_", ""): name for name in OPTIMIZERS}  # of tables, by Keras's in lower case
CASES += [  # the others, with their defaults
    (lower, {}, 0.01) for lower in sorted(NAMES.keys() - {name.lower() for name, _, _ in CASES})
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize(("name", "parameters", "rate"), CASES)
def test_equal_to_keras(name, parameters, rate, dtype, tolerance):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")  # here, so that the tests beside this one do not pay for it
    from oe_runtime.keras import optimizers as ours

    if name == "Nadam" and dtype == "float64":
        tolerance = 1e-7  # in one of two places Keras rounds its constant 0.96 to float32
    client = Client.in_process(servers=2)
    rule = {"name": NAMES[name.lower()], **parameters}
    # Keras rounds some of its numbers to float32, whatever the variables are: these it cannot round.
    defaults = client.spec(client.create_table(TableSpec("defaults", DIM, optimizer=rule))).optimizer
    parameters = {
        key: int(value) if key.endswith("_step") else float(np.float32(value))
        for key, value in {**defaults, **parameters}.items()
        if key != "name"
    }
    table = client.create_table(TableSpec("t", DIM, dtype=dtype, optimizer={**rule, **parameters}))
    keys = np.arange(ROWS) * 1_000_003
    variable = keras.Variable(client.pull_rows(table, keys), dtype=dtype)
    kinds = {kind.lower(): value for kind, value in (vars(keras.optimizers) | vars(ours)).items()}
    kind = vars(keras.optimizers).get(name) or kinds[name.lower()]
    optimizer = kind(learning_rate=rate, **parameters)
    rate = float(np.float32(rate))
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        # Keras's momenta decay in rows without a gradient and ours do not, so every row has one each step;
        # some rows have several.
        ids = np.concatenate([keys, rng.choice(keys, 9)])
        gradients = rng.normal(size=(len(ids), DIM)).astype(dtype)
        dense = np.zeros((ROWS, DIM), dtype)
        np.add.at(dense, np.searchsorted(keys, ids), gradients)
        client.push(client.pull([ids], [(table, 0)]), [gradients], rate)
        optimizer.apply([keras.ops.convert_to_tensor(dense)], [variable])
        if step in (0, 9, STEPS - 1):
            rows = client.pull_rows(table, keys)
            np.testing.assert_allclose(rows, np.asarray(variable), rtol=0, atol=tolerance)
    assert rows.dtype == dtype
    assert not np.allclose(rows, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "parameters", "rate"), CASES + OPTIONS)
def test_a_row_of_any_dim_is_updated_as_rows_of_dim_1(name, parameters, rate, dtype):
    """To the bit: numbers that the processor takes several at a time end where they do one by one."""
    rule = {"name": NAMES[name.lower()], **parameters}
    if name == "RowWiseAdagrad":
        pytest.skip("the update of a weight depends on the row")
    client = Client.in_process()
    dims, keys = (1, 2, 8, 9, 16, 64, 65, 128), np.arange(3)
    plain = {"dtype": dtype, "optimizer": rule, "initializer": {"name": "constant", "value": 0.25}}
    one = client.create_table(TableSpec("one", 1, **plain))
    tables = {dim: client.create_table(TableSpec(f"{dim}", dim, **plain)) for dim in dims}
    rng = np.random.default_rng(1)
    for _ in range(12):
        gradient = rng.normal(size=(len(keys), max(dims))).astype(dtype)
        pulled = client.pull([np.arange(gradient.size)], [(one, 0)])
        client.push(pulled, [gradient.reshape(-1, 1)], rate)
        pulled = client.pull([keys], [(table, 0) for table in tables.values()])
        client.push(pulled, [np.ascontiguousarray(gradient[:, : g.dim]) for g in pulled.groups], rate)
    wanted = client.pull_rows(one, np.arange(gradient.size)).reshape(gradient.shape)
    for dim, table in tables.items():
        assert np.array_equal(client.pull_rows(table, keys), wanted[:, :dim]), dim


@pytest.mark.parametrize(("name", "parameters", "rate"), CASES)
def test_a_class_that_is_made_of_a_rule_updates_dense_variables_as_keras_does(name, parameters, rate):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    from oe_runtime.keras import optimizers as ours

    rule = NAMES[name.lower()]
    if name not in vars(keras.optimizers):
        pytest.skip("Keras does not have it")
    if not _core.trace_rule(rule, {})[0]:
        pytest.skip("not a rule for single weights")
    made = ours.make_class(rule)(rate, **parameters)
    assert made.get_config().items() >= {"learning_rate": pytest.approx(rate), **parameters}.items()
    rng = np.random.default_rng(2)
    first = rng.normal(size=(3, 5))
    variables = [keras.Variable(first, dtype="float64") for _ in range(2)]
    optimizers = [made, vars(keras.optimizers)[name](rate, **parameters)]
    for _ in range(20):
        gradient = rng.normal(size=first.shape)
        for optimizer, variable in zip(optimizers, variables, strict=True):
            optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")], [variable])
    ours_end, keras_end = (np.asarray(variable) for variable in variables)
    np.testing.assert_allclose(ours_end, keras_end, rtol=0, atol=1e-6)
    assert not np.allclose(ours_end, first)


def test_rowwise_adagrad_is_fbgemms():
    """EXACT_ROWWISE_ADAGRAD as FBGEMM publishes it, once more in NumPy; each batch has some of the rows."""
    rng, rate, eps, rows = np.random.default_rng(3), np.float32(0.05), 1e-8, 20
    for dim, decay in ((1, 0.0), (16, 0.0), (67, 0.01)):
        client = Client.in_process(servers=2)
        rule = {"name": "rowwise_adagrad", "epsilon": eps, "coupled_weight_decay": decay}
        table = client.create_table(TableSpec("t", dim, optimizer=rule))
        assert client.slots(table) == {"accumulator": 1}
        weights = client.pull_rows(table, np.arange(rows)).astype(np.float64)
        moments = np.zeros(rows)
        for _ in range(50):
            ids = np.unique(rng.integers(0, rows, 12))
            gradients = rng.normal(size=(len(ids), dim)).astype(np.float32)
            client.push(client.pull([ids], [(table, 0)]), [gradients], float(rate))
            gradient = gradients + decay * weights[ids]
            moments[ids] += (gradient**2).mean(1)
            weights[ids] -= float(rate) / (np.sqrt(moments[ids]) + eps)[:, None] * gradient
        np.testing.assert_allclose(client.pull_rows(table, np.arange(rows)), weights, rtol=0, atol=1e-6)


def test_rowwise_adagrad_of_dense_variables():
    """A matrix has an accumulator per row, a vector one per weight."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    from oe_runtime.keras import RowWiseAdagrad

    optimizer = RowWiseAdagrad(0.5)
    assert RowWiseAdagrad.from_config(optimizer.get_config()).epsilon == optimizer.epsilon
    matrix, vector = keras.Variable(np.zeros((2, 2), np.float32)), keras.Variable(np.zeros(2, np.float32))
    gradients = [np.array([[3, 4], [0, 2]], np.float32), np.array([3, 4], np.float32)]
    optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients], [matrix, vector])
    root = np.sqrt([[12.5], [2.0]])
    np.testing.assert_allclose(np.asarray(matrix), -0.5 * gradients[0] / root, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(vector), [-0.5, -0.5], rtol=1e-6)
    # An embedding that stays, whose gradient has the rows of a batch only: equal ids count together.
    layer = keras.layers.Embedding(4, 2, embeddings_initializer="ones")
    model = keras.Sequential([layer, keras.layers.Flatten()])
    model.compile(RowWiseAdagrad(0.5), keras.losses.MeanAbsoluteError(reduction="sum"))
    model.fit(np.array([[1], [1], [3]]), np.zeros((3, 2), np.float32), batch_size=3, verbose=0)
    np.testing.assert_allclose(np.asarray(layer.embeddings)[:, 0], [1, 0.5, 1, 0.5], rtol=1e-6)


def test_specifications_name_an_option_only_where_it_is_set():
    """So those without are what earlier versions wrote; these versions refuse the others by name."""
    client = Client.in_process()
    later = {"torch", "maximize", "coupled_weight_decay", "learning_rate_decay"}
    for number, (name, parameters, _) in enumerate(CASES + OPTIONS):
        rule = {"name": NAMES[name.lower()], **parameters}
        spec = client.spec(client.create_table(TableSpec(f"t{number}", 2, optimizer=rule)))
        assert spec.optimizer.keys() & later == rule.keys() & later
        assert spec.optimizer.items() >= rule.items()


def test_group_lasso_of_ftrl_through_keras():
    """DeepRec's numbers (embedding_variable_ops_test.py), and dense variables as by Keras's Ftrl."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    from oe_runtime.keras import Ftrl
    from oe_runtime.keras.translate import table_optimizer

    rates = {"l1_regularization_strength": 2.0, "l2_regularization_strength": 0.00001}
    optimizer = Ftrl(0.1, group_lasso=True, **rates)
    assert Ftrl.from_config(optimizer.get_config()).group_lasso is True
    client = Client.in_process()
    spec = TableSpec(
        "t", 3, optimizer=table_optimizer(optimizer), initializer={"name": "constant", "value": 1.0}
    )
    table = client.create_table(spec)
    ids = np.array([0, 0, 0, 1, 1])
    client.push(client.pull([ids], [(table, 0)]), [np.full((5, 3), 2, np.float32)], 0.1)
    rows = client.pull_rows(table, np.array([0, 1]))
    np.testing.assert_allclose(rows, [[0.8282884] * 3, [0.7927219] * 3], atol=5e-7)
    ours, keras_own = keras.Variable(np.ones((2, 3), np.float32)), keras.Variable(np.ones((2, 3), np.float32))
    for rule, variable in ((optimizer, ours), (keras.optimizers.Ftrl(0.1, **rates), keras_own)):
        rule.apply([keras.ops.full((2, 3), 4.0)], [variable])
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(keras_own))
