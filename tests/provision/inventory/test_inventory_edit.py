"""What `pmem-mode --write-inventory` does to files: the lines that change, and that nothing else does."""

import os
from pathlib import Path

import pytest
import yaml

from provision.cluster.errors import InventoryError
from provision.inventory import edit as inventory_edit
from provision.inventory import file
from provision.inventory.edit import Edit

GROUPS = """\
# The cluster of the second floor.
all:
  vars:
    oeprov_cluster:   second   # two blanks too many stay
  children:
    parameter_servers: {{hosts: {{a: , b: , c: }}}}
    workers: {{hosts: {{w: }}}}
    old:
      hosts:
        a:
        b:
      vars: {{{old}}}
  hosts:
    a: {{ansible_host: 192.0.2.1, oeprov_kind: re6p{a}}}
    b:
      # B has a comment.
      ansible_host: 192.0.2.2   # and one behind it
      oeprov_kind: re6p
{b}    c: {{ansible_host: "192.0.2.3", 'oeprov_kind': re6p}}
    w: {{ansible_host: 192.0.2.9, oeprov_kind: cpu, secret: !vault "x", odd: "{{{{ nothing }}}}"}}
"""


def write(path: Path, old: str = "pmem_movable: true", a: str = "", b: str = "") -> Path:
    path.write_text(GROUPS.format(old=old, a=a, b=b))
    return path


def changed(edits: list[Edit]) -> list[tuple[str, str]]:
    """File name and line of all that is removed and added."""
    return [
        (edit.path.name, line)
        for edit in edits
        for line in edit.diff()[2:]
        if line[0] in "+-" and line[1:].strip()
    ]


def modes(path: Path) -> dict[str, object]:
    return {host.name: host.variables.get("pmem_mode") for host in file.read(path).hosts}


def edit(path: Path, *hosts: str, **alike: object) -> list[tuple[str, str]]:
    """Edit the files for real; the lines that changed."""
    before = modes(path)
    edits = inventory_edit.edits_for(path, hosts, "pmem_mode", "system-ram", **alike)  # type: ignore[arg-type]
    for item in edits:
        item.write()
    assert modes(path) == {**before, **dict.fromkeys(hosts, "system-ram")}
    assert list(path.parent.rglob(".*oeprov*")) == []
    return changed(edits)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inventory.yml"


def test_a_host_line_in_flow_style(path: Path) -> None:
    write(path, a=", pmem_mode: fsdax")
    line = "    a: {ansible_host: 192.0.2.1, oeprov_kind: re6p, pmem_mode: %s}"
    assert edit(path, "a") == [
        ("inventory.yml", "-" + line % "fsdax"),
        ("inventory.yml", "+" + line % "system-ram"),
    ]


def test_a_host_in_block_style_keeps_its_quotes_and_comment(path: Path) -> None:
    write(path, b='      pmem_mode: "fsdax"  # as delivered\n')
    assert edit(path, "b") == [
        ("inventory.yml", '-      pmem_mode: "fsdax"  # as delivered'),
        ("inventory.yml", '+      pmem_mode: "system-ram"  # as delivered'),
    ]


def test_a_group_whose_hosts_all_change(path: Path) -> None:
    write(path, old="pmem_mode: fsdax")
    assert edit(path, "a", "b") == [
        ("inventory.yml", "-      vars: {pmem_mode: fsdax}"),
        ("inventory.yml", "+      vars: {pmem_mode: system-ram}"),
    ]


def test_a_value_that_others_share_is_overridden(path: Path) -> None:
    write(path, old="pmem_mode: fsdax")
    assert [line for _, line in edit(path, "b")] == ["+      pmem_mode: system-ram"]
    assert "      # B has a comment.\n      pmem_mode: system-ram\n      ansible_host:" in path.read_text()
    assert edit(path, "a")[-1] == (
        "inventory.yml",
        "+    a: {pmem_mode: system-ram, ansible_host: 192.0.2.1, oeprov_kind: re6p}",
    )


def test_a_value_of_all_hosts(path: Path) -> None:
    path.write_text(
        "all:\n  vars: {pmem_mode: fsdax}\n  children:\n    x: {hosts: {a: , b}}\n    y: {hosts: {a}}\n"
    )
    assert edit(path, "b") == [
        ("inventory.yml", "-    x: {hosts: {a: , b}}"),
        ("inventory.yml", "+    x: {hosts: {a: , b: {pmem_mode: system-ram}}}"),
    ]
    assert edit(path, "a", alike=["b"])[-1] == ("inventory.yml", "+  vars: {pmem_mode: system-ram}")


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("n:", "n: {pmem_mode: system-ram}"),
        ("n:   # new", "n: {pmem_mode: system-ram}   # new"),
        ("n: ~", "n: {pmem_mode: system-ram}"),
        ("n: null  # none", "n: {pmem_mode: system-ram}  # none"),
        ("n: {}", "n: {pmem_mode: system-ram}"),
        ("n: {oeprov_kind: re6p}", "n: {pmem_mode: system-ram, oeprov_kind: re6p}"),
        ("'n':", "'n': {pmem_mode: system-ram}"),
        ("n: {<<: *base, x: 1}", "n: {pmem_mode: system-ram, <<: *base, x: 1}"),
    ],
)
def test_a_host_that_says_nothing_yet(path: Path, entry: str, line: str) -> None:
    path.write_text(
        "x-base: {vars: &base {pmem_mode: fsdax}}\nall:\n  hosts:\n    "
        f"{entry}\n    other: {{<<: *base}}\n"
    )
    assert edit(path, "n")[-1] == ("inventory.yml", "+    " + line)


