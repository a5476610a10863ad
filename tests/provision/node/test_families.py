"""Which family a system is of, from the os-release of each, and that the families' tables are whole."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.cluster import systems
from provision.cluster.errors import OeprovError
from provision.converge import assumed_state
from provision.node import (
    build,
    families,
    family,
    family_el8,
    gpu,
    observe,
    openembedding,
    packages,
    repositories,
    runtime,
)
from provision.node.command import System
from provision.node.plan import make_plan
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
    'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID="21"': ("Ubuntu", "python3", "linuxmint-21-"),
}
ALL = [
    OsInfo(name, release, family.lineage, "", "x86_64", family.package_manager)
    for family in families.known()
    for name in family.ids
    for release in family.releases
]


@pytest.mark.parametrize("text", SYSTEMS, ids=lambda text: re.sub(r"\W+", "-", text)[:40])
def test_a_system_tells_its_family(text: str, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(text + "\n")
    os = observe.observe_os(System(str(tmp_path)))
    name, python, key = SYSTEMS[text]
    family = families.find(os)
    assert family is not None
    assert family.name == name
    assert build.python_of(os, Desired()) == python
    assert build.wheel_key(os, "3.11.2").startswith(key)
    assert families.is_known(os) == (os.id not in ("ol", "linuxmint"))


# ID, VERSION_ID, ID_LIKE as these have them -> what they are treated as; empty: refused.
DERIVATIVES = {
    ("alinux", "2.1903", "rhel fedora centos anolis"): "Alibaba Cloud Linux 2",
    ("alinux", "4", "rhel fedora centos anolis"): "",
    ("alinux", "3", "rhel fedora centos anolis"): "Alibaba Cloud Linux 3",
    ("anolis", "8.8", "rhel fedora centos"): "EL 8",
    ("anolis", "23", "rhel fedora centos"): "",
    ("openEuler", "22.03", ""): "",
    ("ol", "7.9", "fedora"): "CentOS 7",
    ("ol", "8.10", "fedora"): "EL 8",
    ("ol", "9.4", "fedora"): "EL 9",
    ("ol", "10.0", "fedora"): "",
    ("rocky", "8.10", "rhel centos fedora"): "EL 8",
    ("rocky", "9.4", "rhel centos fedora"): "EL 9",
    ("rocky", "10.0", "rhel centos fedora"): "",
    ("almalinux", "8.10", "rhel centos fedora"): "EL 8",
    ("almalinux", "9.4", "rhel centos fedora"): "EL 9",
    ("almalinux", "10.0", "rhel centos fedora"): "",
    ("centos", "6", "rhel fedora"): "",
    ("centos", "8", "rhel fedora"): "EL 8",
    ("centos", "9", "rhel fedora"): "EL 9",
    ("centos", "10", "rhel fedora"): "",
    ("amzn", "2", "centos rhel fedora"): "",
    ("amzn", "2023", "fedora"): "",
    ("fedora", "42", ""): "",
    ("sles", "15.6", "suse"): "",
    ("opensuse-leap", "15.6", "suse opensuse"): "",
    ("debian", "10", ""): "",
    ("debian", "13", ""): "Debian 13",
    ("debian", "14", ""): "Debian 13, the newest that is known",
    ("debian", "", ""): "Debian 13, the newest that is known",  # testing has no number
    ("ubuntu", "18.04", "debian"): "",
    ("ubuntu", "25.10", "debian"): "Ubuntu 24.04, the nearest older that is known",
    ("ubuntu", "26.04", "debian"): "Ubuntu 26.04",
    ("ubuntu", "27.04", "debian"): "Ubuntu 26.04, the newest that is known",
    ("linuxmint", "21.3", "ubuntu debian"): "Ubuntu 22.04",
    ("linuxmint", "22", "ubuntu debian"): "Ubuntu 24.04",
    ("linuxmint", "23", "ubuntu debian"): "Ubuntu 26.04",
    ("linuxmint", "24", "ubuntu debian"): "Ubuntu 26.04, the newest that is known",
    ("linuxmint", "6", "debian"): "Debian 12",
    ("pop", "22.04", "ubuntu debian"): "Ubuntu 22.04",
    ("neon", "22.04", "ubuntu debian"): "Ubuntu 22.04",
    ("neon", "24.04", "ubuntu debian"): "Ubuntu 24.04",
    ("raspbian", "12", "debian"): "Debian 12",
    ("kali", "2025.3", "debian"): "Debian 13, the newest that is known",
}


def test_a_refused_system_is_called_by_its_own_name() -> None:
    desired = Desired(kind="cpu", parameter_server=True)
    for id_, version, name in (
        ("rocky", "10.0", "Rocky Linux 10.0 (Red Quartz)"),
        ("amzn", "2023", "Amazon Linux 2023.6.20241212"),
        ("openEuler", "24.03", "openEuler 24.03 (LTS-SP1)"),
        ("sles", "15.6", "SUSE Linux Enterprise Server 15 SP6"),
    ):
        (line,) = packages.problems(State(os=OsInfo(id_, version, "rhel", name, is_root=True)), desired)
        assert line.startswith(
            f"{name}: packages are known for Alibaba Cloud Linux 2, Alibaba Cloud Linux 3, "
        )


def derivative(root: Path, system: tuple[str, str, str]) -> OsInfo:
    name, version, like = system
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/os-release").write_text(f'ID="{name}"\nVERSION_ID="{version}"\nID_LIKE="{like}"\n')
    return observe.observe_os(System(str(root)))


@pytest.mark.parametrize("system", DERIVATIVES, ids=lambda system: "-".join(system[:2]))
def test_a_derivative_is_treated_as_its_parent_distribution(
    system: tuple[str, str, str], tmp_path: Path
) -> None:
    os = derivative(tmp_path, system)
    expected = DERIVATIVES[system]
    assert families.treated_as(os) == expected
    desired = Desired(kind="cpu", parameter_server=True)
    state = State(os=os._replace(package_manager="apt", is_root=True))
    (line,) = packages.problems(state, desired) or [""]
    assert ("packages are known for" in line) == (not expected)
    if not families.is_known(os):
        said = " ".join(packages.notes(state, desired))
        assert (f"it is treated as {expected}" in said) == bool(expected)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """Families that a test replaces are not remembered from another one, nor for it."""
    families._treated.cache_clear()
    yield
    families._treated.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_the_order_of_the_families_means_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = families.known()
    systems_ = [derivative(tmp_path, system) for system in [*DERIVATIVES, ("new", "10", "rhel")]]
    before = [families.treated_as(os) for os in systems_]
    another = found[0]._replace(name="EL 11", ids=["rhel"], releases=["11"])
    for order in (found[::-1], [*found, another], [another, *found]):
        monkeypatch.setattr(families, "known", lambda order=order: order)
        families._treated.cache_clear()
        assert [families.treated_as(os) for os in systems_] == before


def test_tables_of_what_a_derivative_is_made_from_are_used() -> None:
    mint = OsInfo("linuxmint", "21.3", "debian", architecture="x86_64", package_manager="apt")
    assert families.lacks(mint, "cxl")
    assert build.python_version(State(os=mint), Desired()) == "3.10"
    assert build.wheel_key(mint, "3.10.12") == "linuxmint-21.3-x86_64-py3.10"
    assert families.daxctl_version(OsInfo("ol", "7.9", "rhel")) == 65


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("debian-12-foo", "found architecture 'foo'; allowed: x86_64, aarch64"),
        ("debian-12-", "found architecture ''; allowed: x86_64, aarch64"),
        ("debian-9", "known: alinux-2, alinux-3, almalinux-8, almalinux-9, centos-7"),
        ("ubunto-22.04", "did you mean ubuntu-22.04?"),
        ("rocky-10", "did you mean rocky-"),
        ("opensuse-leap-15.6", "expected ID-RELEASE"),
        ("linuxmint-22", "expected ID-RELEASE"),
        ("debian", "expected ID-RELEASE"),
        ("", "expected ID-RELEASE"),
    ],
)
def test_systems_that_cannot_be_named(text: str, piece: str) -> None:
    with pytest.raises(OeprovError) as caught:
        systems.parse(text)
    assert str(caught.value).startswith(f"--system {text!r}: ")
    assert piece in str(caught.value)


@pytest.mark.usefixtures("_forgotten")
def test_names_of_systems_are_taken_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert systems.parse("Debian-12") == systems.parse("debian-12-x86_64")
    assert systems.parse("ROCKY-8.10-aarch64").architecture == "aarch64"
    euler = family_el8.FAMILY._replace(
        name="openEuler", ids=["openEuler"], releases=["22.03"], by_major=False
    )
    monkeypatch.setattr(families, "known", lambda: [euler])
    assert systems.parse("openeuler-22.03") == systems.parse("openEuler-22.03")
    assert systems.parse("openEuler-22.03").id == "openEuler"


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
        state = assumed_state.state(Desired(kind=kind, parameter_server=True, runtime_venv="/v"), os)
        assert (state.os.id, state.os.version) == (os.id, os.version)
        assert state.kernel.running
        assert state.bootloader.has_grubby == (state.os.package_manager != "apt")
        assert state.runtime.venv == "/v"
        assert make_plan(state, Desired(kind=kind, runtime_venv="/v")).steps


def test_an_unknown_system_has_no_family() -> None:
    assert families.find(OsInfo("plan9", "4")) is None
    assert families.lineage("opensuse-leap", ["suse", "opensuse"]) == "other"
    assert families.names(OsInfo("plan9", "4"), "ndctl") == []


@pytest.mark.parametrize("os", ALL, ids=lambda os: f"{os.id}-{os.version}")
def test_each_release_names_all_that_any_host_needs(os: OsInfo) -> None:
    family = families.find(os)
    assert family is not None
    for kind in ("re6p", "re7p", "bare_metal_pmem", "cxl", "gpu", "cpu"):
        for mode in ("none", "fsdax", "system-ram"):
            desired = Desired(kind=kind, parameter_server=True, pmem_mode=mode)
            for need in packages._needs(desired):
                assert families.names(os, need) or families.lacks(os, need), need
    assert set(family.comes_from) <= set(family.packages)
    for names in family.comes_from.values():
        assert set(names) <= set(family.repositories)
    for table in (family.fresh, family.pythons, family.glibc):
        assert set(table) == set(family.releases)
    assert all(release in family.releases for release in [*family.lacks, *family.daxctl])
    assert gpu.kernel_packages(os)
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


def test_kernel_options_that_platforms_ask_for_are_known_of_fresh_systems() -> None:
    """Or `plan --offline` would say of a kernel that has one that it was built without it."""
    directory = Path(families.__file__).parent
    asked = {
        name
        for path in directory.glob("platform_*.py")
        for name in re.findall(r'KernelOption\("(\w+)"', path.read_text())
    }
    assert len(asked) > 5
    assert asked <= set(family.CXL_OPTIONS)
