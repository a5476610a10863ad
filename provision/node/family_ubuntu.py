"""Ubuntu 20.04 to 26.04. Names were looked up in the indexes, but not those of drivers.

Of 26.04, those of ndctl, libpmem and memkind were looked up on packages.ubuntu.com; no host of it was tried.
"""

from . import family_debian
from .family import CXL_OPTIONS, DriverPackages, Fresh, GpuDriver, KernelSource


def _modules(branch: str, kind: str) -> str:
    """Modules that Ubuntu built and signed: for the running kernel and, by the second name, later ones."""
    modules = "linux-modules-nvidia-" + branch + "-server" + kind
    headless = "nvidia-headless-no-dkms-" + branch + "-server" + kind
    return " ".join(
        (modules + "-{release}", modules + "-{flavour}", headless, "nvidia-utils-" + branch + "-server")
    )


FAMILY = family_debian.FAMILY._replace(
    name="Ubuntu",
    ids=["ubuntu"],
    releases=["20.04", "22.04", "24.04", "26.04"],
    kernels={
        "distribution": KernelSource(
            "linux-image-generic",
            ["linux-image-{release}"],
            by_suffix={"-generic": ["linux-modules-extra-{release}"]},  # the drivers of DAX devices
        )
    },
    gpu=GpuDriver(
        DriverPackages(_modules("580", ""), _modules("{branch}", "")),
        DriverPackages(_modules("580", "-open"), _modules("{branch}", "-open")),
        branches={
            "20.04": "580",
            "22.04": "580",
            "24.04": "580",
            "26.04": "580",
        },  # NVIDIA's long-term branch until 2028
        per_kernel=["linux-modules-nvidia-"],
        fabric="nvidia-fabricmanager-{branch}",
        signed=True,
    ),
    pythons={"20.04": "3.8", "22.04": "3.10", "24.04": "3.12", "26.04": "3.14"},
    glibc={"20.04": 31, "22.04": 35, "24.04": 39, "26.04": 43},
    fresh={
        "20.04": Fresh("5.4.0-190-generic", "3.8.10"),
        "22.04": Fresh("5.15.0-119-generic", "3.10.12"),
        "24.04": Fresh("6.8.0-41-generic", "3.12.3", CXL_OPTIONS),
        "26.04": Fresh("7.0.0-14-generic", "3.14.3", CXL_OPTIONS),
    },
    auto_online="online",
    lacks={
        "20.04": ["cxl", "build-io_uring"],
        "22.04": ["cxl"],
        "24.04": ["tbb"],
        "26.04": ["memkind", "ipmctl", "tbb"],
    },
)
