"""Debian 11 to 13. Names were looked up in the indexes of all three."""

from .family import CXL_OPTIONS, DriverPackages, Family, Fresh, GpuDriver, KernelSource

_CUDA = " nvidia-smi libcuda1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4"

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
        "nvme": "nvme-cli",
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
        "nccl-headers": "libnccl-dev",
        # No package has libpmemobj++'s headers.
        "openembedding-build": "autoconf automake libtool pkg-config wget curl unzip patch libndctl-dev "
        "libdaxctl-dev libtbb-dev libpmem-dev libpmemobj-dev",
        "containers": "docker.io",
        "build": "build-essential pkg-config cmake ninja-build python3-dev python3-venv "
        "libpmem-dev libasio-dev libssl-dev libzstd-dev nlohmann-json3-dev libxxhash-dev",
        "build-io_uring": "liburing-dev",
    },
    kernels={"distribution": KernelSource("linux-image-{architecture}", ["linux-image-{release}"])},
    # In non-free, as all that it needs; the open modules are the default of later branches only.
    gpu=GpuDriver(
        DriverPackages("nvidia-kernel-dkms" + _CUDA),
        headers={"": "linux-headers-{release}"},
        per_kernel=["linux-headers-"],
        branches={"11": "470", "12": "535", "13": "550"},
    ),
    time_service="systemd-timesyncd",
    pythons={"11": "3.9", "12": "3.11", "13": "3.13"},
    glibc={"11": 31, "12": 36, "13": 41},
    fresh={
        "11": Fresh("5.10.0-31-amd64", "3.9.2"),
        "12": Fresh("6.1.0-25-amd64", "3.11.2"),
        "13": Fresh("6.12.38+deb13-amd64", "3.13.5", CXL_OPTIONS),
    },
    lacks={"11": ["cxl"], "12": ["cxl", "tbb"], "13": ["memkind", "ipmctl", "tbb"]},
)
