"""Runs our playbooks through ansible-runner: reports results live and keeps Ansible's output in a log."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from provision.cluster import share
from provision.cluster.errors import ConvergeError
from provision.cluster.inventory import FirstLogin, Host, Inventory
from provision.hosts import askpass, remote
from provision.hosts.journal import private_files
from provision.hosts.passwords import BECOME, LOGIN
from provision.hosts.stop_request import StopRequest
from provision.inventory import vault
from provision.inventory.connection import WITHOUT_PASSWORDS

Status = Literal["ok", "failed", "skipped", "unreachable"]
_STATUS: dict[str, Status] = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_skipped": "skipped",
    "runner_on_unreachable": "unreachable",
}
_SELECTED = "oeprov_selected"  # the group of the hosts of a run
_USERS_COLLECTIONS = "~/.ansible/collections:/usr/share/ansible/collections"  # Ansible's default


@dataclass(frozen=True)
class TaskResult:
    """How one task ended on one host; ``result`` is what its module returned."""

    host: str
    role: str  # empty for a play's own tasks
    task: str
    status: Status
    result: Mapping[str, Any]
    seconds: float

    @property
    def message(self) -> str:
        """The module's message, without secrets."""
        words = self.result.get("msg") or self.result.get("stderr") or self.result.get("module_stderr") or ""
        return vault.hide(str(words).strip())


@dataclass(frozen=True)
class PlaybookRun:
    """How a playbook ended; ``log`` holds all of Ansible's output."""

    outcome: Literal["ok", "failed", "canceled"]
    log: Path
    failures: list[TaskResult]


def run(
    name: str,
    inventory: Inventory,
    *,
    state_dir: Path,
    run_id: str,
    variables: Mapping[str, Any],
    host_variables: Mapping[str, Mapping[str, Any]] | None = None,
    stop: StopRequest,
    tags: Iterable[str] = (),
    on_start: Callable[[str, str, str], None] = lambda host, role, task: None,
    on_result: Callable[[TaskResult], None] = lambda result: None,
) -> PlaybookRun:
    """Run ``playbooks/<name>.yml`` on the inventory's hosts.

    With ``tags`` only roles with one of these tags run. ``on_start(host, role, task)`` and ``on_result`` are
    called as Ansible reports. The hosts' variables are the inventory's final values and ``host_variables``.
    Only the log stays. The caller holds the cluster's lock.
    """
    import ansible_runner  # slow to import, and most commands never change a host

    place = private_files(state_dir, inventory.cluster)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=place))
    log = state_dir.absolute() / "logs" / f"{run_id}-{name}.log"
    log.parent.mkdir(mode=0o700, exist_ok=True)
    failures: list[TaskResult] = []
    try:
        values = _write_hosts(private, inventory, host_variables or {})
        words, passwords, answers = vault.for_run()
        result = ansible_runner.run(
            private_data_dir=str(private),
            playbook=str(share.root() / "playbooks" / f"{name}.yml"),
            inventory=[str(inventory.path.absolute()), str(values)],
            limit=_SELECTED,
            extravars={**dict(variables), **_passwords(inventory)},
            envvars={
                **_environment(),
                "ANSIBLE_COLLECTIONS_PATH": _collections(private),
                "OEPROV_STATE_DIR": str(state_dir.absolute()),
                **passwords,
                **_password_file(inventory),
            },
            **({"cmdline": shlex.join(words), "passwords": answers} if words else {}),
            settings={"pexpect_timeout": 1},
            tags=",".join(tags),
            ident="run",
            quiet=True,
            event_handler=partial(_handle, failures, on_start, on_result),
            cancel_callback=lambda: stop.count > 0,
        )
        output = private / "artifacts" / "run" / "stdout"
        if output.exists():
            log.write_text(vault.hide(output.read_text(errors="replace")))
        if result.status == "canceled":
            return PlaybookRun("canceled", log, failures)
        if result.rc == 127:
            raise ConvergeError(
                "ansible-playbook could not be run; install it with oeprov's other packages: "
                f"{sys.executable} -m pip install ansible-core"
            )
        return PlaybookRun("ok" if result.rc == 0 else "failed", log, failures)
    finally:
        # The private directory has a copy of the whole environment. `cluster_lock` removes that of a run that
        # was killed.
        shutil.rmtree(place, ignore_errors=True)


