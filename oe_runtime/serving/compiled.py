"""Programs of PyTorch, compiled by its AOTInductor for this machine. Imports PyTorch, but not TensorFlow."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from oe_runtime import _core
from oe_runtime.errors import OeError, ServingError
from oe_runtime.support import durable
from oe_runtime.torch.operators import pool_bags

_CALLS_PYTHON = b"aoti_torch_proxy_executor_call_function"  # of an operator without a form in C


class Compiler:
    """Compiles parts of a program, and keeps them in a directory for the next start."""

    def __init__(self, directory: Path, weights: Mapping[str, Any]) -> None:
        """`weights` are the program's tensors, by name; compiled parts read them where they are."""
        self._directory = directory
        self._weights = weights

    def compile(self, module: Any, examples: Sequence[Any]) -> _core.TorchProgram:
        """Return a graph compiled for any size of the first dimension of each argument.

        Takes up to a minute, or a moment if `directory` has it. Raises ServingError for what cannot be
        compiled here.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            library = self._directory / f"{_digest(module, examples)}.so"
            with (self._directory / "lock").open("w") as lock:  # several processes of one export
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    self._write(module, examples, library)
        except OSError as error:
            raise ServingError(f"{self._directory}: {error.strerror or error}") from error
        weights = [
            (name, str(one.dtype).removeprefix("torch."), one.data_ptr(), list(one.shape), list(one.stride()))
            for name, one in self._weights.items()
        ]
        torch_library = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        try:
            return _core.TorchProgram(str(library), torch_library, weights, os.cpu_count() or 1)
        except OeError as error:
            raise ServingError(f"{library}: {error}; remove it to compile it again") from error

    def _write(self, module: Any, examples: Sequence[Any], library: Path) -> None:
        for path in (str(Path(torch.__file__).parent), str(self._directory.absolute())):
            if len(path.split()) > 1:
                raise ServingError(
                    f"PyTorch cannot compile where a path has spaces: {path}; use another place"
                )
        module = torch.fx.GraphModule(module, _to_compile(module.graph))  # export changes its module
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            package = Path(scratch) / "compiled.pt2"
            _build(module, examples, package)
            with zipfile.ZipFile(package) as archive:
                names = archive.namelist()
                for name in names:
                    if name.endswith(".cpp") and _CALLS_PYTHON in archive.read(name):
                        raise ServingError(
                            "the model has operators that PyTorch does not compile: serve it without "
                            "--compile-to"
                        )
                (built,) = (name for name in names if name.endswith(".so"))
                (Path(scratch) / "library").write_bytes(archive.read(built))
            durable.rename(Path(scratch) / "library", library)


def _build(module: Any, examples: Sequence[Any], package: Path) -> None:
    """Compile a graph; leave nothing else. Raises ServingError."""
    sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in examples)
    try:
        with torch.no_grad(), fresh_cache(dir=str(package.parent)):
            program = torch.export.export(module, tuple(examples), dynamic_shapes=sizes)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(package), inductor_configs=dict(_OPTIONS)
            )
    except Exception as error:  # of many kinds
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            raise ServingError("PyTorch needs a C++ compiler to compile: install g++") from error
        said = " ".join(str(error).split())[:500] or type(error).__name__
        raise ServingError(
            f"PyTorch cannot compile the model, serve it without --compile-to: {said}"
        ) from error


# A request's thread is enough. Weights stay where Python's PyTorch has them, which exchanges their values:
# else small ones would be numbers of the code. Compiled headers would stay in /tmp.
_OPTIONS = {
    "cpp.threads": 1,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
}


def _digest(module: Any, examples: Sequence[Any]) -> str:
    """Return what names a compiled graph: everything but the values of weights."""
    parts = [torch.__version__, _processor(), str(_OPTIONS)]
    parts += [one.code for one in module.modules() if isinstance(one, torch.fx.GraphModule)]
    parts += [f"{one.dtype} {tuple(one.shape)}" for one in examples]
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parts += [f"{name} {one.dtype} {tuple(one.shape)}" for name, one in sorted(state.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return what the compiler knows of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _to_compile(graph: Any) -> Any:
    """Return the graph with PyTorch's operators in place of our own, and its outputs' numbers in a row."""
    found = torch.fx.Graph()
    outputs = found.graph_copy(graph, {})
    found.output(tuple(found.call_method("contiguous", (one,)) for one in outputs))
    for node in found.nodes:
        if node.target is torch.ops.oe_runtime.bags.default:
            node.target = pool_bags
    return found
