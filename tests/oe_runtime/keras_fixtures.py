import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest


@pytest.fixture(autouse=True)
def fresh_names():
    """Layer names begin anew in every test, as they do in a new process; seeds too."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


@pytest.fixture
def deterministic():
    """Every TensorFlow operation gives the same bits each time."""
    from tensorflow.python.util import _pywrap_determinism

    before = _pywrap_determinism.is_enabled()
    _pywrap_determinism.enable(True)
    yield
    _pywrap_determinism.enable(before)
