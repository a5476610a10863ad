"""The installed Ansible collection on a host over SSH: each role's example playbook by itself."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import rebootable
from converged import inventory, layer
from installed_collection import Collection
from ssh_hosts import SshHost, SshHosts, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]
JOB = "/var/lib/oeprov/jobs/example"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    files = layer(tmp_path_factory.mktemp("layer"))
    rebootable.add(files)
    agent = os.environ.pop("SSH_AUTH_SOCK", None)
    with SshHosts(tmp_path_factory.mktemp("hosts"), 1, layer=files) as made:
        yield made
    if agent:
        os.environ["SSH_AUTH_SOCK"] = agent


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    return Collection(tmp_path_factory.mktemp("a collection"))


class Example:
    """Copies of a role's example playbooks, as a user begins with them."""

    def __init__(self, directory: Path, collection: Collection, hosts: SshHosts) -> None:
        self.directory, self.collection, self.host = directory, collection, hosts[0]
        self.inventory = inventory(directory / "inventory.yml", hosts)

    def play(self, role: str, *words: str, name: str = "") -> str:
        example = self.collection.path / "roles" / role / "examples" / f"{name or role}.yml"
        return self.collection.play(Path(shutil.copy(example, self.directory)), self.inventory, *words)


@pytest.fixture
def example(tmp_path: Path, collection: Collection, hosts: SshHosts) -> Example:
    return Example(tmp_path, collection, hosts)


def changes(said: str, host: SshHost) -> int:
    (line,) = (line for line in said.splitlines() if line.startswith(host.name) and "changed=" in line)
    return int(line.split("changed=")[1].split()[0])


def test_kernel_shows_a_change_then_makes_it(example: Example) -> None:
    no_trial = ("-e", json.dumps({"kernel_trial_boot": False}))  # which takes a real GRUB
    planned = example.play("kernel", "--check", "--diff", *no_trial)
    assert "+kernel arguments: add transparent_hugepage=never" in planned
    assert rebootable.turns(example.host) == {}
    example.play("kernel", *no_trial)
    assert set(rebootable.turns(example.host)) == {"change", "reboot"}
    assert changes(example.play("kernel", *no_trial), example.host) == 0


@pytest.mark.parametrize("role", ["pmem", "runtime", "gpu"])
def test_a_role_finds_nothing_to_do(role: str, example: Example) -> None:
    """Also `runtime`: the host has the build of these very sources."""
    said = example.play(role)
    assert changes(said, example.host) == 0


def test_a_host_is_prepared_for_a_job(example: Example) -> None:
    assert changes(example.play("parameter_server"), example.host) == 1
    assert example.host.enter("cat", f"{JOB}/token").strip() == (example.directory / "token").read_text()
    assert changes(example.play("worker"), example.host) == 1
    assert changes(example.play("worker"), example.host) == 0
    assert changes(example.play("worker", name="stop"), example.host) == 0


def test_its_playbooks_have_names(example: Example) -> None:
    said = example.collection.play(Path("oeprov.oeprov.verify"), example.inventory)
    assert "failed=0" in said
