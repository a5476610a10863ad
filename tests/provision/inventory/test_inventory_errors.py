"""Bad inventories: one line that names file, host or group, and key, and says what would be right."""

import random
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from provision.cluster import settings
from provision.cluster.errors import InventoryError
from provision.cluster.setting_types import Settings, explain
from provision.inventory.file import RawInventory, read
from provision.inventory.loader import load

GOOD = """\
all:
  children:
    parameter_servers:
      hosts:
        p1: {ansible_host: 10.0.0.1, oeprov_kind: re6p}
    workers:
      hosts:
        w1: {ansible_host: 10.0.0.2, oeprov_kind: cpu}
"""


def refused(tmp_path: Path, text: str, limit: str | None = None) -> str:
    path = tmp_path / "inventory.yml"
    path.write_text(text)
    with pytest.raises(InventoryError) as caught:
        load(path, limit)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert "Traceback" not in message
    return message.removeprefix(str(path))


def with_host(line: str) -> str:
    return GOOD.replace("oeprov_kind: re6p}", "oeprov_kind: re6p, " + line + "}")


def test_the_good_one_is_good(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yml"
    path.write_text(GOOD)
    assert len(load(path).hosts) == 2
    for word, becomes in (("' Yes '", True), ("1", True), ("''", False), ("no", False)):
        path.write_text(with_host(f"ansible_become: {word}"))
        assert load(path).hosts["p1"].become is becomes


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("pmem_mod: fsdax", ["host p1: pmem_mod: unknown key; did you mean pmem_mode?"]),
        ("pmem_xyzzy: 1", ["host p1: pmem_xyzzy: unknown key"]),
        ("pmen_mode: fsdax", ["host p1: pmen_mode: unknown key; did you mean pmem_mode?"]),
        ("kernel_versoin: newest", ["did you mean kernel_version?"]),
        ("pmem_mode: fsdx", ["host p1: pmem_mode: found 'fsdx'; allowed: ", "did you mean fsdax?"]),
        ("pmem_mode: memory", ["pmem_mode: found 'memory': re6p is a guest", "use system-ram"]),
        ("pmem_mode: directory", ["directory stands in for persistent memory on kind local only"]),
        ("pmem_mode: ", ["pmem_mode: has no value"]),
        ("pmem_memmap: 1G!4G", ["pmem_memmap: is for kind re7p only; this host is re6p"]),
        ("parameter_server_storage_size: 64GB", ["found '64GB'; expected a size such as 512M, 64G"]),
        ("parameter_server_storage_size: 64 gigs", ["found '64 gigs'; expected a size"]),
        ("parameter_server_count: 0", ["parameter_server_count: found 0; allowed: at least 1"]),
        ("parameter_server_count: many", ["parameter_server_count: found 'many'; expected a whole number"]),
        ("parameter_server_port: 70000", ["parameter_server_port: found 70000; allowed: at most 65535"]),
        ("kernel_version: 5.10", ["kernel_version: found 5.1;", "put it in quotes"]),
        ("kernel_version: latest", ["kernel_version: found 'latest'; it must match"]),
        ("kernel_arguments: quiet", ["kernel_arguments: found 'quiet'; expected a list"]),
        ("pmem_max_movable_ratio: 0", ["pmem_max_movable_ratio: found 0; allowed: more than 0"]),
        ("gpu_persistence: 7", ["gpu_persistence: found 7; expected true or false"]),
        ("kernel_arguments: [1]", ["kernel_arguments: found 1; YAML reads it as a number: put it in quotes"]),
        ("worker_environment: {A: 1}", ["worker_environment: A: found 1; YAML reads it as a number"]),
        ("worker_environment: A=1", ["worker_environment: found 'A=1'; expected `key: value` lines"]),
        ("ansible_become: maybe", ["ansible_become: found 'maybe'; expected true or false"]),
        ("ssd_devices: [nvme0n1]", ["ssd_devices: ", "'nvme0n1': name a drive as /dev/disk/by-id/"]),
        ("ssd_devices: [/srv/a, /srv/a/]", ["ssd_devices: ", "a drive or directory is named twice"]),
        (
            "ssd_devices: [/dev/disk/by-id/a, /mnt/ssd0]",
            ["ssd_devices: /dev/disk/by-id/a would be mounted at /mnt/ssd0, which is in the list too"],
        ),
        (
            "pmem_mode: fsdax, ssd_devices: [/dev/disk/by-id/a], ssd_mount_prefix: /mnt/pmem",
            ["ssd_mount_prefix: /dev/disk/by-id/a would be mounted at /mnt/pmem0, as persistent memory is"],
        ),
        (
            "pmem_mode: fsdax, ssd_devices: [/dev/disk/by-id/a], ssd_mount_prefix: /mnt//pmem",
            ["would be mounted at /mnt/pmem0, as persistent memory is (pmem_mount_prefix /mnt/pmem): choose"],
        ),
        ("ansible_port: 99999", ["ansible_port: found 99999; expected a port"]),
        (
            "ansible_connection: winrm",
            ["ansible_connection: found 'winrm'; oeprov reaches hosts by ssh or local"],
        ),
        ('pmem_mode: "{{ nowhere }}"', ["host p1: pmem_mode: cannot be templated", "nowhere"]),
    ],
)
def test_a_wrong_value_or_key_of_a_host(tmp_path: Path, line: str, pieces: list[str]) -> None:
    message = refused(tmp_path, with_host(line))
    for piece in pieces:
        assert piece in message
    assert "host p1" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("training_dim: 0", "training_dim: found 0; allowed: at least 1"),
        ("training_holdout: 2", "training_holdout: found 2; allowed: at most 0.9"),
        ("training_steps: 1.5", "training_steps: found 1.5; expected a whole number"),
        ("rollout_shares: []", "rollout_shares: found []; allowed: at least 1 item(s)"),
        ("kubernetes_server_memory: 1M", "kubernetes_server_memory: found '1M'; allowed: at least 256M"),
    ],
)
def test_a_bound_of_a_job_names_what_was_found_and_what_is_allowed(
    tmp_path: Path, line: str, said: str
) -> None:
    message = refused(tmp_path, GOOD.replace("  children:", f"  vars:\n    {line}\n  children:", 1))
    assert message.endswith(f"group all: {said}")


