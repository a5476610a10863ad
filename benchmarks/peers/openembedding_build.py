"""An environment with OpenEmbedding 0.1.2 and today's TensorFlow, for benchmarks.

PyPI has its source with the core prebuilt; only the TensorFlow operations are compiled, some minutes. It
precedes this TensorFlow by four years, so what has since gone is put in its place: Keras 2 and its old
optimizers (tf-keras), C++17, `Status::OK()`, `int64`; the operations for GPUs, which need headers that are no
longer installed, are left out.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import processes

VERSION = "0.1.2"
TENSORFLOW = ("tensorflow-cpu==2.21.*", "tf-keras==2.21.*", "setuptools<81", "wheel", "pybind11")


def python() -> Path:
    """The environment's Python; made when it is not there yet. Raises `Missing` where that fails."""
    found = processes.environment("openembedding-tensorflow", TENSORFLOW, "tensorflow")
    built = found.parents[1] / "built"
    if not built.exists():
        pip = (found, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "source"
            shutil.copytree(processes.package_source("openembedding", VERSION), source)
            modernise(source)
            processes.checked(*pip, source, CFLAGS="-O2 -w")
        built.touch()
    return found


def modernise(source: Path) -> None:
    """Change what this TensorFlow no longer has."""
    setup = source / "setup.py"
    setup.write_text(setup.read_text().replace("--std=c++14", "--std=c++17"))
    operations = source / "openembedding/tensorflow/exb_ops.cpp"
    text = operations.read_text()
    text = re.sub(r'#include "tensorflow/stream_executor/[^\n]*\n', "", text)
    text = text.replace("using namespace stream_executor;\n", "")
    executor = "struct StreamExecutor {\n  void* HostMemoryAllocate(size_t) { return nullptr; }\n"
    executor += "  void HostMemoryDeallocate(void*) {}\n};\n"
    text = text.replace("struct ExecutorHostMemory {", executor + "struct ExecutorHostMemory {")
    begin, end = (
        text.index("template <typename T>\nclass StreamSendOp"),
        text.rindex("}", 0, text.rindex("}")),
    )
    text = text[:begin] + text[end:]
    text = re.sub(r"^ *REGISTER_\w+\(GPU,.*\n", "", text, flags=re.M)
    text = re.sub(r"\\\n(?=\s*(#|$))", "\n", text, flags=re.M)  # what continued the lines that went
    text = text.replace("Status::OK()", "absl::OkStatus()")
    text = re.sub(r"\bint64\b(?![^\n]*\")", "int64_t", text)
    operations.write_text(text)
    layer = source / "openembedding/tensorflow/exb.py"
    layer.write_text(layer.read_text().replace("tf.keras.optimizers.", "tf.keras.optimizers.legacy."))
