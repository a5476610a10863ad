"""Inventories that list no hosts themselves: scripts, queries of inventory plugins, directories of sources.

Ansible's own plugins read them. A source that none can read is an error here, with that plugin's own words.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.inventory import manager as ansible_manager
from ansible.plugins.loader import init_plugin_loader

from provision.cluster.errors import InventoryError

_YAML = (".yml", ".yaml", ".json")
_FAILED = re.compile(r"[Ff]ailed to parse .*?with '?([\w.]+)'? (?:inventory )?plugin:?\s*(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"unknown plugin '([^']+)'")


def is_script(path: Path) -> bool:
    """Whether the file is a program that prints an inventory, as Ansible decides it."""
    try:
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) == b"#!"
    except OSError:
        return False


def is_query(content: Any) -> bool:
    """Whether a parsed file names an inventory plugin."""
    return isinstance(content, dict) and isinstance(content.get("plugin"), str)


def is_yaml(path: Path) -> bool:
    """Whether Ansible reads the file as YAML; with another ending, or none, it may be an INI file."""
    if path.suffix in _YAML:
        return True
    with suppress(OSError):
        lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
        first = next((line for line in lines if line and line[0] not in "#;"), "")
        return not path.suffix and not first.startswith("[")
    return True


def yaml_files(directory: Path) -> list[Path]:
    """The YAML files among the sources of a directory; InventoryError when it has no source at all."""
    found = sorted(item for item in directory.iterdir() if item.is_file() and item.name[0] != ".")
    if not found:
        raise InventoryError(f"{directory}: is a directory without inventory files")
    return [item for item in found if item.suffix in _YAML and not is_script(item)]


def variable_entries(directory: Path, folder: str) -> list[Path]:
    """The files and directories that Ansible reads of ``group_vars`` or ``host_vars`` beside an inventory."""
    found = sorted((directory / folder).iterdir()) if (directory / folder).is_dir() else []
    return [item for item in found if item.name[0] != "." and (item.is_dir() or item.suffix in ("", *_YAML))]


def variable_files(directory: Path) -> Iterator[Path]:
    """The files of variables beside an inventory."""
    for folder in ("group_vars", "host_vars"):
        for entry in variable_entries(directory, folder):
            yield from filter(Path.is_file, sorted(entry.rglob("*")) if entry.is_dir() else [entry])


def refuse_duplicates(path: Path) -> None:
    """Raise InventoryError for a key that stands twice in a mapping; Ansible only warns, and takes the last.

    Keys that ``<<`` merges may be overridden. A file that is not YAML, or encrypted, is left to Ansible.
    """
    with suppress(yaml.YAMLError, OSError, UnicodeError):
        waiting = [yaml.compose(path.read_text(encoding="utf-8"), _Loader)]
        seen: set[int] = set()  # an alias is the node that it names
        while waiting:
            node = waiting.pop()
            if id(node) in seen or not isinstance(node, yaml.CollectionNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += node.value
                continue
            waiting += [value for _, value in node.value]
            keys: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in keys and key.value != "<<":
                    where = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
                    raise InventoryError(f"{where}: {key.value} stands twice here; keep one of them")
                keys.add(key.value)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@contextmanager
def strictly(path: Path) -> Iterator[None]:
    """Make a source that no plugin can read an InventoryError, instead of a warning and no hosts."""
    _find_collections()
    heard = _Heard(ansible_manager.display)
    before = ansible_manager.C.INVENTORY_ANY_UNPARSED_IS_FAILED
    ansible_manager.C.INVENTORY_ANY_UNPARSED_IS_FAILED = True
    ansible_manager.display = heard
    try:
        yield
    except AnsibleError as error:
        if not heard.failures:
            raise
        of_directory = re.search(r"inventory source (.+?)\.?$", str(error).strip().partition("\n")[0])
        name = Path(of_directory[1]).name if of_directory and path.is_dir() else ""
        where = path / name if name and (path / name).is_file() else path
        raise InventoryError(f"{where}: {heard.reason(where)}") from error
    finally:
        ansible_manager.C.INVENTORY_ANY_UNPARSED_IS_FAILED = before
        ansible_manager.display = heard.display


@cache
def _find_collections() -> None:
    """Let Ansible's loader find plugins by their full names; without it there are only short ones."""
    init_plugin_loader()


class _Heard:
    """Ansible's display, which keeps what plugins say about a source instead of showing it."""

    def __init__(self, display: Any) -> None:
        self.display = display
        self.failures: dict[str, str] = {}  # by plugin

    def __getattr__(self, name: str) -> Any:
        return getattr(self.display, name)

    def warning(self, msg: str, *_: Any, **__: Any) -> None:
        """Keep a failure; ansible-core before 2.19 reports it so."""
        if found := _FAILED.search(msg):
            self.failures[found[1]] = found[2]

    def error_as_warning(self, msg: str | None, exception: BaseException, *_: Any, **__: Any) -> None:
        """Keep a failure."""
        if found := _FAILED.search(f"{msg} "):
            self.failures[found[1]] = str(exception)

    def reason(self, path: Path) -> str:
        """One line: the words of the plugin whose business the source was."""
        name = next((item for item in ("script", "auto") if item in self.failures), "")
        text = self.failures[name] if name else next(reversed(self.failures.values()))
        words = " ".join(text.split())
        if unknown := _UNKNOWN.search(words):
            collection = ".".join(unknown[1].split(".")[:2])
            cure = f"ansible-galaxy collection install {collection}"
            return f"inventory plugin {unknown[1]} is not installed: {cure}"
        by_hand = f"; run it to see more: {shlex.quote(str(path))} --list" if name == "script" else ""
        return f"gives no inventory: {words.rstrip('.')}{by_hand}"
