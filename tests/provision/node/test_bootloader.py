import os
import subprocess
from pathlib import Path

import pytest
from boot_machine import NEW, OLD, El, Machine
from boot_machine import sourced as as_sourced

from provision.hosts.observe import COMMAND_TIMEOUT
from provision.node import bootloader, grubdefaults
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.grubdefaults import DEFAULTS
from provision.node.state import Bootloader
from provision.node.step import Applied, Step

DEBIAN = """\
# If you change this file, run 'update-grub' afterwards
GRUB_DEFAULT=0
GRUB_CMDLINE_LINUX_DEFAULT="quiet"
GRUB_CMDLINE_LINUX="console=tty0 crashkernel=auto"  # serial too
"""


def edit(text: str, add: list[str], remove: list[str]) -> str:
    return grubdefaults.edit_arguments({DEFAULTS: text}, add, remove)[DEFAULTS]


def edit_default(text: str, value: str) -> str:
    return grubdefaults.edit_default({DEFAULTS: text}, value)[DEFAULTS]


def sourced(text: str, name: str = "GRUB_CMDLINE_LINUX") -> str:
    """What a shell, as grub-mkconfig is one, makes of the file."""
    done = subprocess.run(
        ["sh", "-c", text + f'\nprintf %s "${name}"'], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_an_argument_is_added_to_the_one_line() -> None:
    edited = edit(DEBIAN, ["memmap=1008G!257G"], [])
    assert sourced(edited) == "console=tty0 crashkernel=auto memmap=1008G!257G"
    assert edited.count("GRUB_CMDLINE_LINUX=") == 1
    assert sourced(edited, "GRUB_CMDLINE_LINUX_DEFAULT") == "quiet"
    assert edited.splitlines()[:3] == DEBIAN.splitlines()[:3]


def test_an_edit_twice_is_an_edit_once() -> None:
    once = edit(DEBIAN, ["a=1", "b"], ["crashkernel=auto"])
    assert edit(once, ["a=1", "b"], ["crashkernel=auto"]) == once
    assert sourced(once) == "console=tty0 a=1 b"


def test_an_edit_can_be_taken_back() -> None:
    once = edit(DEBIAN, ["memmap=1G!4G"], [])
    assert sourced(edit(once, [], ["memmap=1G!4G"])) == sourced(DEBIAN)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("GRUB_CMDLINE_LINUX=quiet", "quiet"),
        ("GRUB_CMDLINE_LINUX='a b'", "a b"),
        ('GRUB_CMDLINE_LINUX=""', ""),
        ('  GRUB_CMDLINE_LINUX="a b"  ', "a b"),
    ],
)
def test_all_ways_of_quoting_are_read_and_kept_whole(line: str, value: str) -> None:
    assert grubdefaults.cmdline_values(line) == [value]
    assert sourced(edit(line, ["new"], [])) == (value + " new").strip()


def test_a_missing_cmdline_line_is_added() -> None:
    assert sourced(edit("GRUB_TIMEOUT=1\n", ["a"], [])) == "a"


def test_the_last_of_two_cmdline_lines_is_edited() -> None:
    text = 'GRUB_CMDLINE_LINUX="a b"\nGRUB_CMDLINE_LINUX="c"\n'
    assert grubdefaults.value_of({DEFAULTS: text}, "GRUB_CMDLINE_LINUX") == ["c"]
    assert len(grubdefaults.cmdline_values(text)) == 2
    assert sourced(edit(text, ["d"], [])) == "c d"


def test_a_comment_is_no_line() -> None:
    text = '#GRUB_CMDLINE_LINUX="a"\nGRUB_CMDLINE_LINUX="b"\n'
    assert grubdefaults.value_of({DEFAULTS: text}, "GRUB_CMDLINE_LINUX") == ["b"]
    assert grubdefaults.cmdline_values(text) == ["b"]


def test_the_default_is_saved() -> None:
    edited = edit_default(DEBIAN, "saved")
    assert grubdefaults.default_of({DEFAULTS: edited}) == "saved"
    assert edited.count("GRUB_DEFAULT=") == 1
    assert edit_default(edited, "saved") == edited
    assert grubdefaults.default_of({DEFAULTS: edit_default("", "saved")}) == "saved"
    assert edit_default(edit_default(DEBIAN, "saved"), "0") == DEBIAN
    assert edit_default("GRUB_DEFAULT=saved\nGRUB_TIMEOUT=1\n", "") == "GRUB_TIMEOUT=1\n"


