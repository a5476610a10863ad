"""Inventories that list no hosts themselves: scripts, queries of inventory plugins, directories of sources.

Ansible's own plugins read them. A source that none can read is an error here, with that plugin's own words.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

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


def yaml_files(directory: Path) -> list[Path]:
    """The YAML files among the sources of a directory; InventoryError when it has no source at all."""
    found = sorted(item for item in directory.iterdir() if item.is_file() and item.name[0] != ".")
    if not found:
        raise InventoryError(f"{directory}: is a directory without inventory files")
    return [item for item in found if item.suffix in _YAML and not is_script(item)]


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
