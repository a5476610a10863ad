"""NumPy arrays as tensors and back, without a copy where memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

# TensorFlow aborts on a tensor whose memory begins elsewhere.
_ALIGNMENT = 64


def to_tensor(array: Any) -> Any:
    """Return an array as a tensor, which shares the array's memory if TensorFlow accepts its alignment.

    Tensors are returned unchanged. The array must not be written while the tensor is in use.
    """
    if not isinstance(array, np.ndarray):
        return array if isinstance(array, tf.Tensor) else tf.convert_to_tensor(array)
    if (
        array.size > 1024
        and array.dtype.kind in "fiu"
        and array.flags.c_contiguous
        and array.flags.writeable
        and array.ctypes.data % _ALIGNMENT == 0
    ):
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def to_numpy(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array, which shares the memory of a CPU tensor and must not be written then."""
    if isinstance(tensor, tf.Tensor):
        if tensor.backing_device.endswith("CPU:0") and tensor.dtype.is_numpy_compatible:
            try:
                return np.asarray(memoryview(tensor))
            except (BufferError, TypeError, ValueError):  # strings and bfloat16 have no buffer
                return np.asarray(tensor.numpy())
        return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def not_dense_error(what: str, value: Any) -> ValueError:
    """Return the error for ragged and sparse data; `what` begins its sentence."""
    return ValueError(
        f"{what} a {type(value).__name__}, but a step with tables takes dense tensors: pad lists of ids with "
        "Dataset.padded_batch and make their Embedding with mask_zero=True, which masks the padding, id 0; "
        "tf.sparse.to_dense turns other sparse features into dense ones"
    )
