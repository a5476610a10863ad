"""Inventories that others make: scripts, any inventory plugin, and directories with `constructed`."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recorded import write_program

from provision.cli import main as cli
from provision.cluster import share
from provision.cluster.errors import InventoryError
from provision.inventory import edit, stray
from provision.inventory.loader import load

MAPPING = share.inventory("kinds-by-instance-type").read_text()
# What the plugins of the clouds call an instance's type -> variables as they give them, and the kind.
INSTANCES: dict[str, tuple[dict[str, Any], str]] = {
    "aws-gpu": ({"instance_type": "p5.48xlarge", "kernel_id": "aki-1"}, "gpu"),
    "aws-small-gpu": ({"instance_type": "g6.xlarge"}, "gpu"),
    "aws-cpu": ({"instance_type": "r7i.4xlarge"}, "cpu"),
    "gcp-gpu": ({"machineType": "https://compute/v1/projects/p/zones/z/machineTypes/a3-highgpu-8g"}, "gpu"),
    "gcp-attached": (
        {"machineType": "zones/z/machineTypes/n1-standard-8", "guestAccelerators": [{"n": 1}]},
        "gpu",
    ),
    "gcp-cpu": ({"machineType": "zones/z/machineTypes/n2-highmem-32"}, "cpu"),
    "azure-gpu": ({"virtual_machine_size": "Standard_ND96asr_v4"}, "gpu"),
    "azure-cpu": ({"virtual_machine_size": "Standard_E16s_v5"}, "cpu"),
    "openstack-gpu": ({"openstack": {"flavor": {"name": "gpu.a100.large"}}}, "gpu"),
    "openstack-cpu": ({"openstack": {"flavor": {"name": "m1.xlarge"}}}, "cpu"),
    "alibaba-re7p": ({"instance_type": "ecs.re7p.16xlarge"}, "re7p"),
    "own": ({"instance_type": "p5.48xlarge", "oeprov_kind": "bare_metal_pmem"}, "bare_metal_pmem"),
}


def script(path: Path, variables: dict[str, dict[str, Any]]) -> Path:
    """An inventory script: the first host is a parameter server, all others are workers."""
    hosts = list(variables)
    made = {
        "parameter_servers": {"hosts": hosts[:1]},
        "workers": {"hosts": hosts[1:]},
        "_meta": {"hostvars": variables},
    }
    return program(path, f"import json\nprint(json.dumps({made!r}))\n")


def program(path: Path, code: str) -> Path:
    write_program(path, code)
    return path


def addressed(variables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {"ansible_host": f"192.0.2.{number}", **values}
        for number, (name, values) in enumerate(variables.items(), 1)
    }


def test_a_script_is_an_inventory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path / "cloud", addressed({"a": {"oeprov_kind": "cpu"}, "b": {"oeprov_kind": "gpu"}}))
    found = load(path)
    assert {name: host.kind.value for name, host in found.hosts.items()} == {"a": "cpu", "b": "gpu"}
    assert found.parameter_servers == ["a"]
    assert cli.run(["plan", "-i", str(path), "--offline"]) == 2
    assert "a " in capsys.readouterr().out


def test_group_vars_beside_a_script_are_read(tmp_path: Path) -> None:
    path = script(tmp_path / "cloud", addressed({"a": {}, "b": {}}))
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("oeprov_kind: cpu\ntraining_dim: 16\n")
    found = load(path)
    assert [host.kind.value for host in found.hosts.values()] == ["cpu", "cpu"]
    assert found.training.dim == 16


def test_kinds_come_from_instance_types_of_the_clouds(tmp_path: Path) -> None:
    directory = tmp_path / "clouds"
    directory.mkdir()
    script(directory / "10-cloud", addressed({name: values for name, (values, _) in INSTANCES.items()}))
    (directory / "20-kinds.yml").write_text(MAPPING)
    (directory / "group_vars").mkdir()
    (directory / "group_vars/all.yml").write_text("pmem_mode: none\n")
    found = load(directory)
    kinds = {name: host.kind.value for name, host in found.hosts.items()}
    assert kinds == {name: kind for name, (_, kind) in INSTANCES.items()}
    # Ansible itself reads the same.
    argv = [str(Path(sys.executable).with_name("ansible-inventory")), "-i", str(directory), "--list"]
    listed = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    read = {name: values["oeprov_kind"] for name, values in listed["_meta"]["hostvars"].items()}
    # Ansible marks words from outside.
    theirs = {n: v["__ansible_unsafe"] if isinstance(v, dict) else v for n, v in read.items()}
    assert theirs == kinds


def test_a_plugin_with_hosts_of_its_own_needs_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "generated.yml"
    query = {
        "plugin": "ansible.builtin.generator",
        "hosts": {"name": "{{ role }}-{{ number }}", "parents": [{"name": "{{ role }}s"}]},
        "layers": {"role": ["parameter_server", "worker"], "number": [1, 2]},
    }
    path.write_text(yaml.safe_dump(query))
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("oeprov_kind: cpu\n")
    assert list(load(path).hosts) == ["parameter_server-1", "parameter_server-2", "worker-1", "worker-2"]


def refused(path: Path) -> str:
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_stray_file_in_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {children: {workers: {hosts: {w: {oeprov_kind: cpu}}}}}\n")
    (tmp_path / "NOTES").write_text("see the wiki\n")
    assert refused(tmp_path).startswith(f"{tmp_path / 'NOTES'}: gives no inventory: ")
    (tmp_path / "NOTES").unlink()
    path = program(tmp_path / "cloud.sh", "raise SystemExit('no credentials')\n")
    assert refused(tmp_path).startswith(f"{path}: gives no inventory: ")
    assert refused(tmp_path).endswith(f"; run it to see more: {shlex.quote(str(path))} --list")


def test_sources_that_give_no_inventory_say_why(tmp_path: Path) -> None:
    path = program(tmp_path / "script", "raise SystemExit('no credentials for the cloud')\n")
    assert refused(path).startswith(f"{path}: gives no inventory: ")
    assert refused(path).endswith(f"; run it to see more: {shlex.quote(str(path))} --list")
    path = program(tmp_path / "words", "print('not JSON')\n")
    assert refused(path).startswith(f"{path}: gives no inventory: ")
    query = tmp_path / "aws_ec2.yml"
    query.write_text("plugin: no.such.plugin\n")
    assert refused(query) == (
        f"{query}: inventory plugin no.such.plugin is not installed: "
        "ansible-galaxy collection install no.such"
    )
    query.write_text("plugin: ansible.builtin.generator\nlayers: {}\n")
    assert "gives no inventory" in refused(query)
    directory = tmp_path / "several"
    directory.mkdir()
    assert refused(directory) == f"{directory}: is a directory without inventory files"
    (directory / "hosts.yml").write_text("all: {hots: {}}\n")
    assert (
        f"{directory / 'hosts.yml'}: group all: hots: a group has vars, children and hosts only"
        in refused(directory)
    )


def test_a_slip_in_a_variable_of_a_script_is_found(tmp_path: Path) -> None:
    """Other variables with our prefixes are the cloud's: aws_ec2 has kernel_id."""
    path = script(tmp_path / "cloud", addressed({"a": {"oeprov_kind": "cpu"}, "b": {"oeprov_knd": "cpu"}}))
    assert "oeprov_knd: unknown key; did you mean oeprov_kind?" in refused(path)