@pytest.mark.parametrize("value", [-(2**70), 2**70, -0.5, float("nan"), "wide", "", [], {}, [{}], True])
@pytest.mark.parametrize("model", settings.MODELS, ids=lambda model: model.prefix)
def test_no_message_has_the_words_of_pydantic(model: type[Settings], value: object) -> None:
    for name in model.model_fields:
        try:
            model.model_validate({name: value})
        except ValidationError as error:
            for item in error.errors():
                if item["type"] != "missing":
                    words = explain(item)
                    assert words.startswith(f"found {item['input']!r}; ")
                    assert not re.search(r"should|[Ii]nput|valid|greater|less than or|Value error", words)


def test_the_line_is_named_where_ansible_knows_it(tmp_path: Path) -> None:
    text = GOOD.replace("    workers:", "      vars:\n        pmem_mode: fsdx\n    workers:")
    message = refused(tmp_path, text)
    assert "group parameter_servers: pmem_mode: found 'fsdx'" in message
    pytest.importorskip("ansible._internal._datatag._tags", reason="ansible-core before 2.19 has no lines")
    assert message.startswith(":7: ")


def test_a_wrong_value_in_group_vars_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "workers.yml").write_text("\ntraining_model: depfm\n")
    path = tmp_path / "inventory.yml"
    path.write_text(GOOD)
    with pytest.raises(InventoryError, match="training_model") as caught:
        load(path)
    assert "w1" in str(caught.value) or "workers" in str(caught.value)


def test_kind_missing(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("oeprov_kind: cpu", "x: 1"))
    assert message.startswith(": host w1: oeprov_kind is missing; one of re6p, re7p, bare_metal_pmem")


def test_kind_unknown(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("kind: re6p", "kind: re6"))
    assert "found 're6'; allowed: re6p, re7p" in message
    assert "did you mean re6p?" in message


def test_kind_local_over_ssh(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("kind: cpu", "kind: local"))
    assert "host w1: ansible_connection: kind local is this machine: set ansible_connection: local" in message


@pytest.mark.parametrize(
    ("kind", "mode", "piece"),
    [
        ("re7p", "memory", "re7p is a guest"),
        ("cxl", "memory", "CXL memory has no memory mode; use system-ram"),
        ("gpu", "fsdax", "kind gpu has no persistent memory"),
        ("cpu", "system-ram", "kind cpu has no persistent memory"),
    ],
)
def test_a_mode_that_the_kind_cannot_do_says_why(tmp_path: Path, kind: str, mode: str, piece: str) -> None:
    assert piece in refused(tmp_path, GOOD.replace("kind: re6p", f"kind: {kind}, pmem_mode: {mode}"))


