"""OpenEmbedding as it is: its package, the TensorFlow that it takes, Horovod and DeepCTR, and its scripts.

Versions are those of its documents (documents/en/pmem.md, README.md), and those that an installation of these
turned out to need. A package that is built on the host follows documents/en/pmem.md, "Build", and
docker/Dockerfile.base: what its network layer needs goes to ``tools`` beside the sources, PMDK 1.9 and
libpmemobj++ 1.10 or newer too where the system's are older, and ``USE_PMEM=1 ./build.sh build`` makes an
archive for pip. All comes from the projects themselves.
"""

import os
import re
from typing import List, NamedTuple, Tuple

from . import cuda, families, foreign, platforms
from .command import System
from .runtime import interpreter
from .state import OsInfo, Runtime, State
from .step import Desired, Step

PACKAGE = "openembedding==0.1.2"
REPOSITORY = "https://github.com/4paradigm/OpenEmbedding.git"
REVISION = "v0.1.2"
SERVER = "test/benchmark/server.py"
HOROVOD = "horovod==0.28.1"
SOURCE = "source"  # what runtime_package says for a package that is built on the host
_VERSION = "0.1.2"
_PMDK = ("https://github.com/pmem/pmdk.git", "1.12.1")
_CPP = ("https://github.com/pmem/libpmemobj-cpp.git", "1.13.0")
_THIRD_PARTY = (
    "gflags glog googletest sparsehash zlib snappy lz4 boost yaml jemalloc prometheus-cpp avro-cpp zookeeper "
    "protobuf leveldb openssl brpc eigen"
)
_SCRIPT = """\
cd {sources}
git submodule update --init --checkout --recursive
export prefix=$PWD/tools THIRD_PARTY=$PWD/tools
export PKG_CONFIG_PATH=$prefix/lib64/pkgconfig:$prefix/lib/pkgconfig
export LIBRARY_PATH=$prefix/lib64:$prefix/lib CPLUS_INCLUDE_PATH=$prefix/include
(cd pico-ps/pico-core && third_party/prepare.sh build {parts})
if ! pkg-config --atleast-version=1.9 libpmem || ! pkg-config --atleast-version=1.9 libpmemobj; then
  rm -rf tools/pmdk
  git clone --depth 1 --branch {pmdk[1]} {pmdk[0]} tools/pmdk
  make -C tools/pmdk -j "$(nproc)" NDCTL_ENABLE=n DOC=n prefix=$prefix install
fi
if ! pkg-config --atleast-version=1.10 libpmemobj++; then
  rm -rf tools/libpmemobj-cpp
  git clone --depth 1 --branch {cpp[1]} {cpp[0]} tools/libpmemobj-cpp
  options=
  for each in TESTS EXAMPLES DOC BENCHMARKS; do options="$options -DBUILD_$each=OFF"; done
  cmake -S tools/libpmemobj-cpp -B tools/libpmemobj-cpp/build -DCMAKE_INSTALL_PREFIX=$prefix $options
  make -C tools/libpmemobj-cpp/build install
fi
./build.sh clean
USE_PMEM=1 SKIP_CHECK_WHEEL_SETUP=1 VERSION={version} PYTHON={python} ./build.sh build
"""
_PYPI = re.compile(r"[A-Za-z0-9._-]+\s*([=<>!~].*)?")


class Stack(NamedTuple):
    """A TensorFlow that OpenEmbedding builds against, and compatible versions."""

    tensorflow: str
    pythons: List[str]  # that TensorFlow has wheels for
    pins: List[str]  # without them pip takes later, incompatible versions


STACKS = [
    Stack(
        "2.2.0",
        ["3.6", "3.7", "3.8"],
        ["numpy<1.19", "h5py<2.11", "protobuf<3.21", "pandas<1.2", "scikit-learn<1.1"],
    ),
    Stack(
        "2.5.1",
        ["3.6", "3.7", "3.8", "3.9"],
        ["numpy~=1.19.2", "protobuf<3.21", "pandas<1.3", "scikit-learn<1.1"],
    ),
]


def stack_of(desired: Desired, python: str) -> Stack:
    """The wanted one, or the newest for this Python; the last one if none fits."""
    fitting = [item for item in STACKS if desired.runtime_tensorflow in ("", item.tensorflow)]
    running = [item for item in fitting if python in item.pythons]
    return (running or fitting or STACKS)[-1]


