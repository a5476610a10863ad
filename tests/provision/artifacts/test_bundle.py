"""Bundles: that what is in one is checked, and what hosts are told to take from it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from provision.artifacts import bundle
from provision.artifacts.bundle import MANIFEST, Bundle
from provision.artifacts.bundle_packages import PackageSet
from provision.cluster import own_sources
from provision.cluster.errors import HostError, OeprovError
from provision.cluster.inventory import Host
from provision.hosts import remote
from provision.inventory.loader import load
from provision.node import kernelinstall, repositories
from provision.node.state import OsInfo, Runtime, State

DEBIAN = OsInfo("debian", "12", "debian", architecture="x86_64", package_manager="apt")
PLACE = "packages/debian-12-x86_64"
INVENTORY = """\
all:
  children:
    parameter_servers: {hosts: {server: }}
    workers: {hosts: {here: }}
  hosts:
    server: {oeprov_kind: cpu, ansible_host: 192.0.2.1, kernel_version: newest}
    here: {oeprov_kind: local, ansible_connection: local, runtime_extra: none, pmem_mode: none}
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Any:
    (tmp_path / "inventory.yml").write_text(INVENTORY)
    return load(tmp_path / "inventory.yml", state_dir=tmp_path / "state")


@pytest.fixture
def made(tmp_path: Path, inventory: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle for Debian 12, without what only apt could bring."""

    def collect(os: OsInfo, parts: list[PackageSet], into: Path) -> int:
        into.mkdir(parents=True)
        names = [name for part in parts for name in part.names]
        for name in names:
            (into / f"{name}.deb").write_text(name)
        (into / "Packages").write_text("index\n")
        (into / "repodata").mkdir()
        (into / "repodata/repomd.xml").write_text("index\n")
        return len(names)

    (tmp_path / "oeprov.whl").write_text("wheel")
    monkeypatch.setattr(bundle, "collect", collect)
    monkeypatch.setattr(bundle.wheel, "provide", lambda build, state_dir, elsewhere: tmp_path / "oeprov.whl")
    lines = bundle.make(inventory, tmp_path / "all", ["debian-12"], tmp_path / "state")
    assert lines[-1] == "wheels/debian-12-x86_64-py3.11: oeprov.whl"
    return tmp_path / "all"


def test_it_has_what_the_hosts_need(made: Path) -> None:
    names = {path.stem for path in (made / "packages" / "debian-12-x86_64").glob("*.deb")}
    assert {"libpmem1", "python3-venv", "linux-image-amd64"} <= names
    files = Bundle(made).files
    there = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert set(files) == there - {MANIFEST}
    assert Bundle(made).lacks(DEBIAN) == ""
    assert "has nothing for debian-13-x86_64, only for debian-12-x86_64" in Bundle(made).lacks(
        DEBIAN._replace(version="13")
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / PLACE / "Packages").write_text("other\n"), "is not what was bundled"),
        (lambda root: (root / PLACE / "libpmem1.deb").unlink(), "libpmem1.deb is missing"),
        (lambda root: (root / PLACE / "evil.deb").write_text("x"), "evil.deb is not what was"),
        (lambda root: (root / MANIFEST).write_text("{"), "is no bundle"),
        (lambda root: (root / MANIFEST).write_text('{"format": 9, "files": {}}'), "is of format 9"),
    ],
)
def test_what_is_not_as_it_was_made_is_refused(made: Path, spoil: Any, said: str) -> None:
    spoil(made)
    with pytest.raises(OeprovError, match=said):
        Bundle(made)


def test_nothing_is_left_of_one_that_could_not_be_made(
    tmp_path: Path, inventory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(OeprovError, match="exists and is not empty"):
        bundle.make(inventory, tmp_path / "full", [], tmp_path / "state")
    with pytest.raises(OeprovError, match=r"all\.making: Not a directory; name another directory"):
        bundle.make(inventory, tmp_path / "full" / "file" / "all", [], tmp_path / "state")
    for system, said in (
        ("plan9-4", "expected ID-RELEASE"),
        ("debian-99", "expected ID-RELEASE"),
        ("nobody=debian-12", "there is no host nobody"),
        ("rocky-9", "repositories have nothing for rocky-9-x86_64: .* name a mirror of its packages"),
        ("ubuntu-24.04", "its apt has no packages of ubuntu-24.04-x86_64"),
    ):
        with pytest.raises(OeprovError, match=said):
            bundle.make(inventory, tmp_path / "all", [system], tmp_path / "state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "inventory.yml"]


def test_hosts_take_all_from_it_and_are_sent_what_they_lack(
    made: Path, inventory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Bundle(made)
    used = opened.used_by(inventory, tmp_path / "state")
    desired = used.hosts["server"].desired()
    assert desired.runtime_repositories == {"archive": "/var/lib/oeprov/bundle/packages"}
    assert desired.runtime_index == "/var/lib/oeprov/bundle/pip"
    assert used.hosts["here"].desired().runtime_repositories["archive"].startswith(f"{made}/packages/")
    key = "debian-12-x86_64-py3.11"
    assert (
        tmp_path / "state" / "wheels" / key / own_sources.digest()[:16] / "oeprov.whl"
    ).read_text() == "wheel"

    there = tmp_path / "host"  # stands for the host's directory
    lines: list[str] = []

    def run(host: Host, command: str, given: bytes, *_: int) -> tuple[int, str, str]:
        lines.append(command)
        line = command.replace(bundle.THERE, str(there))
        done = subprocess.run(["sh", "-c", line], input=given, capture_output=True)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    monkeypatch.setattr(remote, "run", run)
    state = State(os=DEBIAN, runtime=Runtime(base="3.11.2"))
    (there / "packages/repodata").mkdir(parents=True)
    (there / "packages" / "of-another-bundle.deb").write_text("old")
    (there / "packages/repodata/of-another-bundle.xml").write_text("old")
    monkeypatch.setattr(bundle, "_BATCH", 1)  # several of them
    opened.send(used.hosts["server"], state)
    assert len([line for line in lines if "tar -xf" in line]) > 1
    sent = {path.name for path in (there / "packages").iterdir()}
    assert sent == {path.name for path in (made / "packages" / "debian-12-x86_64").iterdir()}
    assert [path.name for path in (there / "packages/repodata").iterdir()] == ["repomd.xml"]
    count = len(lines)
    opened.send(used.hosts["server"], state)
    assert not [line for line in lines[count:] if "tar -xf" in line]
    (there / "packages" / "Packages").write_text("cut off")
    opened.send(used.hosts["server"], state)
    assert len([line for line in lines[count:] if "tar -xf" in line]) == 1
    assert (there / "packages" / "Packages").read_text() == "index\n"
    shutil.rmtree(there)
    there.write_text("a file")
    with pytest.raises(HostError, match="the bundle could not be sent"):
        opened.send(used.hosts["server"], state)


def test_of_other_flavors_it_has_the_systems_packages(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = INVENTORY.replace(
        "all:\n", "all:\n  vars: {runtime_flavor: openembedding, runtime_index: /srv/pip}\n"
    )
    (tmp_path / "theirs.yml").write_text(text)
    theirs = load(tmp_path / "theirs.yml", state_dir=tmp_path / "state")
    lines = bundle.make(theirs, tmp_path / "others", ["debian-12"], tmp_path / "state")
    assert "not included, since runtime_flavor openembedding compiles on the hosts" in lines[-1]
    assert "runtime_index" in lines[-1]
    names = {path.stem for path in (tmp_path / "others" / PLACE).glob("*.deb")}
    assert {"build-essential", "cmake", "git", "linux-image-amd64"} <= names
    assert not list((tmp_path / "others").rglob("*.whl"))
    used = Bundle(tmp_path / "others").used_by(theirs, tmp_path / "state").hosts["server"]
    assert used.runtime.repositories == {"archive": f"{bundle.THERE}/packages"}
    assert used.runtime.index == "/srv/pip"


def test_the_manifest_is_plain(made: Path) -> None:
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["format"] == 1
    assert all(len(sum_) == 64 for sum_ in manifest["files"].values())


def test_wheels_are_for_the_hosts_c_library() -> None:
    el8 = OsInfo("rocky", "8.10", "rhel", architecture="x86_64", package_manager="dnf")
    names = bundle._platforms(el8)
    assert names[0] == "manylinux_2_28_x86_64"
    assert names[-3:] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    assert bundle._platforms(el8._replace(id="centos", version="7"))[0] == "manylinux_2_17_x86_64"


def test_a_driver_wants_what_goes_with_its_kernel(tmp_path: Path) -> None:
    text = INVENTORY.replace("oeprov_kind: cpu", "oeprov_kind: gpu, gpu_driver: '580'").replace(
        ", kernel_version: newest", ""
    )
    (tmp_path / "inventory.yml").write_text(text)
    found = load(tmp_path / "inventory.yml", state_dir=tmp_path / "state")
    with pytest.raises(OeprovError, match=r"set kernel_version, or name them in runtime_packages"):
        bundle.make(found, tmp_path / "all", ["rocky-8"], tmp_path / "state")


def test_elrepos_kernels_come_from_the_bundle(made: Path, tmp_path: Path) -> None:
    text = INVENTORY.replace("kernel_version: newest", "kernel_version: newest, kernel_source: elrepo-lt")
    (tmp_path / "inventory.yml").write_text(text)
    found = load(tmp_path / "inventory.yml", state_dir=tmp_path / "state")
    rocky = OsInfo("rocky", "8.10", "rhel", architecture="x86_64", package_manager="dnf")
    [_, kernel] = bundle._parts(found.hosts["server"], rocky)
    assert kernel.names == ("kernel-lt",)
    assert dict(kernel.given)["kernel"].startswith("https://elrepo.org/linux/kernel/el8/")
    used = Bundle(made).used_by(found, tmp_path / "state").hosts["server"].desired()
    assert used.kernel_repository_url == "/var/lib/oeprov/bundle/packages"
    given = kernelinstall.given(used.kernel_repository_url, "", used.runtime_repositories)
    commands = kernelinstall.install_commands(rocky, kernelinstall.Package("", "elrepo-lt", given))
    commands += repositories.use(rocky, used.runtime_repositories, ["epel", "nvidia"]).commands
    assert not any("http" in word for argv in commands for word in argv), "there is no network"