def test_files_beside_the_inventory(path: Path) -> None:
    write(path)
    for name, text in (
        ("group_vars/old.yml", "---\n# theirs\npmem_mode: fsdax\nother: 1\n"),
        ("host_vars/b/memory.yaml", "pmem_mode: 'fsdax'\n"),
        ("host_vars/c", "pmem_mode: fsdax\r\nother: 2\r\n"),
    ):
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(text.encode())
    assert edit(path, "b") == [
        ("memory.yaml", "-pmem_mode: 'fsdax'"),
        ("memory.yaml", "+pmem_mode: 'system-ram'"),
    ]
    assert edit(path, "a", "c", alike=["b"]) == [
        ("c", "-pmem_mode: fsdax"),
        ("c", "+pmem_mode: system-ram"),
        ("old.yml", "-pmem_mode: fsdax"),
        ("old.yml", "+pmem_mode: system-ram"),
    ]
    assert (path.parent / "host_vars/c").read_bytes() == b"pmem_mode: system-ram\r\nother: 2\r\n"


def test_lines_of_a_file_from_windows(path: Path) -> None:
    path.write_bytes(b"all:\r\n  hosts:\r\n    a:\r\n      oeprov_kind: re6p\r\n")
    edit(path, "a")
    assert path.read_bytes().split(b"\r\n")[3:5] == [
        b"      pmem_mode: system-ram",
        b"      oeprov_kind: re6p",
    ]


def test_links_modes_and_owners_stay(path: Path) -> None:
    real = write(path.with_name("real.yml"), a=", pmem_mode: fsdax")
    real.chmod(0o640)
    path.symlink_to("real.yml")
    edit(path, "a")
    assert path.is_symlink()
    assert (real.stat().st_mode & 0o777, real.stat().st_uid) == (0o640, os.geteuid())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("all: {hosts: {a: {pmem_mode: '{{ mode }}', mode: fsdax}, b: }}", "cannot be changed alone"),
        ("all: {hosts: {b: &b {pmem_mode: fsdax}, a: *b}}", "cannot be changed alone"),
        ("all: {hosts: {b: {pmem_mode: &m fsdax}, a: {pmem_mode: *m}}}", "cannot be changed alone"),
        ("all: {hosts: {'[a:c]': {pmem_mode: fsdax}}}", "host a has no line of its own"),
        ("plugin: oeprov_ecs\nregions: [cn-hangzhou]", "its hosts come from a plugin"),
    ],
)
def test_what_is_not_edited(path: Path, text: str, why: str) -> None:
    path.write_text(text)
    with pytest.raises(InventoryError) as caught:
        inventory_edit.edits_for(path, ["a"], "pmem_mode", "system-ram")
    assert str(caught.value).startswith(f"{path} was not edited: ")
    assert why in str(caught.value)
    assert f"set pmem_mode: system-ram for a there, or in {path.parent}/host_vars/HOST.yml" in str(
        caught.value
    )
    assert path.read_text() == text


def test_a_file_that_was_changed_meanwhile_stays(path: Path) -> None:
    write(path, a=", pmem_mode: fsdax")
    [found] = inventory_edit.edits_for(path, ["a"], "pmem_mode", "system-ram")
    path.write_text(path.read_text() + "# somebody else's line\n")
    with pytest.raises(InventoryError, match="was changed meanwhile, so it was not written"):
        found.write()
    assert path.read_text().endswith("# somebody else's line\n")
    assert "fsdax" in path.read_text()


def test_the_sample_stays_what_it_is(tmp_path: Path) -> None:
    """Of a real inventory with comments, only the hosts' own lines change."""
    sample = Path(__file__).parents[3] / "inventory/sample.yml"
    path = tmp_path / "inventory.yml"
    path.write_bytes(sample.read_bytes())
    kinds = {host.name: host.variables.get("oeprov_kind") for host in file.read(path).hosts}
    hosts = [name for name, kind in kinds.items() if kind in ("re6p", "re7p")]
    lines = edit(path, *hosts)
    assert 0 < len([line for _, line in lines if line[0] == "+"]) <= len(hosts)
    assert len(path.read_text().splitlines()) <= len(sample.read_text().splitlines()) + len(hosts)
    assert yaml.safe_load(path.read_text()) != yaml.safe_load(sample.read_text())
