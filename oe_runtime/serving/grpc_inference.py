"""The Open Inference Protocol over gRPC: inference.GRPCInferenceService."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from google.protobuf import json_format

from oe_runtime.errors import InputError
from oe_runtime.serving import open_inference, requests
from oe_runtime.serving.messages import message
from oe_runtime.serving.metrics import Calls
from oe_runtime.serving.versions import Asked, Versions

# The field of the values of a datatype, and their type there. FP16 and BF16 have none.
_CONTENTS = {
    "BOOL": ("bool_contents", "bool"),
    **{f"INT{bits}": ("int_contents", "int32") for bits in (8, 16, 32)},
    "INT64": ("int64_contents", "int64"),
    **{f"UINT{bits}": ("uint_contents", "uint32") for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
    "BYTES": ("bytes_contents", ""),
}

_MOST = 10_000  # inputs or outputs of a request, before each becomes several objects


class InferenceService:
    """Answers requests of a model by the name of their method."""

    def __init__(self, versions: Versions, calls: Calls) -> None:
        self._versions, self._calls = versions, calls
        self.answers: Mapping[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: message("ServerLiveResponse")(live=True),
            "ServerReady": lambda _: message("ServerReadyResponse")(ready=not versions.unavailable),
            "ModelReady": self._ready,
            "ServerMetadata": lambda _: _filled("ServerMetadata", open_inference.server_metadata()),
            "ModelMetadata": self._metadata,
            "ModelInfer": self._infer,
        }

    def _find(self, name: str, version: str) -> Asked:
        requests.check_name(name, self._versions.name)
        return open_inference.find_version(version, self._versions)

    def _ready(self, request: Any) -> Any:
        self._find(request.name, request.version)
        return message("ModelReadyResponse")(ready=not self._versions.unavailable)

    def _metadata(self, request: Any) -> Any:
        self._find(request.name, request.version)
        return _filled("ModelMetadata", open_inference.model_metadata(self._versions))

    def _infer(self, request: Any) -> Any:
        which = self._find(request.model_name, request.model_version)
        asked = open_inference.parse_request(_to_values(request), self._versions.main.signatures)
        outputs, version = self._versions.predict(which, asked.inputs, asked.signature)
        reply = message("ModelInferResponse")(
            model_name=self._versions.name, model_version=str(version), id=asked.id
        )
        found = [
            (open_inference.describe_output(name, outputs[name]), outputs[name]) for name, _ in asked.outputs
        ]
        # As the request, if the types of all outputs have a field.
        has_fields = not request.raw_input_contents and all(one["datatype"] in _CONTENTS for one, _ in found)
        for described, array in found:
            output = reply.outputs.add(**described)
            if not has_fields:
                reply.raw_output_contents.append(open_inference.to_bytes(array))
                continue
            is_text = described["datatype"] == "BYTES"
            values = open_inference.to_texts(array) if is_text else array.reshape(-1).tolist()
            getattr(output.contents, _CONTENTS[described["datatype"]][0]).extend(values)
        self._calls.add_examples(requests.count_examples(outputs))
        return reply


def _filled(name: str, values: Mapping[str, Any]) -> Any:
    return json_format.ParseDict(values, message(f"{name}Response")())


def _to_values(request: Any) -> dict[str, Any]:
    """Return a request as `parse_request` takes it. Raises InputError."""
    for where, found in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(found) > _MOST:
            raise InputError(f"the request has {len(found)} {where}; at most {_MOST} are read")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InputError(f"raw_input_contents has {len(raw)} tensors for {len(request.inputs)} inputs")
    inputs = []
    for i, one in enumerate(request.inputs):
        if raw and one.HasField("contents"):
            raise InputError(f"input {one.name!r} has contents beside raw_input_contents")
        inputs.append({**_tensor(one), "data": raw[i] if raw else _contents(one)})
    outputs = [{"name": one.name, "parameters": _parameters(one)} for one in request.outputs]
    return {"id": request.id, "parameters": _parameters(request), "inputs": inputs, "outputs": outputs}


def _tensor(one: Any) -> dict[str, Any]:
    shape = list(one.shape)
    return {"name": one.name, "datatype": one.datatype, "shape": shape, "parameters": _parameters(one)}


def _parameters(holder: Any) -> dict[str, Any]:
    chosen = ((name, one, one.WhichOneof("parameter_choice")) for name, one in holder.parameters.items())
    return {name: getattr(one, field) if field else None for name, one, field in chosen}


def _contents(one: Any) -> Any:
    """Return the values of an input, whose datatype may be none. Raises InputError for those of another."""
    field, kind = _CONTENTS.get(one.datatype, ("raw_input_contents", ""))
    if one.datatype not in open_inference.DTYPES:
        return []
    for other, _ in one.contents.ListFields():
        if other.name != field:
            raise InputError(f"input {one.name!r} has {other.name}; {one.datatype} belongs in {field}")
    values = getattr(one.contents, field, [])
    return np.fromiter(values, kind, len(values)) if kind else list(values)
