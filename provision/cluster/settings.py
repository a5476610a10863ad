"""Every inventory variable of oeprov: its name, type, default and meaning.

One model per prefix; the variable is prefix + field (``pmem_mode`` is ``PmemSettings.mode``). A variable is
declared nowhere else: ``make generate`` writes the other files that have it (``tools/generate.py``).
"""

from __future__ import annotations

import posixpath
import re
from enum import Enum
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from provision.cluster.container_settings import ContainerSettings
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.setting_types import Flag, Port, ProcessFlag, Settings, Share, Size, Text
from provision.cluster.training_settings import TrainingSettings
from provision.node import platforms


class Kind(str, Enum):
    """What a host is: one of node's platforms, which decides how its memory is reached."""

    _ignore_ = "item"
    for item in platforms.kinds():
        vars()[item] = item


Mode = Literal["auto", "none", "memory", "fsdax", "system-ram", "tiered", "directory"]
Storage = Literal["dram", "pmem_libpmem", "dram_pmem", "dram_ssd", "pmem_memkind"]


class OeprovSettings(Settings):
    """What oeprov itself needs to know of a host."""

    prefix: ClassVar[str] = "oeprov_"
    kind: Kind = Field(description="What the host is, which decides how its memory is reached. Required.")
    cluster: Text = Field(
        default="",
        max_length=200,  # with more around it, it names files
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of the cluster, the same for all hosts. Unset: the inventory's file name.",
    )
    connection: Literal["key", "password"] = Field(
        default="key",
        description="How SSH logs in to the host. password: by ansible_password or OEPROV_PASSWORD each "
        "time, which is slower, for hosts that take no keys.",
    )


class RolloutSettings(Settings):
    """How many hosts are changed at a time."""

    prefix: ClassVar[str] = "rollout_"
    shares: list[Share] = Field(
        default=[1, "5%", "20%"],
        min_length=1,
        description="Hosts changed and rebooted per turn: a number, or a percentage of the servers and of "
        "the other hosts. The last value repeats. A failed host of the first turn stops all later turns.",
    )
    quorum: Share = Field(
        default="50%",
        description="Parameter servers that stay up during a change: a number, or a percentage of all. At "
        "least one, if there are several. Turns become smaller, or the run stops, when failed servers leave "
        "no more than these.",
    )
    failures: Share = Field(
        default="10%",
        description="Hosts that may fail before the run stops: a number, or a percentage of the hosts that "
        "it changes; at least one. `--fail-fast` and `--keep-going` take its place.",
    )


class KernelSettings(Settings):
    """Which kernel a host runs and how it gets there."""

    prefix: ClassVar[str] = "kernel_"
    version: Text = Field(
        default="keep",
        pattern=r"^(keep|newest|\d+\.\d+[A-Za-z0-9.+~_-]*)$",
        description="Kernel to run: 'keep' the running one, the 'newest' of the source, or a full release "
        "as uname -r prints it. Pin a release in production: newest moves between series.",
    )
    source: Literal["distribution", "elrepo-lt", "elrepo-ml"] = Field(
        default="distribution",
        description="Where a new kernel comes from. ELRepo (lt: long term, ml: mainline) is for EL hosts.",
    )
    repository_url: Text = Field(
        default="",
        description="Mirror of the kernel packages: ADDRESS [ADDRESS-OF-KEY]. "
        "Unset: the source's own address, for EL 7 that of ELRepo's archive.",
    )
    archive_url: Text = Field(
        default="",
        description="Mirror of the distribution's packages, for releases that moved to an archive: ADDRESS "
        "[ADDRESS-OF-KEY]. Unset: the archive itself, if the host still has the installer's mirrors.",
    )
    arguments: list[Text] = Field(default=[], description="Arguments that the kernel command line must have.")
    trial_boot: bool = Field(
        default=True,
        description="Boot a new kernel or new kernel arguments once on trial. They stay only after a health "
        "check.",
    )
    reboot_ok: bool = Field(
        default=False,
        description="Let the roles reboot the host when they run without oeprov. oeprov itself shows "
        "reboots in its plan and asks.",
    )
    reboot_timeout: int = Field(
        default=1800, ge=60, description="Seconds that a reboot may take. Machines with much memory are slow."
    )


