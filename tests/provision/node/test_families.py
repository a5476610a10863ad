"""Which family a system is of, from the os-release of each, and that the families' tables are whole."""

import re
from pathlib import Path

import pytest

from provision import fresh, systems
from provision.node import build, families, observe, openembedding, packages, repositories, runtime
from provision.node.command import System
from provision.node.state import OsInfo, State
from provision.node.step import Desired

# NAME, ID, VERSION_ID, ID_LIKE as the distributions have them -> family, interpreter, key of a wheel.
SYSTEMS = {
    'ID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="7"': ("CentOS 7", "python3", "centos-7-"),
    'ID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="9"': ("EL 9", "python3.11", "centos-9-"),
    'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="8.10"': ("EL 8", "python3.11", "rocky-8-"),
    'ID="almalinux"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"': ("EL 9", "python3.11", "almalinux-9-"),
    'ID="rhel"\nID_LIKE="fedora"\nVERSION_ID="9.4"': ("EL 9", "python3.11", "rhel-9-"),
    'ID="ol"\nID_LIKE="fedora"\nVERSION_ID="8.9"': ("EL 8", "python3.11", "ol-8-"),
    'ID="alinux"\nID_LIKE="rhel fedora centos anolis"\nVERSION_ID="3"': (
        "Alibaba Cloud Linux 3",
        "python3.11",
        "alinux-3-",
    ),
    'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="20.04"': ("Ubuntu", "python3", "ubuntu-20.04-"),
    'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"': ("Ubuntu", "python3", "ubuntu-24.04-"),
    'ID=debian\nVERSION_ID="13"': ("Debian", "python3", "debian-13-"),
    'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID="21"': ("Debian", "python3", "linuxmint-21-"),
}
ALL = [
    OsInfo(name, release, family.lineage, architecture="x86_64", package_manager=manager)
    for family in families.known()
    for name in family.ids
    for release in family.releases
    for manager in ("apt" if family.lineage == "debian" else family.managers[0],)
]


@pytest.mark.parametrize("text", SYSTEMS, ids=lambda text: re.sub(r"\W+", "-", text)[:40])
def test_a_system_tells_its_family(text: str, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(text + "\n")
    os = observe.observe_os(System(str(tmp_path)))
    name, python, key = SYSTEMS[text]
    family = families.of(os)
    assert family is not None
    assert family.name == name
    assert build.python_of(os, Desired()) == python
    assert build.wheel_key(os, "3.11.2").startswith(key)
    assert families.is_known(os) == (os.id not in ("ol", "linuxmint"))


def test_packages_of_the_inventory_come_from_the_repositories_that_it_names_too() -> None:
    rocky = OsInfo("rocky", "8.10", "rhel", package_manager="dnf")
    desired = Desired(runtime_packages=["jemalloc"], runtime_repositories={"epel": "https://mirror/epel"})
    assert packages.further_repositories(rocky, desired) == ["epel"]
    assert packages.further_repositories(rocky, desired._replace(runtime_packages=[])) == []
    cuda = Desired(runtime_packages=["libnccl-devel"])
    assert packages.further_repositories(rocky, cuda) == ["nvidia", "epel"]


def test_what_openembedding_runs_on_is_named_where_the_runtime_does_not() -> None:
    assert set(runtime.OTHERS) == {python for stack in openembedding.STACKS for python in stack.pythons}


@pytest.mark.parametrize("os", ALL, ids=lambda os: f"{os.id}-{os.version}")
def test_each_release_can_be_planned_for_offline(os: OsInfo) -> None:
    assert systems.parse(f"{os.id}-{os.version}").id == os.id
    for kind in ("re6p", "re7p", "bare_metal_pmem", "cxl", "gpu", "cpu"):
        state = fresh.state(Desired(kind=kind, parameter_server=True, runtime_venv="/v"), os)
        assert (state.os.id, state.os.version) == (os.id, os.version)
        assert state.kernel.running
        assert state.bootloader.has_grubby == (state.os.family == "rhel")


def test_what_is_no_linux_of_ours_has_no_family() -> None:
    assert families.of(OsInfo("plan9", "4")) is None
    assert families.lineage("opensuse-leap", ["suse", "opensuse"]) == "other"
    assert families.names(OsInfo("plan9", "4"), "ndctl") == []


@pytest.mark.parametrize("os", ALL, ids=lambda os: f"{os.id}-{os.version}")
def test_each_release_names_all_that_any_host_needs(os: OsInfo) -> None:
    family = families.of(os)
    assert family is not None
    for kind in ("re6p", "re7p", "bare_metal_pmem", "cxl", "gpu", "cpu"):
        for mode in ("none", "fsdax", "system-ram"):
            desired = Desired(kind=kind, parameter_server=True, pmem_mode=mode)
            for need in packages._needs(desired):
                assert families.names(os, need) or families.lacks(os, need), need
    assert set(family.comes_from) <= set(family.packages)
    for names in family.comes_from.values():
        assert set(names) <= set(family.repositories)
    assert all(release in family.releases for release in [*family.lacks, *family.pythons, *family.daxctl])
    assert families.names(os, "build")
    # Every need without a package is explained, or stops the plan.
    unexplained = set(family.lacks.get(families.release(family, os), [])) - set(packages._WITHOUT)
    version = build.python_version(State(os=os), Desired(kind="cpu"))
    assert not unexplained or tuple(map(int, version.split("."))) < (3, 10)


def test_repositories_of_the_distribution_are_switched_on_by_their_own_name() -> None:
    rocky, rhel = (OsInfo(name, "8.10", "rhel", package_manager="dnf") for name in ("rocky", "rhel"))
    assert repositories.use(rocky, {}, ["crb"]) == repositories.Use(options=["--enablerepo=powertools"])
    assert repositories.use(rhel, {}, ["crb"]).options == [
        "--enablerepo=codeready-builder-for-rhel-8-x86_64-rpms"
    ]
    mirrored = repositories.use(rhel, {"crb": "https://mirror/crb"}, ["crb"])
    assert mirrored.options == ["--enablerepo=oeprov-crb"]
    assert mirrored.text == "[oeprov-crb]\nname=oeprov-crb\nbaseurl=https://mirror/crb\nenabled=0\n"
    # Nothing else is asked where all of the distribution's own are replaced.
    assert repositories.use(rocky, {"archive": "file:///mirror"}, []).options == [
        "--disablerepo=*",
        "--enablerepo=oeprov-archive",
    ]
