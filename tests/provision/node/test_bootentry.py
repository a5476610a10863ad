import pytest

from provision.node import bootentry

# As grub-mkconfig of Debian 12 writes it; /boot is a file system of its own.
MENU = """\
if [ x"${feature_menuentry_id}" = xy ]; then
  menuentry_id_option="--id"
fi
function load_video {
  insmod all_video
}
menuentry 'Debian GNU/Linux' --class debian --class os $menuentry_id_option 'gnulinux-simple-5832' {
	load_video
	linux	/vmlinuz-6.1.0-56-amd64 root=UUID=5832 ro console=ttyS0 quiet
	initrd	/initrd.img-6.1.0-56-amd64
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-5832' {
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-56-amd64' --class os $menuentry_id_option 'gnulinux-6.1.0-56-amd64-advanced-5832' {
		load_video
		if [ x$grub_platform = xxen ]; then insmod xzio; insmod lzopio; fi
		savedefault
		linux	/vmlinuz-6.1.0-56-amd64 root=UUID=5832 ro console=ttyS0 quiet
		initrd	/initrd.img-6.1.0-56-amd64
	}
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-56-amd64 (recovery mode)' $menuentry_id_option 'gnulinux-6.1.0-56-amd64-recovery-5832' {
		linux	/vmlinuz-6.1.0-56-amd64 root=UUID=5832 ro single console=ttyS0
	}
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-55-amd64' $menuentry_id_option 'gnulinux-6.1.0-55-amd64-advanced-5832' {
		linux	/vmlinuz-6.1.0-55-amd64 root=UUID=5832 ro console=ttyS0 quiet
	}
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
	fwsetup
}
menuentry "mine" {
	linux16 /boot/memtest
}
"""  # noqa: E501
ENTRIES = [menu.entry for menu in bootentry.parse_menu(MENU)]
NEWEST = "gnulinux-advanced-5832>gnulinux-6.1.0-56-amd64-advanced-5832"
OLDER = "gnulinux-advanced-5832>gnulinux-6.1.0-55-amd64-advanced-5832"

BLS = """\
title Rocky Linux (5.14.0-427.el9.x86_64) 9.4 (Blue Onyx)
version 5.14.0-427.el9.x86_64
linux /vmlinuz-5.14.0-427.el9.x86_64
initrd /initramfs-5.14.0-427.el9.x86_64.img $tuned_initrd
options $kernelopts $tuned_params quiet
id rocky-1
grub_class rocky
"""


def test_entries_of_a_menu() -> None:
    assert [(item.id, item.release) for item in ENTRIES] == [
        ("gnulinux-simple-5832", "6.1.0-56-amd64"),
        (NEWEST, "6.1.0-56-amd64"),
        ("gnulinux-advanced-5832>gnulinux-6.1.0-56-amd64-recovery-5832", "6.1.0-56-amd64"),
        (OLDER, "6.1.0-55-amd64"),
        ("uefi-firmware", ""),
        ("mine", ""),
    ]
    assert ENTRIES[0].arguments == ["root=UUID=5832", "ro", "console=ttyS0", "quiet"]
    assert ENTRIES[3].title == "Debian GNU/Linux, with Linux 6.1.0-55-amd64"


def test_a_release_is_found_by_an_entry_that_will_always_mean_it() -> None:
    for release, name in (("6.1.0-56-amd64", NEWEST), ("6.1.0-55-amd64", OLDER)):
        found = bootentry.find(ENTRIES, release)
        assert found is not None
        assert found.id == name
    assert bootentry.find(ENTRIES, "6.1.0-5-amd64") is None


@pytest.mark.parametrize(
    ("default", "saved", "release"),
    [
        ("0", OLDER, "6.1.0-56-amd64"),
        ("", "", "6.1.0-56-amd64"),
        ("saved", OLDER, "6.1.0-55-amd64"),
        ("saved", "", "6.1.0-56-amd64"),
        ("saved", "gone", "6.1.0-56-amd64"),
        ("saved", "Debian GNU/Linux, with Linux 6.1.0-55-amd64", "6.1.0-55-amd64"),
        (OLDER, "", "6.1.0-55-amd64"),
        ("Advanced options>Debian GNU/Linux, with Linux 6.1.0-55-amd64", "", "6.1.0-55-amd64"),
        ("saved", "2", ""),
        ("1>2", "", ""),
    ],
)
def test_the_default_release(default: str, saved: str, release: str) -> None:
    assert bootentry.default_release(ENTRIES, default, saved) == release


def test_the_entry_of_a_trial() -> None:
    new, old = (
        next(item for item in bootentry.parse_menu(MENU) if item.entry.id == name) for name in (NEWEST, OLDER)
    )
    words = bootentry.changed(new.entry.arguments, ["memmap=1G!4G", "quiet"], ["console=ttyS0"])
    # Lines as GRUB 2.06 ran them: with files that are there, and with one that is not.
    assert bootentry.trial_entry(new, "on trial", words, old).splitlines() == [
        "menuentry 'on trial' --id oeprov-trial {",
        "\tset loaded=no",
        "\tload_video",
        "\tif [ x$grub_platform = xxen ]; then insmod xzio; insmod lzopio; fi",
        "\tif linux /vmlinuz-6.1.0-56-amd64 root=UUID=5832 ro quiet memmap=1G!4G; then set loaded=yes; fi",
        "\tif [ $loaded = yes ]; then",
        "\t\tif initrd\t/initrd.img-6.1.0-56-amd64; then set loaded=yes; else set loaded=no; fi",
        "\tfi",
        "\tif [ $loaded = no ]; then",
        "\t\tlinux\t/vmlinuz-6.1.0-55-amd64 root=UUID=5832 ro console=ttyS0 quiet",
        "\tfi",
        "}",
    ]


def test_our_block_comes_and_goes() -> None:
    for mine in ("", "menuentry 'mine' {\n}\n", "# no newline"):
        once = bootentry.with_block(mine, "one")
        assert "one" in once
        assert once.startswith(mine)
        twice = bootentry.with_block(once, "two")
        assert "one" not in twice
        assert bootentry.with_block(twice, "").rstrip("\n") == mine.rstrip("\n")


def test_entries_of_the_boot_loader_specification() -> None:
    entry = bootentry.parse_bls("1b2c-5.14.0.conf", BLS, {"kernelopts": "root=/dev/sda1 ro"})
    assert entry.id == "1b2c-5.14.0"
    assert entry.release == "5.14.0-427.el9.x86_64"
    assert entry.arguments == ["root=/dev/sda1", "ro", "quiet"]
    copy = bootentry.copy_bls(BLS, "on trial", ["root=/dev/sda1", "panic=15"])
    assert "options root=/dev/sda1 panic=15\n" in copy
    assert "title on trial\n" in copy
    assert "id rocky-1" not in copy
    assert "initrd /initramfs-5.14.0-427.el9.x86_64.img $tuned_initrd\n" in copy


def test_rescue_kernels_are_no_release() -> None:
    assert bootentry.release_of("/boot/vmlinuz-0-rescue-1234") == ""
    assert bootentry.release_of("/memtest86+.bin") == ""


def test_the_environment_block() -> None:
    text = "# GRUB Environment Block\nsaved_entry=a>b\nnext_entry=\n####"
    assert bootentry.parse_grubenv(text) == {"saved_entry": "a>b", "next_entry": ""}