def test_such_inventories_are_not_edited(tmp_path: Path) -> None:
    path = script(tmp_path / "cloud", addressed({"a": {"oeprov_kind": "cpu"}, "b": {"oeprov_kind": "cpu"}}))
    with pytest.raises(InventoryError, match=r"was not edited: its hosts come from a script; set pmem_mode"):
        edit.edits_for(path, ["a"], "pmem_mode", "none")
    with pytest.raises(InventoryError, match=r"was not edited: it is a directory of several sources"):
        edit.edits_for(tmp_path, ["a"], "pmem_mode", "none")


INI = """\
# hosts
[parameter_servers]
p1 ansible_host=10.0.0.1 oeprov_kind=re6p
[workers]
w1 ansible_host=10.0.0.2 oeprov_kind=cpu
"""


@pytest.mark.parametrize("name", ["hosts.ini", "hosts", "hosts.cfg"])
def test_an_ini_file_is_an_inventory(tmp_path: Path, name: str) -> None:
    """As it is in a directory of sources."""
    (tmp_path / name).write_text(INI)
    assert list(load(tmp_path / name).hosts) == ["p1", "w1"]
    (tmp_path / name).write_text(INI.replace("oeprov_kind=cpu", "oeprov_kind=cpo"))
    with pytest.raises(InventoryError, match="oeprov_kind: found 'cpo'"):
        load(tmp_path / name)
    (tmp_path / name).write_text(INI.replace("p1 ", 'p1 "'))
    with pytest.raises(InventoryError, match=r"gives no inventory: .*No closing quotation"):
        load(tmp_path / name)


def test_an_ini_file_is_not_edited(tmp_path: Path) -> None:
    (tmp_path / "hosts.ini").write_text(INI)
    with pytest.raises(
        InventoryError, match=r"was not edited: it is not a YAML file; set pmem_mode: fsdax for p1"
    ):
        edit.edits_for(tmp_path / "hosts.ini", ["p1"], "pmem_mode", "fsdax")


def test_files_of_variables_that_match_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hosts.ini"
    path.write_text(INI)
    for name in ("group_vars/workers.yml", "group_vars/all", "host_vars/p1.yml", "host_vars/.hidden.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("kernel_version: keep\n")
    assert stray.problems(path) == []
    (tmp_path / "group_vars/worker.yml").write_text("kernel_version: newest\n")
    (tmp_path / "host_vars/ps9.yml").write_text("kernel_version: newest\n")
    assert stray.problems(path) == [
        f"{tmp_path}/group_vars/worker.yml: the inventory has no group worker; did you mean workers?; "
        "rename the file, or remove it",
        f"{tmp_path}/host_vars/ps9.yml: the inventory has no host ps9; rename the file, or remove it",
    ]
    (tmp_path / "other.ini").write_text("[worker]\nps9\n")
    assert stray.problems(path) == [], "they are another inventory's"
