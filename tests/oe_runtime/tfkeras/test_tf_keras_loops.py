"""Training loops of one's own, held to those of stock tf-keras."""

from __future__ import annotations

import loops
import pytest
import tf_keras as keras

import oe_runtime.tf_keras as embed

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def minimized(of):
    def step(*batch):
        with of.tape() as tape:
            loss = of.loss(*batch)
        of.optimizer.minimize(loss, of.variables, tape=tape)

    of.run(step)


CASES = {**loops.CASES, "minimize": minimized}


@loops.FUNCTIONS
@pytest.mark.parametrize("case", CASES)
def test_a_loop_trains_as_with_stock_tf_keras(case, function):
    loops.check_case(keras, embed, CASES[case], function)


@loops.FUNCTIONS
@pytest.mark.parametrize("name", loops.changed_by_optimizer(keras))
def test_an_optimizer_changes_gradients_as_in_stock_tf_keras(name, function):
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