@pytest.mark.parametrize("line", ['GRUB_DEFAULT="Advanced options>Linux 6.1, new"', "GRUB_DEFAULT='a b' # c"])
def test_a_default_with_blanks_is_read_whole_and_comes_back(line: str) -> None:
    value = grubdefaults.default_of({DEFAULTS: line + "\n"})
    assert value in ("Advanced options>Linux 6.1, new", "a b")
    assert as_sourced(edit_default("GRUB_DEFAULT=saved\n", value))[0] == value
    assert grubdefaults.default_of({DEFAULTS: edit_default(line, value)}) == value


OVERRIDE = "/etc/default/grub.d/50-cloud.cfg"


def test_a_file_sourced_later_that_starts_anew_is_the_one_to_edit() -> None:
    files = {DEFAULTS: DEBIAN, OVERRIDE: "GRUB_CMDLINE_LINUX='net.ifnames=0'\n"}
    edited = grubdefaults.edit_arguments(files, ["memmap=1G!4G"], [])
    assert edited[DEFAULTS] == DEBIAN
    assert edited[OVERRIDE] == "GRUB_CMDLINE_LINUX='net.ifnames=0 memmap=1G!4G'\n"
    assert grubdefaults.configured_words(edited) == ["net.ifnames=0", "memmap=1G!4G", "quiet"]


def test_a_file_sourced_later_that_adds_leaves_the_line_that_counts() -> None:
    files = {DEFAULTS: DEBIAN, OVERRIDE: 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX net.ifnames=0"\n'}
    edited = grubdefaults.edit_arguments(files, ["memmap=1G!4G"], ["net.ifnames=0"])
    assert sourced(edited[DEFAULTS] + edited[OVERRIDE]).split() == [
        "console=tty0",
        "crashkernel=auto",
        "memmap=1G!4G",
    ]


def test_an_argument_is_removed_from_ordinary_entries_too() -> None:
    files = {DEFAULTS: 'GRUB_CMDLINE_LINUX="a"\nGRUB_CMDLINE_LINUX_DEFAULT="quiet memmap=1G!4G"\n'}
    edited = grubdefaults.edit_arguments(files, [], ["memmap=1G!4G"])
    assert edited[DEFAULTS] == 'GRUB_CMDLINE_LINUX="a"\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\n'


def test_an_argument_of_ordinary_entries_is_not_added_again() -> None:
    files = {DEFAULTS: 'GRUB_CMDLINE_LINUX=""\nGRUB_CMDLINE_LINUX_DEFAULT="quiet a=1"\n'}
    assert grubdefaults.edit_arguments(files, ["a=1"], []) == files


def test_quotes_inside_a_value_are_kept() -> None:
    text = """GRUB_CMDLINE_LINUX='dyndbg="file a.c +p" quiet'\n"""
    assert sourced(edit(text, ["b"], ["quiet"])) == 'dyndbg="file a.c +p" b'


def test_a_line_that_cannot_be_edited_is_reported() -> None:
    text = 'GRUB_CMDLINE_LINUX="a \\\n  b"\nGRUB_CMDLINE_LINUX_DEFAULT=quiet\n'
    assert grubdefaults.unreadable({DEFAULTS: text}) == [DEFAULTS + ":1"]
    assert grubdefaults.unreadable({DEFAULTS: DEBIAN}) == []


@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("memmap=1008G!257G", True),
        ("memmap=1G!4G,1G!8G", True),
        ("pci=assign-busses", True),
        ("isolcpus=1-3,5", True),
        ("memmap=1G$4G", False),
        ('dyndbg="file', False),
        ("a b", False),
        ("a;reboot", False),
        ("", False),
    ],
)
def test_arguments_that_grub_would_expand_are_refused(word: str, plain: bool) -> None:
    assert (grubdefaults.quoting_problems([word]) == []) is plain


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.add_kernel(NEW)
    found.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])
    return found


def change(system: System, add: list[str], remove: list[str]) -> Applied:
    args = {"add": add, "remove": remove}
    return apply(Step("boot-arguments", "w", "y", action="edit_boot_arguments", args=args), system)


