#!/usr/bin/python
"""Ends the processes of a training job on this host, told apart from others by pid and start time."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_stop
short_description: End the processes of a training job on this host
description:
  - Reads C(state.json) of the job and sends SIGTERM to its processes of one role that still run here.
  - Processes whose launcher is gone end by themselves and are only waited for.
  - A worker writes a checkpoint first. A process that got the pid of an ended one is left alone.
options:
  job_directory:
    description: Directory of the job.
    type: path
    required: true
  role:
    description: Which of the job's processes to end.
    choices: [worker, parameter_server]
    type: str
    required: true
  timeout:
    description: Seconds to wait for each process.
    type: int
    default: 600
author: oeprov
"""

EXAMPLES = r"""
- name: Stop the worker of the job once its checkpoint is written
  oeprov_stop:
    job_directory: /var/lib/oeprov/jobs/deepfm-20261121-121500
    role: worker
"""

RETURN = r"""
stopped:
  description: Names of the processes that were running and have ended.
  type: list
  elements: str
  returned: always
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import process


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "job_directory": {"type": "path", "required": True},
            "role": {"choices": ["worker", "parameter_server"], "required": True},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    path = os.path.join(module.params["job_directory"], "state.json")
    try:
        with open(path) as file:
            state = json.load(file)
        supervised = process.alive(state["supervisor_pid"], state["supervisor_started"])
        mine = [item for item in state["processes"] if item["role"] == module.params["role"]]
        running = [item for item in mine if process.alive(item["pid"], item["started"])]
    except (OSError, IOError) as error:
        module.fail_json(msg="{}: {}".format(path, error.strerror))
    except (ValueError, KeyError, TypeError):
        module.fail_json(msg="{}: is not the state of a job".format(path))
    names = [item["name"] for item in running]
    if module.check_mode or not running:
        module.exit_json(changed=bool(running), stopped=names)
    for item in running:
        # Without their supervisor they are ending already, and a second request would cost the checkpoint.
        if supervised:
            process.send(item["pid"], item["started"])
    left = [
        item
        for item in running
        if not process.wait_gone(item["pid"], item["started"], module.params["timeout"])
    ]
    if left:
        words = ", ".join("{} (pid {})".format(item["name"], item["pid"]) for item in left)
        module.fail_json(msg="did not end in {} s: {}".format(module.params["timeout"], words))
    module.exit_json(changed=True, stopped=names)


if __name__ == "__main__":
    main()
