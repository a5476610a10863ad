"""What the peers need, fetched and built in a cache that git ignores; nothing is committed or installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "benchmark-engine"
FBGEMM = ("torch==2.13.0+cpu", "numpy", "fbgemm-gpu-cpu==1.8.0")
TFRA = ("tensorflow-cpu==2.16.2", "tf-keras==2.16.0", "tensorflow-recommenders-addons==0.8.1")
DEBIAN = ("libboost1.81-dev", "libabsl-dev")  # 1.81 is the first with unordered_flat_map
ABSEIL = ("raw_hash_set", "hash", "city", "low_level_hash", "hashtablez_sampler", "raw_logging_internal")


class Missing(Exception):
    """A peer that cannot be had here, and why."""


@dataclass(frozen=True)
class Built:
    """A command that a contender is started with, before its own arguments."""

    command: tuple[str, ...]


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    try:
        subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, cwd=cwd)
    except FileNotFoundError as error:
        raise Missing(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no output").splitlines()[-1]
        raise Missing(f"{Path(str(command[0])).name} failed: {last[:150]}") from error


def _compile(source: Path, program: Path, *flags: str | Path) -> None:
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        _run("g++", "-std=c++17", "-O3", "-march=x86-64-v3", source, "-o", program, *flags)


def openembedding() -> Built:
    """OpenEmbedding's prebuilt core with a worker and a server around it."""
    folder = CACHE / "openembedding-0.1.2" / "openembedding"
    if not (folder / "libcexb_pack.so").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:")
        _run(*pip, "-d", CACHE, "openembedding==0.1.2")
        _run("tar", "-xzf", CACHE / "openembedding-0.1.2.tar.gz", "-C", CACHE)
    program = CACHE / "openembedding"
    library = folder / "libcexb_pack.so"
    _compile(HERE / "openembedding.cc", program, f"-I{folder / 'entry'}", library, f"-Wl,-rpath,{folder}")
    return Built((str(program),))


def fbgemm() -> Built:
    """A virtual environment with FBGEMM for the CPU."""
    return _environment("fbgemm", FBGEMM, "fbgemm_gpu")


def _environment(name: str, requirements: tuple[str, ...], module: str) -> Built:
    python = CACHE / name / "bin" / "python"
    if not (CACHE / name / "complete").exists():
        _run(sys.executable, "-m", "venv", "--clear", CACHE / name)
        _run(python, "-m", "pip", "install", "-q", *requirements)
        _run(python, "-c", f"import {module}")
        (CACHE / name / "complete").touch()
    return Built((str(python), str(HERE / f"{name}.py")))


def tfra() -> Built:
    """A virtual environment with TensorFlow Recommenders Addons and the last TensorFlow it works with."""
    return _environment("tfra", TFRA, "tensorflow_recommenders_addons.dynamic_embedding")


def maps() -> Built:
    """The comparison with plain maps, which links our core too."""
    usr = CACHE / "debian" / "usr"
    if not (usr / "include" / "absl").exists() or not (usr / "include" / "boost").exists():
        (CACHE / "debian").mkdir(parents=True, exist_ok=True)
        _run("apt-get", "download", *DEBIAN, cwd=CACHE)
        for package in CACHE.glob("*.deb"):
            _run("dpkg", "-x", package, CACHE / "debian")
    build = CACHE / "core"
    if not (build / "build.ninja").exists():
        options = ("-DOE_BUILD_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release")
        _run("cmake", "-G", "Ninja", "-S", ROOT, "-B", build, *options)
    _run("cmake", "--build", build, "--target", "oe_core")
    core = build / "oe_runtime" / "core" / "liboe_core.a"
    program = CACHE / "maps"
    if program.exists() and program.stat().st_mtime < core.stat().st_mtime:
        program.unlink()
    libraries = [usr / "lib" / "x86_64-linux-gnu" / f"libabsl_{name}.a" for name in ABSEIL]
    flags = [f"-I{ROOT}", f"-isystem{usr / 'include'}", "-DXXH_INLINE_ALL"]
    _compile(HERE / "maps.cc", program, *flags, core, *libraries, "-lpmem", "-lpthread")
    return Built((str(program),))
