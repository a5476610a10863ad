#!/usr/bin/python
"""Carry out one role's part of a host's plan, with the code that observes and plans for `oeprov plan`."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_converge
short_description: Set up one part of a host as the inventory asks
description:
  - Observes the host, plans with C(provision.node), and carries out the steps of one part, in the order of
    the plan. A reboot waits until the steps of all parts before it are done.
  - An approved plan (O(approved)) is refused if the host's state has changed since. Steps that it does not
    have are not done, and reported.
  - Steps that destroy data need O(consent) that names the object.
  - Only one module at a time changes a host. With O(run), only one run of C(oeprov) does.
options:
  part:
    description: Part whose steps to carry out. V(begin) only checks O(approved) and takes the host's lease
      for O(run), V(end) releases it, V(all) is for check mode.
    choices: [begin, end, kernel, runtime, pmem, gpu, all]
    type: str
    required: true
  preparing:
    description: Carry out only steps that interrupt nothing on the host.
    type: bool
    default: false
  rebooted:
    description: Confirm that the host was just rebooted; fail if it was not.
    type: bool
    default: false
  desired:
    description: Desired values of the host. The action plugin takes them from the inventory's variables.
    type: dict
    required: true
  approved:
    description: The approved plan - C(digest) of its state and ids of its C(steps).
    type: dict
    default: {}
  consent:
    description: Objects whose data may be lost, as plans name them.
    type: list
    elements: str
    default: []
  run:
    description: Holder of the lease - C(id) of the run, its C(owner), and C(where) it runs.
    type: dict
    default: {}
author: oeprov (@oeprov)
"""

EXAMPLES = r"""
- name: Set the mode of persistent memory
  oeprov.oeprov.oeprov_converge:
    part: pmem
"""

