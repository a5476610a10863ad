"""Where playbooks, roles and inventories lie: the repository in a checkout, else inside the wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def root() -> Path:
    """The directory of ``playbooks/``, ``roles/``, ``plugins/``, ``inventory/`` and ``ansible.cfg``."""
    repository = _PACKAGE.parent
    if (repository / "pyproject.toml").is_file() and (repository / "playbooks").is_dir():
        return repository
    return _PACKAGE / "share"


def playbook(name: str) -> Path:
    """Path of ``playbooks/<name>.yml``."""
    return root() / "playbooks" / f"{name}.yml"


def roles() -> Path:
    """Path of the roles directory."""
    return root() / "roles"


def ansible_config() -> Path:
    """Path of ``ansible.cfg``, for ANSIBLE_CONFIG."""
    return root() / "ansible.cfg"


def inventory(name: str) -> Path:
    """Path of ``inventory/<name>.yml``, such as ``sample`` or ``local``."""
    return root() / "inventory" / f"{name}.yml"


def plugins() -> Path:
    """Path of the directory that holds Ansible's modules and plugins."""
    return root() / "plugins"


def node_package() -> Path:
    """Path of the ``provision/node`` package, which travels to nodes."""
    return _PACKAGE / "node"
