"""Files of the system that oeprov edits, read back by the system's own readers: sh and findmnt."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from boot_machine import Machine
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.node import bootloader, fstab, grubdefaults, kernel, mount
from provision.node.command import CommandError, System
from provision.node.grubdefaults import DEFAULTS
from provision.node.state import Bootloader, State
from provision.node.step import Desired

OVERRIDE = "/etc/default/grub.d/99.cfg"
READS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def shell(files: dict[str, str]) -> dict[str, list[str]] | None:
    """GRUB's variables as a shell reads them, in words; None if it cannot read the files."""
    names = ["GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT", "GRUB_DEFAULT", "GRUB_TIMEOUT"]
    script = "\n".join(files.values()) + "\nprintf '%s\\0' " + " ".join(f'"${name}"' for name in names)
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False)
    values = done.stdout.decode().split("\0")[-5:-1]
    if done.returncode or len(values) < len(names):
        return None
    return {name: value.split(" ") for name, value in zip(names, values, strict=True)}


def machine(root: Path, files: dict[str, str]) -> Machine:
    """A machine whose GRUB has these defaults, in a fresh directory."""
    shutil.rmtree(root, ignore_errors=True)
    found = Machine(root)
    for path, text in files.items():
        found.put(path, text)
    return found


LINES = st.sampled_from(
    [
        'GRUB_CMDLINE_LINUX="quiet old=1"',
        "GRUB_CMDLINE_LINUX='root=UUID=x rd.lvm.lv=a/b'",
        "GRUB_CMDLINE_LINUX=quiet",
        "GRUB_CMDLINE_LINUX=",
        "export GRUB_CMDLINE_LINUX=old=1  # why",
        "GRUB_CMDLINE_LINUX='root=UUID=x'; export GRUB_CMDLINE_LINUX",
        "export GRUB_CMDLINE_LINUX",
        'GRUB_CMDLINE_LINUX=$GRUB_CMDLINE_LINUX" extra"',
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX extra old=1"',
        'GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX}extra"',
        'GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX:+$GRUB_CMDLINE_LINUX }extra"',
        "GRUB_CMDLINE_LINUX='$GRUB_CMDLINE_LINUX'",
        'GRUB_CMDLINE_LINUX+=" old=1"',
        "GRUB_CMDLINE_LINUX=quiet; GRUB_TIMEOUT=5",
        "GRUB_TIMEOUT=5; GRUB_CMDLINE_LINUX=quiet",
        "GRUB_CMDLINE_LINUX=quiet GRUB_TIMEOUT=5",
        'GRUB_CMDLINE_LINUX="quiet"" splash"',
        'GRUB_CMDLINE_LINUX="quiet"#splash',
        'GRUB_CMDLINE_LINUX="a \\"b  c\\" \\$d"',
        'GRUB_CMDLINE_LINUX="$(echo old=1) `echo b`"',
        'GRUB_CMDLINE_LINUX="$EXTRA"',
        'EXTRA="old=1"',
        "GRUB_CMDLINE_LINUX=quiet \\",
        'GRUB_CMDLINE_LINUX="a\u00a0b\x0cc"',
        "unset GRUB_CMDLINE_LINUX",
        'if true; then\n  GRUB_CMDLINE_LINUX="in if"\nfi',
        'if false; then\n  GRUB_CMDLINE_LINUX="never"\nfi',
        'GRUB_CMDLINE_LINUX_DEFAULT="quiet old=1"',
        'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT splash"',
        'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX"',
        "GRUB_DEFAULT=0",
        "export GRUB_DEFAULT=0",
        "GRUB_DEFAULT=0; GRUB_TIMEOUT=5",
        "GRUB_DEFAULT=0 GRUB_TIMEOUT=7",
        'GRUB_DEFAULT="Advanced options>Linux 6.1"  # first',
        'GRUB_DEFAULT="$GRUB_TIMEOUT"',
        "GRUB_DEFAULT='it is'\\''nt'",
        "# GRUB_CMDLINE_LINUX=comment \\",
        "GRUB_TIMEOUT=3",
        "exit 0",
        "'",
        "",
    ]
)
TEXTS = st.lists(LINES, max_size=4).flatmap(
    lambda lines: st.sampled_from(["\n", ""]).map(lambda end: "\n".join(lines) + end if lines else "")
)
FILES = st.tuples(TEXTS.filter(bool), TEXTS).map(lambda both: {DEFAULTS: both[0], OVERRIDE: both[1]})


