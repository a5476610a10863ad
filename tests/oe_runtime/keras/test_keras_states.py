"""What programs do to a model's state, with `oe_runtime.keras`."""

from __future__ import annotations

import keras
import model_states
import pytest

import oe_runtime.keras as embed


@pytest.mark.parametrize("way", model_states.CARRIED)
def test_rows_go_along(way, tmp_path):
    model_states.check_carried(keras, embed, model_states.CARRIED[way], tmp_path)


@pytest.mark.parametrize("way", model_states.REFUSED)
def test_what_would_leave_rows_out_is_refused(way, tmp_path):
    model_states.check_refused(keras, embed, way, tmp_path)


def test_matrices_beyond_the_memory_are_refused(monkeypatch):
    model_states.check_matrices_beyond_the_memory(keras, embed, monkeypatch)