def test_arguments_reach_every_entry_once(machine: Machine) -> None:
    applied = change(machine, ["memmap=1G!4G"], ["console=ttyS0"])
    assert (applied.changed, applied.message) == (True, "add memmap=1G!4G, remove console=ttyS0")
    entries = bootloader.observe(machine).entries
    assert len(entries) == 5
    assert all("memmap=1G!4G" in item.arguments for item in entries if "single" not in item.arguments)
    assert change(machine, ["memmap=1G!4G"], ["console=ttyS0"]).changed is False


def test_a_menu_that_was_not_made_again_is_made(machine: Machine) -> None:
    machine.put(DEFAULTS, 'GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX="console=ttyS0 a=1"\n')
    assert change(machine, ["a=1"], []).changed is True
    assert "a=1" in bootloader.observe(machine).entries[0].arguments


def test_files_are_restored_when_grub_mkconfig_fails(machine: Machine) -> None:
    machine.mkconfig_fails = True
    before = machine.read(DEFAULTS), machine.read("/boot/grub/grub.cfg")
    with pytest.raises(CommandError, match="grub-probe: error: no such disk"):
        change(machine, ["a=1"], [])
    assert (machine.read(DEFAULTS), machine.read("/boot/grub/grub.cfg")) == before
    assert machine.list("/boot/grub") == ["grub.cfg", "grubenv"]


def test_a_menu_without_entries_is_not_put_in_place(machine: Machine) -> None:
    before = machine.read("/boot/grub/grub.cfg")
    machine.grub_mkconfig = lambda words: machine.put(words[1], "# nothing\n")  # type: ignore[method-assign]
    with pytest.raises(CommandError, match="a menu without entries"):
        change(machine, ["a=1"], [])
    assert machine.read("/boot/grub/grub.cfg") == before


def test_arguments_that_do_not_arrive_are_noticed(machine: Machine) -> None:
    menu = machine.read("/boot/grub/grub.cfg")
    machine.grub_mkconfig = lambda words: machine.put(words[1], menu)  # type: ignore[method-assign]
    with pytest.raises(CommandError, match="boot entry 'Debian GNU/Linux' did not get them"):
        change(machine, ["a=1"], [])


def test_bad_arguments_are_refused_by_the_step_too(machine: Machine) -> None:
    with pytest.raises(CommandError, match="GRUB would need it quoted"):
        change(machine, ["a$b"], [])
    machine.put(DEFAULTS, 'GRUB_CMDLINE_LINUX="a \\\n b"\n')
    with pytest.raises(CommandError, match=DEFAULTS + ":1"):
        change(machine, ["c"], [])
    (Path(machine.path(DEFAULTS))).unlink()
    with pytest.raises(CommandError, match="there is no /etc/default/grub"):
        change(machine, ["c"], [])


def test_a_kernel_without_an_entry_cannot_be_the_default(machine: Machine) -> None:
    with pytest.raises(CommandError, match=r"has no entry of kernel 9\.9"):
        bootloader.set_default(machine, "9.9")


def test_a_default_that_does_not_stick_is_noticed(machine: Machine) -> None:
    bootloader.set_default(machine, OLD)
    machine.grub_set_default = lambda words: None  # type: ignore[method-assign]
    with pytest.raises(CommandError, match=f"default is kernel {OLD} after it was set to {NEW}"):
        bootloader.set_default(machine, NEW)


def test_grubby_changes_entries_and_the_default(tmp_path: Path) -> None:
    system = El(tmp_path)
    assert change(system, ["memmap=1G!4G"], []).changed is True
    assert ["grubby", "--update-kernel=ALL", "--args=memmap=1G!4G"] in system.asked
    assert change(system, ["memmap=1G!4G"], []).changed is False
    assert bootloader.set_default(system, NEW) is True
    assert bootloader.set_default(system, NEW) is False
    assert system.default == NEW