@READS
@given(files=FILES)
@example(files={DEFAULTS: 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX a"\n', OVERRIDE: ""})
@example(files={DEFAULTS: "GRUB_CMDLINE_LINUX=quiet\n", OVERRIDE: 'GRUB_CMDLINE_LINUX="quiet"" splash"\n'})
def test_kernel_arguments_are_edited_as_a_shell_reads_them_or_not_at_all(
    tmp_path: Path, files: dict[str, str]
) -> None:
    host, before = machine(tmp_path / "host", files), shell(files)
    try:
        bootloader.edit_boot_arguments(host, {"add": ["x=1"], "remove": ["old=1"]})
    except CommandError:
        assert {path: host.read(path) for path in files} == files
        return
    after = shell({path: host.read(path) for path in files})
    assert before is not None
    assert after is not None
    kernel_words = ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT")
    assert "x=1" in [word for name in kernel_words for word in after[name]]
    for name, words in before.items():
        mine = ("old=1", "x=1", "") if name in kernel_words else ()
        assert [word for word in after[name] if word not in mine] == [w for w in words if w not in mine]
        assert "old=1" not in after[name]
    again = host.read(DEFAULTS)
    assert not bootloader.edit_boot_arguments(host, {"add": ["x=1"], "remove": ["old=1"]}).changed
    assert host.read(DEFAULTS) == again


@READS
@given(files=FILES, value=st.sampled_from(["saved", "Advanced options>it's new", ""]))
def test_grub_default_is_set_as_a_shell_reads_it_or_not_at_all(
    tmp_path: Path, files: dict[str, str], value: str
) -> None:
    host, before = machine(tmp_path / "host", files), shell(files)
    try:
        bootloader.save_default(host, bootloader.observe(host), value)
    except CommandError:
        assert {path: host.read(path) for path in files} == files
        return
    edited = {path: host.read(path) for path in files}
    if edited != files:
        assert shell(edited) == {**(before or {}), "GRUB_DEFAULT": value.split(" ")}
        assert grubdefaults.default_of(edited) == value


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("GRUB_CMDLINE_LINUX='root=UUID=x'; export GRUB_CMDLINE_LINUX", True),
        ('GRUB_CMDLINE_LINUX=$GRUB_CMDLINE_LINUX" extra"', True),
        ("GRUB_CMDLINE_LINUX=quiet; GRUB_TIMEOUT=5", True),
        ("GRUB_TIMEOUT=5; GRUB_CMDLINE_LINUX=quiet", True),
        ('GRUB_CMDLINE_LINUX="quiet"" splash"', True),
        ('GRUB_CMDLINE_LINUX="${GRUB_CMDLINE_LINUX:+$GRUB_CMDLINE_LINUX }extra"', True),
        ('GRUB_CMDLINE_LINUX="$EXTRA"', True),
        ('GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX extra"', False),
        ("export GRUB_CMDLINE_LINUX='a'  # why", False),
        ("export GRUB_CMDLINE_LINUX", False),
        ("# GRUB_CMDLINE_LINUX+=x", False),
    ],
)
def test_a_plan_names_the_lines_that_cannot_be_edited(line: str, refused: bool) -> None:
    assert grubdefaults.unreadable({DEFAULTS: f"GRUB_TIMEOUT=1\n{line}\n"}) == [DEFAULTS + ":2"] * refused


def test_a_plan_names_a_default_that_cannot_be_set() -> None:
    loader = Bootloader("grub", "GRUB_DEFAULT=0; GRUB_TIMEOUT=5\n")
    state = State(bootloader=loader)
    desired = Desired(host="a", kernel_version="6.1.0-1-amd64")
    words = f"{DEFAULTS}:1: write GRUB_DEFAULT on a line of its own, as NAME=value"
    assert words in kernel.problems(state, desired)
    fine = State(bootloader=loader._replace(defaults_file="GRUB_DEFAULT=0\n"))
    assert words not in kernel.problems(fine, desired)


