import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest


@pytest.fixture(autouse=True)
def fresh_names():
    """Layer names begin anew in every test; seeds too."""
    keras = pytest.importorskip("tf_keras")
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
