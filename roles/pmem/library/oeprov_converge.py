#!/usr/bin/python
"""Carries out one role's part of a host's plan: the same code that observes and plans for `oeprov plan`."""

from __future__ import absolute_import, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: oeprov_converge
short_description: Bring one part of a host to what the inventory asks for
description:
  - Observes the host, plans with C(provision.node), and carries out the steps of one part.
  - A plan that was agreed to (O(approved)) is refused when the host's state has moved since.
  - Steps that destroy data need O(consent) that names the object.
options:
  part:
    description: Whose steps to do. V(none) only checks O(approved), V(all) is for check mode.
    choices: [none, kernel, runtime, pmem, gpu, all]
    type: str
    required: true
  desired:
    description: What is wanted of the host. The action plugin fills it in from the inventory's variables.
    type: dict
    required: true
  approved:
    description: The plan that was agreed to - C(digest) of its state and ids of its C(steps).
    type: dict
    default: {}
  consent:
    description: Objects whose data may be lost, as plans name them.
    type: list
    elements: str
    default: []
author: oeprov
"""

EXAMPLES = r"""
- name: Bring persistent memory to the mode that the inventory asks for
  oeprov_converge:
    part: pmem
"""

RETURN = r"""
steps:
  description: The steps of the part, each with id, what, ok, message and seconds.
  type: list
  returned: always
state:
  description: What the host looks like now, when the approved plan no longer fits.
  type: dict
  returned: failure
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.node import apply as node_apply
from ansible.module_utils.node import observe as node_observe
from ansible.module_utils.node import plan, roles
from ansible.module_utils.node.command import CommandError, System
from ansible.module_utils.node.step import Desired


def refusal(step, approved, consent):
    """Why the step may not be done; empty when it may."""
    if approved and step.id not in approved.get("steps", []):
        return "{} is not in the plan that was agreed to; plan again".format(step.what)
    missing = [item for item in step.destroys if item not in consent]
    if missing:
        return "{} destroys {}; agree to that by name: oeprov --consent HOST:OBJECT, or pmem_consent".format(
            step.what, ", ".join(missing)
        )
    if not node_apply.can_apply(step):
        return "{}: this version plans this step but does not carry it out".format(step.what)
    return ""


def describe(steps):
    """The steps as text, for --diff."""
    return "".join("{}  ({})\n".format(step.what, step.why) for step in steps)


def run(module, system):
    """Observe, plan, refuse or carry out."""
    params = module.params
    desired = Desired.from_dict(params["desired"])
    state = node_observe.observe(system, desired)
    made = plan.make_plan(state, desired)
    approved, part = params["approved"], params["part"]
    if part == "none":
        if approved and approved["digest"] != made.digest:
            module.fail_json(
                msg="the host has changed since the plan was made; nothing was done here: plan again",
                state=state.to_dict(),
                steps=[],
            )
        module.exit_json(changed=False, steps=[])
    steps = roles.steps_of(made, part)
    if made.problems and (steps or part == "all"):
        module.fail_json(msg="; ".join(made.problems), steps=[])
    diff = {"before": "", "after": describe(steps), "before_header": "now", "after_header": "steps to do"}
    if module.check_mode:
        shown = [
            {"id": step.id, "what": step.what, "ok": True, "message": "", "seconds": 0.0} for step in steps
        ]
        module.exit_json(changed=bool(steps), steps=shown, diff=diff)
    for step in steps:
        reason = refusal(step, approved, params["consent"] + approved.get("consent", []))
        if reason:
            module.fail_json(msg=reason, steps=[])
    done, changed = [], False
    for step in steps:
        begun = time.time()
        entry = {"id": step.id, "what": step.what}
        try:
            applied = node_apply.apply(step, system)
        except CommandError as error:
            done.append(dict(entry, ok=False, message=str(error), seconds=time.time() - begun))
            module.fail_json(msg=str(error), steps=done, changed=changed)
        changed = changed or applied.changed
        done.append(dict(entry, ok=True, message=applied.message, seconds=time.time() - begun))
    module.exit_json(changed=changed, steps=done, diff=diff)


def main():
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "part": {"choices": ["none", "all", "kernel", "runtime", "pmem", "gpu"], "required": True},
            "desired": {"type": "dict", "required": True},
            "approved": {"type": "dict", "default": {}},
            "consent": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    run(module, System())


if __name__ == "__main__":
    main()
