"""Scalars and traces for TensorBoard: `tensorboard --logdir RUN_DIR` (traces: its plugin xprof)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path


class Scalars:
    """Writes numbers by step. Imports TensorFlow, but not TensorBoard, as tf.summary.scalar would."""

    def __init__(self, directory: Path) -> None:
        import tensorflow as tf

        self._tf = tf
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Those of `values` that are known."""
        summary = self._tf.compat.v1.Summary()
        for name, value in values.items():
            if value is not None:
                summary.value.add(tag=name, simple_value=value)
        with self._writer.as_default():
            self._tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        self._writer.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._writer.close()


@contextlib.contextmanager
def traced(directory: Path) -> Iterator[None]:
    """Traces what TensorFlow and Python do inside, into `directory`/plugins/profile. Imports TensorFlow."""
    import tensorflow as tf

    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=1)
    tf.profiler.experimental.start(str(directory), options=options)
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
