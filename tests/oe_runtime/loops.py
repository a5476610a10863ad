"""Training loops that change gradients between the tape and the optimizer, held to stock Keras.

Shared by Keras 3 and tf-keras. A loop is a function of `Loop`, which stands for a stock model or one of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from oe_runtime.errors import GradientError

IDS, ROWS, BATCH = 64, 12, 10
_rng = np.random.default_rng(0)
# No id twice in a batch, so that clipping the gradients of ids is clipping those of rows.
X = np.concatenate([_rng.permutation(IDS)[: 3 * BATCH].reshape(BATCH, 3) for _ in range(6)])
FEATURES = _rng.random((len(X), 2)).astype("float32")
Y = _rng.random((len(X), 1)).astype("float32")


@dataclass
class Loop:
    """A library, a model of it, what makes its tapes, and the optimizers."""

    keras: Any
    embed: Any  # None for the stock model
    model: Any
    function: Callable[[Any], Any]  # tf.function, or nothing

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    @property
    def variables(self) -> Any:
        return self.model.trainable_variables

    def tape(self, **options: Any) -> Any:
        return (
            tf.GradientTape(**options)
            if self.embed is None
            else self.embed.GradientTape(self.model, **options)
        )

    def another(self, optimizer: Any) -> Any:
        return optimizer if self.embed is None else self.embed.distributed_optimizer(optimizer)

    def loss(self, x: Any, features: Any, y: Any) -> Any:
        return tf.reduce_mean((self.model([x, features], training=True) - y) ** 2)

    def apply(self, gradients: Any, variables: Any = None, optimizer: Any = None) -> None:
        pairs = zip(gradients, self.variables if variables is None else variables, strict=True)
        (optimizer or self.optimizer).apply_gradients(list(pairs))

    def run(self, step: Callable[..., Any]) -> None:
        step = self.function(step)
        for begin in range(0, len(X), BATCH):
            part = slice(begin, begin + BATCH)
            step(*(tf.constant(a[part]) for a in (X, FEATURES, Y)))


def two_tables(keras: Any) -> Any:
    """A wide and a deep table, and a dense feature."""
    ids, features = keras.Input((3,), dtype="int64", name="ids"), keras.Input((2,), name="features")
    wide = keras.layers.Flatten()(keras.layers.Embedding(IDS, 1, name="wide")(ids))
    deep = keras.layers.Flatten()(keras.layers.Embedding(IDS, 4, name="deep")(ids))
    joined = keras.layers.Concatenate()([wide, deep, features])
    hidden = keras.layers.Dense(5, "tanh", name="hidden")(joined)
    return keras.Model([ids, features], keras.layers.Dense(1, name="out")(hidden))


def pair(keras: Any, embed: Any, optimizer: Callable[[], Any], function: Any = None) -> list[Loop]:
    """The stock model and ours, with the same weights."""
    loops = []
    rng = np.random.default_rng(7)
    weights = [rng.normal(0, 0.3, one.shape).astype("float32") for one in two_tables(keras).get_weights()]
    for ours in (False, True):
        model = two_tables(keras)
        if ours:
            model = embed.distributed_model(model)
        model.compile(embed.distributed_optimizer(optimizer()) if ours else optimizer(), "mse")
        model.set_weights(weights)
        model.optimizer.build(model.trainable_variables)
        loops.append(Loop(keras, embed if ours else None, model, function or (lambda step: step)))
    return loops


def assert_same(stock: Loop, ours: Loop) -> None:
    for a, b in zip(stock.model.get_weights(), ours.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert int(stock.optimizer.iterations) == int(ours.optimizer.iterations)


def changed(change: Callable[[Any], Any], scale: float = 1.0) -> Callable[[Loop], None]:
    """A loop in which `change` is made to the list of gradients."""

    def loop(of: Loop) -> None:
        def step(*batch: Any) -> None:
            with of.tape() as tape:
                loss = of.loss(*batch) * scale
            of.apply(change(tape.gradient(loss, of.variables)))

        of.run(step)

    return loop


def native(variables: Any) -> list[Any]:
    """TensorFlow's own variables, which some functions of tapes need."""
    return [one if callable(one.value) else one.value for one in variables]