def test_two_names_for_one_machine(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("10.0.0.2", "10.0.0.1"))
    assert "host w1: has the same address as host p1: 10.0.0.1 port 22" in message


def test_the_same_address_with_another_port_is_another_host(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yml"
    path.write_text(GOOD.replace("10.0.0.2", "10.0.0.1, ansible_port: 2222"))
    assert len(load(path).hosts) == 2


@pytest.mark.parametrize("group", ["parameter_servers", "workers"])
def test_an_empty_group(tmp_path: Path, group: str) -> None:
    lines = GOOD.splitlines()
    at = lines.index(f"    {group}:")
    message = refused(tmp_path, "\n".join(lines[: at + 1] + lines[at + 3 :]) + "\n")
    assert message == f": group {group}: has no hosts; a cluster needs at least one"


def test_a_group_that_is_missing(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD.replace("workers:", "worker:"))
    assert "group workers is missing; did you mean worker?" in message


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", ": is empty"),
        ("all: [", ": is not YAML"),
        ("all:\n\thosts:\n", ": is not YAML"),
        ("- a\n- b\n", ": is not an inventory: expected groups at the top"),
        ("[parameter_servers]\nhost1\n", ": is not"),
        (
            "all:\n  host:\n    a:\n",
            ": group all: host: a group has vars, children and hosts only; did you mean hosts?",
        ),
        ("all:\n  hosts: [a, b]\n", ": group all: hosts: expected `name:` lines, found ['a', 'b']"),
        ("all:\n  hosts:\n    a: 5\n", ": host a: expected `key: value` lines, found 5"),
        ("all: 3\n", ": group all: expected vars, children or hosts, found 3"),
    ],
)
def test_what_is_no_inventory(tmp_path: Path, text: str, piece: str) -> None:
    assert piece in refused(tmp_path, text)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yml"
    path.write_bytes(b"\xff\xfe\x00all:")
    with pytest.raises(InventoryError, match="is not YAML"):
        load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=r"nope.yml: no such inventory; name one with -i FILE"):
        load(tmp_path / "nope.yml")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="is a directory without inventory files"):
        load(tmp_path)


def test_training_settings_are_for_the_whole_job(tmp_path: Path) -> None:
    message = refused(tmp_path, with_host("training_dim: 9"))
    assert "training_dim: applies to the whole job" in message
    assert "set it under all: vars:" in message


@pytest.mark.parametrize(
    ("shares", "piece"),
    [
        ("[0]", "found 0; expected a number of hosts from 1 on, or a percentage from '1%' to '100%'"),
        ("[1, 120%]", "found '120%'; expected a number of hosts"),
        ("[]", "at least 1 item"),
        ("5%", "found '5%'; "),
    ],
)
def test_shares_of_a_roll_out(tmp_path: Path, shares: str, piece: str) -> None:
    message = refused(tmp_path, GOOD.replace("all:", f"all:\n  vars: {{rollout_shares: {shares}}}", 1))
    assert "rollout_shares: " in message
    assert piece in message


