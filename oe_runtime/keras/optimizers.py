"""DeepRec's optimizers as Keras optimizers, for dense variables beside tables with the same rule.

core/optimizer/adam_async.cc and adagrad_decay.cc have the rules and name their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops


class _Configured:
    """Lists the additional arguments of an optimizer's constructor, which are attributes of the same name."""

    _own: tuple[str, ...]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**config, **{name: getattr(self, name) for name in self._own}}


@keras.saving.register_keras_serializable(package="oe_runtime")
class AdamAsync(_Configured, keras.optimizers.Optimizer):  # type: ignore[misc]
    """DeepRec's AdamAsync: Adam whose powers of the betas count a table's own updates.

    `apply_sparse_rmsprop` drops the momenta's bias corrections in tables, as in RMSprop; dense variables are
    updated as by Adam.
    """

    _own = ("beta_1", "beta_2", "epsilon", "apply_sparse_rmsprop")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        apply_sparse_rmsprop: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.apply_sparse_rmsprop = apply_sparse_rmsprop

    def build(self, variables: Sequence[Any]) -> None:
        """Make the momenta of `variables`."""
        if self.built:
            return
        super().build(variables)
        self._momenta, self._velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        number = self._get_variable_index(variable)
        m, v = self._momenta[number], self._velocities[number]
        rate, beta_1, beta_2, step = (
            ops.cast(x, variable.dtype)
            for x in (learning_rate, self.beta_1, self.beta_2, self.iterations + 1)
        )
        gradient = ops.cast(gradient, variable.dtype)
        alpha = rate * ops.sqrt(1 - ops.power(beta_2, step)) / (1 - ops.power(beta_1, step))
        self.assign(m, m * beta_1 + gradient * (1 - beta_1))
        self.assign(v, v * beta_2 + ops.square(gradient) * (1 - beta_2))
        self.assign_sub(variable, m * alpha / (ops.sqrt(v) + self.epsilon))


@keras.saving.register_keras_serializable(package="oe_runtime")
class Ftrl(_Configured, keras.optimizers.Ftrl):  # type: ignore[misc]
    """Keras's Ftrl, with DeepRec's rule for rows where `group_lasso` is set.

    `l1_regularization_strength` then applies to the norm of a row, which becomes zero as a whole, not to each
    weight. Dense variables are updated as by Keras's Ftrl, as in DeepRec.
    """

    _own = ("group_lasso",)

    def __init__(self, learning_rate: Any = 0.001, *, group_lasso: bool = False, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.group_lasso = bool(group_lasso)


@keras.saving.register_keras_serializable(package="oe_runtime")
class AdagradDecay(_Configured, keras.optimizers.Optimizer):  # type: ignore[misc]
    """DeepRec's AdagradDecay: Adagrad with decaying accumulators.

    They decay by `accumulator_decay_rate` every `accumulator_decay_step` steps, but not below
    `initial_accumulator_value`.
    """

    _own = ("initial_accumulator_value", "accumulator_decay_step", "accumulator_decay_rate")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        accumulator_decay_step: int = 100_000,
        accumulator_decay_rate: float = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.accumulator_decay_step = accumulator_decay_step
        self.accumulator_decay_rate = accumulator_decay_rate

    def build(self, variables: Sequence[Any]) -> None:
        """Make the accumulators of `variables`."""
        if self.built:
            return
        super().build(variables)
        initial = keras.initializers.Constant(self.initial_accumulator_value)
        self._accumulators = self.add_optimizer_variables(variables, "accumulator", initial)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        slot = self._accumulators[self._get_variable_index(variable)]
        accumulator = ops.convert_to_tensor(slot)
        gradient = ops.cast(gradient, variable.dtype)
        decayed = ops.maximum(accumulator * self.accumulator_decay_rate, self.initial_accumulator_value)
        due = ops.equal((self.iterations + 1) % self.accumulator_decay_step, 0)
        self.assign(slot, ops.where(due, decayed, accumulator) + ops.square(gradient))
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient / ops.sqrt(ops.convert_to_tensor(slot)))