def dense(gradients: Any) -> Any:
    return [tf.convert_to_tensor(one) for one in gradients]


def some_steps_only(of: Loop) -> None:
    of.function, count = (lambda step: step), iter(range(100))

    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        gradients = tape.gradient(loss, of.variables)
        if next(count) % 2:
            of.apply(gradients)

    of.run(step)


def accumulated(of: Loop) -> None:
    """Three tapes before one update."""

    def step(*batch: Any) -> None:
        total = None
        for part in range(3):
            with of.tape() as tape:
                loss = of.loss(*(one[part::3] for one in batch))
            gradients = dense(tape.gradient(loss, of.variables))
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        of.apply([one / 3.0 for one in total])

    of.run(step)


def accumulated_in_variables(of: Loop) -> None:
    of.function, count = (lambda step: step), iter(range(100))
    sums = [tf.Variable(tf.zeros_like(one)) for one in of.variables]

    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        for total, one in zip(sums, tape.gradient(loss, of.variables), strict=True):
            total.assign_add(one)
        if next(count) % 2:
            of.apply([one / 2.0 for one in sums])
            for total in sums:
                total.assign(tf.zeros_like(total))

    of.run(step)


def persistent(of: Loop) -> None:
    """Two losses, and a gradient that is asked for only."""

    def step(*batch: Any) -> None:
        with of.tape(persistent=True) as tape:
            loss = of.loss(*batch)
            other = loss**2
        tape.gradient(loss, of.variables)
        parts = [dense(tape.gradient(one, of.variables)) for one in (loss, other)]
        of.apply([a + 0.5 * b for a, b in zip(*parts, strict=True)])

    of.run(step)


def gradient_penalty(of: Loop) -> None:
    """A loss of the gradient of a dense input."""

    def step(x: Any, features: Any, y: Any) -> None:
        with of.tape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(features)
                loss = of.loss(x, features, y)
            penalty = tf.reduce_sum(inner.gradient(loss, features) ** 2)
            total = loss + 10.0 * penalty
        of.apply(outer.gradient(total, of.variables))

    of.run(step)


def penalty_of_gradients(of: Loop) -> None:
    """A loss of the gradients of all variables, rows too."""

    def step(*batch: Any) -> None:
        with of.tape() as outer:
            with of.tape() as inner:
                loss = of.loss(*batch)
            gradients = inner.gradient(loss, of.variables)
            total = loss + tf.add_n([tf.reduce_sum(one**2) for one in dense(gradients)])
        of.apply(outer.gradient(total, of.variables))

    of.run(step)


def output_gradients(of: Loop) -> None:
    def step(x: Any, features: Any, y: Any) -> None:
        with of.tape() as tape:
            outputs = of.model([x, features], training=True)
        of.apply(tape.gradient(outputs, of.variables, output_gradients=outputs - y))

    of.run(step)


