"""Training loops of one's own, held to those of stock Keras 3."""

from __future__ import annotations

import keras
import loops
import numpy as np
import pytest
import tensorflow as tf

import oe_runtime.keras as embed

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")
CASES = {**loops.CASES, "without variables": loops.without_variables}


@loops.FUNCTIONS
@pytest.mark.parametrize("case", CASES)
def test_a_loop_trains_as_with_stock_keras(case, function):
    loops.check_case(keras, embed, CASES[case], function)


@loops.FUNCTIONS
@pytest.mark.parametrize("name", loops.changed_by_optimizer(keras))
def test_an_optimizer_changes_gradients_as_in_stock_keras(name, function):
    loops.check_optimizer(keras, embed, name, function)


def test_gradient_alone_pushes_nothing():
    loops.check_that_gradient_alone_pushes_nothing(keras, embed)


def test_fit_and_a_loop_are_the_same():
    loops.check_that_fit_and_loop_are_the_same(keras, embed)


def test_a_table_of_any_id():
    loops.check_a_table_of_any_id(keras, embed)


@loops.FUNCTIONS
def test_what_would_not_train_rows_is_refused(function):
    loops.check_refusals(keras, embed, function)


class Towers(keras.Model):
    def __init__(self):
        super().__init__()
        self.tower = keras.Sequential(
            [keras.layers.Embedding(64, 4, name="rows"), keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.tower(x))


def test_variables_of_an_inner_model_lack_its_tables():
    """In Keras 3, which collects them by a property that our layer cannot take part in."""
    model = embed.distributed_model(Towers())
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
    x = tf.constant(np.arange(8).reshape(4, 2))
    model(x)
    rows = model.tower.layers[0].trainable_variables
    assert any(one is rows[0] for one in model.trainable_variables)
    for sources, refused in (
        (model.tower.trainable_variables, True),
        ([*model.tower.trainable_variables, *rows], False),
        (model.out.trainable_variables, False),
    ):
        with embed.GradientTape(model) as tape:
            loss = tf.reduce_sum(model(x, training=True))
        if refused:
            with pytest.raises(
                ValueError, match=r"variables of layer 'sequential.*', which lack table 'rows'"
            ):
                tape.gradient(loss, sources)
        else:
            tape.gradient(loss, sources)
