"""Brings a wheel to a host over Ansible's own connection; if there is none yet, a host builds it.

The module on the host names the build that it wants; see ``provision.node.build``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from provision.artifacts import wheel
from provision.cluster import flavor_facts
from provision.cluster.errors import OeprovError, WheelError
from provision.node.build import WHEEL_WANTED, WHEELS

Result = dict[str, Any]


def with_wheel(
    action: Any,
    variables: Mapping[str, Any],
    state_dir: Path,
    desired: Mapping[str, Any],
    run: Callable[[], Result],
) -> Result:
    """Run the module; if it misses a wheel, bring that and run the module again.

    ``action`` is Ansible's action plugin, ``variables`` are the host's. Returns the result of both runs.
    """
    first = run()
    wanted = str(first.get("msg", ""))
    if not (first.get("failed") and wanted.startswith(WHEEL_WANTED)):
        return first
    build = wanted.removeprefix(WHEEL_WANTED)
    host = str(variables.get("inventory_hostname", ""))
    try:
        own = flavor_facts.get(desired["runtime_flavor"]).own_wheel
        provide = wheel.provide if own else wheel.provide_theirs
        path = provide(build, state_dir, lambda packed, log: _build(action, variables, desired, packed, log))
        with _Scratch(action) as scratch:
            there, directory = shlex.quote(scratch.put(path)), shlex.quote(f"{WHEELS}/{build}")
            scratch.shell(f"mkdir -p {directory} && mv {there} {directory}/")
    except OeprovError as error:
        message = f"{error} (on {host})" if isinstance(error, WheelError) else str(error)
        steps = [*first["steps"][:-1], {**first["steps"][-1], "message": message}]
        return {**first, "msg": message, "steps": steps}
    second = run()
    second["steps"] = first["steps"][:-1] + second.get("steps", [])
    second["changed"] = bool(first.get("changed") or second.get("changed"))
    return second


def _build(
    action: Any, variables: Mapping[str, Any], desired: Mapping[str, Any], packed: Path, log: Path
) -> Path:
    """Have the host build the wheel; returns its path on this machine."""
    host = variables.get("inventory_hostname", "")
    action._display.display(f"{host}: builds the runtime for its kind of system; this takes minutes")
    with _Scratch(action) as scratch:
        arguments = {
            "packed": scratch.put(packed) if packed.exists() else "",
            "into": f"{scratch.path}/build",
            "desired": dict(desired),
        }
        result = action._execute_module(
            module_name="oeprov.oeprov.oeprov_wheel",
            module_args=arguments,
            task_vars=dict(variables),
            tmp=scratch.path,
        )
        if result.get("failed"):
            log.write_text(str(result.get("log", "")) or str(result.get("msg", "")))
            raise WheelError(
                f"the runtime could not be built on {host}: {result.get('msg', '')} (log: {log})"
            )
        made = packed.parent / Path(result["path"]).name
        action._connection.fetch_file(result["path"], str(made))
        return made


class _Scratch:
    """A temporary directory on the host, removed on exit."""

    def __init__(self, action: Any) -> None:
        self.action = action
        self.path = ""

    def __enter__(self) -> _Scratch:
        self.path = str(self.action._make_tmp_path()).rstrip("/")
        return self

    def __exit__(self, *_: object) -> None:
        self.action._remove_tmp_path(self.path, force=True)
        self.action._connection._shell.tmpdir = None

    def put(self, path: Path) -> str:
        """Copy a file into the directory; returns its path on the host."""
        there = f"{self.path}/{path.name}"
        self.action._transfer_file(str(path), there)
        self.action._fixup_perms2((self.path, there), execute=False)
        return there

    def shell(self, command: str) -> None:
        """Run a line of shell on the host; OeprovError if it fails."""
        done = self.action._low_level_execute_command(command)
        if done["rc"]:
            error = (done.get("stderr") or done.get("stdout") or "").strip()
            raise OeprovError(f"the wheel could not be copied to the host: {error}")
