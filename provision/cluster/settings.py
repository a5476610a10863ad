"""Every inventory variable of oeprov: its name, type, default and meaning.

One model a prefix; the variable is prefix + field (``pmem_mode`` is ``PmemSettings.mode``). Roles'
``argument_specs``, ``inventory/sample.yml`` and the JSON Schema follow these models; tests hold them to it.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal

from pydantic import Field

from provision.cluster.container_settings import ContainerSettings
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.setting_types import Port, Settings, Share, Size, Text
from provision.cluster.training_settings import TrainingSettings


class Kind(str, Enum):
    """What a host is, which decides how its memory is reached."""

    re6p = "re6p"
    re7p = "re7p"
    bare_metal_pmem = "bare_metal_pmem"
    cxl = "cxl"
    gpu = "gpu"
    cpu = "cpu"
    local = "local"


Mode = Literal["auto", "none", "memory", "fsdax", "system-ram", "directory"]
Storage = Literal["dram", "pmem_libpmem", "dram_pmem", "pmem_memkind"]


class OeprovSettings(Settings):
    """What oeprov itself needs to know of a host."""

    prefix: ClassVar[str] = "oeprov_"
    kind: Kind = Field(description="What the host is; decides how its memory is reached. Required.")
    cluster: Text = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of the cluster, the same for all hosts; default: the inventory's file name.",
    )


class RolloutSettings(Settings):
    """How many hosts are changed at a time."""

    prefix: ClassVar[str] = "rollout_"
    shares: list[Share] = Field(
        default=[1, "5%", "20%"],
        min_length=1,
        description="Hosts changed and rebooted per turn: a number, or a percentage of the servers and of "
        "the other hosts. The last value repeats; of several parameter servers, one always stays up; a "
        "failed host stops all later turns.",
    )


class KernelSettings(Settings):
    """Which kernel a host runs and how it gets there."""

    prefix: ClassVar[str] = "kernel_"
    version: Text = Field(
        default="keep",
        pattern=r"^(keep|newest|\d+\.\d+[A-Za-z0-9.+~_-]*)$",
        description="'keep' the running kernel, 'newest' that the source offers, or a full release to pin, "
        "as uname -r prints it. Pin in production: newest moves between series.",
    )
    source: Literal["distribution", "elrepo-lt", "elrepo-ml"] = Field(
        default="distribution",
        description="Where a new kernel comes from; ELRepo (lt: long term, ml: mainline) is for EL hosts.",
    )
    repository_url: Text = Field(
        default="", description="Mirror to take the kernel packages from instead of the source's own address."
    )
    archive_url: Text = Field(
        default="",
        description="Mirror of the distribution's own packages, for releases that moved to an archive "
        "(CentOS 7: a vault mirror).",
    )
    arguments: list[Text] = Field(
        default=[], description="Kernel arguments that must be on the command line."
    )
    trial_boot: bool = Field(
        default=True,
        description="Boot a new kernel or new kernel arguments once on trial; they stay only after a health "
        "check.",
    )
    reboot_ok: bool = Field(
        default=False,
        description="Let the roles reboot the host when they are run without oeprov; oeprov itself shows the "
        "reboots in its plan and asks.",
    )
    reboot_timeout: int = Field(
        default=1800, ge=60, description="Seconds that a reboot may take; machines with much memory are slow."
    )


class PmemSettings(Settings):
    """How persistent memory (or CXL memory) is used."""

    prefix: ClassVar[str] = "pmem_"
    mode: Mode = Field(
        default="auto",
        description="fsdax: a file system with DAX; system-ram: a memory node without CPUs; memory: DRAM "
        "becomes a cache (bare metal only); directory: a directory stands in (kind local only); none: leave "
        "alone. auto: fsdax on re6p, re7p and bare_metal_pmem, system-ram on cxl, directory on local, "
        "else none.",
    )
    directory: Text = Field(
        default="",
        description="Kind local: the directory that stands in; default: pmem0 in the state directory.",
    )
    size: Size = Field(
        default=0, description="Kind local: space that must be free for the directory; 0: any amount will do."
    )
    memmap: Text = Field(
        default="",
        pattern=r"^(\d+[KMG]![0-9]+[KMG](,\d+[KMG]![0-9]+[KMG])*)?$",
        description="re7p: SIZE!OFFSET of the persistent range; default: computed from the host's own memory "
        "map (1008G!257G on ecs.re7p.16xlarge).",
    )
    namespaces: list[Text] = Field(
        default=[], description="Namespaces to use, such as namespace0.0; default: all that the host has."
    )
    mount_prefix: Text = Field(
        default="/mnt/pmem",
        pattern=r"^/[^\s]*$",
        description="fsdax: mount points are this plus a number: /mnt/pmem0, and /mnt/pmem1 for a second "
        "socket.",
    )
    filesystem: Literal["ext4", "xfs"] = Field(default="ext4", description="fsdax: the file system to make.")
    map: Literal["auto", "mem", "dev"] = Field(
        default="auto",
        description="Where page structures (1/64 of the size) live: mem (DRAM) or dev (the device). auto "
        "keeps existing fsdax namespaces as they are, uses dev for new ones, and mem for system-ram.",
    )
    movable: bool = Field(
        default=True, description="system-ram: online as ZONE_MOVABLE, so that it can be taken offline again."
    )
    max_movable_ratio: float = Field(
        default=4.0,
        gt=0,
        description="system-ram: refuse when movable memory is more than this times the DRAM.",
    )
    device_timeout: int = Field(
        default=90,
        ge=1,
        description="fsdax: seconds that a boot waits for the device before it goes on without it.",
    )


class GpuSettings(Settings):
    """The GPU driver."""

    prefix: ClassVar[str] = "gpu_"
    driver: Text = Field(
        default="keep",
        pattern=r"^(keep|newest|\d+)$",
        description="'keep' the driver as it is, 'newest' of the distribution or, where runtime_repositories "
        "names nvidia and on EL hosts, of NVIDIA's repository; or a branch such as '550'.",
    )
    persistence: bool = Field(
        default=True, description="Keep the driver loaded while nobody uses it (persistence mode)."
    )
    fabric_manager: bool = Field(
        default=True,
        description="Where there are NVSwitches, install nvidia-fabricmanager of the driver's version and "
        "start it; also take it into bundles.",
    )


class ServerSettings(Settings):
    """The parameter server processes of a host."""

    prefix: ClassVar[str] = "parameter_server_"
    count: int = Field(default=1, ge=1, le=64, description="Server processes on the host.")
    host: Text = Field(
        default="",
        description="Address to listen on; default: 127.0.0.1 on kind local, else the host's address. "
        "Workers reach a server on 0.0.0.0 at the host's address.",
    )
    port: Port = Field(
        default=0,
        description="Port of the first server, the next ones follow; 0: free ports are chosen at launch.",
    )
    storage: Literal["auto", Storage] = Field(
        default="auto",
        description="Where rows live. pmem_libpmem: the file system with DAX; dram_pmem: the same with a "
        "cache in DRAM; pmem_memkind: memory nodes without CPUs; dram: DRAM, or with system-ram those nodes "
        "for all that a server has. auto: pmem_libpmem when pmem_mode is fsdax or directory, else dram.",
    )
    storage_cache: Size = Field(
        default=0,
        description="Storage dram_pmem: DRAM of one server for the rows that are used most; 0: a quarter of "
        "the host's, shared out evenly.",
    )
    storage_size: Size = Field(default=0, description="Most that one server may use; 0: no limit.")
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads of one server; 0: one per CPU that it may use, shared out evenly.",
    )
    cpus: Literal["auto", "all"] = Field(
        default="auto",
        description="CPUs of a server. auto: on a host with several NUMA nodes those of the node that its "
        "persistent memory belongs to; all: any.",
    )
    metrics_port: Port = Field(
        default=0,
        description="Port at which Prometheus finds the metrics of the first server, the next ones follow; "
        "0: none.",
    )
    metrics_host: Text = Field(
        default="127.0.0.1",
        description="Address of the metrics; whoever reaches it may read them.",
    )


class WorkerSettings(Settings):
    """The training processes of a host."""

    prefix: ClassVar[str] = "worker_"
    count: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Worker processes on the host; all of a job's train each batch together, a part each.",
    )
    port: Port = Field(
        default=0,
        description="Port at which the first of several workers listens for the others, the next ones "
        "follow; 0: 7500, on this machine free ones. Not encrypted: for networks of the cluster's own.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="Threads of the framework; 0: the framework decides, several workers share the CPUs.",
    )
    environment: dict[str, Text] = Field(
        default={}, description="Environment variables of the worker. Do not put secrets here."
    )


HOST_MODELS: tuple[type[Settings], ...] = (
    OeprovSettings,
    KernelSettings,
    PmemSettings,
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
JOB_WIDE: tuple[str, ...] = (
    "oeprov_cluster",
    "runtime_flavor",
    "runtime_variant",
    *RolloutSettings.variables(),
    *TrainingSettings.variables(),
    *ContainerSettings.variables(),
    *KubernetesSettings.variables(),
)

MODES: dict[Kind, tuple[str, ...]] = {
    Kind.re6p: ("fsdax", "system-ram", "none"),
    Kind.re7p: ("fsdax", "system-ram", "none"),
    Kind.bare_metal_pmem: ("fsdax", "system-ram", "memory", "none"),
    Kind.cxl: ("system-ram", "fsdax", "none"),
    Kind.gpu: ("none",),
    Kind.cpu: ("none",),
    Kind.local: ("directory", "none"),
}
"""Modes that a kind can do; the first is what ``auto`` means."""


def mode_refusal(kind: Kind, mode: str) -> str:
    """Why ``kind`` cannot do ``mode`` and what can be done instead; empty when it can."""
    if mode == "auto" or mode in MODES[kind]:
        return ""
    if kind in (Kind.re6p, Kind.re7p) and mode == "memory":
        return (
            f"{kind.value} is a guest: memory mode is set by ipmctl in the firmware of the physical "
            "machine, which a guest cannot reach; use system-ram (a memory node of its own) or fsdax"
        )
    if kind is Kind.cxl and mode == "memory":
        return "CXL memory has no memory mode; use system-ram"
    if kind is Kind.local:
        return (
            "kind local is this machine with a directory in place of persistent memory; use directory, or "
            "give the host the kind that it is (re6p, re7p, bare_metal_pmem, cxl) and reach it over ssh"
        )
    if mode == "directory":
        return f"directory stands in for persistent memory on kind local only; {kind.value} can do " + (
            ", ".join(MODES[kind])
        )
    return f"kind {kind.value} has no persistent memory; use none, or correct oeprov_kind"
