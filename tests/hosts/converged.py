"""Hosts on which nothing is to do: an inventory of kind cpu, and a layer that stands for what it asks for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ssh_hosts import SshHost, SshHosts

from provision.cluster import own_sources
from provision.node import build, packages, runtime
from provision.node.command import System
from provision.node.observe import observe_os
from provision.node.plan import Desired
from provision.node.state import Runtime, State

VENV = "/opt/oeprov/venv"


def layer(directory: Path) -> Path:
    """Files over this machine's: the runtime's environment as its stamp tells it (no runtime in it), and in
    dpkg's list what this machine does not have of the packages that a host needs.
    """
    python = subprocess.run(
        ["/usr/bin/python3", "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    system = System()
    desired = Desired(kind="cpu", parameter_server=True, runtime_wheel_digest=own_sources.digest())
    state = State(os=observe_os(system), runtime=Runtime(base=python))
    venv = directory / VENV.lstrip("/")
    installed = venv / "lib" / f"python{build.minor(python)}" / "site-packages" / "oeprov-0.dist-info"
    installed.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {python}\n")
    stamp = {"wheel": build.build_of(state, desired), "made": True, "finished": True}
    (venv / runtime.STAMP).write_text(json.dumps(stamp))
    stand_for_packages(directory, desired)
    return directory


def stand_for_packages(directory: Path, desired: Desired) -> None:
    """Put into dpkg's list of a layer what this machine does not have of the packages that a host needs."""
    system = System()
    found_os = observe_os(system)
    names = packages.needed(desired, found_os)
    found = packages.observe(system, found_os, names)
    status = Path("/var/lib/dpkg/status").read_text()
    for name in names:
        if not found[name]:
            status += f"\nPackage: {name}\nStatus: install ok installed\nArchitecture: all\nVersion: 0\n"
            status += "Maintainer: nobody <nobody@localhost>\nDescription: stands for the package\n"
    (directory / "var/lib/dpkg").mkdir(parents=True)
    (directory / "var/lib/dpkg/status").write_text(status)


def entry(host: SshHost, extra: str = "") -> str:
    """One line of an inventory."""
    return f"    {host.name}: {{ansible_host: {host.address}{extra}}}\n"


def inventory(path: Path, hosts: SshHosts, entries: str = "") -> Path:
    """All hosts as parameter servers of kind cpu; ``entries`` in the place of the inventory's host lines."""
    lines = entries or "".join(entry(host) for host in hosts)
    names = [line.split(":")[0].strip() for line in lines.splitlines()]
    members = "".join(f"        {name}:\n" for name in names)
    path.write_text(
        "all:\n"
        "  vars:\n"
        "    ansible_user: root\n"
        f"    ansible_ssh_private_key_file: {hosts.key}\n"
        f"    ansible_ssh_common_args: -o UserKnownHostsFile={hosts.known_hosts} -o IdentitiesOnly=yes\n"
        "    oeprov_kind: cpu\n"
        "    runtime_extra: none\n"
        f"  hosts:\n{lines}"
        f"  children:\n    parameter_servers:\n      hosts:\n{members}"
        f"    workers:\n      hosts:\n        {names[0]}:\n"
    )
    return path
