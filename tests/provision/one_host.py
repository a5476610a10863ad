"""An inventory of one host that is a parameter server and a worker, and that nobody can reach."""

from pathlib import Path

from provision.cli.views.terminal import Terminal
from provision.cluster.inventory import Inventory
from provision.converge.changes import Consent, How
from provision.inventory.loader import load

_TEXT = """\
all:
  vars: {oeprov_cluster: c}
  children:
    parameter_servers: {hosts: {one: }}
    workers: {hosts: {one: }}
  hosts:
    one: {ansible_host: 192.0.2.7, oeprov_kind: KIND, runtime_extra: none}
"""


def inventory(directory: Path, kind: str) -> Inventory:
    """The inventory, written to ``directory``; the host is ``one``, of that kind, the cluster ``c``."""
    path = directory / "inventory.yml"
    path.write_text(_TEXT.replace("KIND", kind))
    return load(path, state_dir=directory)


def how(
    state_dir: Path, consent: Consent | None = None, *, as_json: bool = False, check: bool = False
) -> How:
    """How `changes` and others are told to change hosts, on this terminal."""
    return How(state_dir, consent or Consent(), Terminal(as_json=as_json), check)
