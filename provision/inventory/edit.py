"""Sets one variable of some hosts in the inventory's files; comments and other hosts stay as they are.

A value that only these hosts have is replaced in place; else each host gets a line of its own.
Only the characters of the value change, so that comments and layout stay. Before writing, the new files
are read as YAML and by Ansible: everything else in them must have the same meaning as before.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from provision.cluster.errors import InventoryError
from provision.inventory import file
from provision.inventory.file import RawHost, RawInventory
from provision.inventory.sources import is_script, is_yaml
from provision.inventory.vault import is_vaulted_file

_SUFFIXES = ("", ".yml", ".yaml", ".json")  # of files with variables, as Ansible looks for them


class _Unclear(Exception):
    """A place that cannot be edited safely; the message says why."""


@dataclass(frozen=True)
class Edit:
    """One file's text before and after."""

    path: Path
    old: str
    new: str

    def diff(self) -> list[str]:
        """The lines that change, as `diff -u` shows them."""
        lines = difflib.unified_diff(
            self.old.splitlines(), self.new.splitlines(), str(self.path), str(self.path), n=1, lineterm=""
        )
        return list(lines)

    def write(self) -> None:
        """Replace the file atomically; InventoryError if it changed meanwhile or cannot be written."""
        path = self.path.resolve()  # a link stays a link
        new = path.with_name(f".{path.name}.oeprov-{os.getpid()}")
        try:
            if _read(path) != self.old:
                raise InventoryError(f"{self.path}: was changed meanwhile, so it was not written")
            with new.open("x", encoding="utf-8", newline="") as file:
                shutil.copystat(path, new)
                if os.geteuid() == 0:
                    os.chown(new, path.stat().st_uid, path.stat().st_gid)
                file.write(self.new)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise InventoryError(f"{self.path}: cannot be written: {error.strerror}") from None


