"""Scalars for TensorBoard: `tensorboard --logdir RUN_DIR`."""

from __future__ import annotations

from collections.abc import Mapping
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
