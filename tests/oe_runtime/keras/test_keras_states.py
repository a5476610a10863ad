"""What programs do to a model's state, with `oe_runtime.keras`."""

from __future__ import annotations

import keras
import model_states
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime.keras import dense


@pytest.mark.parametrize("way", model_states.CARRIED)
def test_rows_go_along(way, tmp_path):
    model_states.check_carried(keras, embed, model_states.CARRIED[way], tmp_path)


@pytest.mark.parametrize("way", model_states.REFUSED)
def test_what_would_leave_rows_out_is_refused(way, tmp_path):
    model_states.check_refused(keras, embed, way, tmp_path)


def test_matrices_beyond_the_memory_are_refused(monkeypatch):
    model_states.check_matrices_beyond_the_memory(keras, embed, monkeypatch)


def test_later_steps_do_not_change_the_dense_values_of_a_checkpoint():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(), "mse")
    taken = [dense.values(model), dense.weights(model)]
    before = [{name: array.copy() for name, array in arrays.items()} for arrays in taken]
    model.train_on_batch(np.ones((4, 2)), np.ones((4, 3)))
    for arrays, copies in zip(taken, before, strict=True):
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, copies[name])
    assert any((array != taken[0][name]).any() for name, array in dense.values(model).items())


def test_a_value_in_the_memory_of_its_variable_is_copied():
    class Variable:  # as PyTorch's are
        memory = np.zeros(4)

        def numpy(self):
            return self.memory[:]

    copied = dense._copy(Variable())
    Variable.memory += 1
    assert not copied.any()
