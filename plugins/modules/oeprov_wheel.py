#!/usr/bin/python
"""Build oeprov's wheel on a host, for all hosts with the same system."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_wheel
short_description: Build the runtime of oeprov as a wheel
description:
  - Installs compilers and libraries from the distribution, and builds. Nothing comes from PyPI.
  - The wheel of another flavor is built in a container, as that flavor's documentation says.
  - C(oeprov_converge) uses it if there is no wheel for the host's system.
options:
  packed:
    description: Tar archive with C(source) and C(tools) on the host; empty for another flavor's wheel.
    type: path
    default: ""
  into:
    description: Directory to build in; emptied first.
    type: path
    required: true
  desired:
    description: Desired values of the host; only its flavor, interpreter and repositories are used.
    type: dict
    required: true
author: oeprov (@oeprov)
"""

EXAMPLES = r"""
- name: Build the runtime
  oeprov.oeprov.oeprov_wheel:
    packed: /root/build.tar.gz
    into: /root/build
    desired: "{{ oeprov_plan.desired }}"
"""

RETURN = r"""
path:
  description: Path of the wheel.
  type: str
  returned: success
log:
  description: The last 200 lines that pip and the compiler printed.
  type: str
  returned: failure
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.oeprov.oeprov.plugins.module_utils.node import flavors
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.command import CommandError, System
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.observe import observe_os
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.state import decode
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.step import Desired


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "packed": {"type": "path", "default": ""},
            "into": {"type": "path", "required": True},
            "desired": {"type": "dict", "required": True},
        }
    )
    system, into = System(), module.params["into"]
    try:
        flavor = flavors.get(decode(Desired, module.params["desired"]))
        path = flavor.make(system, observe_os(system), module.params)
    except CommandError as error:
        log = system.read(os.path.join(into, "log")).splitlines()
        module.fail_json(msg=str(error), log="\n".join(log[-200:]))
    module.exit_json(changed=True, path=path)


if __name__ == "__main__":
    main()