class PmemSettings(Settings):
    """How persistent memory (or CXL memory) is used."""

    prefix: ClassVar[str] = "pmem_"
    mode: Mode = Field(
        default="auto",
        description="How persistent memory is used. fsdax: a file system with DAX; system-ram: a memory "
        "node without CPUs; tiered: such a node, and the kernel moves pages between it and DRAM by their "
        "use; memory: DRAM becomes its cache (bare metal only); directory: a directory stands in (kind local "
        "only); none: leave it alone. auto: fsdax on re6p, re7p and bare_metal_pmem, system-ram on cxl, "
        "directory on local, else none.",
    )
    directory: Text = Field(
        default="",
        description="Kind local: directory that stands in for persistent memory. Unset: pmem0 in the state "
        "directory.",
    )
    size: Size = Field(
        default=0, description="Kind local: space that must be free for the directory. 0: any."
    )
    memmap: Text = Field(
        default="",
        pattern=r"^(\d+[KMG]![0-9]+[KMG](,\d+[KMG]![0-9]+[KMG])*)?$",
        description="re7p: SIZE!OFFSET of the persistent range. Unset: computed from the host's memory map "
        "(1008G!257G on ecs.re7p.16xlarge).",
    )
    namespaces: list[Text] = Field(
        default=[], description="Namespaces to use, such as namespace0.0. Unset: all of the host."
    )
    mount_prefix: Text = Field(
        default="/mnt/pmem",
        pattern=r"^/[^\s]*$",
        description="fsdax: how mount points begin; a number follows. /mnt/pmem0, and /mnt/pmem1 for a "
        "second socket.",
    )
    filesystem: Literal["ext4", "xfs"] = Field(default="ext4", description="fsdax: file system to make.")
    map: Literal["auto", "mem", "dev"] = Field(
        default="auto",
        description="Where page structures (1/64 of the size) live: mem (DRAM) or dev (the device). auto: "
        "dev for new fsdax namespaces, mem for system-ram; existing fsdax namespaces stay as they are.",
    )
    movable: bool = Field(
        default=True, description="system-ram: online as ZONE_MOVABLE, so that it can go offline again."
    )
    max_movable_ratio: float = Field(
        default=4.0,
        gt=0,
        description="system-ram: most movable memory, as a multiple of DRAM. More is refused.",
    )
    dram_weight: int = Field(
        default=0,
        ge=0,
        le=255,
        description="tiered: pages on each node with CPUs per page on a memory node, for programs that "
        "interleave by weight (Linux 6.9 or newer). 0: the kernel's weights.",
    )
    device_timeout: int = Field(
        default=90,
        ge=1,
        description="fsdax: seconds that a boot waits for the device. Then it goes on without it.",
    )


class SsdSettings(Settings):
    """NVMe drives for rows."""

    prefix: ClassVar[str] = "ssd_"
    devices: list[Annotated[Text, Field(json_schema_extra={"pattern": r"^/[^\s:]+$"})]] = Field(
        default=[],
        description="Drives for rows: paths in /dev/disk/by-id, on which oeprov makes file systems, or "
        "directories that are there already. Servers take turns on them. With storage dram_ssd, and with "
        "pmem_libpmem and dram_pmem unless pmem_mode is fsdax.",
    )
    mount_prefix: Text = Field(
        default="/mnt/ssd",
        pattern=r"^/[^\s]*$",
        description="How the drives' mount points begin; the place in ssd_devices follows, from 0 on.",
    )
    filesystem: Literal["ext4", "xfs"] = Field(default="ext4", description="File system to make on drives.")

    @field_validator("devices")
    @classmethod
    def _stable(cls, devices: list[str]) -> list[str]:
        for device in devices:
            if re.fullmatch(r"/[^\s:]+", device) is None:
                raise ValueError(
                    f"{device!r}: name a drive as /dev/disk/by-id/… or a directory from / on, without spaces "
                    "and colons"
                )
            if device.startswith("/dev/") and not device.startswith("/dev/disk/by-id/"):
                raise ValueError(
                    f"{device} may be another drive after a reboot: name it by /dev/disk/by-id/…"
                )
        if len({posixpath.normpath(device) for device in devices}) < len(devices):
            raise ValueError("a drive or directory is named twice")
        return devices


class GpuSettings(Settings):
    """The GPU driver."""

    prefix: ClassVar[str] = "gpu_"
    driver: Text = Field(
        default="keep",
        pattern=r"^(keep|newest|\d+)$",
        description="Driver to run: 'keep' the installed one, the 'newest', or a branch such as '550'. The "
        "newest is the distribution's; on EL hosts, and where runtime_repositories names nvidia, NVIDIA's.",
    )
    persistence: bool = Field(
        default=True, description="Keep the driver loaded while no process uses it (persistence mode)."
    )
    fabric_manager: bool = Field(
        default=True,
        description="Install and start nvidia-fabricmanager on hosts with NVSwitches. Bundles have it too.",
    )


MOST_SERVERS = 64  # on one host


