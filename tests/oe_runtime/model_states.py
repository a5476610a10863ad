"""Each way in which a program copies, saves or sets a model's state: rows go along, or it is refused by name.

Shared by Keras 3 and tf-keras.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from loops import FEATURES, X, Y, pair, two_tables

INPUTS = [X, FEATURES]


def trained(keras: Any, embed: Any) -> Any:
    """A model with two tables after some steps."""
    _, ours = pair(keras, embed, lambda: keras.optimizers.Adagrad(0.1))
    ours.model.fit(INPUTS, Y, verbose=0)
    return ours.model


def train_on(model: Any, **options: Any) -> None:
    model.fit(INPUTS, 3 - Y, verbose=0, shuffle=False, **options)


def assert_state(model: Any, predictions: Any) -> None:
    np.testing.assert_allclose(model.predict(INPUTS, verbose=0), predictions, atol=1e-6)


def set_weights(model: Any, **_of: Any) -> None:
    weights = model.get_weights()
    train_on(model)
    model.set_weights(weights)


def set_weights_of_layers(model: Any, **_of: Any) -> None:
    weights = {layer.name: layer.get_weights() for layer in model.layers}
    train_on(model)
    for layer in model.layers:
        layer.set_weights(weights[layer.name])


def save_weights(model: Any, path: Path, **_of: Any) -> None:
    model.save_weights(path / "saved")
    train_on(model)
    model.load_weights(path / "saved")


def checkpoint(model: Any, path: Path, keras: Any, **_of: Any) -> None:
    """ModelCheckpoint(save_best_only=True): the first epoch is the best."""
    file = str(path / "best.weights.h5")
    best = keras.callbacks.ModelCheckpoint(
        file, "loss", save_best_only=True, save_weights_only=True, mode="max"
    )
    model.optimizer.learning_rate.assign(0.0)
    train_on(model, epochs=2, callbacks=[best])
    model.optimizer.learning_rate.assign(0.1)
    train_on(model)
    model.load_weights(file)


def stopping(model: Any, keras: Any, **_of: Any) -> None:
    """EarlyStopping(restore_best_weights=True): the first epoch changes nothing, and is the best."""
    rates = iter([0.0, 0.1, 0.1])
    schedule = keras.callbacks.LearningRateScheduler(lambda _epoch: next(rates))
    best = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True, mode="max")
    train_on(model, epochs=3, callbacks=[schedule, best])
    assert "on_epoch_end" not in vars(best)


def another_model(model: Any, keras: Any, embed: Any, **_of: Any) -> Any:
    """The weights given to a second model, stock or ours, and back."""
    second = embed.distributed_model(two_tables(keras))
    for other in (two_tables(keras), second):
        other.set_weights(model.get_weights())
        assert_state(other, model.predict(INPUTS, verbose=0))
    weights = second.get_weights()
    second.compile("sgd", "mse")
    second.set_weights(weights)
    return second


CARRIED: dict[str, Callable[..., Any]] = {
    "set_weights(get_weights())": set_weights,
    "set_weights of layers": set_weights_of_layers,
    "save_weights": save_weights,
    "ModelCheckpoint": checkpoint,
    "EarlyStopping": stopping,
    "another model": another_model,
}


def check_carried(keras: Any, embed: Any, way: Callable[..., Any], path: Path) -> None:
    model = trained(keras, embed)
    predictions = model.predict(INPUTS, verbose=0)
    assert_state(way(model, path=path, keras=keras, embed=embed) or model, predictions)


_COPIED = r"copy\.deepcopy and pickle would leave out: .*set_weights\(model\.get_weights\(\)\)"
_FILES = r"rows of 'wide' are on parameter servers, and files of .* model\.save_weights\(directory\)"
_CLONED = r"has no parameter servers: make it with distributed_model"

# What is refused: the call, and the sentence.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "copy.deepcopy": (lambda model, **_of: copy.deepcopy(model), _COPIED),
    "pickle": (lambda model, **_of: pickle.dumps(model), _COPIED),
    "clone_model, set_weights": (
        lambda model, keras, **_of: keras.models.clone_model(model).set_weights(model.get_weights()),
        _CLONED,
    ),
    "clone_model, predict": (
        lambda model, keras, **_of: keras.models.clone_model(model).predict(INPUTS, verbose=0),
        _CLONED,
    ),
    "from_config": (
        lambda model, **_of: type(model).from_config(model.get_config()).get_weights(),
        _CLONED,
    ),
    "save_model": (
        lambda model, keras, path, **_of: keras.models.save_model(model, path / "m.keras"),
        _FILES,
    ),
    "tf.train.Checkpoint": (
        lambda model, path, **_of: tf.train.Checkpoint(model=model).write(str(path / "checkpoint")),
        _FILES,
    ),
    "tf.saved_model.save": (
        lambda model, path, **_of: tf.saved_model.save(model, str(path / "saved_model")),
        _FILES,
    ),
    "export": (
        lambda model, path, **_of: model.export(path / "export"),
        r"use save_as_original_model\(path\)",
    ),
    "use_ema": (
        lambda model, keras, **_of: model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse"),
        "use_ema=True.*leave use_ema out",
    ),
    "embeddings": (lambda model, **_of: model.get_layer("deep").embeddings, r"layer\.get_weights\(\)\[0\]"),
    "another shape": (
        lambda model, **_of: model.set_weights([one[:3] for one in model.get_weights()]),
        r"(?s)shape|not compatible",
    ),
    "too few": (lambda model, **_of: model.set_weights(model.get_weights()[2:]), "weight list of length 4"),
}


def check_refused(keras: Any, embed: Any, name: str, path: Path) -> None:
    call, sentence = REFUSED[name]
    model = trained(keras, embed)
    predictions = model.predict(INPUTS, verbose=0)
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=sentence):
        call(model, keras=keras, path=path)
    assert_state(model, predictions)


def check_matrices_beyond_the_memory(keras: Any, embed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(keras, embed)
    monkeypatch.setattr("oe_runtime.keras.matrices._available_bytes", lambda: 1000)
    for use in (model.get_weights, lambda: model.set_weights([])):
        with pytest.raises(ValueError, match=r"the rows up to layer 'deep' take .* GiB.*save_weights"):
            use()
