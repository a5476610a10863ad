"""What programs do to a model's state, with `oe_runtime.tf_keras`."""

from __future__ import annotations

import tempfile

import model_states
import pytest
import tf_keras as keras

import oe_runtime.tf_keras as embed


@pytest.mark.parametrize("way", model_states.CARRIED)
def test_rows_go_along(way, tmp_path):
    model_states.check_carried(keras, embed, model_states.CARRIED[way], tmp_path)


@pytest.mark.parametrize("way", model_states.REFUSED)
def test_what_would_leave_rows_out_is_refused(way, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tf_keras leaves one where a save fails
    model_states.check_refused(keras, embed, way, tmp_path)


def test_matrices_beyond_the_memory_are_refused(monkeypatch):
    model_states.check_matrices_beyond_the_memory(keras, embed, monkeypatch)


def test_backups_of_tf_keras_are_refused(tmp_path):
    """They are TensorFlow's checkpoints, without the rows; those of Keras 3 are ours."""
    model = model_states.trained(keras, embed)
    with pytest.raises(
        ValueError, match=r"rows of 'wide' .* files of Keras and TensorFlow would not have them"
    ):
        model_states.train_on(model, callbacks=[keras.callbacks.BackupAndRestore(str(tmp_path))])
