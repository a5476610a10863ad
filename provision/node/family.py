"""What differs between distributions, as data: one file a family (``family_*.py``), each a ``Family``;
``families.py`` finds the one of a host.

They are Python because nodes are sent nothing else: both Ansible and ``provision/hosts/payload.py`` carry
modules.
"""

from typing import Dict, List, NamedTuple, Optional


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