def wanted(desired: Desired, python: str) -> foreign.Wanted:
    """The environment of this host."""
    stack, package = stack_of(desired, python), desired.runtime_package or PACKAGE
    revision = desired.runtime_revision or REVISION
    framework = "tensorflow" if platforms.get(desired.kind).has_gpus else "tensorflow-cpu"
    pypi, source = bool(_PYPI.fullmatch(package)), package == SOURCE
    sources = foreign.sources_of(desired)
    pins = [item for item in stack.pins if desired.worker or not item.startswith(("pandas", "scikit"))]
    tensorflow = f"{framework}=={stack.tensorflow}"
    pip = [
        ["--upgrade", "pip", "setuptools<60", "wheel"],
        [tensorflow, "pybind11", "psutil"] + pins,
    ]
    # A new enough cmake in the environment itself.
    pip += [["cmake>=3.13,<4"], [foreign.COMPILE]] if source else []
    # Its operations are compiled against the installed TensorFlow, not against one that pip fetches.
    pip.append(["--no-build-isolation", _built_archive(sources) if source else package])
    needs = [package if pypi and not source else "openembedding", "psutil", tensorflow]
    if desired.worker:
        # DeepCTR requires another h5py than this TensorFlow, but works with this one.
        pip.append(["--no-deps", "deepctr==0.9.3"])
        needs += ["deepctr", "pandas", "scikit-learn"]
    if desired.worker and desired.runtime_variant in ("horovod", "standalone"):
        pip.append(["packaging", "cloudpickle", "pyyaml", "cffi"])
        pip.append(_horovod(platforms.get(desired.kind).has_gpus))
        needs.append(HOROVOD)
    if desired.worker and desired.runtime_variant == "mpi":
        pip.append(["mpi4py"])
        needs.append("mpi4py")
    return foreign.Wanted(
        title=f"OpenEmbedding ({package}) for TensorFlow {stack.tensorflow}",
        requirements=needs,
        package="{} {}".format(package + " " + revision if source else package, tensorflow),
        pip=pip,
        check=["-c", "import openembedding.tensorflow"],
        repository=desired.runtime_repository or REPOSITORY,
        revision=revision,
        folders=[],
        script=SERVER,
        compile=_build_script(sources, interpreter(desired.runtime_venv)) if source else "",
    )


def _build_script(sources: str, python: str) -> str:
    """The script for bash; ``python`` is the environment's, which has pybind11."""
    return _SCRIPT.format(
        sources=sources, python=python, version=_VERSION, parts=_THIRD_PARTY, pmdk=_PMDK, cpp=_CPP
    )


def _built_archive(sources: str) -> str:
    """The archive that the build makes."""
    return os.path.join(sources, "build", "pypi", "dist", f"openembedding-{_VERSION}.tar.gz")


def _horovod(gpus: bool) -> List[str]:
    """pip's words for Horovod with Gloo, for TensorFlow only."""
    without = [f"HOROVOD_WITHOUT_{name}=1" for name in ("MPI", "PYTORCH", "MXNET")]
    gpu = ["HOROVOD_GPU_OPERATIONS=NCCL"] if gpus else []
    given = ["HOROVOD_WITH_TENSORFLOW=1", "HOROVOD_WITH_GLOO=1"]
    return given + without + gpu + ["--no-build-isolation", HOROVOD]


def observe(system: System, os_info: OsInfo, desired: Desired) -> Runtime:
    """Observe the environment and the sources."""
    state = State(os=os_info, runtime=Runtime(venv=desired.runtime_venv))
    base = foreign.look(system, os_info, desired, wanted(desired, foreign.version_of(state, desired)))
    python = foreign.version_of(state._replace(runtime=base), desired)
    right = wanted(desired, python)
    # The requirements depend on the Python.
    found = foreign.look(system, os_info, desired, right)
    return found if found.made or not found.exists else _theirs(system, os_info, desired, found)


def _theirs(system: System, os_info: OsInfo, desired: Desired, found: Runtime) -> Runtime:
    """Observe an environment that oeprov did not make; its versions may differ from oeprov's."""
    needs = [item for item in wanted(desired, "").requirements if not item.startswith("tensorflow")]
    names = [re.split("[=<>]", item)[0] for item in needs]
    loose = wanted(desired, "")._replace(requirements=names)
    return foreign.look(system, os_info, desired, loose)._replace(base=found.base)


