"""Optimizers of tables that Keras does not have, for dense variables beside tables with the same rule.

A rule for single weights needs nothing here: its class is made from the core's description (`DECLARED`).
core/optimizer has the rules and names their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

import oe_runtime._core as _core

# Options that the core adds to every rule. Keras's own weight_decay is that of dense variables.
_OF_EVERY_RULE = {"weight_decay", "coupled_weight_decay", "learning_rate_decay", "maximize"}


class _Configured:
    """Lists the additional arguments of an optimizer's constructor, which are attributes of the same name."""

    _own: tuple[str, ...]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**config, **{name: getattr(self, name) for name in self._own}}


class _Declared(_Configured, keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer of the core by its description and its rule."""

    _rule: str  # its name in the core
    _defaults: dict[str, float | bool]
    _in_tables_only: tuple[str, ...] = ()  # flags that dense variables are updated without

    def __init__(self, learning_rate: Any = 0.001, *values: float | bool, **kwargs: Any) -> None:
        given = dict(zip(self._own, values, strict=False))
        if len(values) > len(self._own) or given.keys() & kwargs:
            raise TypeError(f"{type(self).__name__} takes learning_rate, {', '.join(self._own)}, each once")
        for name in self._own:
            given.setdefault(name, kwargs.pop(name, self._defaults[name]))
        kwargs.setdefault("weight_decay", self._defaults["weight_decay"] or None)
        super().__init__(learning_rate=learning_rate, **kwargs)
        for name, value in given.items():
            setattr(self, name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the slots of `variables`."""
        if self.built:
            return
        super().build(variables)
        values = {name: float(getattr(self, name)) for name in self._own if name not in self._in_tables_only}
        operations, results, slots = _core.trace_rule(self._rule, values)
        self.__dict__["_program"] = operations, results  # TensorFlow would track lists that are set
        # All slots of a variable come before those of the next one, as Keras's do: files have them by place.
        self._slots = self.add_optimizer_variables(
            variables, [name for name, _ in slots], [keras.initializers.Constant(first) for _, first in slots]
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable: carry the rule's operations out in Keras."""
        slots = [slot[self._get_variable_index(variable)] for slot in self._slots]
        known = {"rate": learning_rate, "step": self.iterations + 1, "gradient": gradient, "weight": variable}
        known |= {f"slot_{i}": slot for i, slot in enumerate(slots)}
        operations, results = self.__dict__["_program"]
        values: list[Any] = []
        for name, constant, operands in operations:
            if operands:
                values.append(getattr(ops, name)(*(values[i] for i in operands)))
            else:
                values.append(ops.cast(known.get(name, constant), variable.dtype))
        for place, result in zip([variable, *slots], results, strict=True):
            self.assign(place, values[result])


def make_class(rule: str, **attributes: Any) -> type[Any]:
    """Make the Keras class of an optimizer of the core whose rule is for single weights."""
    defaults, _ = _core.optimizers()[rule]
    name = "".join(word.capitalize() for word in rule.split("_"))
    own = tuple(key for key in defaults if key not in _OF_EVERY_RULE)
    doc = f"The tables' optimizer {rule}({', '.join(own)}); core/optimizer/{rule}.cc has the rule."
    attributes = {"__doc__": doc, **attributes, "__module__": __name__}
    return type(name, (_Declared,), {**attributes, "_rule": rule, "_defaults": defaults, "_own": own})


def _declare(rule: str, **attributes: Any) -> Any:
    return keras.saving.register_keras_serializable(package="oe_runtime")(make_class(rule, **attributes))


AdamAsync = _declare(
    "adam_async",
    _in_tables_only=("apply_sparse_rmsprop",),
    __doc__="""DeepRec's AdamAsync: Adam whose powers of the betas count a table's own updates.

    `apply_sparse_rmsprop` drops the momenta's bias corrections in tables, as in RMSprop; dense variables are
    updated as by Adam.
    """,
)


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


@keras.saving.register_keras_serializable(package="oe_runtime")
class RowWiseAdagrad(_Configured, keras.optimizers.Optimizer):  # type: ignore[misc]
    """FBGEMM's row-wise Adagrad: Adagrad with one accumulator per row, of the mean of its squared gradients.

    The rows of a dense variable are those of its first axis; a vector's are its weights. A table keeps 4
    bytes of state per row. On the data sets that were measured it loses 0.0007 to 0.0012 of Adagrad's AUC.
    """

    _own = ("initial_accumulator_value", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, variables: Sequence[Any]) -> None:
        """Make the accumulators of `variables`."""
        if self.built:
            return
        super().build(variables)
        initial = keras.initializers.Constant(self.initial_accumulator_value)
        self._accumulators = [
            self.add_variable(
                (*v.shape[:1], *[1 for _ in v.shape[1:]]), initial, v.dtype, name=f"{v.name}_accumulator"
            )
            for v in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        slot = self._accumulators[self._get_variable_index(variable)]
        gradient = ops.cast(ops.convert_to_tensor(gradient, sparse=False), variable.dtype)
        gradient = ops.reshape(gradient, variable.shape)  # TensorFlow does not know it of an embedding's
        squares = ops.square(gradient)
        axes = list(range(1, len(variable.shape)))
        self.assign_add(slot, ops.mean(squares, axes, keepdims=True) if axes else squares)
        rate = ops.cast(learning_rate, variable.dtype)
        root = ops.sqrt(ops.convert_to_tensor(slot)) + ops.cast(self.epsilon, variable.dtype)
        self.assign_sub(variable, rate / root * gradient)


_known = {name.lower() for name in (*vars(keras.optimizers), *globals())}

# The classes of all other optimizers of the core with a rule for single weights, by name.
DECLARED = {
    kind.__name__: kind
    for kind in (
        _declare(rule)
        for rule in _core.optimizers()
        if rule.replace("_", "") not in _known and _core.trace_rule(rule, {})[0]
    )
}
globals().update(DECLARED)
