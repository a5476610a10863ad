"""Pass the host's desired values to the module, checked by the same models as in `oeprov`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Import the collection's own package `provision`: an installed one may have another version.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
try:
    from provision.artifacts import delivery
    from provision.cluster import settings
    from provision.cluster.errors import OeprovError
    from provision.inventory.loader import host_of
    from provision.node.state import encode
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

STATE_DIR = Path(os.environ.get("OEPROV_STATE_DIR", ".oeprov"))
CONNECTION = ("ansible_connection", "ansible_host", "ansible_port", "ansible_user")


class ActionModule(ActionBase):
    """Runs on the controller, with `provision` and pydantic; the module needs nothing on the host."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add `desired`, and the plan that the user approved (`oeprov_plan`), to the arguments."""
        if MISSING:
            raise AnsibleActionFail(f"{sys.executable}: {MISSING}; install pydantic there with pip")
        variables = task_vars or {}
        name = str(variables["inventory_hostname"])
        arguments = dict(self._task.args)
        approved = dict(variables.get("oeprov_plan", {}))
        if "desired" not in arguments:
            arguments["desired"] = approved.pop("desired", None) or self._desired(name, variables)
        arguments.setdefault("approved", approved)
        arguments.setdefault("run", variables.get("oeprov_run", {}))
        consent = self._templar.template(variables.get("pmem_consent", []))
        arguments.setdefault("consent", [str(item) for item in consent])

        def module() -> dict[str, Any]:
            return self._execute_module(
                module_name="oeprov.oeprov.oeprov_converge",
                module_args=arguments,
                task_vars=task_vars,
                tmp=tmp,
            )

        return delivery.with_wheel(self, variables, STATE_DIR, arguments["desired"], module)

    def _desired(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = {
            key: self._templar.template(variables[key])
            for key in (*settings.KNOWN, *CONNECTION)
            if key in variables
        }
        # Ansible connects, also by plugins that `oeprov` itself has not: buildah, chroot.
        if str(found.get("ansible_connection", "")).rpartition(".")[2] not in ("ssh", "local"):
            found.pop("ansible_connection", None)
        try:
            host = host_of(name, variables.get("group_names", []), found, state_dir=STATE_DIR)
        except OeprovError as error:
            raise AnsibleActionFail(str(error)) from None
        return encode(host.desired())
