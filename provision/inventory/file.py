"""Reads an inventory file through Ansible's own loader: groups, hosts and their templated variables."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager, split_host_pattern
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import inventory_loader
from ansible.template import Templar
from ansible.vars.manager import VariableManager

from provision.cluster import settings, share
from provision.cluster.errors import InventoryError, did_you_mean
from provision.inventory import connection, ecs, sources, vault

try:  # ansible-core 2.19 remembers the line that each value came from; older ones do not.
    from ansible._internal._datatag._tags import Origin
except ImportError:  # pragma: no cover - depends on the ansible-core that is installed
    Origin = None


@dataclass(frozen=True)
class RawHost:
    """A host as Ansible sees it; ``failed`` tells why a variable has no value (key → reason)."""

    name: str
    groups: tuple[str, ...]
    variables: dict[str, Any]
    failed: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # key → "file:line: host or group NAME"

    def label(self, path: Path) -> str:
        """``inventory.yml: host NAME``."""
        return f"{path}: host {self.name}"


class RawInventory:
    """Groups, hosts and variables of one inventory file."""

    def __init__(
        self, path: Path, manager: InventoryManager, loader: DataLoader, *, generated: bool = False
    ) -> None:
        self.path = path
        self.generated = generated  # plugins make hosts, with variables of their own
        self._manager = manager
        self.groups: list[str] = [name for name in manager.groups if name != "all"]
        variables = VariableManager(loader=loader, inventory=manager)
        self.hosts = [
            _raw_host(path, host, variables.get_vars(host=host, include_hostvars=False), loader)
            for host in manager.get_hosts("all")
        ]

    def where(self, host: RawHost, key: str) -> str:
        """File, line where Ansible knows it, and the host or group that sets ``key``."""
        return host.origins.get(key) or host.label(self.path)

    def is_written(self, host: RawHost, key: str) -> bool:
        """Whether a person wrote the variable, as far as Ansible knows; a plugin may have made it."""
        return not self.generated or bool(re.search(r":\d+: ", host.origins.get(key, "")))

    def where_group(self, group: str) -> str:
        """``inventory.yml: group NAME``."""
        return f"{self.path}: group {group}"

    def names(self) -> Iterator[tuple[str, str, bool]]:
        """(where, name, ``is_written``) of every variable that a host or a group sets."""
        for host in self.hosts:
            for key in host.variables.keys() | host.failed.keys():
                yield self.where(host, key), key, self.is_written(host, key)
        for name, group in self._manager.groups.items():
            for key in group.vars:
                if not group.get_hosts():
                    yield self.where_group(name), key, not self.generated

    def select(self, pattern: str) -> list[str]:
        """Names of the hosts that Ansible's host pattern selects.

        InventoryError when a part of the pattern names no host or group, or when no host is left. Ansible
        ignores such parts, and takes a pattern without parts for all hosts.
        """
        where = f"{self.path}: --limit {pattern!r}"
        constants.HOST_PATTERN_MISMATCH = "ignore"  # no warning by Ansible before our error
        try:
            parts = _limit_parts(pattern)
            for part in parts:
                self._check_limit(part)
            names = [str(host.name) for host in self._manager.get_hosts(parts)] if parts else []
        except (AnsibleError, OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else _one_line(error)
            raise InventoryError(f"{where} cannot be read: {reason}") from None
        if not parts:
            raise InventoryError(f"{where} names no host or group; leave it out for all hosts")
        if not names:
            raise InventoryError(f"{where} selects no host")
        return names

    def _check_limit(self, part: str) -> None:
        """InventoryError unless the part, such as ``!gpu-*``, names a host or a group of this inventory."""
        name = part[1:] if part[0] in "!&" else part
        hosts = [host.name for host in self.hosts]
        is_empty = not name.strip("~") or name[0] in "!&"
        matches = set() if is_empty else {str(host.name) for host in self._manager.get_hosts([name])}
        if name not in self.groups and matches.isdisjoint(hosts):
            hint = did_you_mean(name, [*self.groups, "all", *hosts], cutoff=0.5)
            raise InventoryError(f"{self.path}: --limit {part!r} is no host or group{hint}")


def _limit_parts(pattern: str) -> list[str]:
    """The single patterns of a host pattern, with the lines of files (``@FILE``).

    ValueError for a bracket without its partner: Ansible drops it, and ``~[`` would be ``~``, all hosts.
    """
    if pattern.startswith("@") and Path(pattern[1:]).is_file():
        parts = [pattern]  # its name may have any character
    else:
        parts = [part for part in split_host_pattern(split_host_pattern(pattern)) if part]  # as Ansible does
        if len(_SEPARATORS.sub("", "".join(parts))) != len(_SEPARATORS.sub("", pattern)):
            raise ValueError("a bracket has no partner")
    found: list[str] = []
    for part in parts:
        lines = Path(part[1:]).read_text(encoding="utf-8").splitlines() if part[0] == "@" else [part]
        found += [line.strip() for line in lines if line.strip()]
    return found


_SEPARATORS = re.compile(r"[\s,:]")


def read(path: Path) -> RawInventory:
    """The inventory at ``path``; InventoryError when it is missing, not YAML or not an inventory."""
    if not path.exists():
        raise InventoryError(
            f"{path}: no such inventory; name one with -i FILE or OEPROV_INVENTORY, or start from a copy of "
            f"{share.inventory('sample')}"
        )
    loader = DataLoader()
    vault.unlock(loader)
    generated = path.is_dir() or sources.is_script(path) or not sources.is_yaml(path)
    for file in sources.yaml_files(path) if path.is_dir() else [] if generated else [path]:
        generated |= _check_file(file, loader)
    for file in sources.variable_files(path if path.is_dir() else path.parent):
        sources.refuse_duplicates(file)
    try:
        with sources.strictly(path) if generated else contextlib.nullcontext():
            manager = InventoryManager(loader=loader, sources=[str(path.absolute())])
        return RawInventory(path, manager, loader, generated=generated)
    except AnsibleError as error:
        raise _unreadable(error, path) from None


def _check_file(path: Path, loader: DataLoader) -> bool:
    """Check a YAML file; whether a plugin makes hosts from it. InventoryError says what is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InventoryError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text.decode()
        content = loader.load_from_file(str(path.absolute()), unsafe=False)
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise InventoryError(f"{path}:{line}: is not YAML: {error.reason}; write it in UTF-8") from None
    except (AnsibleError, OSError) as error:
        raise _unreadable(error, path) from None
    if ecs.is_query(content):
        ecs.find(path)  # fails with one line; the plugin then uses the cached answer
        inventory_loader.add_directory(str(share.root() / "plugins/inventory"))
    elif not sources.is_query(content):
        _check_structure(path, content)
        sources.refuse_duplicates(path)
        return False
    return True


_POSITION = re.compile(r"appears to be in '([^']+)': line (\d+), column (\d+)")  # ansible-core before 2.19
_NO_MAPPING = re.compile(r"Could not process '([^']+)'.*expected dicts but got")


def _unreadable(error: BaseException, path: Path) -> InventoryError:
    """File, line and column of what is wrong in an inventory or the files beside it, in one sentence."""
    file, position, cause = path.absolute(), "", error
    for item in vault.chain(error):
        obj = getattr(item, "obj", None)
        origin = obj if Origin is not None and isinstance(obj, Origin) else None
        if origin is None and Origin is not None and obj is not None:
            origin = Origin.get_tag(obj)
        match = _POSITION.search(str(item)) or _NO_MAPPING.search(str(item))
        if origin is not None and origin.path:
            file, cause = Path(origin.path), item
            position = f":{origin.line_num}:{origin.col_num or 1}" if origin.line_num else ""
        elif match:
            file, cause = Path(match[1]), item
            position = ":".join(("", *match.groups()[1:]))
        if position or (match and not position):
            break
    shown = path if file == path.absolute() else _shown(file, path)
    if vault.is_failure(error):
        return InventoryError(f"{shown}: {vault.refusal()}")
    if _NO_MAPPING.search(str(cause)):
        return InventoryError(f"{shown}: expected `key: value` lines, found something else")
    words = _one_line(cause).removeprefix("YAML parsing failed: ")
    if not position:
        return InventoryError(f"{shown}: {words}")
    words = "; ".join(piece[:1].lower() + piece[1:] for piece in words.rstrip(".").split(". "))
    return InventoryError(f"{shown}{position}: is not YAML: {words}; check this line and the one before")


def _shown(file: Path, path: Path) -> Path:
    """A file beside the inventory, relative or absolute as the inventory is."""
    try:
        return path.parent / file.relative_to(path.parent.absolute())
    except ValueError:
        return file


def _one_line(error: BaseException) -> str:
    text = str(getattr(error, "message", "") or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = " ".join(lines[:2]) if lines else type(error).__name__
    obj = getattr(error, "obj", None)
    origin = Origin.get_tag(obj) if Origin is not None and obj is not None else None
    if origin is not None and origin.line_num and not isinstance(obj, Origin):
        message += f" (line {origin.line_num})"
    return message


def _check_structure(path: Path, content: Any) -> None:
    """Check the shape of groups, about which Ansible only warns or which it takes for another format."""
    if content is None:
        raise InventoryError(f"{path}: is empty")
    if not isinstance(content, dict):
        raise InventoryError(f"{path}: is not an inventory: expected groups at the top, such as `all:`")
    for name, group in content.items():
        _check_group(path, str(name), group)


def _check_group(path: Path, name: str, group: Any) -> None:
    where = f"{path}: group {name}"
    if group is None:
        return
    if not isinstance(group, dict):
        raise InventoryError(f"{where}: expected vars, children or hosts, found {group!r}")
    parts = ("vars", "children", "hosts")
    for key, value in group.items():
        if key not in parts:
            hint = did_you_mean(str(key), parts, cutoff=0.5)
            raise InventoryError(f"{where}: {key}: a group has vars, children and hosts only{hint}")
        if value is not None and not isinstance(value, dict):
            example = "`name:` lines" if key != "vars" else "`key: value` lines"
            raise InventoryError(f"{where}: {key}: expected {example}, found {value!r}")
    for child, content in (group.get("children") or {}).items():
        _check_group(path, str(child), content)
    for host, variables in (group.get("hosts") or {}).items():
        if variables is not None and not isinstance(variables, dict):
            raise InventoryError(f"{path}: host {host}: expected `key: value` lines, found {variables!r}")


def _raw_host(path: Path, host: Any, merged: dict[str, Any], loader: DataLoader) -> RawHost:
    """Template only what oeprov reads; other variables may need Ansible's facts, which are missing here."""
    templar = Templar(loader=loader, variables=merged)
    variables: dict[str, Any] = {}
    failed: dict[str, str] = {}
    origins: dict[str, str] = {}
    for key, value in merged.items():
        if key not in _MAGIC:
            _keep_secret(key, value)
        origins[key] = _origin(path, host, key, value)
        if not key.startswith(settings.PREFIXES) and key not in connection.KEYS:
            variables[key] = None
            continue
        try:
            variables[key] = _plain(templar.template(value))
        except AnsibleError as error:
            why = f"cannot be templated: {_one_line(error)}"
            failed[key] = vault.refusal() if vault.is_failure(error) else why
    groups = tuple(str(group.name) for group in host.get_groups() if group.name != "all")
    return RawHost(str(host.name), groups, variables, failed, origins)


def _keep_secret(key: str, value: Any) -> None:
    """Remember vaulted texts, and every value of a vaulted file except public words such as fsdax."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _keep_secret(key, item)
    elif vault.is_vaulted(value):
        with contextlib.suppress(AnsibleError):  # without the password it is not read either
            vault.remember(str(value), secret=key not in connection.KEYS)
    elif isinstance(value, str) and key not in _PUBLIC:
        tag = Origin.get_tag(value) if Origin is not None else None
        if tag is not None and tag.path and vault.is_vaulted_file(tag.path) and value not in _choices():
            own = key.startswith(settings.PREFIXES) or key in connection.KEYS
            vault.remember(str(value), secret=not own)


_MAGIC = ("groups", "group_names", "inventory_hostname", "inventory_hostname_short")  # every host has them
_PUBLIC = (
    *settings.OeprovSettings.variables(),
    "ansible_user",
    "ansible_connection",
    "ansible_become_method",
)


@cache
def _choices() -> frozenset[str]:
    """Every choice of a setting, such as fsdax."""
    from provision.inventory.schema import inventory_schema

    known = inventory_schema()["definitions"]["variables"]["properties"].values()
    return frozenset(str(word) for item in known for word in item["anyOf"][0].get("enum", []))


def _plain(value: Any) -> Any:
    """Ansible's tagged strings, lists and dictionaries as Python's own."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _origin(path: Path, host: Any, key: str, value: Any) -> str:
    """Where ``key`` of ``host`` is set: file, line, and host or group."""
    owner = f"host {host.name}"
    if key not in host.vars:
        for group in sorted(host.get_groups(), key=lambda item: -item.depth):
            if key in group.vars:
                owner = f"group {group.name}"
                break
    tag = Origin.get_tag(value) if Origin is not None else None
    if tag is None or not tag.path:
        return f"{path}: {owner}"
    source = Path(tag.path)
    shown = path if source.absolute() == path.absolute() else source
    return f"{shown}:{tag.line_num}: {owner}"
