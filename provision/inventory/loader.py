"""From an inventory file to its hosts: Ansible's own loader reads it, pydantic checks it.

``load`` finds all mistakes in one pass.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import BOOLEANS, boolean
from pydantic import ValidationError

from provision.cluster import flavor_facts, settings
from provision.cluster.container_settings import ContainerSettings
from provision.cluster.errors import InventoryError, did_you_mean
from provision.cluster.inventory import DEFAULT_PYTHON, PARAMETER_SERVERS, WORKERS, Host, Inventory
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.setting_types import explain
from provision.cluster.settings import (
    GpuSettings,
    KernelSettings,
    Kind,
    OeprovSettings,
    PmemSettings,
    RolloutSettings,
    ServerSettings,
    SsdSettings,
    WorkerSettings,
)
from provision.cluster.training_settings import TrainingSettings
from provision.inventory.connection import KEYS, first_login, refusals, ssh_arguments
from provision.inventory.file import RawHost, RawInventory, read
from provision.node import drives, platforms

_LONGEST = 200  # letters of the cluster's name, as in OeprovSettings


def load(path: Path, limit: str | None = None, *, state_dir: Path = Path(".oeprov")) -> Inventory:
    """The inventory at ``path``, checked as a whole, then narrowed to ``limit`` (Ansible's host patterns).

    ``state_dir`` is where kind ``local`` keeps its stand-in directory by default. Raises InventoryError; its
    ``problems`` lists everything that is wrong, its message the first of them.
    """
    raw = read(path)
    problems = _Problems(raw)
    problems.check_names()
    hosts: dict[str, Host] = {}
    for raw_host in raw.hosts:
        problems.check_words(raw_host)
        if "oeprov_kind" in raw_host.variables or {PARAMETER_SERVERS, WORKERS} & set(raw_host.groups):
            host = _host(raw_host, problems, state_dir)
            if host is not None:
                hosts[host.name] = host
    problems.check_groups()
    _check_addresses(hosts.values(), problems)
    cluster, jobs = _job_wide(raw, problems)
    problems.raise_if_any()
    cluster = cluster or path.stem
    if len(cluster.encode()) > _LONGEST:
        raise InventoryError(
            f"{path}: the cluster has the file's name, which has more than {_LONGEST} letters: set "
            "oeprov_cluster"
        )
    selected = hosts.keys() if limit is None else set(raw.select(limit))
    hosts = {name: host for name, host in hosts.items() if name in selected}
    if not hosts:
        raise InventoryError(f"{path}: --limit {limit!r} selects no host of the cluster")
    return Inventory(
        path=path,
        cluster=cluster,
        hosts=hosts,
        parameter_servers=[name for name, host in hosts.items() if host.is_parameter_server],
        workers=[name for name, host in hosts.items() if host.is_worker],
        **jobs,
    )


def host_of(
    name: str, groups: Iterable[str], variables: Mapping[str, Any], *, state_dir: Path = Path(".oeprov")
) -> Host:
    """One host from variables that Ansible has templated itself: roles under plain ``ansible-playbook``.

    Raises InventoryError naming host and key.
    """
    raw = RawHost(name, tuple(groups), dict(variables))
    problems = _Problems(_Given())
    found = _host(raw, problems, state_dir)
    problems.raise_if_any()
    if found is None:
        raise InventoryError(f"host {name}: its variables cannot be used")
    return found


@cache
def _nearest_name(key: str) -> tuple[str, bool]:
    """The known name nearest to ``key`` (may be empty), and whether it is so near that ``key`` is a typo."""
    close = difflib.get_close_matches(key, settings.KNOWN, n=1, cutoff=0.6)
    near = bool(close) and difflib.SequenceMatcher(None, key, close[0]).ratio() >= 0.88
    return (close[0] if close else "", near)


class _Given(RawInventory):
    """Takes the place of an inventory file that is not there."""

    def __init__(self) -> None:
        self.path, self.groups, self.hosts = Path("inventory"), [], []


class _Problems:
    """Collects problems, each once, in the order found."""

    def __init__(self, raw: RawInventory) -> None:
        self.raw = raw
        self.lines: dict[str, None] = {}

    def add(self, where: str, what: str) -> None:
        self.lines[f"{where}: {what}"] = None

    def add_at(self, host: RawHost, key: str, what: str) -> None:
        self.add(self.raw.where(host, key), f"{key}: {what}")

    def raise_if_any(self) -> None:
        if self.lines:
            raise InventoryError.from_list(list(self.lines))

    def check_names(self) -> None:
        """Report unknown names that have one of our prefixes or are a typo of a known name."""
        for where, key, written in self.raw.names():
            if key in settings.KNOWN:
                continue
            meant, slip = _nearest_name(key)
            # Clouds' plugins have names such as kernel_id.
            if key.startswith(settings.PREFIXES) and (written or slip):
                hint = f"; did you mean {meant}?" if meant else "; `oeprov inventory schema` lists all keys"
                self.add(where, f"{key}: unknown key{hint}")
            elif slip:
                self.add(where, f"{key}: unknown key; did you mean {meant}?")

    def check_words(self, host: RawHost) -> None:
        """Refuse names, addresses and users that programs would take for an option, or for two words."""
        words = {"": host.name, **{key: host.variables.get(key) for key in ("ansible_host", "ansible_user")}}
        for key, found in words.items():
            if (
                isinstance(found, str)
                and found
                and (found[0] == "-" or re.search(r"[\s\x00-\x1f\x7f]", found))
            ):
                what = f"found {found!r}; it may not begin with - or have blanks"
                self.add(
                    *(self.raw.where(host, key), f"{key}: {what}")
                    if key
                    else (str(self.raw.path), f"host: {what}")
                )

    def check_groups(self) -> None:
        for group in (PARAMETER_SERVERS, WORKERS):
            if group not in self.raw.groups:
                hint = did_you_mean(group, self.raw.groups)
                self.add(str(self.raw.path), f"group {group} is missing{hint}")
            elif not any(group in host.groups for host in self.raw.hosts):
                self.add(self.raw.where_group(group), "has no hosts; a cluster needs at least one")


def _host(raw: RawHost, problems: _Problems, state_dir: Path) -> Host | None:
    found = len(problems.lines)
    parts = {model: _part(model, raw, problems) for model in settings.HOST_MODELS}
    connection = _connection(raw, problems)
    port = _port(raw, problems)
    if connection == "ssh":
        unread = {key: raw.failed[key] for key in KEYS if key in raw.failed}
        for key, why in {**refusals(raw.variables), **unread}.items():
            problems.add_at(raw, key, why)
    if len(problems.lines) > found or any(part is None for part in parts.values()):
        return None
    head, pmem = parts[OeprovSettings], parts[PmemSettings]
    kind: Kind = head.kind
    platform = platforms.get(kind.value)
    refusal = platform.refuse(pmem.mode)
    if refusal:
        problems.add_at(raw, "pmem_mode", f"found {pmem.mode!r}: {refusal}")
    if not platform.managed and connection != "local":
        problems.add_at(
            raw, "ansible_connection", "kind local is this machine: set ansible_connection: local"
        )
    if head.connection == "password" and connection == "local":
        problems.add_at(
            raw, "oeprov_connection", "ansible_connection is local, which needs no login: remove this line"
        )
    if pmem.memmap and not platform.takes_memmap:
        problems.add_at(raw, "pmem_memmap", f"is for kind re7p only; this host is {kind.value}")
    become = raw.variables.get("ansible_become")
    if become is not None and str(become).strip().lower() not in {"", *BOOLEANS}:
        problems.add_at(raw, "ansible_become", f"found {become!r}; expected true or false")
    names = parts[SsdSettings].devices
    if platform.needs_drives and not names:
        problems.add_at(raw, "ssd_devices", f"kind {kind.value} keeps rows on drives: name them")
    if not platform.managed and any(map(drives.is_drive, names)):
        problems.add_at(raw, "ssd_devices", "on kind local oeprov makes no file systems: name a directory")
    if len(problems.lines) > found:
        return None
    variables = raw.variables
    host = Host(
        name=raw.name,
        address="127.0.0.1" if connection == "local" else str(variables.get("ansible_host") or raw.name),
        port=port,
        user=str(variables.get("ansible_user") or ""),
        connection=connection,
        private_key=str(variables.get("ansible_ssh_private_key_file") or ""),
        ssh_arguments=ssh_arguments(variables),
        become=boolean(str(variables.get("ansible_become")), strict=False),
        python=_python(variables),
        first_login=first_login(variables),
        login=head.connection,
        groups=raw.groups,
        kind=kind,
        given=frozenset(settings.KNOWN).intersection(variables),
        **{_FIELD[model]: part for model, part in parts.items() if model in _FIELD},
    )
    host = _final(host, state_dir)
    _check_mount_points(raw, problems, host)
    return host


def _check_mount_points(raw: RawHost, problems: _Problems, host: Host) -> None:
    """Refuse drives that would be mounted at a directory of the same list, or where persistent memory is."""
    directories = {posixpath.normpath(name) for name in host.ssd.devices if not drives.is_drive(name)}
    of_pmem = re.escape(posixpath.normpath(host.pmem.mount_prefix + "0")[:-1]) + r"\d+"
    for name in filter(drives.is_drive, host.ssd.devices):
        where = posixpath.normpath(drives.place(host.desired(), name))
        if where in directories:
            problems.add_at(
                raw, "ssd_devices", f"{name} would be mounted at {where}, which is in the list too"
            )
        if host.pmem.mode == "fsdax" and re.fullmatch(of_pmem, where):
            problems.add_at(
                raw,
                "ssd_mount_prefix",
                f"{name} would be mounted at {where}, as persistent memory is (pmem_mount_prefix "
                f"{host.pmem.mount_prefix}): choose another",
            )


def _python(variables: Mapping[str, Any]) -> str:
    """The interpreter that the inventory names; Ansible's words for its own search leave the choice to us."""
    named = str(variables.get("ansible_python_interpreter") or "")
    return (
        DEFAULT_PYTHON if named in ("", "auto", "auto_legacy", "auto_silent", "auto_legacy_silent") else named
    )


_FIELD: dict[type[Any], str] = {
    KernelSettings: "kernel",
    PmemSettings: "pmem",
    SsdSettings: "ssd",
    RuntimeSettings: "runtime",
    GpuSettings: "gpu",
    ServerSettings: "server",
    WorkerSettings: "worker",
}


def _final(host: Host, state_dir: Path) -> Host:
    """Replace ``auto`` and empty values by what they mean for this host."""
    local = not host.platform.managed
    mode = host.platform.modes[0] if host.pmem.mode == "auto" else host.pmem.mode
    directory = host.pmem.directory
    if local and mode == "directory":
        directory = str((Path(directory).expanduser() if directory else state_dir / "pmem0").absolute())
    extra: str = host.runtime.extra
    if extra == "auto":
        framework = "tensorflow-gpu" if host.platform.has_gpus else "tensorflow"
        extra = framework if host.is_worker else "none"
    flavor = flavor_facts.get(host.runtime.flavor)
    storage: str = host.server.storage
    if storage == "auto":
        storage = flavor.storage(mode, host.runtime, drives=bool(host.ssd.devices))
    return replace(
        host,
        pmem=host.pmem.model_copy(update={"mode": mode, "directory": directory}),
        runtime=host.runtime.model_copy(
            update={"extra": extra, "venv": host.runtime.venv or flavor.venv(local, state_dir)}
        ),
        server=host.server.model_copy(
            update={
                "storage": storage,
                "host": host.server.host or ("127.0.0.1" if local else host.address),
            }
        ),
    )


def _part(model: type[Any], raw: RawHost, problems: _Problems) -> Any:
    """The model's settings of one host, or None when a problem was found."""
    values = {}
    for name in model.model_fields:
        key = model.prefix + name
        if key in raw.failed:
            problems.add_at(raw, key, raw.failed[key])
        elif key in raw.variables:
            if raw.variables[key] is None:
                problems.add_at(raw, key, "has no value; give it one or remove the line")
            else:
                values[name] = raw.variables[key]
    try:
        return model(**values)
    except ValidationError as error:
        for item in error.errors():
            name, *inside = item["loc"]
            key, value = f"{model.prefix}{name}", values.get(name)
            if item["type"] == "missing":
                kinds = ", ".join(kind.value for kind in Kind)
                problems.add(raw.label(problems.raw.path), f"{key} is missing; one of {kinds}")
            elif inside:
                entry = f"{inside[0]}: " if isinstance(value, dict) else ""
                problems.add_at(raw, key, entry + explain(item))
            else:
                problems.add_at(raw, key, explain({**item, "input": value}))  # a size as it is written
        return None


def _connection(raw: RawHost, problems: _Problems) -> str:
    found = str(raw.variables.get("ansible_connection", "ssh"))
    name = found.rsplit(".", 1)[-1]
    if name == "smart":
        return "ssh"
    if name in ("paramiko", "paramiko_ssh"):
        problems.add_at(
            raw,
            "ansible_connection",
            f"found {found!r}; oeprov reaches hosts by OpenSSH, and by Fabric only in `oeprov adopt`: "
            "remove this line; for a host that takes no keys, set oeprov_connection: password",
        )
        return "ssh"
    if name not in ("ssh", "local"):
        problems.add_at(raw, "ansible_connection", f"found {found!r}; oeprov reaches hosts by ssh or local")
    return name


def _port(raw: RawHost, problems: _Problems) -> int:
    key, default = "ansible_port", 22
    value = raw.variables.get(key, default)
    try:
        number = int(value)
        if not 0 < number < 65536:
            raise ValueError(value)
    except (TypeError, ValueError):
        problems.add_at(raw, key, f"found {value!r}; expected a port from 1 to 65535")
        return default
    return number


def _check_addresses(hosts: Iterable[Host], problems: _Problems) -> None:
    """Refuse two names for one machine, which would be changed twice at the same time."""
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        if host.is_here:
            continue
        other = seen.setdefault((host.address, host.port), host.name)
        if other != host.name:
            problems.add(
                f"{problems.raw.path}: host {host.name}",
                f"has the same address as host {other}: {host.address} port {host.port}; "
                "give each host one name and put it in both groups",
            )


_JOBS: dict[str, type[Any]] = {
    "rollout": RolloutSettings,
    "training": TrainingSettings,
    "containers": ContainerSettings,
    "kubernetes": KubernetesSettings,
}


def _job_wide(raw: RawInventory, problems: _Problems) -> tuple[str, dict[str, Any]]:
    """The cluster's name and the job-wide settings, which must be the same on all hosts."""
    members = [host for host in raw.hosts if {PARAMETER_SERVERS, WORKERS} & set(host.groups)]
    for host in members[1:]:
        first = members[0]
        for key in settings.JOB_WIDE:
            mine, others = host.variables.get(key), first.variables.get(key)
            if mine != others:
                odd = host if key in host.variables else first
                problems.add_at(
                    odd,
                    key,
                    f"applies to the whole job but is {others!r} on {first.name} and {mine!r} on "
                    f"{host.name}; set it under all: vars:",
                )
    cluster = str(members[0].variables.get("oeprov_cluster") or "") if members else ""
    found = {
        name: _part(model, members[0], problems) if members else model() for name, model in _JOBS.items()
    }
    return cluster, found
