"""What Secure Boot lets start.

The images are the headers of Debian 12's linux-image-6.1.0-56-amd64, with and without -unsigned, of
which only the table of certificates differs: 1,472 bytes at the end, or nothing.
"""

import struct
from pathlib import Path

import pytest
from boot_machine import NEW, OLD, Machine

from provision.node import kernel, kernelinstall, secureboot
from provision.node.command import CommandError
from provision.node.state import Bootloader, OsInfo
from provision.node.step import Desired

EFI = "/sys/firmware/efi/efivars/"
ON = EFI + "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
UNCHECKED = EFI + "MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23"
OWNERS_KEYS = EFI + "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"


def image(certificates: int, kind: int = 0x20B) -> bytes:
    """The first bytes of a kernel: that of a PC starts at 0x40 and is a 64-bit program."""
    tables = struct.pack("<8xII", 8245760, certificates).rjust(4 * 8 + 8, b"\0")
    optional = struct.pack("<H", kind).ljust(112 if kind == 0x20B else 96, b"\0") + tables
    header = b"PE\0\0" + struct.pack("<HHIIIHH", 0x8664, 4, 0, 0, 1, len(optional), 0x206)
    return (b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40) + header + optional).ljust(8192, b"\0")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path)
    found.add_kernel(NEW)
    found.put(ON, "\x06\0\0\0\x01")
    Path(found.path("/boot/vmlinuz-" + OLD)).write_bytes(image(1472))
    Path(found.path("/boot/vmlinuz-" + NEW)).write_bytes(image(0))
    return found


@pytest.mark.parametrize("kind", [0x20B, 0x10B])
def test_a_kernel_without_a_signature_is_known(machine: Machine, kind: int) -> None:
    path = machine.path("/boot/vmlinuz-" + NEW)
    for size in (0, 1472):
        Path(path).write_bytes(image(size, kind))
        assert secureboot.is_unsigned(machine, "/boot/vmlinuz-" + NEW) is not bool(size)


@pytest.mark.parametrize("data", [b"", b"MZ", b"\x1f\x8b\x08gzip", image(0)[:70], b"MZ" + b"\xff" * 4094])
def test_a_file_that_is_no_kernel_image_is_not_checked_for_a_signature(machine: Machine, data: bytes) -> None:
    Path(machine.path("/boot/vmlinuz-" + NEW)).write_bytes(data)
    assert secureboot.is_unsigned(machine, "/boot/vmlinuz-" + NEW) is False
    assert secureboot.is_unsigned(machine, "/boot/vmlinuz-none") is False


def test_an_unsigned_kernel_is_not_booted(machine: Machine) -> None:
    kernelinstall.check_installed(machine, OLD, [])
    with pytest.raises(CommandError, match=f"kernel {NEW} has no signature, .* but will not be booted"):
        kernelinstall.check_installed(machine, NEW, [])
    machine.put(ON, "\x06\0\0\0\0")
    kernelinstall.check_installed(machine, NEW, [])


def test_secure_boot_counts_as_off_if_shim_validates_nothing(machine: Machine) -> None:
    assert secureboot.is_on(machine)
    machine.put(UNCHECKED, "\x06\0\0\0\x01")
    assert not secureboot.is_on(machine)


def test_what_a_plan_is_made_of(machine: Machine) -> None:
    def seen(version: str) -> tuple[bool, bool, list[str]]:
        desired = Desired("h", "cpu", kernel_version=version)
        found = kernel.observe(machine, OsInfo("debian", "12", "debian"), desired, Bootloader())
        return found.secure_boot, found.elrepo_key, found.unsigned

    assert seen(NEW) == (True, False, [NEW])
    machine.put(OWNERS_KEYS, "\x07\0\0\0" + "0\x82\x03 ELRepo.org Secure Boot Key")
    assert seen(NEW) == (True, True, [NEW])
    assert seen("") == (True, False, []), "nothing is looked up where no kernel is asked for"
    machine.put(ON, "\x06\0\0\0\0")
    assert seen(NEW) == (False, False, [])
