"""Good inventories: what Ansible's loader and our models make of them."""

import re
import sys
from pathlib import Path

import pytest

from provision.cluster import settings, share
from provision.cluster.errors import InventoryError
from provision.cluster.inventory import Inventory
from provision.cluster.setting_types import parse_size
from provision.cluster.settings import Kind
from provision.inventory.loader import load
from provision.inventory.schema import inventory_schema, shown
from provision.node.state import decode, encode


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def two_hosts(tmp_path: Path, vars_text: str = "") -> Inventory:
    return load(
        write(
            tmp_path / "inventory.yml",
            f"""
all:
  vars: {{training_dim: 16{vars_text}}}
  children:
    parameter_servers:
      vars: {{pmem_mode: system-ram, parameter_server_count: "{{{{ 1 + 1 }}}}"}}
      hosts:
        ps-[1:2]:
          ansible_host: "10.0.0.{{{{ inventory_hostname[-1] }}}}"
          oeprov_kind: re6p
    workers:
      hosts:
        w1: {{oeprov_kind: gpu, ansible_port: 2222, ansible_user: me}}
        ps-1:
""",
        )
    )


def test_values_are_templated_ranges_expanded_and_hosts_win(tmp_path: Path) -> None:
    found = two_hosts(tmp_path)
    assert list(found.hosts) == ["ps-1", "ps-2", "w1"]
    assert found.parameter_servers == ["ps-1", "ps-2"]
    assert found.workers == ["ps-1", "w1"]
    assert [host.address for host in found.hosts.values()] == ["10.0.0.1", "10.0.0.2", "w1"]
    first = found.hosts["ps-1"]
    assert (first.server.count, first.pmem.mode, first.kind) == (2, "system-ram", Kind.re6p)
    assert (found.hosts["w1"].port, found.hosts["w1"].user) == (2222, "me")
    assert found.training.dim == 16


def test_defaults_become_what_they_mean_for_the_host(tmp_path: Path) -> None:
    found = two_hosts(tmp_path)
    both, server, gpu = found.hosts.values()
    assert (both.runtime.extra, server.runtime.extra, gpu.runtime.extra) == (
        "tensorflow",
        "none",
        "tensorflow-gpu",
    )
    assert (server.server.storage, server.server.host) == ("dram", "10.0.0.2")
    assert server.runtime.venv == "/opt/oeprov/venv"
    assert gpu.pmem.mode == "none"
    assert found.cluster == "inventory"


def test_group_vars_and_host_vars_beside_the_file_count(tmp_path: Path) -> None:
    write(tmp_path / "group_vars" / "parameter_servers.yml", "kernel_version: newest\n")
    write(tmp_path / "host_vars" / "ps-2.yml", "pmem_mode: fsdax\n")
    found = two_hosts(tmp_path)
    assert found.hosts["ps-1"].kernel.version == "newest"
    assert found.hosts["w1"].kernel.version == "keep"
    assert found.hosts["ps-2"].pmem.mode == "fsdax"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ps-1", ["ps-1"]),
        ("workers", ["ps-1", "w1"]),
        ("all:!w1", ["ps-1", "ps-2"]),
        ("workers:&parameter_servers", ["ps-1"]),
        ("ps-*", ["ps-1", "ps-2"]),
        ("ps-2,w1", ["ps-2", "w1"]),
    ],
)
def test_limit_takes_ansibles_patterns(tmp_path: Path, pattern: str, names: list[str]) -> None:
    two_hosts(tmp_path)
    found = load(tmp_path / "inventory.yml", pattern)
    assert list(found.hosts) == names
    assert set(found.workers) <= set(names)


def test_other_users_variables_are_left_alone(tmp_path: Path) -> None:
    found = two_hosts(tmp_path, ', my_pool: x, nginx_port: 80, secret: "{{ lookup_that_is_not_there() }}"')
    assert len(found.hosts) == 3


def test_hosts_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    text = (tmp_path / "inventory.yml").read_text() if two_hosts(tmp_path) else ""
    write(tmp_path / "inventory.yml", text + "    monitoring:\n      hosts: {grafana: }\n")
    assert "grafana" not in load(tmp_path / "inventory.yml").hosts


def test_local_is_this_machine(tmp_path: Path) -> None:
    found = load(share.inventory("local"), state_dir=tmp_path / "state")
    host = found.hosts["localhost"]
    assert (host.connection, host.kind, host.address) == ("local", Kind.local, "127.0.0.1")
    assert host.pmem.directory == str(tmp_path / "state" / "pmem0")
    assert host.runtime.venv == sys.prefix
    assert host.server.storage == "pmem_libpmem"
    assert (host.is_parameter_server, host.is_worker) == (True, True)
    assert found.training.data.startswith("generate:")


def test_desired_carries_everything_the_planner_knows(tmp_path: Path) -> None:
    host = two_hosts(tmp_path).hosts["ps-1"]
    desired = host.desired()
    assert (desired.host, desired.kind, desired.pmem_mode) == ("ps-1", "re6p", "system-ram")
    assert (desired.kernel_version, desired.gpu_driver) == ("", "")
    assert any(item.startswith("keras") for item in desired.runtime_requirements)
    assert decode(type(desired), encode(desired)) == desired
    for name in desired._fields:
        if name.startswith(settings.PREFIXES) and not name.startswith("parameter_server"):
            assert name in settings.KNOWN or name in (
                "runtime_requirements",
                "runtime_wheel_digest",
                "runtime_wheel_key",
            )


def test_the_sample_explains_every_key_and_loads() -> None:
    path = share.inventory("sample")
    found = load(path)
    assert sorted({host.kind.value for host in found.hosts.values()}) == sorted(
        kind.value for kind in Kind if kind is not Kind.local
    )
    text = path.read_text()
    for key in settings.KNOWN:
        line = next((line for line in text.splitlines() if re.search(rf"^[ #]*{key}:", line)), "")
        assert line, f"{key} is not in sample.yml"
    for kind in Kind:
        assert kind.value in text


def test_keys_that_the_sample_shows_as_defaults_are_the_defaults() -> None:
    import yaml

    text = share.inventory("sample").read_text()
    known = {model.prefix + name: item for model in settings.MODELS for name, item in shown(model).items()}
    found = re.findall(r"^ *# (\w+): (.*?) +# (.*(?:\n {41}# .*)*)", text, re.MULTILINE)
    compared = [key for key, _, comment in found if key in known and "(example" not in comment]
    for key, value, _ in found:
        if key in compared:
            assert (known[key].get("default", "") or None) == (yaml.safe_load(value) or None), key
    assert len(compared) > 60


def test_the_schema_agrees_with_our_inventories() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    validator = jsonschema.Draft7Validator(inventory_schema())
    for name in ("local", "sample"):
        validator.validate(yaml.safe_load(share.inventory(name).read_text()))
    bad = {"all": {"hosts": {"h": {"pmem_mode": "fsdx"}}, "vars": {"pmem_mod": "fsdax"}}}
    assert len(list(validator.iter_errors(bad))) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("1K", 1024), ("64G", 64 << 30), ("1.5T", 3 << 39), ("2 GiB", 2 << 30)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["64GB", "64 gigs", "-1", -1, True, "", "1.5", None, "G", "1e9", "٣G"])
def test_what_is_no_size(text: object) -> None:
    if text == "1.5":
        assert parse_size(text) == 1
        return
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_the_error_carries_all_problems(tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        two_hosts(tmp_path, ", pmem_mod: x, training_modle: y")
    assert len(caught.value.problems) == 2
    assert "and 1 more" in str(caught.value)
