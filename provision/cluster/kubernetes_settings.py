"""Inventory variables of jobs on Kubernetes; set them under ``all: vars:``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from provision.cluster.setting_types import Settings, Size, Text

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # RFC 1123, what names of most objects are


class KubernetesSettings(Settings):
    """Where in a Kubernetes cluster a job runs, with which images and how much of its nodes."""

    prefix: ClassVar[str] = "kubernetes_"
    context: Text = Field(
        default="", description="Context of the kubeconfig file (KUBECONFIG); default: its current one."
    )
    namespace: Text = Field(
        default="default", pattern=rf"^{_LABEL}$", description="Namespace of all that a job is made of."
    )
    server_image: Text = Field(
        default="",
        pattern=r"^\S*$",
        description="Image of parameter servers, with a tag or digest; containers/ has its recipe.",
    )
    worker_image: Text = Field(
        default="", pattern=r"^\S*$", description="Image of workers; containers/ has its recipe."
    )
    pull_secret: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Secret of the namespace with the registry's password; default: none.",
    )
    user: int = Field(
        default=10001,
        ge=1,
        description="User and group that containers run as; it must be able to write to the claim.",
    )
    claim: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Claim (ReadWriteMany) of the namespace for data, checkpoints and exports, which all "
        "pods of a job mount.",
    )
    claim_path: Text = Field(
        default="/shared",
        pattern=r"^/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$",
        description="Where pods see the claim; training_data lies below it.",
    )
    servers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Parameter servers; 0: parameter_server_count of each host of parameter_servers.",
    )
    server_cpus: float = Field(default=2, gt=0, description="CPUs of a server.")
    server_memory: Size = Field(
        default=8 << 30, ge=256 << 20, description="DRAM of a server; with storage dram, its rows are in it."
    )
    server_nodes: dict[str, Text] = Field(
        default={},
        description="Labels of nodes for servers; default: the hosts of parameter_servers by their names "
        "(not on kind local).",
    )
    storage_class: Text = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$",
        description="Storage pmem_libpmem and dram_pmem: class of the servers' volumes, such as that of the "
        "PMem CSI driver; default: local volumes at the mount points of the hosts of parameter_servers.",
    )
    storage_size: Size = Field(
        default=0, description="The same: size of a server's volume; without storage_class it may use all."
    )
    workers: int = Field(default=1, ge=1, le=1024, description="Workers of a job.")
    worker_cpus: float = Field(default=4, gt=0, description="CPUs of a worker.")
    worker_memory: Size = Field(default=8 << 30, ge=1 << 30, description="Memory of a worker.")
    worker_gpus: int = Field(default=0, ge=0, le=64, description="GPUs (nvidia.com/gpu) of a worker.")
    worker_nodes: dict[str, Text] = Field(
        default={}, description="Labels of nodes for workers; default: any."
    )
    form: Literal["job", "tfjob", "mpijob"] = Field(
        default="job",
        description="What workers are: an Indexed Job, or Kubeflow's TFJob (kubeflow.org/v1) or MPIJob "
        "(v2beta1), whose operators the cluster must then have.",
    )
    monitoring_namespace: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Namespace whose pods may read the servers' metrics too, such as Prometheus's.",
    )