def test_the_menu_of_efi_machines_is_found(machine: Machine, tmp_path: Path) -> None:
    menu = machine.read("/boot/grub/grub.cfg")
    Path(machine.path("/boot/grub/grub.cfg")).unlink()
    machine.put("/boot/efi/EFI/centos/grub.cfg", menu)
    (tmp_path / "etc/grub2-efi.cfg").symlink_to("../boot/efi/EFI/centos/grub.cfg")
    assert bootloader.observe(machine).config_path == "/boot/grub/grub.cfg", "it was booted by a BIOS"
    machine.put("/sys/firmware/efi/fw_platform_size", "64\n")
    loader = bootloader.observe(machine)
    assert loader.config_path == "/boot/efi/EFI/centos/grub.cfg"
    assert loader.stray_config == ""
    assert bootloader.trial_path(loader) == "/boot/efi/EFI/centos/custom.cfg"
    assert len(loader.entries) == 5


def test_a_stray_menu_on_an_efi_machine_is_not_the_one_to_edit(machine: Machine, tmp_path: Path) -> None:
    """The customary `grub2-mkconfig -o /boot/grub2/grub.cfg` makes one that nothing reads."""
    machine.put("/sys/firmware/efi/fw_platform_size", "64\n")
    on = "menuentry 'Another system' {\n\tset root='hd0,gpt3'\n\tconfigfile /grub2/grub.cfg\n}\n"
    machine.put("/boot/efi/EFI/centos/grub.cfg", machine.read("/boot/grub/grub.cfg") + on)
    (tmp_path / "etc/grub2-efi.cfg").symlink_to("../boot/efi/EFI/centos/grub.cfg")
    loader = bootloader.observe(machine)
    assert loader.config_path == "/boot/efi/EFI/centos/grub.cfg"
    assert loader.stray_config == "/boot/grub/grub.cfg"
    stray = machine.read("/boot/grub/grub.cfg")
    change(machine, ["memmap=1G!4G"], [])
    assert machine.read("/boot/grub/grub.cfg") == stray
    assert "memmap=1G!4G" in machine.read("/boot/efi/EFI/centos/grub.cfg")


def test_a_menu_that_leads_on_to_the_one_in_boot_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    """EL 9, and images that start by BIOS and EFI."""
    machine.put("/sys/firmware/efi/fw_platform_size", "64\n")
    on = "search --fs-uuid --set=dev 5f3c\nset prefix=($dev)/grub2\nconfigfile $prefix/grub.cfg\n"
    machine.put("/boot/efi/EFI/rocky/grub.cfg", on)
    (tmp_path / "etc/grub2-efi.cfg").symlink_to("../boot/efi/EFI/rocky/grub.cfg")
    loader = bootloader.observe(machine)
    assert (loader.config_path, loader.stray_config) == ("/boot/grub/grub.cfg", "")


@pytest.mark.parametrize("line", ["  blscfg", "menuentry 'CentOS' {", "\tlinuxefi /vmlinuz ro"])
def test_a_menu_with_an_entry_that_leads_on_is_the_one_to_edit(
    line: str, machine: Machine, tmp_path: Path
) -> None:
    machine.put("/sys/firmware/efi/fw_platform_size", "64\n")
    machine.put("/boot/efi/EFI/centos/grub.cfg", line + "\n\tconfigfile /grub2/grub.cfg\n")
    (tmp_path / "etc/grub2-efi.cfg").symlink_to("../boot/efi/EFI/centos/grub.cfg")
    assert bootloader.observe(machine).config_path == "/boot/efi/EFI/centos/grub.cfg"


def test_a_hanging_grub_probe_ends_within_the_time_of_a_survey() -> None:
    """The plan then says that it cannot tell, instead of a host that does not answer."""
    waited = []

    class Hangs(System):
        def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
            waited.append(timeout)
            return Result(argv, len(waited) - 1, "", "")  # the second is ended, as by a timeout

    loader = Bootloader("grub", mkconfig="grub-mkconfig", config_path="/boot/grub/grub.cfg")
    assert bootloader.grubenv_on(Hangs(), loader) == ""
    assert len(waited) == 2
    assert sum(waited) < COMMAND_TIMEOUT * 0.75


