"""Admission and eviction under a Keras model, end to end."""

import keras
import numpy as np
import tensorflow as tf

import oe_runtime.keras as embed


def test_an_embedding_with_admission_and_a_cap_trains(tmp_path):
    ids = keras.Input((4,), dtype="int64")
    layer = embed.Embedding(
        -1,
        4,
        name="t",
        admission={"name": "counter", "filter_freq": 2, "default_value": 0.25},
        eviction=[
            {"name": "global_step", "steps_to_live": 20, "every_steps": 1},
            {"name": "cap", "max_rows": 64, "policy": "lru"},
        ],
    )
    out = keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids)))
    model = embed.distributed_model(keras.Model(ids, out))
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.5)), "mse")
    rng = np.random.default_rng(1)
    often, rare = rng.integers(0, 16, (256, 4)), rng.integers(1 << 20, 1 << 60, (256, 2))
    x = np.concatenate([often[:, :2], rare], axis=1)
    y = (often[:, :1] % 2).astype(np.float32)
    losses = model.fit(x, y, batch_size=32, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    (server,) = model.client.stats()["servers"]
    stats = server["tables"]["t"]
    assert 16 <= stats["rows"] <= 64
    assert stats["admission"]["refused_keys"] > 0
    assert stats["eviction"]["cap"]["evicted_rows"] > 0
    copy = embed.Embedding.from_config(layer.get_config())
    assert (copy.admission, copy.eviction) == (layer.admission, layer.eviction)

    # What has no row reads the default, in the exported model too.
    unknown = np.full((1, 4), 7 << 40, np.int64)
    np.testing.assert_array_equal(model.get_layer("t").table.rows(unknown), np.full((1, 4, 4), 0.25))
    path = model.save_as_original_model(tmp_path / "export")
    exported = tf.saved_model.load(str(path))
    served = exported.serve(tf.constant(unknown)).numpy()
    np.testing.assert_allclose(served, model.predict(unknown, verbose=0), rtol=1e-6)
