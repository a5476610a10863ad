"""Ubuntu 20.04 to 24.04. Names were looked up in the indexes of all three."""

from . import family_debian
from .family import GpuDriver, KernelSource

FAMILY = family_debian.FAMILY._replace(
    name="Ubuntu",
    ids=["ubuntu"],
    releases=["20.04", "22.04", "24.04"],
    kernels={
        "distribution": KernelSource(
            "linux-image-generic",
            ["linux-image-{release}"],
            by_suffix={"-generic": ["linux-modules-extra-{release}"]},  # the drivers of DAX devices
        )
    },
    gpu=GpuDriver(
        ["install", "-y", "linux-headers-{running}", "nvidia-driver-server"],
        ["install", "-y", "linux-headers-{running}", "nvidia-driver-{branch}-server"],
    ),
    pythons={"20.04": "3.8", "22.04": "3.10", "24.04": "3.12"},
    lacks={"20.04": ["cxl"], "22.04": ["cxl"], "24.04": ["tbb"]},
)