def test_on_el_7_arguments_outlive_a_menu_that_is_made_again(machine: Machine) -> None:
    """grubby edits grub.cfg alone there, and the next grub2-mkconfig makes that from the defaults file."""

    def grubby(words: list[str]) -> str:
        menu = machine.read("/boot/grub/grub.cfg")
        added = next((word[7:] for word in words if word.startswith("--args=")), "")
        gone = next((word[14:] for word in words if word.startswith("--remove-args=")), "")
        lines = [f"{line} {added}" if "\tlinux\t" in line else line for line in menu.splitlines()]
        machine.put("/boot/grub/grub.cfg", "\n".join(lines).replace(gone or "\0", "") + "\n")
        return ""

    machine.grubby = grubby  # type: ignore[attr-defined]
    assert change(machine, ["memmap=1G!4G"], ["console=ttyS0"]).changed is True
    for _ in range(2):
        (entry, *_) = bootloader.observe(machine).entries
        assert "memmap=1G!4G" in entry.arguments
        assert "console=ttyS0" not in entry.arguments
        machine.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])
    assert change(machine, ["memmap=1G!4G"], ["console=ttyS0"]).changed is False


class Probed(System):
    """A machine on which grub-probe answers as it was seen to, or as its source has it."""

    def __init__(self, root: Path, answers: dict[str, str]) -> None:
        super().__init__(str(root))
        self.answers = answers

    def run(self, argv, timeout=0.0, environment=None):  # type: ignore[no-untyped-def]
        assert argv[0] == "grub2-probe"
        said = self.answers.get(argv[1].replace("--target=", ""))
        return Result(argv, 1, "", "no such disk.") if said is None else Result(argv, 0, said, "")


# File systems as Debian 12's grub-probe 2.06 printed them; abstractions from util/grub-probe.c of GRUB 2.12.
# A multipath device is none to GRUB (grub-core/osdep/devmapper/getroot.c): what lies on it is plain.
@pytest.mark.parametrize(
    ("fs", "abstraction", "on"),
    [
        ("ext2\n", "", "plain"),
        ("xfs\n", "", "plain"),
        ("fat\n", "", "plain"),
        ("btrfs\n", "", "btrfs"),
        ("zfs\n", "", "zfs"),
        ("f2fs\n", "", "f2fs"),
        ("ext2\n", "lvm\n", "lvm"),
        ("xfs\n", "diskfilter\nmdraid1x\n", "raid"),
        ("xfs\n", "diskfilter\nmdraid1x\nlvm\n", "lvm"),
        ("ext2\n", "cryptodisk\nluks\ngcry_rijndael\n", "cryptodisk"),
        ("ext2\n", "ldm\n", "ldm"),
        (None, "", ""),
        (None, None, ""),
    ],
)
def test_what_grubs_environment_block_lies_on(
    tmp_path: Path, fs: str | None, abstraction: str | None, on: str
) -> None:
    answers = {"fs": fs, "abstraction": abstraction}
    system = Probed(tmp_path, {name: text for name, text in answers.items() if text is not None})
    system.write(DEFAULTS, DEBIAN)
    system.write("/boot/grub2/grub.cfg", "")
    assert bootloader.grubenv_on(system, bootloader.observe(system)) == on


PROBED = {"ext4": "plain", "xfs": "plain", "btrfs": "btrfs"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs loop devices")
@pytest.mark.parametrize("fs", PROBED)
def test_grubenv_is_judged_by_grub_probe_on_real_file_systems(tmp_path: Path, fs: str) -> None:
    """Another program's answer, not what we think that it is."""
    system = System()
    missing = [name for name in ("grub-probe", "losetup", "mkfs." + fs) if not system.which(name)]
    if missing:
        pytest.skip("there is no " + ", ".join(missing))
    image, mounted = tmp_path / "image", tmp_path / "boot"
    image.touch()
    os.truncate(image, 320 << 20)
    mounted.mkdir()
    found = system.run(["losetup", "--find", "--show", str(image)])
    if not found.ok:
        pytest.skip(found.explain())
    loop = found.out.strip()
    try:
        system.check(["mkfs." + fs, "-q", loop])
        if not (mount := system.run(["mount", "-t", fs, loop, str(mounted)])).ok:
            pytest.skip(mount.explain())
        try:
            (mounted / "grubenv").write_text("# GRUB Environment Block\n")
            loader = Bootloader("grub", mkconfig="grub-mkconfig", config_path=f"{mounted}/grub.cfg")
            assert bootloader.grubenv_on(system, loader) == PROBED[fs]
        finally:
            system.check(["umount", str(mounted)])
    finally:
        system.check(["losetup", "--detach", loop])
