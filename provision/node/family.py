"""What differs between families of distributions, as data: one ``Family`` per file ``family_*.py``.

``families.py`` lists them and finds the family of a host. The data is Python because hosts are sent Python
modules only.
"""

from typing import Dict, List, NamedTuple, Optional

# Kernel options that decide which modes of memory are possible, as kernels of today have them.
DAX_OPTIONS = {
    "CONFIG_DEV_DAX_KMEM": "m",
    "CONFIG_FS_DAX": "y",
    "CONFIG_NUMA": "y",
    "CONFIG_NUMA_BALANCING": "y",
    "CONFIG_X86_PMEM_LEGACY": "m",
}
CXL_OPTIONS = dict(DAX_OPTIONS, CONFIG_DEV_DAX_CXL="m")  # from kernel 6.3 on


class Fresh(NamedTuple):
    """A release as its installer leaves it, for `oeprov plan --offline`: kernel, its options, Python."""

    kernel: str
    python: str
    options: Dict[str, str] = DAX_OPTIONS


class Repository(NamedTuple):
    """An rpm repository that a fresh host does not have, or has disabled."""

    ids: Dict[str, str] = {}  # ID of os-release, "" for any other -> the name of the disabled repository
    url: str = ""  # its address, if the distribution does not bring it
    key: str = ""  # address of the key of its packages


class AnsiblePython(NamedTuple):
    """Packages of a Python beside the distribution's own, where Ansible needs a newer one."""

    packages: str = ""  # empty: there are none
    program: str = ""  # its path
    version: str = ""
    libraries: str = ""  # directory of shared libraries that the linker does not search
    repositories: List[str] = []  # repositories to enable for it


class KernelSource(NamedTuple):
    """Packages of a kernel; ``{architecture}`` is Debian's, ``{release}`` as ``uname -r`` prints it.

    rpm families name packages without the architecture, which is taken off there.
    """

    newest: str
    pinned: List[str]
    by_suffix: Dict[str, List[str]] = {}  # suffix of a release -> further packages
    release_rpm: str = ""  # package that sets the repository up, without a mirror
    repository: str = ""  # the disabled repository that it sets up
    address: str = ""  # of the repository and its key, for bundles
    archive: str = ""  # where its packages moved to, and the address of their key; used without a mirror


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
    headers: Dict[str, str] = {}  # kernel_source -> packages to build modules against; "": any other
    per_kernel: List[str] = []  # how the names of packages begin that are for one kernel only
    branches: Dict[str, str] = {}  # release -> the branch that is newest there
    repositories: List[str] = []  # repositories to enable for it
    fabric: str = ""  # package of nvidia-fabricmanager, by {branch} or of the enabled stream; empty: none
    signed: bool = False  # its modules have the distribution's signature, which Secure Boot accepts


class Family(NamedTuple):
    """Distributions that are set up alike; ``by_major``: their releases are major numbers only."""

    name: str
    lineage: str  # "debian" or "rhel": the ID_LIKE of derivatives
    ids: List[str]  # ID of os-release
    releases: List[str]
    managers: List[str]  # programs; the first one that is installed is used
    packages: Dict[str, str]  # need -> packages
    kernels: Dict[str, KernelSource]  # kernel_source ->
    gpu: GpuDriver
    python: str = "python3"  # interpreter that makes the runtime's environment
    pythons: Dict[str, str] = {}  # release -> its version
    glibc: Dict[str, int] = {}  # release -> its C library is 2.this
    lacks: Dict[str, List[str]] = {}  # release -> needs without a package
    daxctl: Dict[str, int] = {}  # release -> version of daxctl, if too old for a mode
    repositories: Dict[str, Repository] = {}
    comes_from: Dict[str, List[str]] = {}  # need -> repositories to enable for it
    compilers: str = ""  # directory of the compilers that build the runtime; empty: those on the PATH
    toolchain: str = ""  # the same, of those of the need toolchain
    mpi: str = ""  # directory of the programs of the need mpi; empty: they are on the PATH
    by_major: bool = False  # minor releases are compatible
    time_service: str = "chronyd"
    gone: Dict[
        str, str
    ] = {}  # ID of os-release -> archive of its packages and their key: its mirrors are gone
    gone_mirrors: List[str] = []  # how its installer names these mirrors in /etc/yum.repos.d
    fresh: Dict[str, Fresh] = {}  # release -> how its installer leaves it
    grub: str = "grub"  # how the names of GRUB's programs and its directory in /boot begin
    grubby: bool = False  # boot entries are edited with grubby
    bls: bool = False  # boot entries are files (Boot Loader Specification)
    auto_online: str = "offline"  # policy for hot-added memory
    module_platform: str = "el{release}"  # what modules of dnf are made for
    first_python: str = "python3"  # package of the distribution's Python 3, which may not be there
    ansible_python: AnsiblePython = AnsiblePython()  # if that one may be too old for Ansible

    @property
    def package_manager(self) -> str:
        """The first of its package managers, as ``OsInfo`` names it."""
        return manager_name(self.managers[0])


def manager_name(program: str) -> str:
    """What ``OsInfo.package_manager`` calls a program: ``apt`` for apt-get."""
    return "apt" if program == "apt-get" else program
