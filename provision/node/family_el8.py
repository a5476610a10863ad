"""EL 8: RHEL, Rocky, Alma, CentOS Stream. From their documentation, not looked up in their indexes."""

from typing import Dict

from .family import AnsiblePython, DriverPackages, Family, Fresh, GpuDriver, KernelSource, Repository


def kernels(release: str) -> Dict[str, KernelSource]:
    """The kernels of a release: the distribution's and ELRepo's."""
    package = f"https://www.elrepo.org/elrepo-release-{release}.el{release}.elrepo.noarch.rpm"
    address = "https://elrepo.org/linux/kernel/el{}/$basearch/ https://www.elrepo.org/RPM-GPG-KEY-elrepo.org"
    found = {"distribution": KernelSource("kernel", ["kernel-{release}"])}
    for name in ("lt", "ml"):
        kernel, pinned = "kernel-" + name, ["kernel-" + name + "-{release}"]
        found["elrepo-" + name] = KernelSource(
            kernel, pinned, {}, package, "elrepo-kernel", address.format(release)
        )
    return found


def repositories(release: str, crb: str) -> Dict[str, Repository]:
    """The repositories of a release; ``crb``: the name of its own for builds, except on RHEL."""
    rhel = f"codeready-builder-for-rhel-{release}-x86_64-rpms"
    return {
        "crb": Repository({"rhel": rhel, "": crb}),
        "epel": Repository(
            url=f"https://dl.fedoraproject.org/pub/epel/{release}/Everything/$basearch/",
            key="https://dl.fedoraproject.org/pub/epel/RPM-GPG-KEY-EPEL-" + release,
        ),
        "nvidia": nvidia(release),
    }


def nvidia(release: str) -> Repository:
    """NVIDIA's repository for a release."""
    url = f"https://developer.download.nvidia.com/compute/cuda/repos/rhel{release}/"
    return Repository(url=url + "$basearch/", key=url + "x86_64/D42D0685.pub")


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
        "nvme": "nvme-cli",
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
    kernels=kernels("8"),
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
    repositories=repositories("8", "powertools"),
    comes_from={"build": ["crb", "epel"], "ipmctl": ["epel"], "openembedding-build": ["crb"]},
    compilers="/opt/rh/gcc-toolset-13/root/usr/bin",
    mpi="/usr/lib64/mpich/bin",
    by_major=True,
    # Its own kernel, 4.18, has much of later ones, KMEM DAX too.
    fresh={"8": Fresh("4.18.0-553.el8_10.x86_64", "3.6.8")},
    grub="grub2",
    grubby=True,
    bls=True,
    first_python="python36",
    ansible_python=AnsiblePython("python3.11", "/usr/bin/python3.11", "3.11"),
)
