"""Every inventory variable of oeprov: its name, type, default and meaning.

One model a prefix; the variable is prefix + field (``pmem_mode`` is ``PmemSettings.mode``). Roles'
``argument_specs``, ``inventory/sample.yml`` and the JSON Schema follow these models; tests hold them to it.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal

from pydantic import Field

from provision.container_settings import ContainerSettings
from provision.kubernetes.settings import KubernetesSettings
from provision.runtime_settings import RuntimeSettings as RuntimeSettings
from provision.setting_types import Port, Size, Switch, Text
from provision.setting_types import Settings as _Settings
from provision.setting_types import parse_size as parse_size

_WIDTHS = r"^[1-9]\d*(,[1-9]\d*)*$"


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


class OeprovSettings(_Settings):
    """What oeprov itself needs to know of a host."""

    prefix: ClassVar[str] = "oeprov_"
    kind: Kind = Field(description="What the host is; decides how its memory is reached. Required.")
    cluster: Text = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of the cluster, the same for all hosts; default: the inventory's file name.",
    )


class KernelSettings(_Settings):
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


class PmemSettings(_Settings):
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
    map: Literal["mem", "dev"] = Field(
        default="mem",
        description="Where struct pages live (1/64 of the size): in DRAM (mem) or on the device (dev).",
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


class GpuSettings(_Settings):
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


class ServerSettings(_Settings):
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


class WorkerSettings(_Settings):
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


class TrainingSettings(_Settings):
    """The training job; the same for all hosts, so set these under all: vars:."""

    prefix: ClassVar[str] = "training_"
    model: Literal["deepfm", "dlrm", "wdl", "xdeepfm"] = Field(
        default="deepfm", description="Model to train."
    )
    data: Text = Field(
        default="",
        description="Rows in Criteo's shape: a file, directory or glob of .tsv, .csv (also .gz, .zst), "
        ".parquet or .tfrecord; or generate:ROWS or generate:ROWS:SEED.",
    )
    max_bad_rows: int = Field(
        default=0,
        ge=0,
        description="Broken rows of a pass over the data that are left out, and said; 0: the first one is an "
        "error.",
    )
    dim: int = Field(default=9, ge=1, le=4096, description="Width of an embedding.")
    batch_size: int = Field(default=4096, ge=1, description="Rows of a step, of all workers together.")
    epochs: int = Field(default=1, ge=1, description="Passes over the data.")
    steps: int = Field(default=0, ge=0, description="Stop after so many steps; 0: at the end of the epochs.")
    hidden: Text = Field(
        default="256,128",
        pattern=_WIDTHS,
        description="Widths of the layers of the deep part, of DLRM's top.",
    )
    cin: Text = Field(
        default="64,64",
        pattern=_WIDTHS,
        description="xdeepfm: feature maps of the layers of its interaction network.",
    )
    bottom: Text = Field(
        default="512,256,64",
        pattern=_WIDTHS,
        description="dlrm: widths of the layers over the integers, before one of width training_dim.",
    )
    interaction: Literal["dot", "cat"] = Field(
        default="dot", description="dlrm: inner products of all pairs of fields (dot), or none (cat)."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the hidden layers' products; with bfloat16, weights stay in float32.",
    )
    row_precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of the tables' rows; bfloat16 halves their memory, the optimizer's state stays float32.",
    )
    index: Literal["array", "hash"] = Field(
        default="array",
        description="Tables with a row for each of a field's ids (array), or for any 64-bit id, made when it "
        "is first trained (hash).",
    )
    admission: Text = Field(
        default="",
        description="With training_index hash, only ids that came so often get a row: counter:TIMES or "
        "cbf:TIMES[:MOST_IDS[:PROBABILITY]]; default: all do.",
    )
    eviction: Text = Field(
        default="",
        description="Rows that go: global_step:STEPS[:EVERY], l2_weight:THRESHOLD[:EVERY], "
        "ttl:SECONDS[:EVERY], cap:ROWS[:lru|lfu], several with commas; default: none.",
    )
    jit: bool = Field(default=False, description="Let XLA fuse the operations of a step.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="Where the model computes; gpu: refuse to train where TensorFlow finds none; auto: gpu "
        "on hosts of kind gpu, elsewhere a GPU if there is one.",
    )
    micro_batch: int = Field(
        default=1,
        ge=1,
        description="Parts in which a worker computes its part of a batch, one after the other, before one "
        "update: less memory, the same results within floating point.",
    )
    pipeline: bool = Field(
        default=True, description="Pull the rows of the next batch while one computes; the results are equal."
    )
    workqueue: bool = Field(
        default=False,
        description="Workers do not wait for each other: each takes ranges of the files from a queue in the "
        "job's directory (so all on one host, or on Kubernetes), each row once an epoch. "
        "training_batch_size is then of each worker.",
    )
    staleness: int | None = Field(
        default=None,
        ge=0,
        description="With training_workqueue, wait for workers that are more steps behind (default: for "
        "none). Without, of one worker: 1 lets a push go out while the next batch computes (default 0).",
    )
    optimizer: Literal[
        "adadelta",
        "adagrad",
        "adagraddecay",
        "adam",
        "adamasync",
        "adamax",
        "adamw",
        "amsgrad",
        "ftrl",
        "lion",
        "momentum",
        "nadam",
        "rmsprop",
        "sgd",
    ] = Field(default="adagrad", description="Optimizer.")
    learning_rate: float = Field(default=0.01, gt=0, description="Learning rate.")
    seed: int = Field(default=0, ge=0, description="Seed of all that is random.")
    max_cardinality: int = Field(
        default=0,
        ge=0,
        description="At most so many distinct ids a categorical field; 0: the full cardinalities.",
    )
    holdout: float = Field(default=0.1, ge=0, lt=1, description="Part of the rows kept for evaluation.")
    tls: Switch = Field(
        default="auto",
        description="Encrypt the connections between workers and servers; auto: unless all servers listen on "
        "loopback.",
    )
    checkpoint_steps: int = Field(
        default=1000, ge=0, description="Steps between checkpoints; 0: only at the end."
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, le=64, description="How many of the newest checkpoints are kept."
    )
    checkpoint_rows: Literal["auto", "pool", "files"] = Field(
        default="auto",
        description="Where checkpoints have their rows: in the servers' persistent memory, which stops "
        "nothing (pool), or in files of the job's directory (files); auto: pool with storage pmem_libpmem "
        "and dram_pmem. The last one of a finished job has files.",
    )
    export_checkpoints: int = Field(
        default=0,
        ge=0,
        description="With rows of checkpoints in persistent memory, every so many have them in files all the "
        "same; 0: none but the last.",
    )
    checkpoint_increments: int = Field(
        default=0,
        ge=0,
        description="With rows of checkpoints in files: after one with all rows, so many with only those "
        "that changed since the one before. What they build on is kept. 0: all have all rows.",
    )
    server_wait: int = Field(
        default=300,
        ge=0,
        description="Seconds that training waits for a server that was lost to be started again; then it "
        "goes on from the last checkpoint. 0: losing a server ends the job.",
    )
    worker_wait: int = Field(
        default=600,
        ge=1,
        description="Seconds that workers wait for one that does not come or is busy, as with a checkpoint.",
    )
    on_worker_lost: Literal["stop", "continue"] = Field(
        default="stop",
        description="When one of several workers is killed or its host is lost: stop, or go on with the "
        "rest, unless training_restarts starts it again. Workers of a queue (training_workqueue) go on where "
        "they are, with its ranges too; others start again from the last checkpoint, with its part of every "
        "batch. Checkpoints are on worker 0's host. (On Kubernetes lost workers are always started again.)",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="How often a job of several workers starts them again, from the last checkpoint, when "
        "one was killed, or a server lost that did not come back in time.",
    )
    timeline: int = Field(
        default=0,
        ge=0,
        description="Every so many steps, one is traced by TensorFlow's profiler, for TensorBoard; 0: none.",
    )
    export: bool = Field(
        default=True, description="Export the trained model as a SavedModel in the job directory."
    )


HOST_MODELS: tuple[type[_Settings], ...] = (
    OeprovSettings,
    KernelSettings,
    PmemSettings,
    RuntimeSettings,
    GpuSettings,
    ServerSettings,
    WorkerSettings,
)
MODELS: tuple[type[_Settings], ...] = (
    *HOST_MODELS,
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