class ServerSettings(Settings):
    """The parameter server processes of a host."""

    prefix: ClassVar[str] = "parameter_server_"
    count: Annotated[int, Flag("servers")] = Field(
        default=1,
        ge=1,
        le=MOST_SERVERS,
        description="Parameter servers per host; unset, dram_ssd has one for each of ssd_devices.",
    )
    host: Text = Field(
        default="",
        description="Address to listen on. Unset: 127.0.0.1 on kind local, else the host's address. Workers "
        "reach a server on 0.0.0.0 at the host's address.",
    )
    port: Port = Field(
        default=0,
        description="Port of the host's first server; the next ones follow. 0: free ports, chosen at launch.",
    )
    storage: Annotated[Literal["auto", Storage], Flag(allowed=get_args(Storage))] = Field(
        default="auto",
        description="Where rows live. dram: DRAM, or with system-ram memory nodes without CPUs for all of a "
        "server; pmem_libpmem: a file system with DAX (fsdax); dram_pmem: the same with a cache in DRAM; "
        "dram_ssd: drives of ssd_devices with a cache in DRAM; pmem_memkind: memory nodes without CPUs "
        "(system-ram). auto: pmem_libpmem when pmem_mode is fsdax or directory; dram_ssd when it is none and "
        "ssd_devices names drives; else dram.",
    )
    storage_cache: Annotated[Size, Flag()] = Field(
        default=0,
        description="With storage dram_pmem and dram_ssd: DRAM per server for the most used rows, such as "
        "8G. 0: the host's servers share a quarter of its DRAM.",
    )
    storage_size: Size = Field(default=0, description="Most memory per server. 0: no limit.")
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads per server. 0: one per CPU that it may use; servers of a host share them.",
    )
    storage_scrub: Annotated[Size | None, ProcessFlag()] = Field(
        default=None,
        description="With rows in pmem_libpmem, dram_pmem and dram_ssd: bytes per second whose checksums a "
        "server verifies in the background. 0: only of rows that are copied, saved, or read after a "
        "recovery. Unset: 32M.",
    )
    max_connections: Annotated[int | None, ProcessFlag()] = Field(
        default=None,
        ge=1,
        description="Most clients of a server; more are refused. The limit of open files can lower it. "
        "Unset: 1024.",
    )
    start_timeout: int = Field(
        default=180,
        ge=1,
        description="Seconds until a server must listen. One that recovers many rows, or whose host is slow, "
        "needs more.",
    )
    cpus: Literal["auto", "all"] = Field(
        default="auto",
        description="CPUs that a server may use. auto: with several sockets, those beside its memory, and in "
        "mode system-ram only the memory nodes there, if the host's servers can share them evenly; all: any.",
    )
    metrics_port: Port = Field(
        default=0,
        description="Port of the first server's metrics for Prometheus; the next ones follow. 0: no metrics.",
    )
    metrics_host: Text = Field(
        default="127.0.0.1",
        description="Address of the metrics. Anyone who reaches it can read them.",
    )


class WorkerSettings(Settings):
    """The training processes of a host."""

    prefix: ClassVar[str] = "worker_"
    count: Annotated[int, Flag("workers")] = Field(
        default=1,
        ge=1,
        le=64,
        description="Workers per host; unset, training_script gets one per GPU. All workers of a job train "
        "each batch together, a part each, unless training_workqueue is set.",
    )
    port: Port = Field(
        default=0,
        description="Port at which the host's first worker listens for other workers; the next ones follow. "
        "0: free ports, chosen at each start. Not encrypted: use a network of the cluster's own.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads of the framework per worker. 0: the framework decides; several workers share "
        "the CPUs.",
    )
    environment: dict[str, Text] = Field(
        default={}, description="Environment variables of the worker. Do not put secrets here."
    )


HOST_MODELS: tuple[type[Settings], ...] = (
    OeprovSettings,
    KernelSettings,
    PmemSettings,
    SsdSettings,
    RuntimeSettings,
    GpuSettings,
    ServerSettings,
    WorkerSettings,
)
MODELS: tuple[type[Settings], ...] = (
    *HOST_MODELS,
    RolloutSettings,
    TrainingSettings,
    ContainerSettings,
    KubernetesSettings,
)
PREFIXES: tuple[str, ...] = tuple(model.prefix for model in MODELS)
KNOWN: tuple[str, ...] = tuple(name for model in MODELS for name in model.variables())
LAUNCH_FLAGS: tuple[str, ...] = tuple(name for model in MODELS for name in model.flags())
JOB_WIDE: tuple[str, ...] = (
    "oeprov_cluster",
    "runtime_flavor",
    "runtime_variant",
    *RolloutSettings.variables(),
    *TrainingSettings.variables(),
    *ContainerSettings.variables(),
    *KubernetesSettings.variables(),
)