def edits_for(
    path: Path, hosts: Collection[str], key: str, value: str, *, alike: Collection[str] = ()
) -> list[Edit]:
    """The edits that make ``key`` be ``value`` on ``hosts``; none when it is so already.

    A place shared with hosts of ``alike`` may change too.

    InventoryError says why no file can be edited safely, and where to set the variable by hand.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="oeprov-") as shadow:
            return _edits(_Files(path, Path(shadow)), set(hosts), set(alike), key, value)
    except (_Unclear, OSError, UnicodeError) as error:
        why = str(error) if isinstance(error, _Unclear) else f"a file beside it cannot be read ({error})"
        raise InventoryError(
            f"{path} was not edited: {why}; set {key}: {value} for {', '.join(hosts)} there, or in "
            f"{path.parent / 'host_vars'}/HOST.yml"
        ) from None


def _edits(files: _Files, hosts: set[str], alike: set[str], key: str, value: str) -> list[Edit]:
    if files.path.is_dir():
        raise _Unclear("it is a directory of several sources")
    if is_script(files.path):
        raise _Unclear("its hosts come from a script")
    if not is_yaml(files.path):
        raise _Unclear("it is not a YAML file")
    if _has(_compose(files.text(files.path).old), "plugin"):
        raise _Unclear("its hosts come from a plugin")
    found = before = files.load()
    for places in (files.host_places, files.group_places):
        left = {name for name in hosts if _value(found, name, key) != value}
        for place in places(before, key) if left else ():
            # A place that other hosts use too must not change.
            if place.hosts <= hosts | alike and place.hosts & left:
                with suppress(_Unclear):
                    place.replace(key, value)
        found = files.load() if left else found
    for name in [host.name for host in before.hosts if host.name in hosts]:
        if _value(found, name, key) != value:
            files.add(name, key, value)
    files.check(before, hosts, key, value)
    return files.edits()


def _value(found: RawInventory, name: str, key: str) -> Any:
    return next(host.variables.get(key) for host in found.hosts if host.name == name)


@dataclass
class _Text:
    """A YAML file that is being edited."""

    path: Path
    old: str
    new: str
    want: Any  # the meaning that ``new`` must have

    @classmethod
    def read(cls, path: Path) -> _Text:
        text = _read(path)
        if text.startswith("$ANSIBLE_VAULT"):
            raise _Unclear(f"{path} is encrypted")
        return cls(path, text, text, _meaning(_compose(text)))

    def node(self, keys: tuple[str, ...]) -> yaml.Node:
        """The node below these keys."""
        node = _compose(self.new)
        for name in keys:
            node = _child(node, name)[1]
        return node

    def edit(self, start: int, end: int, text: str) -> None:
        self.new = self.new[:start] + text + self.new[end:]


@dataclass(frozen=True)
class _Place:
    """A mapping of variables in a file, and the hosts that it applies to."""

    text: _Text
    keys: tuple[str, ...]
    hosts: frozenset[str]

    def replace(self, key: str, value: str) -> None:
        """Give ``key``, which is there, another value."""
        name, node = _child(self.text.node(self.keys), key)
        old = self.text.new[node.start_mark.index : node.end_mark.index]
        if not isinstance(node, yaml.ScalarNode) or node.start_mark.index < name.end_mark.index:
            raise _Unclear(f"{self.text.path}: {key} is an alias or no plain value")
        if "{{" in node.value or "\n" in old or old[:1] in ("", "&", "*", "!", "|", ">"):
            raise _Unclear(f"{self.text.path}:{node.start_mark.line + 1}: {key} is no plain value")
        quote = node.style or ""
        self.text.edit(node.start_mark.index, node.end_mark.index, quote + value + quote)
        _set(self.text.want, self.keys, key, value)

    def add(self, key: str, value: str) -> None:
        """Give the mapping, which may be empty, one more ``key``."""
        if self.text.path.suffix == ".json":
            raise _Unclear(f"{self.text.path} is JSON")
        node, line = self.text.node(self.keys), f"{key}: {value}"
        start = node.start_mark.index
        if isinstance(node, yaml.MappingNode) and node.flow_style:
            at = self.text.new.index("{", start) + 1
            self.text.edit(at, at, line + (", " if node.value else ""))
        elif isinstance(node, yaml.MappingNode) and node.value:
            first = node.value[0][0].start_mark
            end = "\r\n" if "\r\n" in self.text.new else "\n"
            self.text.edit(first.index, first.index, f"{line}{end}{' ' * first.column}")
        elif isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            before = self.text.new[:start].rstrip(" ")
            joint = "" if self.text.new[start - 1 : start] == " " else " "
            joint = joint if before.endswith(":") else ":" + joint
            self.text.edit(start, node.end_mark.index, f"{joint}{{{line}}}")
        else:
            raise _Unclear(f"{self.text.path}:{node.start_mark.line + 1}: is no mapping")
        _set(self.text.want, self.keys, key, value)


class _Files:
    """The inventory and the files with variables beside it."""

    def __init__(self, path: Path, shadow: Path) -> None:
        self.path = path
        self.shadow = shadow  # an empty directory
        self.texts: dict[Path, _Text] = {}

    def text(self, path: Path) -> _Text:
        """The file as it is edited."""
        if path not in self.texts:
            self.texts[path] = _Text.read(path)
        return self.texts[path]

    def host_places(self, found: RawInventory, key: str) -> Iterator[_Place]:
        """Where single hosts have the variable."""
        for host in found.hosts:
            yield from self._variable_places("host_vars", host.name, key, frozenset([host.name]))
        for keys, name, node in _hosts(_compose(self.text(self.path).new)):
            if _has(node, key):
                yield _Place(self.text(self.path), keys, frozenset([name]))

    def group_places(self, found: RawInventory, key: str) -> Iterator[_Place]:
        """Where groups have it, ``all`` too."""
        for name in [*found.groups, "all"]:
            yield from self._variable_places("group_vars", name, key, _members(found, name))
        for keys, name, node in _groups(_compose(self.text(self.path).new)):
            if (variables := _get(node, "vars")) is not None and _has(variables, key):
                yield _Place(self.text(self.path), (*keys, "vars"), _members(found, name))

    def _variable_places(self, folder: str, name: str, key: str, hosts: frozenset[str]) -> Iterator[_Place]:
        for suffix in _SUFFIXES:
            path = self.path.parent / folder / (name + suffix)
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            for item in inside:
                if not item.is_file() or item.suffix not in _SUFFIXES or is_vaulted_file(str(item)):
                    continue
                with suppress(_Unclear):  # Ansible does not read it as YAML either
                    if _has(_compose(self.text(item).new), key):
                        yield _Place(self.text(item), (), hosts)

    def add(self, name: str, key: str, value: str) -> None:
        """Give a host a line of its own in the inventory."""
        text = self.text(self.path)
        entries = [(keys, node) for keys, host, node in _hosts(_compose(text.new)) if host == name]
        if not entries:
            raise _Unclear(f"host {name} has no line of its own in {self.path}")
        full = [keys for keys, node in entries if isinstance(node, yaml.MappingNode) and node.value]
        _Place(text, full[0] if full else entries[-1][0], frozenset([name])).add(key, value)

    def edits(self) -> list[Edit]:
        """The files that changed."""
        return [Edit(text.path, text.old, text.new) for text in self.texts.values() if text.new != text.old]

    def load(self) -> RawInventory:
        """The inventory as Ansible reads it with the new texts; the files themselves are not touched."""
        # Always the same path, so that templates which use it give the same value before and after.
        place = self.shadow / "inventory"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        _shadow(self.path.parent.absolute(), place, {item.path.absolute(): item.new for item in self.edits()})
        try:
            return file.read(place / self.path.name)
        except InventoryError as error:
            raise _Unclear(str(error).replace(str(place), str(self.path.parent))) from None

    def check(self, before: RawInventory, hosts: set[str], key: str, value: str) -> None:
        """Raise _Unclear unless the new files differ in meaning only in the variable of these hosts."""
        for text in self.texts.values():
            if _meaning(_compose(text.new)) != text.want:
                raise _Unclear(f"{text.path}: {key} cannot be changed alone")
        after = self.load()
        wanted = [
            replace(host, variables={**host.variables, key: value} if host.name in hosts else host.variables)
            for host in before.hosts
        ]
        if before.groups != after.groups or list(map(_plain, wanted)) != list(map(_plain, after.hosts)):
            raise _Unclear(f"{key} would not be {value} on these hosts alone")


def _plain(host: RawHost) -> RawHost:
    """The host without the origins of its values, whose lines may move."""
    return replace(host, origins={}, variables=dict(sorted(host.variables.items())))


def _members(found: RawInventory, group: str) -> frozenset[str]:
    return frozenset(host.name for host in found.hosts if group == "all" or group in host.groups)


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def _shadow(source: Path, target: Path, texts: dict[Path, str]) -> None:
    """Links to all that ``source`` has, and files with the new texts."""
    for item in source.iterdir():
        there = target / item.name
        if item in texts:
            with there.open("w", encoding="utf-8", newline="") as file:
                file.write(texts[item])
        elif item.is_dir() and any(item in path.parents for path in texts):
            there.mkdir()
            _shadow(item, there, texts)
        else:
            there.symlink_to(item)


def _compose(text: str) -> yaml.Node:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _Unclear("it is not YAML: " + " ".join(str(error).split())) from None
    if node is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    return node


def _meaning(node: yaml.Node) -> Any:
    """The meaning of a document, with order and tags; encrypted values stay encrypted."""
    if isinstance(node, yaml.MappingNode):
        return [[_meaning(key), _meaning(value)] for key, value in node.value]
    if isinstance(node, yaml.SequenceNode):
        return (node.tag, [_meaning(item) for item in node.value])
    return (node.tag, node.value)


def _set(want: Any, keys: tuple[str, ...], key: str, value: str) -> None:
    """Set ``key`` of the mapping below ``keys`` in the wanted meaning."""
    for name in keys:
        pair = next(pair for pair in want if pair[0][1] == name)
        if not isinstance(pair[1], list):  # empty so far
            pair[1] = []
        want = pair[1]
    scalar = ("tag:yaml.org,2002:str", value)
    for pair in want:
        if pair[0][1] == key:
            pair[1] = scalar
            return
    want.insert(0, [("tag:yaml.org,2002:str", key), scalar])


def _child(node: yaml.Node, name: str) -> tuple[yaml.Node, yaml.Node]:
    """Key and value nodes of a mapping's entry; _Unclear unless it is there once."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    found = [(key, value) for key, value in pairs if key.value == name]
    if len(found) != 1:
        raise _Unclear(f"line {node.start_mark.line + 1}: {name} is there {len(found)} times")
    return found[0]


def _get(node: yaml.Node, name: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _has(node: yaml.Node, key: str) -> bool:
    return _get(node, key) is not None


def _groups(node: yaml.Node, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, yaml.Node]]:
    """(keys, name, node) of every group in the inventory, in the file's order."""
    for name, group in node.value if isinstance(node, yaml.MappingNode) else []:
        here = (*keys, str(name.value))
        yield here, here[-1], group
        if (children := _get(group, "children")) is not None:
            yield from _groups(children, (*here, "children"))


def _hosts(node: yaml.Node) -> Iterator[tuple[tuple[str, ...], str, yaml.Node]]:
    """(keys, name, node) of every entry of a host in the inventory, in the file's order."""
    for keys, _, group in _groups(node):
        hosts = _get(group, "hosts")
        for name, entry in hosts.value if isinstance(hosts, yaml.MappingNode) else []:
            yield (*keys, "hosts", str(name.value)), str(name.value), entry
