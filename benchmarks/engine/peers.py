"""The commands that start the engine's peers, which processes.py fetches and builds."""

from __future__ import annotations

from pathlib import Path

import processes
from processes import BUILD, ROOT, compile_peer

HERE = Path(__file__).parent
FBGEMM = ("torch==2.13.0+cpu", "numpy", "fbgemm-gpu-cpu==1.8.0")
TFRA = ("tensorflow-cpu==2.16.2", "tf-keras==2.16.0", "tensorflow-recommenders-addons==0.8.1")
DEBIAN = ("libboost1.81-dev", "libabsl-dev")  # 1.81 is the first with unordered_flat_map
ABSEIL = ("raw_hash_set", "hash", "city", "low_level_hash", "hashtablez_sampler", "raw_logging_internal")


def openembedding() -> tuple[str, ...]:
    """OpenEmbedding's prebuilt core with a worker and a server around it."""
    folder = processes.package_source("openembedding", "0.1.2") / "openembedding"
    library = folder / "libcexb_pack.so"
    flags = (f"-I{folder / 'entry'}", library, f"-Wl,-rpath,{folder}")
    return (str(compile_peer(HERE / "openembedding.cc", *flags)),)


def fbgemm() -> tuple[str, ...]:
    """FBGEMM for the CPU."""
    return (str(processes.environment("fbgemm", FBGEMM, "fbgemm_gpu")), str(HERE / "fbgemm.py"))


def tfra() -> tuple[str, ...]:
    """TensorFlow Recommenders Addons and the last TensorFlow it works with."""
    module = "tensorflow_recommenders_addons.dynamic_embedding"
    return (str(processes.environment("tfra", TFRA, module)), str(HERE / "tfra.py"))


def maps() -> Path:
    """The comparison with plain maps, which links our core too."""
    usr = processes.debian("maps", DEBIAN) / "usr"
    processes.build("oe_core")
    core = BUILD / "oe_runtime" / "core" / "liboe_core.a"
    program = processes.CACHE / "maps.program"
    if program.exists() and program.stat().st_mtime < core.stat().st_mtime:
        program.unlink()
    libraries = [usr / "lib" / "x86_64-linux-gnu" / f"libabsl_{name}.a" for name in ABSEIL]
    flags = [f"-I{ROOT}", f"-isystem{usr / 'include'}", "-DXXH_INLINE_ALL"]
    return compile_peer(HERE / "maps.cc", *flags, core, *libraries, "-lpmem", "-lpthread")
