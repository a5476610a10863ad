"""The callback of Keras 3 that makes `fit` a part of a job."""

from __future__ import annotations

from typing import Any

import keras

from oe_runtime.keras import backends
from oe_runtime.keras.job_fit import JobFit


class JobCallback(JobFit, keras.callbacks.Callback):  # type: ignore[misc]
    """Makes `fit` a part of a job: `model.fit(data, callbacks=[embed.JobCallback(job)])`.

    Brings progress lines, metrics, checkpoints at the job's interval, stop requests, and resuming after the
    batch of the checkpoint. `fit` must be given the same data at every start. Its losses then are those of an
    uninterrupted run, if the script sets its seeds or shuffles nothing.
    """

    def __init__(self, job: Any) -> None:
        """`job` is the module oe_runtime.job. Raises ValueError for a backend other than TensorFlow."""
        if backends.NAME != "tensorflow":
            raise ValueError(
                f"JobCallback needs Keras on TensorFlow, but it runs on {backends.NAME} here: set "
                "KERAS_BACKEND=tensorflow, or write the loop yourself with job.training and job.step"
            )
        super().__init__(job)
