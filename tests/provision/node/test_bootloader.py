import subprocess

import pytest

from provision.node import grubdefaults
from provision.node.grubdefaults import DEFAULTS

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


def test_a_file_without_the_line_gets_one() -> None:
    assert sourced(edit("GRUB_TIMEOUT=1\n", ["a"], [])) == "a"


def test_of_two_lines_the_last_counts() -> None:
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
