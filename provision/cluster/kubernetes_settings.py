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
        default="", description="Context of the kubeconfig file (KUBECONFIG). Unset: its current one."
    )
    namespace: Text = Field(
        default="default", pattern=rf"^{_LABEL}$", description="Namespace of all objects of a job."
    )
    server_image: Text = Field(
        default="",
        pattern=r"^\S*$",
        description="Image of parameter servers, with a tag or digest. containers/ has its recipe.",
    )
    worker_image: Text = Field(
        default="", pattern=r"^\S*$", description="Image of workers. containers/ has its recipe."
    )
    pull_secret: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Secret of the namespace with the registry's password. Unset: none.",
    )
    user: int = Field(
        default=10001,
        ge=1,
        description="User and group of containers. They must be able to write to the claim.",
    )
    claim: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Claim (ReadWriteMany) for data, checkpoints and exports. All pods of a job mount it.",
    )
    claim_path: Text = Field(
        default="/shared",
        pattern=r"^/[A-Za-z0-9._/-]*[A-Za-z0-9._-]$",
        description="Where pods mount the claim. training_data and training_eval_data lie below it; a "
        "training_script below it runs there.",
    )
    servers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Parameter servers of a job. 0: as many as the hosts of parameter_servers have "
        "(parameter_server_count).",
    )
    server_cpus: float = Field(default=2, gt=0, description="CPUs per server.")
    server_memory: Size = Field(
        default=8 << 30, ge=256 << 20, description="DRAM per server. With storage dram, its rows are in it."
    )
    server_nodes: dict[str, Text] = Field(
        default={},
        description="Labels of nodes for servers. Unset: the hosts of parameter_servers by name, except "
        "those of kind local.",
    )
    storage_class: Text = Field(
        default="",
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$",
        description="With storage pmem_libpmem, dram_pmem and dram_ssd: class of the servers' volumes, such "
        "as the PMem CSI driver's. Unset: local volumes at the mount points of the hosts of "
        "parameter_servers.",
    )
    storage_size: Size = Field(
        default=0,
        description="With storage pmem_libpmem, dram_pmem and dram_ssd: size of a server's volume. 0: all of "
        "a local one.",
    )
    workers: int = Field(default=1, ge=1, le=1024, description="Workers of a job.")
    worker_cpus: float = Field(default=4, gt=0, description="CPUs per worker.")
    worker_memory: Size = Field(default=8 << 30, ge=1 << 30, description="Memory per worker.")
    worker_gpus: int = Field(default=0, ge=0, le=64, description="GPUs (nvidia.com/gpu) per worker.")
    worker_nodes: dict[str, Text] = Field(
        default={}, description="Labels of nodes for workers. Unset: any node."
    )
    form: Literal["job", "tfjob", "mpijob"] = Field(
        default="job",
        description="Object that runs the workers: an Indexed Job, or Kubeflow's TFJob (kubeflow.org/v1) or "
        "MPIJob (v2beta1). The cluster must have Kubeflow's operator for it.",
    )
    monitoring_namespace: Text = Field(
        default="",
        pattern=rf"^({_LABEL})?$",
        description="Another namespace whose pods may read the servers' metrics, such as Prometheus's.",
    )
