#!/usr/bin/python
"""Prepare a host for a training job and start its servers, or stop the job's processes there."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_job
short_description: Prepare a host for a training job and start its servers, or stop the job's processes
description:
  - V(prepared) creates the directories that a role's processes use, and the job's token, which only its
    owner can read. It refuses a storage directory that cannot be written. With O(units) it starts systemd
    units and waits until each server listens; if one does not, it stops and removes all of them.
  - V(stopped) stops the job's processes of one role on this host; a worker writes a checkpoint first.
    It removes units. Rows in persistent memory stay, so that the job can be resumed. Processes that the
    launcher started (C(state.json)) get SIGTERM. If the launcher has ended, they end by themselves, and the
    module only waits for them. Another process that has the pid of an ended one is left alone.
options:
  directory:
    description: Directory of the job.
    type: path
    required: true
  role:
    description: Role of the processes.
    choices: [worker, parameter_server]
    type: str
    required: true
  state:
    description: State to reach.
    choices: [prepared, stopped]
    type: str
    default: prepared
  token:
    description: The job's token; required for V(prepared).
    type: str
  user:
    description: System user that the job's units run as, created if it does not exist; empty if the launcher
      itself starts the processes.
    type: str
    default: ""
  units:
    description: Units to start, as C(oeprov launch-training) writes them.
    type: list
    elements: dict
    default: []
  storage_directory:
    description: Directory that servers keep rows in; empty for none.
    type: path
    default: ""
  timeout:
    description: Seconds to wait for servers to listen, or for processes to end.
    type: int
    default: 600
author: oeprov (@oeprov)
"""

EXAMPLES = r"""
- name: Stop the worker of the job once its checkpoint is written
  oeprov.oeprov.oeprov_job:
    directory: /var/lib/oeprov/jobs/deepfm-20261121-121500
    role: worker
    state: stopped
"""

RETURN = r"""
stopped:
  description: Names of the processes that were running and have ended.
  type: list
  elements: str
  returned: when state is stopped
servers:
  description: Each server that was started, with name, pid, host and port.
  type: list
  elements: dict
  returned: when units were started
"""

import json
import os
import stat
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.oeprov.oeprov.plugins.module_utils.node import job, jobfiles, process
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.command import CommandError, System

FOLDERS = {"worker": ["", "logs", "run"], "parameter_server": ["", "logs", "ready", "metrics"]}


def prepare(module, directory, storage):
    """Create missing directories and the token; return whether anything was missing."""
    if storage and not (os.path.isdir(storage) and os.access(storage, os.W_OK | os.X_OK)):
        module.fail_json(msg="{} is not a directory that this user can write to".format(storage))
    changed = False
    for folder in FOLDERS[module.params["role"]]:
        path = os.path.join(directory, folder).rstrip("/")
        if not os.path.isdir(path):
            changed = True
            if not module.check_mode:
                os.makedirs(path, 0o700)
    token, path = module.params["token"].strip() + "\n", os.path.join(directory, "token")
    try:
        with open(path) as file:
            same = file.read() == token and stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    except (OSError, IOError):
        same = False
    if not same and not module.check_mode:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(token)
    return changed or not same


def start(module, system):
    """Prepare the host for units and start them; return the module's result."""
    params = module.params
    if module.check_mode:
        return {"changed": True}
    args = {key: params[key] for key in ("directory", "user", "token", "units")}
    args["seconds"] = params["timeout"]
    return dict(job.start(system, args), changed=True)


def running(module, path):
    """Return the role's running processes of a launcher on this machine, and whether the launcher runs.

    A job's processes on a host reached over SSH have no launcher there, but can write such a file.
    """
    on_host = os.path.dirname(os.path.dirname(path)) == os.path.join(jobfiles.HOME, "jobs")
    if on_host or not os.path.exists(path):
        return [], False
    try:
        with open(path) as file:
            owner = os.fstat(file.fileno()).st_uid
            if owner != os.geteuid():
                module.fail_json(msg="{} belongs to user {}: stop the job as that user".format(path, owner))
            state = json.load(file)
        supervised = process.alive(state["supervisor_pid"], state["supervisor_started"])
        mine = [
            item
            for item in state["processes"]
            if item["role"] == module.params["role"] and not item.get("unit")
        ]
        return [item for item in mine if process.alive(item["pid"], item["started"])], supervised
    except (OSError, IOError) as error:
        module.fail_json(msg="{}: {}".format(path, error.strerror))
    except (ValueError, KeyError, TypeError):
        module.fail_json(msg="{} is not the state of a job".format(path))


def stop(module, found, supervised):
    """Stop the processes; fail if one does not end."""
    for item in found:
        # Without their supervisor they are ending already; a second signal would abort the checkpoint.
        if supervised:
            process.send(item["pid"], item["started"])
    deadline = time.time() + module.params["timeout"]
    left = [
        item
        for item in found
        if not process.wait_gone(item["pid"], item["started"], max(0.0, deadline - time.time()))
    ]
    if left:
        words = ", ".join("{} (pid {})".format(item["name"], item["pid"]) for item in left)
        module.fail_json(msg="did not end in {} s: {}".format(module.params["timeout"], words))


def stop_units(module, system):
    """Stop and remove the role's units; return the names of those that ran here."""
    directory, role = module.params["directory"], module.params["role"]
    units = [item for item in jobfiles.recorded(system, directory) if item["role"] == role]
    if not units or module.check_mode:
        return [item["name"] for item in units]
    done = job.stop(system, {"directory": directory, "role": role, "keep_pools": True})["stopped"]
    return [name for name, item in sorted(done.items()) if item["ran"]]


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "role": {"choices": ["worker", "parameter_server"], "required": True},
            "state": {"choices": ["prepared", "stopped"], "default": "prepared"},
            "token": {"type": "str", "no_log": True},
            "user": {"type": "str", "default": ""},
            "units": {"type": "list", "elements": "dict", "default": []},
            "storage_directory": {"type": "path", "default": ""},
            "timeout": {"type": "int", "default": 600},
        },
        required_if=[("state", "prepared", ["token"])],
        supports_check_mode=True,
    )
    directory, system = module.params["directory"], System()
    try:
        if module.params["state"] == "prepared" and module.params["user"]:
            module.exit_json(**start(module, system))
        if module.params["state"] == "prepared":
            module.exit_json(changed=prepare(module, directory, module.params["storage_directory"]))
        found, supervised = running(module, os.path.join(directory, "state.json"))
        if not module.check_mode:
            stop(module, found, supervised)
        stopped = [item["name"] for item in found] + stop_units(module, system)
        module.exit_json(changed=bool(stopped), stopped=stopped)
    except CommandError as error:
        module.fail_json(msg=str(error))
    except (OSError, IOError) as error:
        module.fail_json(msg="{}: {}".format(error.filename or directory, error.strerror))


if __name__ == "__main__":
    main()
