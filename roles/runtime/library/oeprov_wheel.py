#!/usr/bin/python
"""Builds oeprov's wheel on a host, for all hosts of its kind."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_wheel
short_description: Build the runtime of oeprov as a wheel
description:
  - Installs compilers and libraries from the distribution, and builds. Nothing comes from PyPI.
  - Used by C(oeprov_converge) where no wheel for the host's kind of system is had.
options:
  packed:
    description: Tar archive with C(source) and C(tools) on the host.
    type: path
    required: true
  into:
    description: Directory to build in; emptied first.
    type: path
    required: true
  python:
    description: Interpreter that the wheel is for.
    type: str
    default: python3
  repositories:
    description: Where packages come from, as the variable C(runtime_repositories) says.
    type: dict
    default: {}
author: oeprov
"""

EXAMPLES = r"""
- name: Build the runtime
  oeprov_wheel:
    packed: /root/build.tar.gz
    into: /root/build
"""

RETURN = r"""
path:
  description: The wheel.
  type: str
  returned: success
log:
  description: The last 200 lines of what pip and the compiler said.
  type: str
  returned: failure
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import build
from ansible.module_utils.node.command import CommandError, System
from ansible.module_utils.node.observe import observe_os
from ansible.module_utils.node.step import Desired


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "packed": {"type": "path", "required": True},
            "into": {"type": "path", "required": True},
            "python": {"type": "str", "default": "python3"},
            "repositories": {"type": "dict", "default": {}},
        }
    )
    system, into = System(), module.params["into"]
    host = observe_os(system)
    python = build.python_of(host, Desired(runtime_python=module.params["python"]))
    try:
        given = module.params["repositories"]
        path = build.make(system, host, python, module.params["packed"], into, given)
    except CommandError as error:
        log = system.read(os.path.join(into, "log")).splitlines()
        module.fail_json(msg=str(error), log="\n".join(log[-200:]))
    module.exit_json(changed=True, path=path)


if __name__ == "__main__":
    main()
