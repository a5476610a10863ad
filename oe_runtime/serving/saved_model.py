"""SavedModels to serve, with or without rows. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import context

from oe_runtime import _core
from oe_runtime.client import Client
from oe_runtime.errors import InputError, OeError, ServingError
from oe_runtime.model_description import FILE, SIGNATURE, Description, Signature, Tensor
from oe_runtime.serving.without_rows import Arrays, WithoutRows, outside

_PLATFORM = "tensorflow_savedmodel"


def load(path: Path) -> SavedWithoutRows | WithRows:
    """Load the SavedModel at `path`. Raises ServingError if it is none."""
    if not (path / "saved_model.pb").exists():
        raise ServingError(
            f"{path} is not a model to serve: save_serving_model or save_as_original_model writes one"
        )
    try:
        loaded = tf.saved_model.load(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ServingError(f"{path}: TensorFlow cannot load it: {error}") from error
    if (path / FILE).exists():
        return SavedWithoutRows(path, loaded, Description.read(path / FILE))
    return WithRows(path, loaded)


class WithRows:
    """A SavedModel that includes its rows, served by its signatures."""

    platform = _PLATFORM

    def __init__(self, path: Path, loaded: Any) -> None:
        try:
            self._function = loaded.signatures[SIGNATURE]
        except KeyError:
            raise ServingError(f"{path} has no signature {SIGNATURE}") from None
        self._loaded = loaded  # its variables live as long as it does
        own = _signature(self._function)
        self.inputs, self.outputs = own.inputs, own.outputs
        self.others = {n: _signature(one) for n, one in loaded.signatures.items() if n != SIGNATURE}

    def predict(self, inputs: Arrays, signature: str) -> dict[str, NDArray[Any]]:
        """Return a signature's outputs by name. Raises InputError."""
        with _refusals(inputs):
            outputs = self._loaded.signatures[signature](
                **{name: _constant(array) for name, array in inputs.items()}
            )
        return {name: np.asarray(value) for name, value in outputs.items()}

    def make_predictor(self, name: str) -> _core.Predictor | None:
        """See WithoutRows."""
        names = [tensor.name for tensor in self.inputs]
        places = [("input", names.index(one)) for one in _arguments_of(self._function)]
        return _predictor(name, self.inputs, self.outputs, self._function, places)


class SavedWithoutRows(WithoutRows):
    """A SavedModel that takes its rows as arguments."""

    platform = _PLATFORM

    def __init__(self, path: Path, loaded: Any, description: Description) -> None:
        self._variables = loaded.weights
        weights = [(tuple(one.shape), np.dtype(one.dtype.as_numpy_dtype)) for one in loaded.weights]
        super().__init__(path, description, weights)
        self._loaded = loaded
        self._forward = loaded.signatures["forward"]
        self._ids = loaded.signatures["ids"] if description.lookups else None

    def make_predictor(self, name: str) -> _core.Predictor | None:
        """See WithoutRows."""
        places = []
        for argument in _arguments_of(self._forward):
            kind, _, number = argument.partition("_")
            places.append((kind, int(number or 0)))
        rows: dict[str, Any] = {}
        if self._ids is not None:
            inputs = [int(one.partition("_")[2]) for one in _arguments_of(self._ids)]
            rows = {"lookups": self._lookups, "groups": self.description.groups}
            sources = _sources_of_ids(self._ids, [tensor.dtype for tensor in self.inputs])
            if sources is not None:
                rows["ids_inputs"] = sources
            elif len(self._ids.outputs) <= _FEW:  # in the order of ids_0, ids_1, …
                rows |= {"ids": self._ids, "ids_inputs": inputs}
            else:
                return None
        return _predictor(name, self.inputs, self.outputs, self._forward, places, **rows)

    def look_up(self, inputs: Arrays, client: Client) -> dict[str, Any]:
        """See WithoutRows."""
        tensors = {f"input_{i}": _constant(inputs[t.name]) for i, t in enumerate(self.inputs)}
        rows: list[Any] = []
        if self._ids is not None:
            asked = self._ids(**tensors)
            rows = self.pull([asked[f"ids_{n}"].numpy() for n in range(len(asked))], inputs, client)
        groups = {
            f"rows_{i}": tf.constant(np.concatenate([rows[lookup] for lookup in group]))
            for i, group in enumerate(self.description.groups)
        }
        sizes = tf.constant([len(part) for part in rows], tf.int64)
        return {"sizes": sizes, **groups, **tensors}

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """See WithoutRows."""
        with _refusals(inputs):
            outputs = self._forward(**arguments)
        return {name: np.asarray(value) for name, value in outputs.items()}

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """See WithoutRows."""
        for variable, array in zip(self._variables, arrays, strict=True):
            variable.assign(array)


def _arguments_of(function: Any) -> list[str]:
    """Return the names of a signature's arguments, in the order of its graph."""
    return list(function._arg_keywords)


