"""Compatible versions on a GPU host: TensorFlow, Python, CUDA, cuDNN, driver, GPU. Data and rules.

Sources, looked up on 2026-11-22:

- TensorFlow, Python, cuDNN, CUDA: tensorflow.org/install/source, "Tested build configurations", Linux, GPU
  (tensorflow/docs, site/en/install/source.md, commit 07007c36).
- Which releases bring CUDA as wheels, and their NCCL: extra ``and-cuda`` in the metadata of tensorflow on
  PyPI (2.14.1 to 2.21.0).
- Least driver: CUDA Toolkit Release Notes, "CUDA Toolkit and Corresponding Driver Versions", and from CUDA
  11.2 on that for minor version compatibility (docs.nvidia.com/deploy/cuda-compatibility): 450.80.02 for
  11.x, 525.60.13 for 12.x.
- Architectures: device ids of the PCI ID repository (pci-ids.ucw.cz); the first CUDA that compiles for them
  and the last driver branch: "CUDA Toolkit, Driver, and Architecture Matrix" of
  docs.nvidia.com/datacenter/tesla/drivers, and CUDA 13.0's release notes, "Deprecated Architectures"; open
  kernel modules: NVIDIA Driver Installation Guide, "Kernel Modules".
"""

import re
from typing import List, NamedTuple, Optional, Tuple

Version = Tuple[int, ...]


class Build(NamedTuple):
    """Versions that one release of TensorFlow for GPUs was built and tested with."""

    tensorflow: str
    first_python: str
    last_python: str
    cuda: str
    cudnn: str
    driver: str  # the oldest that runs this CUDA
    nccl: str = ""  # of the wheels; empty: TensorFlow has its own, and CUDA must be on the host

    @property
    def wheels(self) -> bool:
        """CUDA comes with ``tensorflow[and-cuda]``."""
        return bool(self.nccl)


BUILDS = [
    Build("2.2", "3.5", "3.8", "10.1", "7.6", "418.39"),
    Build("2.3", "3.5", "3.8", "10.1", "7.6", "418.39"),
    Build("2.4", "3.6", "3.8", "11.0", "8.0", "450.51.05"),
    Build("2.5", "3.6", "3.9", "11.2", "8.1", "450.80.02"),
    Build("2.6", "3.6", "3.9", "11.2", "8.1", "450.80.02"),
    Build("2.7", "3.7", "3.9", "11.2", "8.1", "450.80.02"),
    Build("2.8", "3.7", "3.10", "11.2", "8.1", "450.80.02"),
    Build("2.9", "3.7", "3.10", "11.2", "8.1", "450.80.02"),
    Build("2.10", "3.7", "3.10", "11.2", "8.1", "450.80.02"),
    Build("2.11", "3.7", "3.10", "11.2", "8.1", "450.80.02"),
    Build("2.12", "3.8", "3.11", "11.8", "8.6", "450.80.02"),
    Build("2.13", "3.8", "3.11", "11.8", "8.6", "450.80.02"),
    Build("2.14", "3.9", "3.11", "11.8", "8.7", "450.80.02", "2.16.5"),
    Build("2.15", "3.9", "3.11", "12.2", "8.9", "525.60.13", "2.16.5"),
    Build("2.16", "3.9", "3.12", "12.3", "8.9", "525.60.13", "2.19.3"),
    Build("2.17", "3.9", "3.12", "12.3", "8.9", "525.60.13", "2.19.3"),
    Build("2.18", "3.9", "3.12", "12.5", "9.3", "525.60.13", "2.21.5"),
    Build("2.19", "3.9", "3.12", "12.5", "9.3", "525.60.13", "2.23.4"),
    Build("2.20", "3.9", "3.13", "12.5", "9.3", "525.60.13", "2.25.1"),
    Build("2.21", "3.10", "3.13", "12.5", "9.3", "525.60.13", "2.27.7"),
]


class Architecture(NamedTuple):
    """A generation of GPUs; ``ids`` are ranges of PCI device ids, first and last."""

    name: str
    ids: List[Tuple[int, int]]
    cuda: str  # the first with code for it
    driver: str  # the first that supports it
    last_driver: str = ""  # the last branch that supports it; empty: current branches do
    open_modules: bool = True  # NVIDIA's open kernel modules drive it