def unconnected(of: Loop) -> None:
    """A loss without one of the tables."""

    def step(x: Any, features: Any, y: Any) -> None:
        with of.tape() as tape:
            of.model([x, features], training=True)
            loss = tf.reduce_mean((of.model.get_layer("deep")(x) - y[:, None]) ** 2)
        found = tape.gradient(loss, native(of.variables), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        of.apply(found)

    of.run(step)


def some_without_gradient(of: Loop) -> None:
    def step(x: Any, features: Any, y: Any) -> None:
        with of.tape() as tape:
            loss = tf.reduce_mean((of.model.get_layer("deep")(x) - y[:, None]) ** 2)
        found = tape.gradient(loss, of.variables)
        assert [one is None for one in found].count(False) == 1
        of.apply(found)

    of.run(step)


def without_variables(of: Loop) -> None:
    """`optimizer.apply(gradients)`, of Keras 3."""

    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        of.optimizer.apply(tape.gradient(loss, of.variables))

    of.run(step)


def subset(of: Loop) -> None:
    """All but one table and one layer, by a structure of variables."""

    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        chosen = {name: of.model.get_layer(name).trainable_variables[0] for name in ("deep", "hidden")}
        found = tape.gradient(loss, chosen)
        of.apply(list(found.values()), list(chosen.values()))

    of.run(step)


def a_table_only(of: Loop) -> None:
    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        variable = of.model.get_layer("wide").trainable_variables[0]
        of.apply([tape.gradient(loss, variable)], [variable])

    of.run(step)


def two_optimizers(of: Loop) -> None:
    """Wide and deep, each with its learning rate."""
    wide = of.model.get_layer("wide").trainable_variables
    deep = [one for one in of.variables if not any(one is other for other in wide)]
    other = of.another(of.keras.optimizers.SGD(0.02))
    other.build(wide)

    def step(*batch: Any) -> None:
        with of.tape(persistent=True) as tape:
            loss = of.loss(*batch)
        of.apply(tape.gradient(loss, deep), deep)
        of.apply(tape.gradient(loss, wide), wide, other)

    of.run(step)
    assert int(other.iterations) == len(X) // BATCH


def watched(of: Loop) -> None:
    def step(*batch: Any) -> None:
        with of.tape(watch_accessed_variables=False) as tape:
            tape.watch(native(of.model.get_layer("deep").trainable_variables))
            loss = of.loss(*batch)
        found = tape.gradient(loss, of.variables)
        assert sum(one is not None for one in found) == 1
        of.apply(found)

    of.run(step)


def watched_variables(of: Loop) -> None:
    def step(*batch: Any) -> None:
        with of.tape() as tape:
            loss = of.loss(*batch)
        variables = tape.watched_variables()
        assert len(variables) == len(of.variables)
        known = {getattr(one, "path", one.name).partition(":")[0]: one for one in of.variables}
        names = [getattr(one, "path", one.name).partition(":")[0] for one in variables]
        of.apply(tape.gradient(loss, variables), [known[name] for name in names])

    of.run(step)


def scaled(of: Loop) -> None:
    """The library's LossScaleOptimizer, and one batch whose gradients are not finite."""
    keras = of.keras
    kind = getattr(keras.mixed_precision, "LossScaleOptimizer", None) or keras.optimizers.LossScaleOptimizer
    optimizer = kind(of.optimizer, initial_scale=1024.0)
    count = iter(range(100))
    of.function = lambda step: step

    def step(*batch: Any) -> None:
        bad = float("inf") if next(count) == 2 else 1.0
        with of.tape() as tape:
            loss = of.loss(*batch) * bad
            scale = getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss
            loss = scale(loss)
        gradients = tape.gradient(loss, of.variables)
        if hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        of.apply(gradients, optimizer=optimizer)

    of.run(step)


def averaged(of: Loop) -> None:
    """A moving average of all weights, which replaces them at the end."""
    averages = [tf.Variable(tf.convert_to_tensor(one)) for one in of.variables]
    changed(lambda found: found)(of)
    for average, one in zip(averages, of.variables, strict=True):
        average.assign(0.9 * average + 0.1 * one)
        one.assign(average - one * 0.5)


def by_global_norm(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, 0.05)[0]


CASES: dict[str, Callable[[Loop], None]] = {
    "plain": changed(lambda found: found),
    "clip by global norm": changed(by_global_norm),
    "clip by global norm, dense": changed(lambda found: by_global_norm(dense(found))),
    "clip by norm": changed(lambda found: [tf.clip_by_norm(one, 0.01) for one in found]),
    "clip by value": changed(lambda found: [tf.clip_by_value(one, -0.01, 0.01) for one in found]),
    "scaled loss": changed(lambda found: [one / 1024.0 for one in dense(found)], 1024.0),
    "zeros": changed(lambda found: [tf.zeros_like(one) for one in dense(found)]),
    "noise": changed(lambda found: [one + 0.01 for one in dense(found)]),
    "some steps": some_steps_only,
    "accumulated": accumulated,
    "accumulated in variables": accumulated_in_variables,
    "persistent": persistent,
    "gradient penalty": gradient_penalty,
    "penalty of gradients": penalty_of_gradients,
    "output_gradients": output_gradients,
    "unconnected_gradients": unconnected,
    "some without gradient": some_without_gradient,
    "subset": subset,
    "a table only": a_table_only,
    "two optimizers": two_optimizers,
    "watched": watched,
    "watched_variables": watched_variables,
    "LossScaleOptimizer": scaled,
    "moving average": averaged,
}


def changed_by_optimizer(keras: Any) -> dict[str, Callable[[], Any]]:
    """Optimizers that change gradients or their rate."""
    rules = keras.optimizers
    return {
        "clipnorm": lambda: rules.SGD(0.1, clipnorm=0.02),
        "clipvalue": lambda: rules.SGD(0.1, clipvalue=0.003),
        "global_clipnorm": lambda: rules.SGD(0.1, global_clipnorm=0.05),
        "schedule": lambda: rules.SGD(rules.schedules.ExponentialDecay(0.3, 1, 0.5)),
        "adagrad": lambda: rules.Adagrad(0.1),
    }


FUNCTIONS = pytest.mark.parametrize("function", [None, tf.function], ids=["eager", "function"])


def check_case(keras: Any, embed: Any, case: Callable[[Loop], None], function: Any) -> None:
    stock, ours = pair(keras, embed, lambda: keras.optimizers.SGD(0.1), function)
    case(stock)
    case(ours)
    assert_same(stock, ours)


def check_optimizer(keras: Any, embed: Any, name: str, function: Any) -> None:
    stock, ours = pair(keras, embed, changed_by_optimizer(keras)[name], function)
    for one in (stock, ours):
        CASES["plain"](one)
        CASES["clip by global norm"](one)
    assert_same(stock, ours)


def check_that_gradient_alone_pushes_nothing(keras: Any, embed: Any) -> None:
    _, ours = pair(keras, embed, lambda: keras.optimizers.SGD(0.1))
    before, pushes = ours.model.get_weights(), []
    ours.model.client.push = lambda *_args, **_named: pushes.append(1)

    def step(*batch: Any) -> None:
        with ours.tape() as tape:
            loss = ours.loss(*batch)
        tape.gradient(loss, ours.variables)

    ours.run(step)
    assert not pushes
    for a, b in zip(before, ours.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def check_that_fit_and_loop_are_the_same(keras: Any, embed: Any) -> None:
    """Ids repeat in a batch, where stock Keras differs: Adam squares the gradient of each."""
    models: list[Any] = []
    for loop in (False, True):
        model = embed.distributed_model(two_tables(keras), seed=1)
        model.set_weights([np.random.default_rng(3).random(one.shape) for one in model.get_weights()])
        model.compile(
            embed.distributed_optimizer(keras.optimizers.Adam(0.1, epsilon=1e-3, global_clipnorm=0.1)), "mse"
        )
        x, features = X % 7, FEATURES
        if loop:
            of = Loop(keras, embed, model, lambda step: step)
            for begin in range(0, len(x), BATCH):
                part = slice(begin, begin + BATCH)
                with of.tape() as tape:
                    loss = of.loss(*(tf.constant(a[part]) for a in (x, features, Y)))
                of.apply(tape.gradient(loss, of.variables))
        else:
            model.fit([x, features], Y, batch_size=BATCH, shuffle=False, verbose=0)
        models.append(model)
    for a, b in zip(*(one.get_weights() for one in models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def check_a_table_of_any_id(keras: Any, embed: Any) -> None:
    """Its gradient has no dense form, but slices that may be changed."""
    ids = keras.Input((2,), dtype="int64")
    rows = embed.Embedding(-1, 4, name="any")(ids)
    model = embed.distributed_model(keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows))))
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.5)), "mse")
    x = tf.constant([[2**60, -5], [3, 2**60]])
    before = np.array(model.get_layer("any")(x))
    with embed.GradientTape(model) as tape:
        loss = tf.reduce_sum(model(x, training=True))
    variable, *others = model.trainable_variables
    gradient, *_ = tape.gradient(loss, [variable, *others])
    assert gradient.indices.numpy().tolist() == [2**60, -5, 3, 2**60]
    with pytest.raises(ValueError, match="IndexedSlices"):
        tf.convert_to_tensor(gradient)
    half = tf.IndexedSlices(gradient.values / 2, gradient.indices)
    model.optimizer.apply_gradients([(half, variable)])
    once = np.zeros((2, 2, 4))
    for place, value in zip(((0, 0), (0, 1), (1, 0), (1, 1)), gradient.values.numpy(), strict=True):
        once[place] = value
    once[0, 0] = once[1, 1] = once[0, 0] + once[1, 1]
    np.testing.assert_allclose(np.array(model.get_layer("any")(x)), before - 0.25 * once, atol=1e-6)
    assert int(model.optimizer.iterations) == 1
    for use in (variable.numpy, lambda: tf.zeros_like(variable), model.get_weights):
        with pytest.raises(ValueError, match="'any' takes any id, so that no matrix has all of its rows"):
            use()