def _function(function: Any, outputs: int) -> _core.TensorFlowFunction:
    """Return a signature's function in TensorFlow's context, with the variables that it reads."""
    directory = Path(tf.__file__).parent
    return _core.TensorFlowFunction(
        str(directory / "libtensorflow_cc.so.2"),
        str(directory / "python" / "lib_pywrap_tensorflow_common.so"),
        context.context()._handle,
        function.function_def.signature.name,
        list(function.captured_inputs),
        outputs,
    )


def _predictor(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    forward: Any,
    arguments: Sequence[tuple[str, int]],
    ids: Any = None,
    **rows: Any,
) -> _core.Predictor | None:
    """Return a predictor of the core; None for types that it does not read, or in other TensorFlows."""
    if any(tensor.shape is None for tensor in inputs):
        return None
    types = {tensor.name: tensor.dtype for tensor in outputs}
    try:
        return _core.Predictor(
            name,
            [(t.name, t.dtype, [-1 if n is None else n for n in t.shape or ()]) for t in inputs],
            [(one, types[one]) for one in sorted(types)],  # as TensorFlow flattens them
            _function(forward, len(types)),
            None if ids is None else _function(ids, len(ids.outputs)),
            arguments=arguments,
            **rows,
        )
    except OeError:
        return None


_FEW = 10  # names with one digit, which TensorFlow sorts as they count
_KEEPS_IDS = ("Identity", "Reshape", "ExpandDims", "Squeeze")


def _sources_of_ids(function: Any, dtypes: Sequence[str]) -> list[int] | None:
    """Return of each output of `ids` which input it is, flat; None if one is computed in another way."""
    definition = function.graph.as_graph_def()
    functions = {one.signature.name: one for one in definition.library.function}
    outer = {node.name: node for node in definition.node}

    def follow(tensor: str, nodes: Mapping[str, Any], inputs: Mapping[str, str | None]) -> str | None:
        """Return the input of the graph, as `inputs` names it, that a tensor has the values of."""
        name, _, place = tensor.partition(":")
        if name in inputs:
            return inputs[name]
        node = nodes[name]
        if node.op in _KEEPS_IDS or (node.op == "Cast" and node.attr["DstT"].type == tf.int64):
            return follow(node.input[0], nodes, inputs)
        if node.op not in ("PartitionedCall", "StatefulPartitionedCall"):
            return None
        called = functions[node.attr["f"].func.name]
        arguments = [argument.name for argument in called.signature.input_arg]
        given = {a: follow(source, nodes, inputs) for a, source in zip(arguments, node.input, strict=False)}
        output = called.signature.output_arg[int(place.rpartition(":")[2] or 0)].name
        return follow(called.ret[output], {one.name: one for one in called.node_def}, given)

    own = {node.name: node.name for node in definition.node if node.op == "Placeholder"}
    sources = []
    for name, output in zip(sorted(function.structured_outputs), function.outputs, strict=True):
        source = follow(output.name, outer, own)
        if source is None or not source.startswith("input_"):
            return None
        sources.append((int(name.partition("_")[2]), int(source.partition("_")[2])))
    found = [source for _, source in sorted(sources)]
    return found if all(dtypes[source] in ("int32", "int64") for source in found) else None


# What TensorFlow's gather says of an id.
_OUTSIDE_OF_ROWS = re.compile(r"indices(?:\[([\d,]*)\])? = (-?\d+) is not in \[0, (\d+)\)")
_OF_GRAPH = re.compile(
    r"\[\[.*?\]\]|\[Op:.*?\]|^(Graph execution error|Detected at node|<stack traces).*$", re.M
)


@contextlib.contextmanager
def _refusals(inputs: Arrays) -> Iterator[None]:
    """Raise InputError for inputs that TensorFlow refuses, without the names of its graph."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if found := _OUTSIDE_OF_ROWS.search(error.message):
            place = tuple(int(n) for n in (found[1] or "").split(",") if n)
            raise outside(
                inputs,
                int(found[2]),
                int(found[3]),
                lambda a: (
                    place if np.shape(place) == (a.ndim,) and np.all(place < np.array(a.shape)) else None
                ),
            ) from error
        said = " ".join(_OF_GRAPH.sub("", error.message).split())
        raise InputError(f"TensorFlow cannot answer it: {said[:300]}") from error


def _constant(array: NDArray[Any]) -> Any:
    return tf.constant(array, tf.string if array.dtype == object else None)


def _signature(function: Any) -> Signature:
    return Signature(
        [_tensor(name, spec) for name, spec in function.structured_input_signature[1].items()],
        [_tensor(name, spec) for name, spec in function.structured_outputs.items()],
    )


def _tensor(name: str, spec: Any) -> Tensor:
    return Tensor(name, spec.dtype.name, None if spec.shape.rank is None else spec.shape.as_list())
