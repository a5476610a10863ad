"""How answers over gRPC hold their values."""

import numpy as np
import pytest
import tensorflow as tf

from oe_runtime.serving.grpc import tensor_proto

NUMBERS = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)


@pytest.mark.parametrize("name", [*NUMBERS, "bool", "complex64", "complex128", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 2), (), (1,), (3, 2)])
def test_values_are_where_tensorflow_serving_has_them(name: str, shape: tuple[int, ...]) -> None:
    dtype = tf.as_dtype(name).as_numpy_dtype
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1).astype(dtype)
    proto = tensor_proto(array)
    assert not proto.tensor_content
    found = tf.make_ndarray(proto)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found.astype("complex128"), array.astype("complex128"))


def test_byte_strings_are_in_string_val() -> None:
    assert list(tensor_proto(np.array([[b"a", b"b"]], object)).string_val) == [b"a", b"b"]
