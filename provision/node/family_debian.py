"""Debian 11 to 13. Names were looked up in the indexes of all three."""

from .family import Family, GpuDriver, KernelSource

FAMILY = Family(
    name="Debian",
    lineage="debian",
    ids=["debian"],
    releases=["11", "12", "13"],
    managers=["apt-get"],
    packages={
        "libpmem": "libpmem1",
        "memkind": "libmemkind0",
        "ndctl": "ndctl",
        "daxctl": "daxctl",
        "cxl": "cxl",
        "ipmctl": "ipmctl",
        "numactl": "numactl",
        "ext4": "e2fsprogs",
        "xfs": "xfsprogs",
        "venv": "python3-venv",
        "numpy": "python3-numpy",
        "libstdc++": "libstdc++6",
        "own-python": "python3-venv python3-dev",
        "toolchain": "build-essential cmake",
        "git": "git",
        "mpi": "mpich libmpich-dev",
        "tbb": "libtbb2",
        "containers": "docker.io",
        "build": "build-essential pkg-config cmake ninja-build python3-dev python3-venv "
        "libpmem-dev libasio-dev libssl-dev nlohmann-json3-dev libxxhash-dev",
    },
    kernels={"distribution": KernelSource("linux-image-{architecture}", ["linux-image-{release}"])},
    gpu=GpuDriver(["install", "-y", "linux-headers-{running}", "nvidia-driver"], []),
    time_service="systemd-timesyncd",
    pythons={"11": "3.9", "12": "3.11", "13": "3.13"},
    lacks={"11": ["cxl"], "12": ["tbb"], "13": ["memkind", "ipmctl", "tbb"]},
)
