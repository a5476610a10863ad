"""How requests and answers over gRPC hold their values, beside TensorFlow and its messages."""

import numpy as np
import pytest
import tensorflow as tf

from oe_runtime.errors import InputError
from oe_runtime.serving import messages
from oe_runtime.serving.messages import message, read_tensor, tensor_proto

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


def as_tensorflow(proto):
    return tf.make_tensor_proto(0).FromString(proto.SerializeToString())


def as_ours(proto):
    return message("TensorProto").FromString(proto.SerializeToString())


@pytest.mark.parametrize("name", [*NUMBERS, "bool", "complex64", "complex128", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 2), (), (1,), (3, 2)])
def test_values_are_where_tensorflow_serving_has_them(name: str, shape: tuple[int, ...]) -> None:
    dtype = tf.as_dtype(name).as_numpy_dtype
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1).astype(dtype)
    proto = tensor_proto(array)
    assert not proto.tensor_content
    assert proto.SerializeToString() == as_tensorflow(proto).SerializeToString()
    found = tf.make_ndarray(as_tensorflow(proto))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found.astype("complex128"), array.astype("complex128"))


def test_byte_strings_are_in_string_val() -> None:
    assert list(tensor_proto(np.array([[b"a", "b"]], object)).string_val) == [b"a", b"b"]


@pytest.mark.parametrize("name", [*NUMBERS, "bool", "complex64", "complex128", "bfloat16", "string"])
@pytest.mark.parametrize("shape", [(0, 2), (), (1,), (3, 2), (4, 1, 5)])
@pytest.mark.parametrize("packed", [True, False])
def test_tensors_are_read_as_tensorflow_reads_them(name: str, shape: tuple[int, ...], packed: bool) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1
    array = array.astype("S" if name == "string" else tf.as_dtype(name).as_numpy_dtype)
    proto = tf.make_tensor_proto(array) if packed else as_tensorflow(tensor_proto(array))
    want, found = tf.make_ndarray(proto), read_tensor(as_ours(proto), 100)
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("value", [1.5, b"text", True])
@pytest.mark.parametrize("values", [0, 1, 2])
def test_the_last_value_fills_the_shape(value: object, values: int) -> None:
    proto = tf.make_tensor_proto([value] * 2)
    field = {float: "float_val", bytes: "string_val", bool: "bool_val"}[type(value)]
    proto.ClearField("tensor_content")
    proto.ClearField(field)
    getattr(proto, field).extend([value] * values)
    proto.tensor_shape.dim[0].size = 5
    want = tf.make_ndarray(proto)
    if values or not isinstance(value, bytes):
        np.testing.assert_array_equal(read_tensor(as_ours(proto), 100), want)
    else:  # where TensorFlow has a str among its bytes
        assert read_tensor(as_ours(proto), 100).tolist() == [b""] * 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda proto: proto.tensor_shape.dim.add(size=60), r"the shape \[2, 60\]"),
        (lambda proto: proto.tensor_shape.dim.add(size=-1), r"the shape \[2, -1\]"),
        (lambda proto: [proto.tensor_shape.dim.add(size=2**62) for _ in range(10**5)], "100001 dimensions"),
        (lambda proto: proto.int_val.extend([1, 2, 3]), r"it has 3 values for the shape \[2\]"),
        (lambda proto: proto.int_val.append(300), "300 out of bounds for int8"),
        (lambda proto: setattr(proto, "dtype", 20), "type 20 of tensorflow.DataType is not read here"),
        (lambda proto: setattr(proto, "dtype", 999), "type 999 of tensorflow.DataType is not read here"),
        (lambda proto: setattr(proto, "tensor_content", b"abc"), r"it has 3 values for the shape \[2\]"),
        (lambda proto: setattr(proto, "tensor_content", b"a"), r"it has 1 values for the shape \[2\]"),
    ],
)
def test_what_is_no_tensor_is_refused(change, said) -> None:
    proto = message("TensorProto")(dtype="DT_INT8")
    proto.tensor_shape.dim.add(size=2)
    change(proto)
    with pytest.raises(InputError, match=said):
        read_tensor(proto, 100)


def test_messages_have_the_fields_of_tensorflow_serving() -> None:
    apis = pytest.importorskip("tensorflow_serving.apis")
    from tensorflow.core.example import example_pb2, feature_pb2
    from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2
    from tensorflow.core.protobuf import meta_graph_pb2
    from tensorflow_serving.apis import (
        classification_pb2,
        get_model_metadata_pb2,
        get_model_status_pb2,
        input_pb2,
        model_management_pb2,
        model_pb2,
        predict_pb2,
        regression_pb2,
    )
    from tensorflow_serving.config import (
        file_system_storage_path_source_pb2,
        logging_config_pb2,
        model_server_config_pb2,
    )

    assert apis
    files = [tensor_pb2, tensor_shape_pb2, meta_graph_pb2]
    files += [get_model_metadata_pb2, get_model_status_pb2, model_pb2, predict_pb2]
    files += [classification_pb2, example_pb2, feature_pb2, input_pb2, regression_pb2]
    files += [model_management_pb2, file_system_storage_path_source_pb2, logging_config_pb2]
    files += [model_server_config_pb2]
    theirs = {name: one for file in files for name, one in file.DESCRIPTOR.message_types_by_name.items()}
    status = theirs["ModelVersionStatus"].fields_by_name["status"].message_type
    for name in [*messages._TENSORS, *messages._SERVICES]:
        outer, *inner = name.split(".")
        wanted = status if name == "StatusProto" else theirs[outer]
        for part in inner:
            wanted = wanted.nested_types_by_name[part]
        _compare(message(inner[-1] if inner else name).DESCRIPTOR, wanted)


def _compare(ours, theirs) -> None:
    assert ours.full_name == theirs.full_name
    for field in ours.fields:
        other = theirs.fields_by_number[field.number]
        assert (field.name, field.type) == (other.name, other.type), ours.name
        assert field.is_repeated == other.is_repeated, field.full_name
        names = [one and one.name for one in (field.containing_oneof, other.containing_oneof)]
        assert names[0] in (None, names[1]), field.full_name
        if field.enum_type is not None:
            known = {value.name: value.number for value in other.enum_type.values}
            assert {value.name: value.number for value in field.enum_type.values}.items() <= known.items()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            assert other.message_type.GetOptions().map_entry
            _compare(field.message_type, other.message_type)
        elif field.message_type is not None:
            assert field.message_type.full_name == other.message_type.full_name
