"""Ansible's inventory plugin for ``plugin: oeprov_ecs``; ``provision/inventory/ecs.py`` does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
name: oeprov_ecs
short_description: Alibaba Cloud ECS instances by tag
description:
  - Puts the running instances that have all O(tags) into the groups C(parameter_servers) and C(workers).
  - Alibaba Cloud's SDK finds the credentials in its usual places; they are never in the file.
options:
  plugin:
    description: This plugin.
    required: true
    choices: [oeprov_ecs, oeprov.oeprov.oeprov_ecs]
  regions:
    description: Regions to search.
    type: list
    elements: str
    required: true
  tags:
    description: Tags that an instance must have, with their values.
    type: dict
    required: true
  address:
    description: Address of an instance to connect to.
    choices: [private, public]
    default: private
  user:
    description: User to log in as.
    default: root
  private_key:
    description: File of the SSH key; empty for ssh's default.
    default: ''
  port:
    description: Port of its SSH server.
    type: int
    default: 22
  kinds:
    description: Kinds by pattern of instance type families, in addition to the plugin's own table.
    type: dict
    default: {}
  group_tag:
    description: Tag whose value names the groups of an instance; without the tag, its kind decides.
    default: oeprov
  endpoint:
    description: Address of the service, if not the region's public one.
    default: ''
  vars:
    description: Variables by group (C(all), C(parameter_servers), C(workers)).
    type: dict
    default: {}
author: oeprov (@oeprov)
"""

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin

# Import the collection's own package `provision`: an installed one may have another version.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
try:
    from provision.cluster.errors import OeprovError
    from provision.inventory import ecs
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""


class InventoryModule(BaseInventoryPlugin):
    """Everything is in ``provision.inventory.ecs``; this hands it on."""

    NAME = "oeprov_ecs"

    def verify_file(self, path: str) -> bool:
        """Any YAML file; Ansible asks only for those that name this plugin."""
        return bool(super().verify_file(path)) and path.endswith((".yml", ".yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Fill the inventory."""
        if MISSING:
            raise AnsibleParserError(f"{sys.executable}: {MISSING}; install pydantic there with pip")
        super().parse(inventory, loader, path, cache)
        try:
            query, hosts = ecs.read_query(Path(path)), ecs.find(Path(path))
        except OeprovError as error:
            raise AnsibleParserError(str(error)) from None
        for group in (ecs.PARAMETER_SERVERS, ecs.WORKERS):
            inventory.add_group(group)
        for group, variables in query.vars.items():
            for key, value in variables.items():
                inventory.set_variable(group, key, value)
        for host in hosts:
            for group in host.groups:
                inventory.add_host(host.name, group=group)
            for key, value in host.variables.items():
                inventory.set_variable(host.name, key, value)
