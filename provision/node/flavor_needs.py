"""System packages that each flavor of the runtime needs, in the words of ``family.py``."""

from typing import Callable, Dict, List

from . import platforms
from .step import Desired

DEFAULT = "oe_runtime"


def _oe_runtime(desired: Desired) -> List[str]:
    found, managed = [], platforms.get(desired.kind).managed
    if desired.parameter_server or managed:
        # The core links against it on every tier. (libssl is in the core, or Python needs it too.)
        found.append("libpmem")
    if managed:
        found.append("libstdc++")
        if desired.runtime_python == "python3":
            found.append("venv")
            if not desired.runtime_requirements:
                found.append("numpy")  # with a framework, pip brings its version
    return found


def _openembedding(desired: Desired) -> List[str]:
    # Its operations and Horovod's are compiled on the host against the installed TensorFlow.
    found = ["own-python"] if desired.runtime_python == "python3" else []
    found += ["toolchain"] + ([] if desired.runtime_sources else ["git"])
    if desired.worker and desired.runtime_variant == "mpi":
        found.append("mpi")
    if desired.runtime_package == "source":
        found.append("openembedding-build")
    elif desired.runtime_package and desired.pmem_mode == "fsdax":
        found.append("tbb")  # of an archive with persistent memory
    return found


def _deeprec(desired: Desired) -> List[str]:
    found = ["own-python"] if desired.runtime_python == "python3" else []
    return found + ["libpmem", "memkind"] + ([] if desired.runtime_sources else ["git"])


_NEEDS: Dict[str, Callable[[Desired], List[str]]] = {
    DEFAULT: _oe_runtime,
    "openembedding": _openembedding,
    "deeprec": _deeprec,
}


def needs(desired: Desired) -> List[str]:
    """Needs of the host's flavor, in a fixed order."""
    return _NEEDS[desired.runtime_flavor](desired)
