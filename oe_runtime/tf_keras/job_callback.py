"""The callback of tf-keras that makes `fit` a part of a job."""

from __future__ import annotations

import tf_keras

from oe_runtime.keras.job_fit import JobFit


class JobCallback(JobFit, tf_keras.callbacks.Callback):  # type: ignore[misc]
    """Makes `fit` a part of a job; see `oe_runtime.keras.JobCallback`.

    Layers that draw random numbers, such as Dropout, continue with other numbers after a resume unless the
    script calls tf_keras.backend.experimental.enable_tf_random_generator() before it makes them.
    """