def plan(state: State, desired: Desired) -> List[Step]:
    """Steps for the environment and the scripts."""
    return foreign.plan(state, desired, wanted(desired, foreign.version_of(state, desired)))


def problems(state: State, desired: Desired) -> List[str]:
    """Why OpenEmbedding cannot run on this host, and what would."""
    python = foreign.version_of(state, desired)
    found = foreign.problems(state, desired, wanted(desired, python))
    theirs = state.runtime.exists and not state.runtime.made
    return found if theirs else found + _versions(state, desired, python)


def _versions(state: State, desired: Desired, python: str) -> List[str]:
    """Incompatible versions."""
    asked = desired.runtime_tensorflow
    fitting = [item for item in STACKS if asked in ("", item.tensorflow)]
    known = "; ".join(
        f"TensorFlow {item.tensorflow} (Python {item.pythons[0]} to {item.pythons[-1]})" for item in STACKS
    )
    if not fitting:
        return [
            f"runtime_tensorflow: found {asked!r}; OpenEmbedding is known to be built against: {known}; with "
            "another one, make the environment yourself and name it as runtime_venv"
        ]
    if not python or any(python in item.pythons for item in fitting):
        return []
    good = sorted({version for item in fitting for version in item.pythons})
    why = f"runtime_python {desired.runtime_python} is Python {python}"
    others = [item.tensorflow for item in STACKS if python in item.pythons]
    cure = f"set runtime_python to the path of a Python {good[0]} to {good[-1]} (pyenv, conda, your site's)"
    if others:
        cure = f"set runtime_tensorflow: {others[-1]!r}, or {cure}"
    return [
        "{}, for which {}: {}; flavor oe_runtime runs on Python 3.10 and later".format(
            why,
            f"there is no TensorFlow {asked}"
            if asked
            else "there is no TensorFlow that OpenEmbedding is built against",
            cure,
        )
    ]


def framework(state: State, desired: Desired) -> Tuple[List[str], str]:
    """The TensorFlow of a worker, and its Python; none if oeprov did not choose it, or none fits."""
    python, theirs = foreign.version_of(state, desired), state.runtime.exists and not state.runtime.made
    if not desired.worker or theirs or _versions(state, desired, python):
        return [], python
    return ["tensorflow==" + stack_of(desired, python).tensorflow], python


def notes(state: State, desired: Desired) -> List[str]:
    """Notes on its connections, its build and persistent memory."""
    found = (
        ["OpenEmbedding's connections are neither encrypted nor authenticated"]
        if platforms.get(desired.kind).managed
        else []
    )
    right, runtime = wanted(desired, foreign.version_of(state, desired)), state.runtime
    compiled = HOROVOD in right.requirements and (not runtime.exists or HOROVOD in runtime.missing)
    build = cuda.build_of(stack_of(desired, foreign.version_of(state, desired)).tensorflow)
    if platforms.get(desired.kind).has_gpus and compiled and build is not None:
        headers = ", ".join(families.names(state.os, "nccl-headers"))
        found.append(
            "Horovod is compiled for NCCL, which needs nvcc and NCCL's headers: runtime_packages: "
            f"[cuda-toolkit-{build.cuda.replace('.', '-')}, {headers}]"
        )
    if desired.runtime_package == SOURCE and not state.runtime.exists:
        found.append(
            f"OpenEmbedding is built on this host from {right.repository} and its dependencies, with PMDK: "
            "that takes an hour or more, 10 GB, and access to the projects' servers"
        )
    if desired.parameter_server and desired.pmem_mode == "fsdax" and has_no_pmem(desired.runtime_package):
        found.append(
            f"{desired.runtime_package or PACKAGE} from PyPI was built without persistent memory: rows stay "
            "in DRAM unless runtime_package names an archive such as openembedding-0.1.2-pmem.tar.gz, or is "
            "source"
        )
    return found


def has_no_pmem(package: str) -> bool:
    """It is PyPI's package, whose core was built without PMDK."""
    return package != SOURCE and bool(_PYPI.fullmatch(package or PACKAGE))
