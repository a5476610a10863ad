"""EL 8: RHEL, Rocky, Alma, CentOS Stream. From their documentation, not looked up in their indexes."""

from .family import DriverPackages, Family, Fresh, GpuDriver, KernelSource, Repository

EPEL = "https://dl.fedoraproject.org/pub/epel/"
NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos/"
_ELREPO = "https://www.elrepo.org/elrepo-release-8.el8.elrepo.noarch.rpm"
_KERNELS = "https://elrepo.org/linux/kernel/el8/$basearch/ https://www.elrepo.org/RPM-GPG-KEY-elrepo.org"

FAMILY = Family(
    name="EL 8",
    lineage="rhel",
    ids=["rhel", "rocky", "almalinux", "centos"],
    releases=["8"],
    managers=["dnf"],
    packages={
        "libpmem": "libpmem",
        "memkind": "memkind",
        "ndctl": "ndctl",
        "daxctl": "daxctl",
        "cxl": "cxl-cli",
        "ipmctl": "ipmctl",
        "numactl": "numactl",
        "ext4": "e2fsprogs",
        "xfs": "xfsprogs",
        "venv": "python3.11",  # python3 is 3.6
        "numpy": "python3.11-numpy",
        "libstdc++": "libstdc++",
        "own-python": "python36 python36-devel",
        "toolchain": "gcc-c++ make cmake",
        "git": "git",
        "mpi": "mpich mpich-devel",
        "tbb": "tbb",
        "nccl-headers": "libnccl-devel",
        "openembedding-build": "autoconf automake libtool pkgconfig wget curl unzip patch ndctl-devel "
        "daxctl-devel tbb-devel libpmem-devel libpmemobj-devel libpmemobj++-devel",
        "containers": "podman podman-docker",
        # EL's own compiler, 8.5, knows too little of C++17.
        "build": "gcc-toolset-13-gcc-c++ pkgconf-pkg-config cmake ninja-build python3.11-devel openssl-devel "
        "libpmem-devel asio-devel json-devel xxhash-devel",
    },
    kernels={
        "distribution": KernelSource("kernel", ["kernel-{release}"]),
        "elrepo-lt": KernelSource(
            "kernel-lt", ["kernel-lt-{release}"], {}, _ELREPO, "elrepo-kernel", _KERNELS
        ),
        "elrepo-ml": KernelSource(
            "kernel-ml", ["kernel-ml-{release}"], {}, _ELREPO, "elrepo-kernel", _KERNELS
        ),
    },
    gpu=GpuDriver(
        DriverPackages("cuda-drivers", "cuda-drivers", "latest-dkms", "{branch}-dkms"),
        DriverPackages("nvidia-open", "nvidia-open", "open-dkms", "{branch}-open"),
        headers={
            "": "kernel-devel-{release}",
            "elrepo-lt": "kernel-lt-devel-{release}",
            "elrepo-ml": "kernel-ml-devel-{release}",
        },
        per_kernel=["kernel-devel-", "kernel-lt-devel-", "kernel-ml-devel-"],
        repositories=["nvidia", "epel"],
        fabric="nvidia-fabric-manager",
    ),
    python="python3.11",
    pythons={"8": "3.11"},
    glibc={"8": 28},
    repositories={
        "crb": Repository({"rhel": "codeready-builder-for-rhel-8-x86_64-rpms", "": "powertools"}),
        "epel": Repository(
            url=EPEL + "8/Everything/$basearch/",
            key="https://dl.fedoraproject.org/pub/epel/RPM-GPG-KEY-EPEL-8",
        ),
        "nvidia": Repository(url=NVIDIA + "rhel8/$basearch/", key=NVIDIA + "rhel8/x86_64/D42D0685.pub"),
    },
    comes_from={"build": ["crb", "epel"], "ipmctl": ["epel"], "openembedding-build": ["crb"]},
    compilers="/opt/rh/gcc-toolset-13/root/usr/bin",
    mpi="/usr/lib64/mpich/bin",
    by_major=True,
    # Its own kernel, 4.18, has much of later ones, KMEM DAX too.
    fresh={"8": Fresh("4.18.0-553.el8_10.x86_64", "3.6.8")},
    grub="grub2",
    grubby=True,
    bls=True,
    get_python="dnf install python3.11",
)