def check_refusals(keras: Any, embed: Any, function: Any) -> None:
    rules = keras.optimizers

    def one_step(of: Loop, optimizer: Any = None, sources: Any = None, more: Any = lambda: 0.0) -> None:
        def step(*batch: Any) -> None:
            with of.tape() as tape:
                loss = of.loss(*batch) + more()
            of.apply(tape.gradient(loss, sources or of.variables), sources, optimizer)

        of.run(step)

    def ours() -> Loop:
        return pair(keras, embed, lambda: rules.SGD(0.1), function)[1]

    for rule in (rules.SGD(0.1), rules.Adam(0.1)):
        with pytest.raises(RuntimeError, match=r"rows of 'wide' are on .* embed\.distributed_optimizer\("):
            one_step(ours(), rule)
    with pytest.raises(ValueError, match=r"(?s)table 'wide' was made for sgd\(.*applied by adagrad\("):
        one_step(ours(), embed.distributed_optimizer(rules.Adagrad(0.1)))
    of = ours()
    with pytest.raises(RuntimeError, match="rows of 'wide' are read under a GradientTape"):
        one_step(of, more=lambda: tf.add_n([tf.nn.l2_loss(one) for one in of.variables]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.convert_to_tensor(of.variables[-1]))
    with pytest.raises(RuntimeError, match=r"rows of 'wide' are on .*embed\.GradientTape\(model\)"):
        tape.gradient(loss, of.variables)
    zeros = [tf.zeros(one.shape) for one in of.variables]
    with pytest.raises(ValueError, match=r"gradient of the rows of 'wide' has shape \(3, 1\)"):
        of.apply([tf.zeros((3, 1)), *zeros[1:]])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        of.apply([None] * len(zeros))
    before = of.model.get_weights()
    with pytest.raises(GradientError, match=r"table 'wide'.*not finite"):
        of.apply([one + float("nan") for one in zeros])
    for a, b in zip(before, of.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if hasattr(of.optimizer, "minimize"):
        with pytest.raises(RuntimeError, match=r"rows of 'wide' are on .*embed\.GradientTape\(model\)"):
            of.optimizer.minimize(lambda: of.loss(X, FEATURES, Y), of.variables)