def _handle(
    failures: list[TaskResult],
    on_start: Callable[[str, str, str], None],
    on_result: Callable[[TaskResult], None],
    event: dict[str, Any],
) -> bool:
    """Pass an event of Ansible's on, and add to the failures."""
    data = event.get("event_data", {})
    host, role, task = (str(data.get(key) or "") for key in ("host", "role", "task"))
    if event.get("event") == "runner_on_start":
        on_start(host, role, task)
    elif status := _STATUS.get(str(event.get("event"))):
        seconds = float(data.get("duration") or 0.0)
        result = TaskResult(host, role, task, status, data.get("res") or {}, seconds)
        if status in ("failed", "unreachable") and not data.get("ignore_errors"):
            failures.append(result)
        on_result(result)
    return False  # no file for every event


def _write_hosts(private: Path, inventory: Inventory, more: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write an inventory of the hosts' final values, and `more` of them by host."""
    hosts = {
        name: {**_interpreter(host), **_login(host), **host.variables(), **more.get(name, {})}
        for name, host in inventory.hosts.items()
    }
    # A group: the names of 6,000 hosts are more than fits into an argument.
    selected = {_SELECTED: {"hosts": dict.fromkeys(hosts)}}
    values = private / "hosts.json"
    values.write_text(json.dumps({"all": {"hosts": hosts, "children": selected}}))
    return values


def _collections(private: Path) -> str:
    """The run's collections path: our collection, made of links, then the user's own."""
    collection = private / "collections" / "ansible_collections" / "oeprov" / "oeprov"
    plugins = collection / "plugins"
    plugins.mkdir(parents=True)
    for name in ("action", "inventory", "modules"):
        (plugins / name).symlink_to(share.root() / "plugins" / name)
    (plugins / "module_utils").mkdir()
    (plugins / "module_utils" / "node").symlink_to(share.node_package())
    (collection / "roles").symlink_to(share.root() / "roles")
    users = os.environ.get("ANSIBLE_COLLECTIONS_PATH") or _USERS_COLLECTIONS
    return f"{private / 'collections'}:{users}"


def _interpreter(host: Host) -> dict[str, str]:
    """The Python that Ansible uses on the host.

    On this machine it is ours: discovery costs a round trip and may find a shim that does not run.
    """
    python = sys.executable if host.is_here and host.python == "python3" else host.python
    return {"ansible_python_interpreter": python}


def _login(host: Host) -> dict[str, str]:
    """How Ansible logs in to a host that takes no keys: by the same ssh as we do, for files too."""
    if host.login != "password":
        return {}
    return {"ansible_ssh_executable": str(askpass.SSH), "ansible_ssh_transfer_method": "piped"}


def _password_file(inventory: Inventory) -> dict[str, str]:
    """What ``askpass.SSH`` needs to log in to hosts that take no keys."""
    hosts = [host for host in inventory.hosts.values() if host.login == "password"]
    for host in hosts:
        remote.password(host)
    return askpass.environment() if hosts else {}


def _passwords(inventory: Inventory) -> dict[str, str]:
    """Variables that keep Ansible from using passwords that are for ``oeprov adopt``."""
    has_some = any(host.first_login != FirstLogin() for host in inventory.hosts.values())
    return WITHOUT_PASSWORDS if has_some else {}


def _environment() -> dict[str, str]:
    """Environment variables by which Ansible finds our configuration and plugin from any directory."""
    return {
        "ANSIBLE_CONFIG": str(share.root() / "ansible.cfg"),
        "ANSIBLE_INVENTORY_PLUGINS": str(share.root() / "plugins/inventory"),
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
        "ANSIBLE_HOST_KEY_CHECKING": os.environ.get("ANSIBLE_HOST_KEY_CHECKING", "True"),  # runner: False
        "ANSIBLE_NOCOLOR": "1",
        **dict.fromkeys((LOGIN, BECOME), ""),  # runner writes the environment to a file
        "ANSIBLE_NO_TARGET_SYSLOG": "True",  # our modules' arguments may be secret
        "PATH": os.pathsep.join([*_programs(), os.environ.get("PATH", os.defpath)]),
    }


def _programs() -> list[str]:
    """Directories of ansible-playbook: of this environment, and of the one that a .pth file adds to it."""
    places = [Path(sys.executable).parent]
    with contextlib.suppress(metadata.PackageNotFoundError):  # there may be one on the PATH; who runs it says
        for file in metadata.files("ansible-core") or ():
            if file.name == "ansible-playbook":
                places.append(Path(str(file.locate())).resolve().parent)
    return [str(place) for place in places]


def forks() -> int:
    """How many hosts Ansible works on at the same time."""
    found = configparser.ConfigParser(interpolation=None)
    found.read(share.root() / "ansible.cfg")
    return int(os.environ.get("ANSIBLE_FORKS") or found.get("defaults", "forks"))