# The first range with an id counts.
ARCHITECTURES = [
    Architecture("Pascal", [(0x15F0, 0x15FF), (0x1B00, 0x1D7F)], "8.0", "367.48", "580", False),
    Architecture("Kepler", [(0x0FC0, 0x12FF)], "6.0", "331.62", "470", False),
    Architecture("Maxwell", [(0x1340, 0x17FF)], "6.5", "340.29", "580", False),
    Architecture("Volta", [(0x1D80, 0x1DFF)], "9.0", "384.81", "580", False),
    Architecture("Turing", [(0x1E00, 0x1FFF), (0x2180, 0x21FF)], "10.0", "410.48"),
    Architecture("Ampere", [(0x2080, 0x20FF), (0x2200, 0x22FF), (0x2400, 0x25FF)], "11.0", "450.36.06"),
    Architecture("Hopper", [(0x2300, 0x23FF)], "11.8", "520.61.05"),
    Architecture("Ada Lovelace", [(0x2600, 0x28FF)], "11.8", "520.61.05"),
    Architecture("Blackwell", [(0x2900, 0x32FF)], "12.8", "570.26"),
]
# Prefixes of packages that only NVIDIA's repository has.
PACKAGES = ("cuda-", "libcudnn", "libnccl")
# From this branch on NVIDIA's open kernel modules are the ones to use; from 620 on there are no others.
OPEN_SINCE = 560


def numbers(version: str) -> Version:
    """550.90.07 → (550, 90, 7)."""
    return tuple(int(word) for word in re.findall(r"\d+", version))


def architecture(device: str) -> Optional[Architecture]:
    """The generation of a PCI device id such as ``1eb8``; None if unknown."""
    number = int(device, 16)
    for item in ARCHITECTURES:
        if any(first <= number <= last for first, last in item.ids):
            return item
    return None


def architectures(devices: List[str]) -> List[Architecture]:
    """The generations of several devices, oldest first."""
    found = [item for item in map(architecture, devices) if item is not None]
    return [item for item in ARCHITECTURES if item in found]


def build_of(tensorflow: str) -> Optional[Build]:
    """The row of a release such as ``2.16.2``; the last row for newer ones, None for older ones."""
    version = numbers(tensorflow)[:2]
    if version > numbers(BUILDS[-1].tensorflow):
        return BUILDS[-1]
    return next((item for item in BUILDS if numbers(item.tensorflow) == version), None)


def has_python(build: Build, python: str) -> bool:
    """The release has wheels for a Python such as ``3.11.2``, or the Python is unknown."""
    return not python or numbers(build.first_python) <= numbers(python)[:2] <= numbers(build.last_python)


def clauses(requirements: List[str]) -> Optional[List[Tuple[str, Version]]]:
    """Version bounds of TensorFlow for GPUs in requirements (PEP 508); None without it."""
    for text in requirements:
        match = re.match(r"\s*tensorflow(-gpu)?(?![\w-])\s*(\[[^]]*\])?\s*([^;\[]*)(;|$)", text)
        if match:
            found = re.findall(r"(==|>=|<=|~=|!=|<|>)\s*([\d.]+)", match.group(3))
            return [(sign, numbers(version)) for sign, version in found]
    return None


def allowed(build: Build, bounds: List[Tuple[str, Version]]) -> bool:
    """A release of this row can satisfy the bounds, of which the first two numbers count."""
    version = numbers(build.tensorflow)
    for sign, bound in bounds:
        near = bound[:2]
        # "<2.16" and "<2.16.0" leave no 2.16; "<2.16.2" does.
        below = version < near or (version == near and any(bound[2:]))
        held = {
            "==": version == near,
            "~=": near <= version and (version == near or (len(bound) == 2 and version[0] == near[0])),
            ">=": version >= near,
            ">": version >= near,
            "<=": version <= near,
            "<": below,
            "!=": True,
        }
        if not held[sign]:
            return False
    return True


def candidates(bounds: List[Tuple[str, Version]], python: str) -> List[Build]:
    """Releases within the bounds that have wheels for this Python, oldest first."""
    return [item for item in BUILDS if allowed(item, bounds) and has_python(item, python)]