RETURN = r"""
steps:
  description: The steps of the part, each with id, what, ok, message and seconds.
  type: list
  returned: always
left:
  description: Steps that were not done because the approved plan does not have them.
  type: list
  elements: str
  returned: always
reboot:
  description: Whether the host must be rebooted now.
  type: bool
  returned: always
booted:
  description: Whether the system is booted. If not, as in the build of an image, hardware, reboots and units
    are left for the booted host.
  type: bool
  returned: success
kernel_left:
  description: Whether the role kernel must run before the remaining steps.
  type: bool
  returned: always
state:
  description: State of the host, if the approved plan no longer fits.
  type: dict
  returned: failure
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.oeprov.oeprov.plugins.module_utils.node import apply as node_apply
from ansible_collections.oeprov.oeprov.plugins.module_utils.node import lease, plan, trial
from ansible_collections.oeprov.oeprov.plugins.module_utils.node import observe as node_observe
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.command import CommandError, System
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.state import decode, encode
from ansible_collections.oeprov.oeprov.plugins.module_utils.node.step import Desired


def refusal(step, consent):
    """Return why the step is refused; empty if it is not."""
    missing = [item for item in step.destroys if item not in consent]
    if missing:
        return "{} destroys {}; agree to that by name: oeprov --consent HOST:OBJECT, or pmem_consent".format(
            step.what, ", ".join(missing)
        )
    if not node_apply.can_apply(step):
        return "{}: this version plans this step but does not carry it out".format(step.what)
    return ""


def describe(steps):
    """Return the steps as text, for --diff."""
    return "".join("{}  ({})\n".format(step.what, step.why) for step in steps)


def begin(module, made, state):
    """Refuse a plan that was made from another state."""
    approved = module.params["approved"]
    if approved and approved["digest"] != made.digest:
        module.fail_json(
            msg="the host has changed since the plan was made; nothing was done here: plan again",
            state=encode(state),
            steps=[],
        )
    module.exit_json(**nothing())


def nothing():
    """Return the result for nothing done."""
    return {"changed": False, "steps": [], "left": [], "reboot": False, "kernel_left": False}


def warn_of_image(module, made, state):
    """Say what a system that is not booted leaves for the booted host."""
    if not state.image.booted:
        for note in made.notes[:1]:
            module.warn(note)


def warn_of_waiting(module, made):
    """Warn if a reboot waits for steps that another role has to carry out first."""
    others = made.steps_before_reboot()
    if others:
        module.warn(
            "the host does not reboot yet: first {}".format(
                "; ".join("{} (role {})".format(step.what, step.role) for step in others)
            )
        )


def carry_out(module, system, steps):
    """Carry out the steps in order; return those done, whether the host changed, and whether to reboot."""
    done, changed, reboot = [], False, False
    for step in steps:
        started = time.time()
        entry = {"id": step.id, "what": step.what}
        try:
            applied = node_apply.apply(step, system)
        except CommandError as error:
            done.append(dict(entry, ok=False, message=str(error), seconds=time.time() - started))
            module.fail_json(msg=str(error), steps=done, changed=changed)
        changed = changed or applied.changed
        reboot = reboot or step.action == "reboot"
        done.append(dict(entry, ok=True, message=applied.message, seconds=time.time() - started))
    return done, changed, reboot


def run(module, system, holder):
    """Observe, plan, refuse or carry out."""
    params = module.params
    part, approved = params["part"], params["approved"]
    desired = decode(Desired, params["desired"])
    confirmed = ""
    if not module.check_mode:
        confirmed = trial.confirm(system).message if params["rebooted"] else trial.confirm_if_pending(system)
    state = node_observe.observe(system, desired)
    made = plan.make_plan(state, desired)
    warn_of_image(module, made, state)
    if part == "begin":
        begin(module, made, state)
    steps = made.steps if part == "all" else made.ready_steps(part, params["preparing"])
    if made.problems and (steps or part == "all"):
        module.fail_json(msg="; ".join(made.problems), steps=[])
    if part == "kernel" and not params["preparing"]:
        warn_of_waiting(module, made)
    # The first step that was not approved is not done, nor any after it.
    agreed = [not approved or step.id in approved.get("steps", []) for step in steps] + [False]
    left = [step.what for step in steps[agreed.index(False) :]]
    steps = steps[: agreed.index(False)]
    kernel_left = bool(made.role_steps("kernel"))
    diff = {"before": "", "after": describe(steps), "before_header": "now", "after_header": "steps to do"}
    if module.check_mode:
        shown = [
            {"id": step.id, "what": step.what, "ok": True, "message": "", "seconds": 0.0} for step in steps
        ]
        module.exit_json(
            changed=bool(steps),
            steps=shown,
            left=left,
            reboot=False,
            kernel_left=kernel_left,
            booted=state.image.booted,
            diff=diff,
        )
    for step in steps:
        reason = refusal(step, params["consent"] + approved.get("consent", []))
        if reason:
            module.fail_json(msg=reason, steps=[])
    done, changed, reboot = carry_out(module, system, steps)
    if confirmed and part == "kernel":
        done.insert(0, {"id": "reboot-check", "what": confirmed, "ok": True, "message": "", "seconds": 0.0})
    if reboot and holder:
        lease.acquire(system, holder, desired.kernel_reboot_timeout + lease.SECONDS)
    module.exit_json(
        changed=changed,
        steps=done,
        left=left,
        reboot=reboot,
        kernel_left=kernel_left,
        booted=state.image.booted,
        diff=diff,
    )


def run_alone(module, system, holder):
    """Run while holding the host's lock, and its lease if there is a holder."""
    with lease.lock(system):
        if module.params["part"] != "end":
            if holder:
                lease.acquire(system, holder)
            run(module, system, holder)
        if holder:
            lease.release(system, holder)
        module.exit_json(**nothing())


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "part": {
                "choices": ["begin", "end", "all", "kernel", "runtime", "pmem", "gpu"],
                "required": True,
            },
            "preparing": {"type": "bool", "default": False},
            "rebooted": {"type": "bool", "default": False},
            "desired": {"type": "dict", "required": True},
            "approved": {"type": "dict", "default": {}},
            "consent": {"type": "list", "elements": "str", "default": []},
            "run": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        if module.check_mode or module.params["desired"].get("kind") == "local":
            # On kind local, which needs no root, the lock of the cluster is enough.
            run(module, System(), {})
        else:
            run_alone(module, System(), module.params["run"])
    except CommandError as error:
        module.fail_json(msg=str(error), steps=[])


if __name__ == "__main__":
    main()
