"""Answers to requests from a trained model, with rows from checkpoints or from servers.

    from oe_runtime.serving import Model

    with Model.load("serving_model", "run/checkpoints") as model:
        outputs = model.predict({"ids": ids, "numbers": numbers})
        model.refresh()  # load what training has published since

`python -m oe_runtime.serve` serves it over HTTP and gRPC, with TensorFlow Serving's requests.
"""

from oe_runtime.errors import InputError, ServingError
from oe_runtime.serving.model import Model

__all__ = ["InputError", "Model", "ServingError"]
