"""Programs of `oe_runtime.torch.export` to serve. Imports PyTorch, but not TensorFlow."""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import InputError, ServingError
from oe_runtime.model_description import FILE, PROGRAM, ROWS, Description
from oe_runtime.serving.without_rows import Arrays, WithoutRows, outside, unravel
from oe_runtime.torch.export import lookups_of, sources_of, weight_name
from oe_runtime.torch.operators import supplied


def load(path: Path) -> TorchProgram:
    """Load the program at `path`. Raises ServingError if it is none."""
    description = Description.read(path / FILE)
    file = path / PROGRAM
    content = _without_pickles(file)
    try:
        return TorchProgram(path, torch.export.load(content), description)
    except ServingError:
        raise
    except (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ServingError(f"{file}: PyTorch cannot load it: {error}") from error


class TorchProgram(WithoutRows):
    """A program of torch.export that takes its rows from an operator."""

    def __init__(self, path: Path, program: Any, description: Description) -> None:
        # By name: torch.export.load puts weights that share memory beside each other.
        names = {weight_name(name): name for name in program.state_dict}
        if names.keys() != set(description.weights):
            raise ServingError(f"{path / FILE} is of another program: its weights are {description.weights}")
        tensors = [program.state_dict[names[name]] for name in description.weights]
        super().__init__(path, description, [(tuple(one.shape), _array(one).dtype) for one in tensors])
        module = program.module()
        graph = module.graph
        lookups = lookups_of(graph)
        for number, node in enumerate(lookups):
            node.update_arg(4, number)
        if len(lookups) != len(description.lookups):
            raise ServingError(
                f"{path / FILE} is of another program: it has {len(description.lookups)} lookups"
            )
        # In PyTorch, the rows of small embeddings are weights.
        small = [node for node in graph.nodes if _is_embedding(node)]
        small = [node for node in small if sources_of([node.args[1]]).isdisjoint(lookups)]
        self._small = [int(node.args[0].meta["val"].shape[0]) for node in small]
        self._asked = _part(module, [*(node.args[0] for node in lookups), *(node.args[1] for node in small)])
        self._answer = _part(module, None)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._tensors = [state[names[name]] for name in description.weights]
        # The lengths of lists come after the first input that has them.
        every = [name for tensor in self.inputs for name in (tensor.name, tensor.lengths) if name is not None]
        self._names = list(dict.fromkeys(every))
        if (path / ROWS).is_dir():
            self.rows = path / ROWS

    def look_up(self, inputs: Arrays, client: Client) -> Mapping[str, Any]:
        """See WithoutRows."""
        with _refusals():
            asked = self._asked(*self._arguments(inputs))
        ids = [tensor.reshape(-1).numpy() for tensor in asked]
        n = len(self._lookups)
        for array, rows in zip(ids[n:], self._small, strict=True):
            if (wrong := np.flatnonzero((array < 0) | (array >= rows))).size:
                place = partial(unravel, wrong[0], len(array))
                raise outside(inputs, int(array[wrong[0]]), rows, place)
        return {"rows": self.pull(ids[:n], inputs, client) if n else []}

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """See WithoutRows."""
        with _refusals(), supplied(arguments["rows"]):
            outputs = self._answer(*self._arguments(inputs))
        names = (tensor.name for tensor in self.outputs)
        return {name: _array(value) for name, value in zip(names, outputs, strict=True)}

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """See WithoutRows."""
        with torch.no_grad():
            for tensor, array in zip(self._tensors, arrays, strict=True):
                tensor.copy_(torch.from_numpy(array))

    def _arguments(self, inputs: Arrays) -> list[Any]:
        # A copy: arrays of requests may be read-only, which PyTorch does not know.
        return [torch.from_numpy(np.array(inputs[name])) for name in self._names]


def _part(module: Any, outputs: Sequence[Any] | None) -> Any:
    """Return a module of a program's inputs that returns these nodes, or what the program does."""
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    returned = graph.graph_copy(module.graph, copies)
    graph.output(tuple(returned if outputs is None else (copies[node] for node in outputs)))
    if outputs is not None:
        needed = sources_of(copies[node] for node in outputs)
        for node in reversed(graph.nodes):
            if node not in needed and node.op not in ("placeholder", "output"):
                graph.erase_node(node)
    return torch.fx.GraphModule(module, graph)


def _is_embedding(node: Any) -> bool:
    """Whether a node looks ids up in a weight of the model."""
    of = getattr(node.target, "overloadpacket", None)
    known = (torch.ops.aten.embedding, torch.ops.aten.embedding_bag)
    return of in known and node.args[0].op == "get_attr"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise InputError for inputs that PyTorch refuses."""
    try:
        with torch.no_grad():
            yield
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"PyTorch cannot answer it: {said[:300]}") from error


def _array(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16, which NumPy lacks, as float32, as checkpoints have it."""
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    return array


# What a program of ours has below its one directory. torch.export.load unpickles what others may have, or
# loads it as a library: weights in one file, opaque objects, compiled code, the form of PyTorch 2.7.
_PARTS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|models/model\.json"
    r"|data/weights/(model_weights_config\.json|weight_\d+)"
    r"|data/constants/(model_constants_config\.json|tensor_\d+)"
    r"|data/sample_inputs/model\.pt"
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")


def _without_pickles(file: Path) -> io.BytesIO:
    """Return a program's content. Raises ServingError for one of which torch.export.load would run code."""
    try:
        content = io.BytesIO(file.read_bytes())
        with zipfile.ZipFile(content) as archive:
            names = archive.namelist()
            root = names[0].partition("/")[0] if names else ""
            for name in names:
                if names.count(name) > 1 or not _PARTS.fullmatch(name.removeprefix(f"{root}/")):
                    raise ServingError(f"{file}: it has {name}, which oe_runtime.torch.export does not write")
                if name.endswith("_config.json"):
                    payloads = json.loads(archive.read(name))["config"]
                    for key, one in payloads.items():
                        if one["use_pickle"] is not False or not _PAYLOAD.fullmatch(one["path_name"]):
                            raise ServingError(f"{file}: {key} is a pickled object, which is not loaded")
                elif name.endswith("/sample_inputs/model.pt") and (inputs := archive.read(name)):
                    torch.load(io.BytesIO(inputs), weights_only=True)
    except ServingError:
        raise
    except Exception as error:  # pickle raises of many kinds
        raise ServingError(f"{file}: cannot be read as a program of PyTorch: {error}") from error
    content.seek(0)
    return content