@pytest.mark.parametrize(
    ("limit", "piece"),
    [
        ("p2", "--limit 'p2' is no host or group; did you mean p1?"),
        ("wrokers", "did you mean workers?"),
        ("p1:&workers", "selects no host"),
        ("", "--limit '' names no host or group; leave it out for all hosts"),
        (",", "--limit ',' names no host or group; leave it out for all hosts"),
        (" ", "--limit ' ' names no host or group; leave it out for all hosts"),
        (",:,", "names no host or group"),
        ("[", "--limit '[' cannot be read: a bracket has no partner"),
        ("~[", "--limit '~[' cannot be read: a bracket has no partner"),
        ("&[", "--limit '&[' cannot be read: a bracket has no partner"),
        ("p1]", "a bracket has no partner"),
        ("~", "--limit '~' is no host or group"),
        ("~(", "--limit '~(' cannot be read: Invalid host list pattern: ~("),
        ("all:!", "--limit '!' is no host or group"),
        ("!", "--limit '!' is no host or group"),
        ("&", "--limit '&' is no host or group"),
        ("!p2", "--limit '!p2' is no host or group; did you mean p1?"),
        ("p1,q*", "--limit 'q*' is no host or group"),
        ("p1:w2,w1", "--limit 'w2' is no host or group"),
        ("w1,~]", "--limit 'w1,~]' cannot be read: a bracket has no partner"),
        ("p1,~q", "--limit '~q' is no host or group"),
        ("p1[5]", "--limit 'p1[5]' cannot be read: No hosts matched the subscripted pattern 'p1[5]'"),
        ("workers[9]", "cannot be read: No hosts matched the subscripted pattern 'workers[9]'"),
        ("workers[5:9]", "--limit 'workers[5:9]' is no host or group"),
        ("localhost", "is no host or group"),
        ("w1,::1", "--limit '::1' is no host or group"),
        ("@nofile", "--limit '@nofile' cannot be read: No such file or directory"),
        ("@", "--limit '@' cannot be read: Is a directory"),
        ("@/", "--limit '@/' cannot be read: Is a directory"),
        ("@/dev/null", "--limit '@/dev/null' names no host or group"),
    ],
)
def test_a_limit_that_names_nothing_is_refused(tmp_path: Path, limit: str, piece: str) -> None:
    assert piece in refused(tmp_path, GOOD, limit)


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        (b"\n \n", "names no host or group"),
        (b"p1\nw2\n", "--limit 'w2' is no host or group; did you mean w1?"),
        (b"p1\xff\n", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_file_of_hosts_that_names_nothing_is_refused(tmp_path: Path, content: bytes, piece: str) -> None:
    (tmp_path / "left: 2, new").write_bytes(content)
    assert piece in refused(tmp_path, GOOD, f"@{tmp_path / 'left: 2, new'}")


def test_a_file_of_hosts_may_have_any_name(tmp_path: Path) -> None:
    assert "names no host" in refused(tmp_path, GOOD, "@/dev/null")
    (tmp_path / "left: 2, new").write_text("w1\n\n")
    assert list(load(tmp_path / "inventory.yml", f"@{tmp_path / 'left: 2, new'}").hosts) == ["w1"]


def test_any_limit_selects_what_it_names_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inventory.yml").write_text(GOOD)
    raw = read(tmp_path / "inventory.yml")
    draw = random.Random(1)  # noqa: S311
    for _ in range(3000):
        check_limit(raw, "".join(draw.choices("pw1*?~![]&@,: ()-", k=draw.randint(0, 6))))


def check_limit(raw: RawInventory, pattern: str) -> None:
    try:
        names = raw.select(pattern)
    except InventoryError:
        return
    assert set(names) <= {"p1", "w1"}, pattern
    assert re.search("[pw1*?]|~[^]~]", pattern), pattern


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    host = "        p1: {ansible_host: 10.0.0.1, oeprov_kind: re6p}\n"
    message = refused(tmp_path, GOOD.replace(host, host * 2))
    assert message == ":6:9: p1 stands twice here; keep one of them"
    (tmp_path / "inventory.yml").write_text(GOOD)
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/w1.yml").write_text("kernel_version: newest\nkernel_version: keep\n")
    with pytest.raises(InventoryError, match=r"host_vars/w1.yml:2:1: kernel_version stands twice here"):
        load(tmp_path / "inventory.yml")


@pytest.mark.parametrize(
    ("old", "new", "piece"),
    [
        ("p1:", '"p1\\nx":', r"host: found 'p1\nx'; it may not begin with - or have blanks"),
        ("p1:", "-p1:", "host: found '-p1'; it may not begin with -"),
        ("p1:", '"p1 x":', "host: found 'p1 x'; it may not"),
        ("10.0.0.1", "-oProxyCommand=x", "host p1: ansible_host: found '-oProxyCommand=x'; it may not"),
        ("10.0.0.1", '"10.0.0.1\\n"', r"host p1: ansible_host: found '10.0.0.1\n'; it may not"),
        ("oeprov_kind: re6p", "oeprov_kind: re6p, ansible_user: -x", "ansible_user: found '-x'; it may not"),
    ],
)
def test_names_that_programs_would_misread(tmp_path: Path, old: str, new: str, piece: str) -> None:
    assert piece in refused(tmp_path, GOOD.replace(old, new, 1))


def test_the_name_of_a_cluster_has_a_limit(tmp_path: Path) -> None:
    message = refused(tmp_path, with_host(f"oeprov_cluster: {'c' * 300}"))
    assert "oeprov_cluster: found a text of 300 letters; allowed: at most 200" in message
    path = tmp_path / f"{'c' * 240}.yml"
    path.write_text(GOOD)
    with pytest.raises(InventoryError, match="has more than 200 letters: set oeprov_cluster"):
        load(path)
