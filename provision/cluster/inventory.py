"""The inventory's hosts and settings, checked and final.

Values are final: ``auto`` and empty defaults are replaced by their meaning for the host, so that no later
code decides again. ``provision.inventory.loader.load`` makes it from a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible import release

from provision.cluster import flavor_facts
from provision.cluster.container_settings import ContainerSettings
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.settings import (
    GpuSettings,
    KernelSettings,
    Kind,
    PmemSettings,
    RolloutSettings,
    ServerSettings,
    SsdSettings,
    WorkerSettings,
)
from provision.cluster.training_settings import TrainingSettings
from provision.node import platforms
from provision.node.platform_base import Platform
from provision.node.state import decode
from provision.node.step import Desired

PARAMETER_SERVERS = "parameter_servers"
WORKERS = "workers"
DEFAULT_PYTHON = "python3"  # on hosts whose inventory names none: then oeprov chooses


@dataclass(frozen=True)
class Removal:
    """What ``oeprov destroy`` removes from a host: ``objects`` with data, by name; ``jobs``: their directory.

    ``arguments`` (the kernel's) and ``grub_default`` are from before oeprov; None: unknown.
    """

    objects: tuple[str, ...]
    jobs: str
    arguments: tuple[str, ...] | None = None
    grub_default: str | None = None


@dataclass(frozen=True)
class FirstLogin:
    """What the inventory gives ``oeprov adopt`` to log in and to become root with; empty if it gives nothing.

    Other commands use only ``password``, and only for a host with ``oeprov_connection: password``.
    """

    password: str = field(default="", repr=False)
    become_password: str = field(default="", repr=False)
    become_method: str = "sudo"  # or "su"


@dataclass(frozen=True)
class Host:
    """One host with its checked settings; ``connection`` is ``local`` or ``ssh``.

    ``ssh_arguments`` holds all options that ``ssh`` is given for it; it logs in by ``login``: ``key`` or
    ``password``.
    """

    name: str
    address: str
    port: int
    user: str
    connection: str
    private_key: str
    ssh_arguments: tuple[str, ...]
    become: bool
    python: str
    groups: tuple[str, ...]
    kind: Kind
    pmem: PmemSettings = field(default_factory=PmemSettings)
    ssd: SsdSettings = field(default_factory=SsdSettings)
    kernel: KernelSettings = field(default_factory=KernelSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    given: frozenset[str] = frozenset()  # variables of ours that the inventory sets
    removal: Removal | None = None
    retry_trials: bool = False  # of this command only
    first_login: FirstLogin = FirstLogin()
    login: str = "key"

    @property
    def platform(self) -> Platform:
        """What differs between its kind of host and others."""
        return platforms.get(self.kind.value)

    @property
    def is_here(self) -> bool:
        """It is this machine: processes of jobs are children of their launcher, not systemd units."""
        return self.connection == "local"

    @property
    def is_parameter_server(self) -> bool:
        """The host runs parameter servers."""
        return PARAMETER_SERVERS in self.groups

    @property
    def is_worker(self) -> bool:
        """The host runs workers."""
        return WORKERS in self.groups

    def servers(self, storage: str = "") -> int:
        """How many parameter servers it has with a storage, the inventory's unless one is given."""
        unset = "parameter_server_count" not in self.given
        if unset and (storage or self.server.storage) == "dram_ssd":
            return len(self.ssd.devices) or 1  # a table is spread over servers, and so over drives
        return self.server.count

    def variables(self) -> dict[str, Any]:
        """All settings by variable name, final values, JSON types."""
        flat: dict[str, Any] = {"oeprov_kind": self.kind.value}
        for part in (self.kernel, self.pmem, self.ssd, self.runtime, self.gpu, self.server, self.worker):
            flat.update(part.flat())
        return {**flat, "parameter_server_count": self.servers()}

    def desired(self) -> Desired:
        """What the planner is told to reach on this host."""
        values = {name: value for name, value in self.variables().items() if name in Desired._fields}
        values["kernel_version"] = "" if self.kernel.version == "keep" else self.kernel.version
        values["gpu_driver"] = "" if self.gpu.driver == "keep" else self.gpu.driver
        values.update(
            host=self.name,
            kind=self.kind.value,
            parameter_server=self.is_parameter_server,
            worker=self.is_worker,
            retry_trials=self.retry_trials,
            ansible_core=release.__version__ if self.connection == "ssh" else "",
            ansible_interpreter="" if self.python == DEFAULT_PYTHON else self.python,
        )
        values |= flavor_facts.get(self.runtime.flavor).desired(self.kind, self.runtime)
        if self.removal:
            values.update(
                remove=True,
                remove_objects=list(self.removal.objects),
                remove_jobs=self.removal.jobs,
                remove_known=self.removal.arguments is not None,
                remove_arguments_before=list(self.removal.arguments or ()),
                remove_grub_default="saved"
                if self.removal.grub_default is None
                else self.removal.grub_default,
                runtime_requirements=[],  # what it has does not matter any more
            )
        return decode(Desired, values)


@dataclass(frozen=True)
class Inventory:
    """A checked inventory; ``hosts`` keeps the file's order and only what ``limit`` selects."""

    path: Path
    cluster: str
    hosts: dict[str, Host]
    parameter_servers: list[str]
    workers: list[str]
    rollout: RolloutSettings
    training: TrainingSettings
    containers: ContainerSettings
    kubernetes: KubernetesSettings

    @property
    def flavor(self) -> str:
        """What trains; the same on all hosts."""
        return next(iter(self.hosts.values())).runtime.flavor
