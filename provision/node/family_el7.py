"""CentOS 7.8 and 7.9, whose mirrors are gone. From documentation, not looked up in its indexes."""

from . import family_el8
from .family import AnsiblePython, DriverPackages, Fresh, GpuDriver, KernelSource, Repository

_VAULT = "https://vault.centos.org/"
_KERNELS = (
    "https://mirrors.coreix.net/elrepo-archive-archive/kernel/el7/x86_64/ "
    "https://www.elrepo.org/RPM-GPG-KEY-elrepo.org"
)
_PYTHON = "/opt/rh/rh-python38/root/usr"
_COMPILERS = "/opt/rh/devtoolset-11/root/usr/bin"

FAMILY = family_el8.FAMILY._replace(
    name="CentOS 7",
    ids=["centos", "rhel"],
    releases=["7"],
    managers=["yum", "dnf"],
    packages=dict(
        family_el8.FAMILY.packages,
        venv="",
        numpy="",
        build="devtoolset-11-gcc-c++ pkgconfig cmake3 ninja-build openssl11-devel libpmem-devel asio-devel "
        "json-devel xxhash-devel",
        **{
            "own-python": "python3 python3-devel",
            "toolchain": "devtoolset-11-gcc-c++ make cmake3",
            "containers": "docker",
        },
    ),
    kernels={
        "distribution": KernelSource("kernel", ["kernel-{release}"]),
        "elrepo-lt": KernelSource("kernel-lt", ["kernel-lt-{release}"], archive=_KERNELS),
        "elrepo-ml": KernelSource("kernel-ml", ["kernel-ml-{release}"], archive=_KERNELS),
    },
    # NVIDIA's repository for it ends with branch 550.
    gpu=GpuDriver(
        DriverPackages("nvidia-driver-latest-dkms", "nvidia-driver-branch-{branch}"),
        headers=family_el8.FAMILY.gpu.headers,
        per_kernel=family_el8.FAMILY.gpu.per_kernel,
        branches={"7": "550"},
        repositories=["nvidia", "epel"],
        fabric="nvidia-fabric-manager",
    ),
    python="python3",
    pythons={"7": "3.6"},
    glibc={"7": 17},
    lacks={"7": ["cxl", "venv", "numpy"]},
    daxctl={"7": 65},
    repositories={
        "epel": Repository(
            url="https://archives.fedoraproject.org/pub/archive/epel/7/$basearch/",
            key="https://archives.fedoraproject.org/pub/archive/epel/RPM-GPG-KEY-EPEL-7",
        ),
        "scl": Repository(
            url=_VAULT + "7.9.2009/sclo/$basearch/rh/",
            key="https://www.centos.org/keys/RPM-GPG-KEY-CentOS-SIG-SCLo",
        ),
        "nvidia": family_el8.nvidia("7"),
    },
    comes_from={
        "build": ["scl", "epel"],
        "toolchain": ["scl", "epel"],
        "ipmctl": ["epel"],
        "openembedding-build": ["epel"],
    },
    compilers=_COMPILERS,
    toolchain=_COMPILERS,
    # RHEL 7 has Red Hat's own mirrors. The installer leaves the key.
    gone={"centos": _VAULT + "7.9.2009/os/$basearch/ file:///etc/pki/rpm-gpg/RPM-GPG-KEY-CentOS-7"},
    gone_mirrors=["mirrorlist.centos.org", "mirror.centos.org"],
    fresh={"7": Fresh("3.10.0-1127.el7.x86_64", "3.6.8", {"CONFIG_FS_DAX": "y"})},
    bls=False,
    first_python="python3",
    ansible_python=AnsiblePython(
        "rh-python38", _PYTHON + "/bin/python3.8", "3.8", _PYTHON + "/lib64", ["scl"]
    ),
)
