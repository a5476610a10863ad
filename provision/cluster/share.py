"""Paths of playbooks, roles and inventories: in the repository, or inside the wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def root() -> Path:
    """The directory of ``playbooks/``, ``roles/``, ``plugins/``, ``inventory/`` and ``ansible.cfg``."""
    repository = _PACKAGE.parent
    if (repository / "pyproject.toml").is_file() and (repository / "playbooks").is_dir():
        return repository
    return _PACKAGE / "share"


def inventory(name: str) -> Path:
    """Path of ``inventory/<name>.yml``, such as ``sample`` or ``local``."""
    return root() / "inventory" / f"{name}.yml"


def node_package() -> Path:
    """Path of the ``provision/node`` package, which travels to nodes."""
    return _PACKAGE / "node"
