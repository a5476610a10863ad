from pathlib import Path
from typing import Any

import pytest
from boot_machine import NEW, OLD, El, Machine

from provision.node import bootloader, kernel, kernelinstall
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.kernelinstall import Package
from provision.node.state import OsInfo
from provision.node.step import Applied, Desired, Step

OS = {"id": "debian", "version": "12", "architecture": "x86_64", "package_manager": "apt"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def install(machine: System, release: str = NEW, options: tuple[str, ...] = (), **other: Any) -> Applied:
    args = {
        "release": release,
        "source": "distribution",
        "repositories": {},
        "options": list(options),
        "os": OS,
        **other,
    }
    return apply(Step("kernel-install", "install", "why", action="install_kernel", args=args), machine)


def test_the_old_kernel_stays_the_default(machine: Machine) -> None:
    applied = install(machine)
    assert (applied.changed, applied.message) == (True, f"installed kernel {NEW}; {OLD} stays the default")
    machine.boot()
    assert machine.running == OLD
    assert install(machine).changed is False
    assert sum("install" in argv for argv in machine.asked if argv[0] == "apt-get") == 1


def test_the_newest_kernel_need_not_be_known_by_name(machine: Machine) -> None:
    assert install(machine, "").message == f"installed kernel {NEW}; {OLD} stays the default"


def test_a_kernel_without_what_the_mode_needs_is_not_booted(machine: Machine) -> None:
    with pytest.raises(CommandError, match=r"was built without CONFIG_NONE, .* will not be booted"):
        install(machine, options=("CONFIG_FS_DAX", "CONFIG_NONE"))
    machine.boot()
    assert machine.running == OLD


@pytest.mark.parametrize("name", ["vmlinuz-", "initrd.img-"])
def test_an_incomplete_kernel_is_found(machine: Machine, name: str) -> None:
    machine.add_kernel(NEW)
    machine.put(f"/boot/{name}{NEW}", "")
    with pytest.raises(CommandError, match=r"is missing or empty|no initial ramdisk"):
        kernelinstall.check_installed(machine, NEW, [])


def test_too_little_room_is_found_before_anything_is_touched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelinstall, "room", lambda *_: (3 << 20, 60 << 20))
    with pytest.raises(CommandError, match=rf"/boot has 3 MiB free .* about 61 MiB: .*installed: {OLD}\)"):
        install(machine)
    assert not [argv for argv in machine.asked if argv[0] == "apt-get"]


def test_room_is_judged_by_the_running_kernel(machine: Machine) -> None:
    machine.put(f"/lib/modules/{OLD}/kernel/a.ko", "x" * 4000)
    files = 2 * 1000 + len(machine.read("/boot/config-" + OLD)) + 4000
    free, need = kernelinstall.room(machine, OLD)
    assert need == files * 5 // 4
    assert free > 0


def test_a_boot_that_fills_up_leaves_no_half_installed_package(machine: Machine) -> None:
    machine.full = True
    with pytest.raises(
        CommandError,
        match=rf"No space left on device .*/boot had \d+ MiB free\).*were removed: linux-image-{NEW}",
    ):
        install(machine)
    assert machine.half == []
    assert kernelinstall.installed_releases(machine) == [OLD]
    machine.boot()
    assert machine.running == OLD


def test_a_menu_that_was_cut_off_is_put_back(machine: Machine) -> None:
    menu = machine.read("/boot/grub/grub.cfg")

    def breaks(words: list[str]) -> Result:
        if "install" in words:
            machine.put("/boot/grub/grub.cfg", menu[:60])
        return Result([], 100, "", "No space left on device")

    machine.apt_get = breaks  # type: ignore[method-assign, assignment]
    with pytest.raises(CommandError, match="nothing was left half-installed"):
        install(machine)
    assert machine.read("/boot/grub/grub.cfg") == menu


@pytest.mark.parametrize("unpacking", [True, False])
def test_what_a_killed_run_left_is_finished(machine: Machine, unpacking: bool) -> None:
    machine.unpacking = unpacking
    machine.put("/boot/vmlinuz-" + NEW, "x" * 1000)
    machine.half = ["linux-image-" + NEW]
    assert kernelinstall.installed_releases(machine) == [OLD]
    install(machine)
    assert machine.half == []
    assert kernelinstall.installed_releases(machine) == [OLD, NEW]


def test_a_run_killed_before_the_menu_was_made_is_finished(machine: Machine) -> None:
    machine.add_kernel(NEW)
    machine.half = ["linux-image-" + NEW]
    loader = bootloader.observe(machine)
    assert kernel.observe(machine, OsInfo(), Desired(), loader).installed == [OLD]
    install(machine)
    assert machine.half == []
    loader = bootloader.observe(machine)
    assert kernel.observe(machine, OsInfo(), Desired(), loader).installed == [OLD, NEW]
    machine.boot()
    assert machine.running == OLD


def test_half_installed_packages_of_others_are_left_to_them(machine: Machine) -> None:
    machine.half = ["postgresql-15"]
    with pytest.raises(CommandError, match=r"already: postgresql-15; repair them first"):
        install(machine)


def test_commands_of_each_distribution() -> None:
    ubuntu = OsInfo("ubuntu", "22.04", package_manager="apt", architecture="x86_64")
    assert kernelinstall.install_commands(ubuntu, Package("5.15.0-130-generic"))[-1][-2:] == [
        "linux-image-5.15.0-130-generic",
        "linux-modules-extra-5.15.0-130-generic",
    ]
    assert kernelinstall.install_commands(ubuntu, Package(""))[-1][-1] == "linux-image-generic"
    rocky = OsInfo("rocky", "9.4", package_manager="dnf", architecture="x86_64")
    release = "5.14.0-427.13.1.el9_4.x86_64"
    assert kernelinstall.install_commands(rocky, Package(release)) == [
        ["dnf", "install", "-y", "kernel-5.14.0-427.13.1.el9_4"]
    ]


def test_el_installs_from_the_mirrors_and_keeps_its_default(tmp_path: Path) -> None:
    system = El(tmp_path)
    os = {**OS, "id": "centos", "version": "7", "package_manager": "yum"}
    urls = {"archive": "https://mirror/vault", "kernel": "https://mirror/el7"}
    applied = install(system, NEW, source="elrepo-lt", os=os, repositories=urls)
    assert applied.message == f"installed kernel {NEW}; {OLD} stays the default"
    assert system.default == OLD
    text = system.read("/etc/yum.repos.d/oeprov.repo")
    assert "baseurl=https://mirror/vault\nenabled=0\n" in text
    options = ["--disablerepo=*", "--enablerepo=oeprov-archive", "--enablerepo=oeprov-kernel"]
    assert ["yum", "install", "-y", *options, "kernel-lt-" + NEW] in system.asked


def test_an_unnamed_default_is_named(machine: Machine) -> None:
    machine.add_kernel(NEW)
    machine.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])
    apply(Step("s", "w", "y", action="set_saved_default", args={}), machine)
    loader = bootloader.observe(machine)
    assert loader.saved_entry == f"gnulinux-advanced-5f3c>gnulinux-{OLD}-advanced-5f3c"
    assert (loader.saved_default, bootloader.default_release(loader)) == (True, OLD)
    machine.boot()
    assert machine.running == OLD