def findmnt(text: str, directory: Path) -> list[tuple[str, str, str]]:
    """Source, mount point and options of each entry, as findmnt reads the file."""
    (directory / "fstab").write_text(text)
    argv = ["findmnt", "--tab-file", str(directory / "fstab"), "--json", "-o", "SOURCE,TARGET,OPTIONS"]
    out = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    rows = json.loads(out)["filesystems"] if out else []
    return [
        (row["source"], re.sub("/+", "/", row["target"]).rstrip("/"), row["options"] or "defaults")
        for row in rows
    ]


FIELDS = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(["", " ", "\t", "#", " # "]),
    st.sampled_from(["/dev/pmem0", "UUID=1-2", "LABEL=a\\040b", "none"]),
    st.sampled_from([" ", "\t ", ""]),
    st.sampled_from(
        [
            "/mnt/pmem0",
            "/mnt/pmem0/",
            "//mnt/pmem0",
            "/mnt/pm\\145m0",
            "/home",
            "/a\\040b",
            "/h\\043",
            "/\\303\\251",
        ]
    ),
    st.sampled_from(
        [" ext4", " ext4 ", "\text4\tdax,nofail", " ext4 defaults 0", " ext4 defaults 0 2", "", " ext4 a x"]
    ),
    st.sampled_from(["", " # note", "\t"]),
)


@pytest.mark.skipif(not shutil.which("findmnt"), reason="there is no findmnt")
@READS
@given(lines=st.lists(FIELDS, max_size=5), end=st.sampled_from(["\n", ""]))
@example(lines=["/dev/pmem0 /mnt/caf\\303\\251 ext4", "/dev/pmem1 /mnt/pmem0 ext4"], end="\n")
@example(lines=["/dev/pmem0 /mnt/pmem0 ext4", "UUID=q /home ext4 defaults 0 2"], end="\n")
def test_fstab_is_edited_as_findmnt_reads_it(tmp_path: Path, lines: list[str], end: str) -> None:
    text = "\n".join(lines) + end if lines else ""
    before = findmnt(text, tmp_path)
    parsed = [(item.spec, item.where, ",".join(item.options)) for item in fstab.parse(text)]
    assert [(fstab.unescape(spec), where, options) for spec, where, options in parsed] == before
    line = "UUID=1 /mnt/pmem0 ext4 dax,nofail 0 0"
    edited = mount.edit_fstab(text, ["/mnt/pmem0"], line)
    others = [row for row in before if row[1] != "/mnt/pmem0"]
    after = findmnt(edited, tmp_path)
    assert [row for row in after if row[1] == "/mnt/pmem0"] == [("UUID=1", "/mnt/pmem0", "dax,nofail")]
    assert [row for row in after if row[1] != "/mnt/pmem0"] == others
    assert mount.edit_fstab(edited, ["/mnt/pmem0"], line) == edited
    assert findmnt(mount.edit_fstab(edited, ["/mnt/pmem0"], ""), tmp_path) == others


@given(where=st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=8))
@settings(deadline=None, derandomize=True)
def test_any_mount_point_comes_back(where: str) -> None:
    assert fstab.unescape(fstab.escape(where)) == where


def test_an_edited_file_keeps_its_mode_owner_and_link(tmp_path: Path) -> None:
    (tmp_path / "etc/default").mkdir(parents=True)
    real = tmp_path / "etc/real"
    real.write_text("GRUB_TIMEOUT=1\n")
    real.chmod(0o600)
    (tmp_path / "etc/default/grub").symlink_to("../real")
    assert System(str(tmp_path)).edit(DEFAULTS, "GRUB_TIMEOUT=2 # é\n")
    assert (tmp_path / "etc/default/grub").is_symlink()
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("GRUB_TIMEOUT=2 # é\n", 0o600)
    assert not System(str(tmp_path)).edit(DEFAULTS, "GRUB_TIMEOUT=2 # é\n")


@pytest.mark.parametrize("path", [DEFAULTS, fstab.PATH, "/boot/grub/custom.cfg"])
def test_a_file_that_could_not_be_kept_byte_for_byte_is_left_alone(tmp_path: Path, path: str) -> None:
    real = tmp_path / path.lstrip("/")
    real.parent.mkdir(parents=True)
    real.write_bytes(b"# caf\xe9\n")
    with pytest.raises(CommandError, match="is not UTF-8"):
        System(str(tmp_path)).edit(path, "x\n")
    assert real.read_bytes() == b"# caf\xe9\n"
