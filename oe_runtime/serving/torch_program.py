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

from oe_runtime import _core
from oe_runtime.client import Client
from oe_runtime.errors import InputError, OeError, ServingError
from oe_runtime.model_description import FILE, PROGRAM, ROWS, Description
from oe_runtime.serving.compiled import Compiler
from oe_runtime.serving.without_rows import Arrays, WithoutRows, outside, unravel
from oe_runtime.torch.export import lookups_of, sources_of, weight_name
from oe_runtime.torch.operators import supplied


def load(path: Path, compile_to: Path | None = None) -> TorchProgram:
    """Load the program at `path`; compile it, with a directory that keeps what was compiled.

    Raises ServingError if it is none, and if it cannot be compiled.
    """
    description = Description.read(path / FILE)
    file = path / PROGRAM
    content = _without_pickles(file)
    try:
        loaded = TorchProgram(path, torch.export.load(content), description)
    except ServingError:
        raise
    except (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ServingError(f"{file}: PyTorch cannot load it: {error}") from error
    if compile_to is not None:
        loaded.compile(compile_to)
    return loaded


class TorchProgram(WithoutRows):
    """A program of torch.export that takes its rows from an operator."""

    platform = "pytorch_export"

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
        asked = [*(node.args[0] for node in lookups), *(node.args[1] for node in small)]
        self._asked = _part(module, asked)
        self._answer = _part(module, None)
        self._state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._tensors = [self._state[names[name]] for name in description.weights]
        places = [node for node in graph.nodes if node.op == "placeholder"]
        # Where each array of ids is an input as it is.
        self._sources = [places.index(node) for node in asked] if set(asked) <= set(places) else None
        self._compiled_ids: _core.TorchProgram | None = None
        self._compiled: _core.TorchProgram | None = None
        # The lengths of lists come after the first input that has them.
        every = [name for tensor in self.inputs for name in (tensor.name, tensor.lengths) if name is not None]
        self._names = list(dict.fromkeys(every))
        if (path / ROWS).is_dir():
            self.rows = path / ROWS

    def compile(self, directory: Path) -> None:
        """Compile it, or take from `directory` what was compiled before. Raises ServingError."""
        compiler = Compiler(directory, self._state)
        examples = self._examples()
        with torch.no_grad():
            ids = self._asked(*examples)
        if self._sources is None:
            self._compiled_ids = compiler.compile(self._asked, examples)
        tables = [self.description.tables[table] for table, _ in self._lookups]
        rows = [
            torch.rand(*one.shape, table["dim"], dtype=getattr(torch, _dtype_of_rows(table)))
            for one, table in zip(ids, tables, strict=False)
        ]
        self._compiled = compiler.compile(_with_rows(self._answer), [*examples, *rows])
        with torch.no_grad(), supplied([one.numpy() for one in rows]):
            expected = self._answer(*examples)
        found = self._compiled.call([one.numpy() for one in (*examples, *rows)])
        for tensor, want, have in zip(self.outputs, expected, found, strict=True):
            if not np.allclose(_array(want), have, rtol=1e-3, atol=1e-5):
                raise ServingError(
                    f"output '{tensor.name}' of {self._path} is another one when it is compiled: serve it "
                    "without --compile-to"
                )

    def _examples(self) -> list[Any]:
        """Return inputs of a few examples, with ids of 0."""
        found = {}
        for tensor in self.inputs:
            lengths = torch.tensor([2, 1, 3, 1, 2, 4])
            sizes = [len(lengths), *(tensor.shape or ())[1:]]
            if tensor.lengths is not None:
                found[tensor.lengths] = lengths
                sizes = [int(lengths.sum())]
            found[tensor.name] = torch.zeros(
                [size or 1 for size in sizes], dtype=getattr(torch, tensor.dtype)
            )
        return [found[name] for name in self._names]

    def make_predictor(self, name: str) -> _core.Predictor | None:
        """See WithoutRows. Only for a compiled program without lists."""
        if self._compiled is None or any(tensor.lengths is not None for tensor in self.inputs):
            return None
        arguments = [("input", i) for i in range(len(self.inputs))]
        arguments += [("lookup", i) for i in range(len(self._lookups))]
        count = len(self._lookups)
        try:
            return _core.Predictor(
                name,
                [(t.name, t.dtype, [-1 if n is None else n for n in t.shape or ()]) for t in self.inputs],
                [(tensor.name, tensor.dtype) for tensor in self.outputs],
                self._compiled,
                self._compiled_ids,
                arguments=arguments,
                ids_inputs=range(len(self.inputs)) if self._sources is None else self._sources[:count],
                limits=self._small,
                lookups=self._lookups,
            )
        except OeError:
            return None  # numbers of types that the core does not read

    def look_up(self, inputs: Arrays, client: Client) -> Mapping[str, Any]:
        """See WithoutRows."""
        with _refusals():
            asked = self._run(self._compiled_ids, self._asked, inputs)
        ids = [array.reshape(-1) for array in asked]
        n = len(self._lookups)
        for array, rows in zip(ids[n:], self._small, strict=True):
            if (wrong := np.flatnonzero((array < 0) | (array >= rows))).size:
                place = partial(unravel, wrong[0], len(array))
                raise outside(inputs, int(array[wrong[0]]), rows, place)
        pulled = self.pull(ids[:n], inputs, client) if n else []
        return {
            "rows": [one.reshape(*of.shape, one.shape[-1]) for one, of in zip(pulled, asked, strict=False)]
        }

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """See WithoutRows."""
        rows = arguments["rows"]
        with _refusals(), supplied(rows):
            outputs = self._run(self._compiled, self._answer, inputs, rows)
        names = (tensor.name for tensor in self.outputs)
        return dict(zip(names, outputs, strict=True))

    def _run(
        self, compiled: _core.TorchProgram | None, module: Any, inputs: Arrays, rows: Sequence[Any] = ()
    ) -> list[NDArray[Any]]:
        """Return what a part of the program does, by its compiled form if there is one."""
        arrays = [np.array(inputs[name]) for name in self._names]  # a copy: those of requests are read-only
        if compiled is not None:
            with contextlib.suppress(OeError):  # PyTorch has words for it
                return compiled.call([*arrays, *rows])
        return [_array(value) for value in module(*(torch.from_numpy(array) for array in arrays))]

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """See WithoutRows."""
        with torch.no_grad():
            for tensor, array in zip(self._tensors, arrays, strict=True):
                tensor.copy_(torch.from_numpy(array))


def _dtype_of_rows(table: Mapping[str, Any]) -> str:
    return "float64" if table["dtype"] == "float64" else "float32"


def _with_rows(module: Any) -> Any:
    """Return a program that takes the rows of each lookup as a further argument."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    (*_, last) = (node for node in graph.nodes if node.op == "placeholder")
    for number, node in enumerate(lookups_of(graph)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"rows_{number}")
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(module, graph)


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
