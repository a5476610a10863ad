"""What differs between families of distributions, as data: one ``Family`` per file ``family_*.py``.

``families.py`` lists them and finds the family of a host. The data is Python because hosts are sent Python
modules only.
"""

from typing import Dict, List, NamedTuple, Optional

# Kernel options that decide which modes of memory are possible, as kernels of today have them.
DAX_OPTIONS = {"CONFIG_DEV_DAX_KMEM": "m", "CONFIG_FS_DAX": "y", "CONFIG_X86_PMEM_LEGACY": "m"}
CXL_OPTIONS = dict(DAX_OPTIONS, CONFIG_DEV_DAX_CXL="m")  # from kernel 6.3 on


class Fresh(NamedTuple):
    """A release as its installer leaves it, for `oeprov plan --offline`: kernel, its options, Python."""

    kernel: str
    python: str
    options: Dict[str, str] = DAX_OPTIONS


class Repository(NamedTuple):
    """A repository of rpm packages that is not enabled on a fresh host."""

    ids: Dict[str, str] = {}  # ID of os-release, "" for any other -> what the distribution calls it, disabled
    url: str = ""  # its address where the distribution does not bring it
    key: str = ""  # address of the key that its packages are signed with


class KernelSource(NamedTuple):
    """Packages of a kernel; ``{architecture}`` is Debian's, ``{release}`` as ``uname -r`` prints it.

    rpm families name packages without the architecture, which is taken off there.
    """

    newest: str
    pinned: List[str]
    by_suffix: Dict[str, List[str]] = {}  # end of a release -> packages on top
    release_rpm: str = ""  # package that brings the repository, for hosts without a mirror
    repository: str = ""  # what that package calls the repository, disabled
    address: str = ""  # of the repository, and of its key: for collecting packages elsewhere
    archived: str = ""  # who has archived it: a mirror must be named
    mirror: str = ""  # one that somebody keeps, and the address of the key


class DriverPackages(NamedTuple):
    """Packages of the GPU driver, with one kind of kernel modules.

    ``{branch}`` is such as 580, ``{release}`` a kernel's, ``{flavour}`` its last word (generic). Streams are
    those of dnf's module nvidia-driver.
    """

    newest: str
    branch: str = ""  # empty: there is one branch only
    newest_stream: str = ""
    branch_stream: str = ""


class GpuDriver(NamedTuple):
    """A family's packages; those with ``open`` modules are for GPUs from Turing on."""

    proprietary: DriverPackages
    open: Optional[DriverPackages] = None
    headers: Dict[str, str] = {}  # kernel_source -> what modules are built against; "" for any other
    per_kernel: List[str] = []  # how the names of packages begin that are for one kernel only
    branches: Dict[str, str] = {}  # release -> the branch that newest is there
    repositories: List[str] = []  # those that it comes from on top of the enabled ones
    fabric: str = ""  # package of nvidia-fabricmanager, by {branch} or of the enabled stream; empty: none
    signed: bool = False  # its modules come with the distribution's signature, which Secure Boot takes


class Family(NamedTuple):
    """Distributions that are set up alike; releases are majors if ``by_major``, else as os-release says."""

    name: str
    lineage: str  # "debian" or "rhel": which tools there are, and what derivatives say that they are like
    ids: List[str]  # ID of os-release
    releases: List[str]
    managers: List[str]  # programs, of which the first that is there is used
    packages: Dict[str, str]  # what is needed -> packages
    kernels: Dict[str, KernelSource]  # kernel_source ->
    gpu: GpuDriver
    python: str = "python3"  # interpreter that makes the runtime's environment
    pythons: Dict[str, str] = {}  # release -> its version
    glibc: Dict[str, int] = {}  # release -> its C library is 2.this
    lacks: Dict[str, List[str]] = {}  # release -> needs without a package there
    daxctl: Dict[str, int] = {}  # release -> version of daxctl there, where that is too old for something
    repositories: Dict[str, Repository] = {}
    comes_from: Dict[str, List[str]] = {}  # need -> repositories on top of those that are enabled
    compilers: str = ""  # directory of the compilers that build the runtime; empty: those on the PATH
    toolchain: str = ""  # the same, of those of the need toolchain
    mpi: str = ""  # directory of the programs of the need mpi; empty: they are on the PATH
    by_major: bool = False  # minor releases run each other's programs
    time_service: str = "chronyd"
    gone: str = ""  # where its packages are now, when its own mirrors have none any more
    fresh: Dict[str, Fresh] = {}  # release -> how its installer leaves it
    grub: str = "grub"  # how the names of GRUB's programs and its directory in /boot begin
    grubby: bool = False  # boot entries are edited with grubby
    bls: bool = False  # boot entries are files (Boot Loader Specification)
    auto_online: str = "offline"  # policy for hot-added memory
    module_platform: str = "el{release}"  # what modules of dnf are made for
    get_python: str = ""  # command that installs a Python where the installer leaves none

    @property
    def package_manager(self) -> str:
        """The first of its package managers, as ``OsInfo`` names it."""
        return manager_name(self.managers[0])


def manager_name(program: str) -> str:
    """What ``OsInfo.package_manager`` calls a program: ``apt`` for apt-get."""
    return "apt" if program == "apt-get" else program
