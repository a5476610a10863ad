"""EL hosts: real dnf, rpm and rpmdb with packages that stand for EL's (see el_host.py)."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import bare_debian
import pytest
import yaml
from bare_debian import put_wheel
from el_host import FABRICS, KERNEL, REPOSITORY, ElHost
from other_pythons import find_python
from sample_wheel import wheel

from provision.artifacts.bundle import FORMAT, MANIFEST
from provision.cluster import share
from provision.node import family_el7

BIN = Path(sys.executable).parent
ROCKY = (
    'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="8.10"\n'
    'PRETTY_NAME="Rocky Linux 8.10 (Green Obsidian)"\nPLATFORM_ID="platform:el8"\n'
)
CENTOS = (
    'NAME="CentOS Linux"\nID="centos"\nID_LIKE="rhel fedora"\nVERSION_ID="7"\n'
    'PRETTY_NAME="CentOS Linux 7 (Core)"\n'
)
PYTHON_2_7 = find_python("2.7")
PYTHON_3_6 = find_python("3.6")
ARCHIVE = f"file://{REPOSITORY} unsigned"

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(bare_debian.why_not()), reason=bare_debian.why_not() or "never"),
]


@pytest.fixture
def rocky(tmp_path: Path) -> Iterator[ElHost]:
    with ElHost(tmp_path / "host", ROCKY) as made:
        yield made


@pytest.fixture
def centos(tmp_path: Path) -> Iterator[ElHost]:
    with ElHost(tmp_path / "host", CENTOS) as made:
        yield made


def oeprov(
    directory: Path,
    host: ElHost,
    variables: dict[str, Any],
    *argv: str,
    expect: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run `oeprov` from outside the repository on an inventory of the host; gives all that it printed."""
    inventory = {
        "all": {
            "children": {
                "parameter_servers": {"hosts": {"server": None}},
                "workers": {"hosts": {"here": None}},
            },
            "hosts": {
                "server": {"oeprov_kind": "cpu", **host.inventory(), **variables},
                "here": {
                    "oeprov_kind": "local",
                    "ansible_connection": "local",
                    "runtime_extra": "none",
                    "pmem_mode": "none",
                },
            },
        }
    }
    (directory / "inventory.yml").write_text(yaml.safe_dump(inventory))
    done = subprocess.run(
        [str(BIN / "oeprov"), *argv, "-i", "inventory.yml", "--limit", "server"],
        cwd=directory,
        env={**os.environ, "OEPROV_STATE_DIR": str(directory / "state"), "COLUMNS": "250", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def on_node(host: ElHost, code: str, *, check: bool = True) -> str:
    """Run Python on the host with the node package, as `node`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        file.add(share.node_package(), "node", filter=lambda item: None if "cache" in item.name else item)
    argv = ["ssh", *host.ssh_options(), "-i", str(host.key), "-p", str(host.port), "root@127.0.0.1"]
    subprocess.run(
        [*argv, "mkdir -p /root/code && tar -xf - -C /root/code"], input=packed.getvalue(), check=True
    )
    host.put("/root/code/run.py", code)
    return host.run("cd /root/code && python3 run.py 2>&1", check=check)


def test_a_rocky_host_becomes_a_parameter_server(rocky: ElHost, tmp_path: Path) -> None:
    # Nothing is enabled on the host: all comes from the repository that the inventory names.
    variables = {"runtime_repositories": {"archive": ARCHIVE}}
    put_wheel(tmp_path / "state", "rocky-8-x86_64-py3.11")
    planned = oeprov(tmp_path, rocky, variables, "plan", "--commands", expect=2)
    assert "install libpmem, libstdc++, python3.11, python3.11-numpy" in planned
    assert "'--disablerepo=*' --enablerepo=oeprov-archive" in planned
    assert rocky.run("rpm -qa") == ""
    assert "1 host converged" in oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0)
    installed = rocky.run("rpm -qa").splitlines()
    assert "python3.11-numpy-1.23.5-1.el8.noarch" in installed
    assert rocky.run("dnf repolist -q") == ""  # the repository stays switched off for everybody else
    assert "nothing to do" in oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0)

    # One package is taken away behind our back.
    rocky.run("rpm -e --nodeps libpmem")
    planned = oeprov(tmp_path, rocky, variables, "plan", expect=2)
    assert "install libpmem " in planned

    # What cannot be installed is said by name, and the rest of the plan is not done.
    variables["runtime_packages"] = ["no-such-package"]  # type: ignore[assignment]
    failed = oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=1)
    assert "Unable to find a match: no-such-package" in failed


@pytest.mark.skipif(
    PYTHON_3_6 is None or PYTHON_3_6.parents[1] == Path("/usr"),
    reason="no Python 3.6 here in a folder of its own",
)
def test_a_host_with_python_3_6_is_set_up_by_ansible_core_2_16(rocky: ElHost, tmp_path: Path) -> None:
    assert PYTHON_3_6
    rocky.bind(PYTHON_3_6.parents[1])
    rocky.run(f"ln -sf {PYTHON_3_6} /usr/bin/python3.6")  # EL 8's, for Ansible; 3.11 is the runtime's
    variables = {
        "ansible_python_interpreter": "/usr/bin/python3.6",
        "runtime_repositories": {"archive": ARCHIVE},
    }
    put_wheel(tmp_path / "state", "rocky-8-x86_64-py3.11")
    newer = oeprov(tmp_path, rocky, variables, "plan", expect=1)
    assert "/usr/bin/python3.6 there is 3.6." in newer
    assert "pip install 'ansible-core<2.17'" in newer
    core = tmp_path / "core"
    pip = [str(BIN / "python"), "-m", "pip", "install", "-q", "--no-deps", "--target", str(core)]
    subprocess.run([*pip, "ansible-core==2.16.*"], check=True)
    old = {"PYTHONPATH": str(core)}
    shown = oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0, environment=old)
    assert "1 host converged" in shown
    assert "python3.11-numpy-1.23.5-1.el8.noarch" in rocky.run("rpm -qa").splitlines()
    again = oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0, environment=old)
    assert "nothing to do" in again


needs_3_6 = pytest.mark.skipif(
    PYTHON_3_6 is None or PYTHON_3_6.parents[1] == Path("/usr"),
    reason="no Python 3.6 here in a folder of its own",
)


@needs_3_6
def test_a_stock_rocky_8_is_set_up_in_one_command(rocky: ElHost, tmp_path: Path) -> None:
    assert PYTHON_3_6
    rocky.stock_python(PYTHON_3_6, PYTHON_3_6)
    variables = {"runtime_repositories": {"archive": ARCHIVE}}
    put_wheel(tmp_path / "state", "rocky-8-x86_64-py3.11")
    assert "3.6." in rocky.run("python3 --version")
    planned = oeprov(tmp_path, rocky, variables, "plan", expect=2)
    offline = oeprov(tmp_path, rocky, variables, "plan", "--offline", "--system", "rocky-8", expect=2)
    for shown in (planned, offline):
        assert "install python3.11 for Ansible; python3 stays 3.6." in shown
    assert rocky.run("rpm -qa") == ""
    shown = oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0)
    assert "1 host converged" in shown
    assert shown.index("✓ server: install python3.11 for Ansible") < shown.index("✓ server: install libpmem")
    assert "3.6." in rocky.run("python3 --version")
    assert "3.11." in rocky.run("oeprov-python3 --version")
    assert "nothing to do" in oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0)
    steps = [
        (line["event"], line["step"])
        for line in map(json.loads, (tmp_path / "state/journal.jsonl").read_text().splitlines())
        if line["event"] in ("begin", "end")
    ]
    assert steps[:2] == [("begin", "python"), ("end", "python")]

    # It was removed behind our back.
    rocky.run("rpm -e --nodeps python3.11; rm /usr/bin/python3.11")
    assert "install python3.11 for Ansible" in oeprov(tmp_path, rocky, variables, "plan", expect=2)
    oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=0)

    removed = oeprov(tmp_path, rocky, variables, "destroy", "--yes", expect=0)
    assert "✓ server: remove /usr/local/bin/oeprov-python3" in removed
    assert "gone" in rocky.run("test -e /usr/local/bin/oeprov-python3 || echo gone")
    assert "nothing to do" in oeprov(tmp_path, rocky, variables, "destroy", "--yes", expect=0)


@needs_3_6
@pytest.mark.skipif(PYTHON_2_7 is None, reason="no Python 2.7 here")
def test_a_stock_centos_7_with_python_2_only(centos: ElHost, tmp_path: Path) -> None:
    """Its archives are laid out as the real ones: base packages, and software collections."""
    assert PYTHON_3_6
    centos.stock_python(PYTHON_2_7, PYTHON_3_6)
    os_, scl = "/srv/centos/7.9.2009/os/x86_64", "/srv/centos/7.9.2009/sclo/x86_64/rh"
    centos.run(
        f"mkdir -p {os_}/Packages {scl}/Packages && cp -r {REPOSITORY}/noarch/* {os_}/Packages && "
        f"mv {os_}/Packages/rh-python38* {scl}/Packages && createrepo_c -q {os_} && createrepo_c -q {scl}"
    )
    (gone, *_) = family_el7.FAMILY.gone_mirrors
    centos.put(
        "/etc/yum.repos.d/CentOS-Base.repo",
        f"[base]\nname=base\nmirrorlist=http://{gone}/?release=$releasever\ngpgcheck=1\n",
    )
    assert "2.7." in centos.run("python --version 2>&1; command -v python3 || true")
    assert "CentOS 7's own mirrors are gone: packages come from" in oeprov(
        tmp_path, centos, {}, "plan", expect=2
    )

    right, wrong = centos.sign(os_, "Right"), centos.make_key("Wrong")
    collections = centos.sign(scl, "Collections")
    # The site's own newer Python, for the runtime.
    wheel(tmp_path / "wheels", "numpy", "1.26.4", 1)
    centos.bind(Path(sys.base_prefix), tmp_path / "wheels")
    minor = f"3.{sys.version_info.minor}"
    variables = {
        "runtime_python": f"{sys.base_prefix}/bin/python{minor}",
        "runtime_index": str(tmp_path / "wheels"),
        "kernel_archive_url": f"file://{os_} {wrong}",
        "runtime_repositories": {"scl": f"file://{scl} {collections}"},
    }
    put_wheel(tmp_path / "state", f"centos-7-x86_64-py{minor}")
    failed = oeprov(tmp_path, centos, variables, "bootstrap", "--yes", expect=1)
    assert f"server: repository archive (file://{os_}): python3" in failed
    assert f"is not signed with its key {wrong}: use a mirror of the original packages, or name" in failed
    assert centos.run("rpm -qa | grep -v gpg-pubkey || true") == ""

    variables["kernel_archive_url"] = f"file://{os_} {right}"
    shown = oeprov(tmp_path, centos, variables, "bootstrap", "--yes", expect=0)
    assert "✓ server: install python3 " in shown
    assert "Steps that only became visible now" in shown
    assert "✓ server: install rh-python38 for Ansible; python3 stays 3.6." in shown
    assert "1 host converged" in shown
    assert "rh-python38-2.0-5.el7.noarch" in centos.run("rpm -qa").splitlines()
    assert "nothing to do" in oeprov(tmp_path, centos, variables, "bootstrap", "--yes", expect=0)


def test_a_wrong_signature_of_a_mirror_is_one_sentence(rocky: ElHost, tmp_path: Path) -> None:
    right, wrong = rocky.sign(REPOSITORY, "Right"), rocky.make_key("Wrong")
    put_wheel(tmp_path / "state", "rocky-8-x86_64-py3.11")
    address = f"file://{REPOSITORY}"

    def bootstrap(archive: str, expect: int) -> str:
        variables = {"runtime_repositories": {"archive": archive}}
        return oeprov(tmp_path, rocky, variables, "bootstrap", "--yes", expect=expect)

    failed = bootstrap(f"{address} {wrong}", 1)
    assert f"repository archive ({address}): " in failed
    assert f"is not signed with its key {wrong}: use a mirror of the original packages" in failed
    failed = bootstrap(f"{address} file:///root/none", 1)
    assert f"repository archive ({address}): its key file:///root/none cannot be read: correct" in failed
    failed = bootstrap(address, 1)
    assert (
        f"repository archive ({address}): this host has no key of it: name the key after the mirror's"
        in failed
    )
    assert rocky.run("rpm -qa | grep -v gpg-pubkey || true") == ""
    assert "1 host converged" in bootstrap(f"{address} {right}", 0)


def test_without_a_repository_dnf_says_what_is_missing(rocky: ElHost, tmp_path: Path) -> None:
    put_wheel(tmp_path / "state", "rocky-8-x86_64-py3.11")
    failed = oeprov(tmp_path, rocky, {}, "bootstrap", "--yes", expect=1)
    assert "There are no enabled repositories" in failed
    unsigned = {"runtime_repositories": {"archive": f"file://{REPOSITORY}"}}
    failed = oeprov(tmp_path, rocky, unsigned, "bootstrap", "--yes", expect=1)
    assert "GPG" in failed
    assert rocky.run("rpm -qa") == ""


def test_a_kernel_of_a_mirror_is_installed_and_the_running_one_stays_the_default(rocky: ElHost) -> None:
    release = KERNEL + ".x86_64"
    args = {
        "release": release,
        "source": "elrepo-lt",
        "repositories": {"kernel": ARCHIVE},
        "options": ["CONFIG_DEV_DAX_KMEM"],
        "os": {
            "id": "rocky",
            "version": "8.10",
            "family": "rhel",
            "architecture": "x86_64",
            "package_manager": "dnf",
        },
    }
    rocky.run("mkdir -p /boot/grub2 /boot/loader/entries && echo GRUB_DEFAULT=saved >/etc/default/grub")
    code = (
        "import json\nfrom node import bootloader, kernelinstall\nfrom node.command import System\n"
        f"args = json.loads({json.dumps(json.dumps(args))})\n"
        "loader = bootloader.observe(System())\nassert loader.has_grubby, loader\n"
        "for number in range(2):\n    print(kernelinstall.install_kernel(System(), args))\n"
    )
    first, second = on_node(rocky, code).splitlines()
    running = rocky.run("uname -r").strip()
    assert (
        first == f"Applied(changed=True, message='installed kernel {release}; {running} stays the default')"
    )
    assert second == f"Applied(changed=False, message='kernel {release} is installed')"
    assert rocky.run("cat /boot/default-kernel").strip() == f"/boot/vmlinuz-{running}"
    assert rocky.run("rpm -q kernel-lt").strip() == f"kernel-lt-{KERNEL}.noarch"
    # An option that this kernel was not built with is found after it is installed, before it is booted.
    bad = code.replace("CONFIG_DEV_DAX_KMEM", "CONFIG_X86_PMEM_LEGACY")
    assert "was built without CONFIG_X86_PMEM_LEGACY" in on_node(rocky, bad, check=False)


def test_a_package_whose_script_fails_is_not_taken_for_installed(rocky: ElHost) -> None:
    code = (
        "from node import packages, repositories\nfrom node.command import System\n"
        "from node.state import OsInfo\n"
        "os = OsInfo('rocky', '8.10', 'rhel', package_manager='dnf')\n"
        f"use = repositories.use(os, {{'archive': '{ARCHIVE}'}}, [])\n"
        "print(packages.apply(System(), 'dnf', ['ndctl', 'broken'], use))\n"
    )
    assert "broken" in on_node(rocky, code, check=False)
    assert "not installed" in rocky.run("rpm -q broken || true")


def test_a_locked_dnf_is_waited_for_within_bounds_and_its_holder_named(rocky: ElHost) -> None:
    code = (
        "from node import packages, repositories\nfrom node.command import System\n"
        "from node.state import OsInfo\n"
        "packages.UPDATE_PAUSE = 0.0\n"
        "os = OsInfo('rocky', '8.10', 'rhel', package_manager='dnf')\n"
        f"use = repositories.use(os, {{'archive': '{ARCHIVE}'}}, [])\n"
        "print(packages.apply(System(), 'dnf', ['ndctl'], use))\n"
    )
    lock = "/var/lib/dnf/rpmdb_lock.pid"
    pid = rocky.run(
        f"mkdir -p /var/lib/dnf; sleep 1000 </dev/null >/dev/null 2>&1 & echo $! | tee {lock}"
    ).strip()
    said = on_node(rocky, code, check=False)
    assert f"dnf is locked by process {pid}: wait for it to end, and run this again" in said
    assert "not installed" in rocky.run("rpm -q ndctl || true")
    rocky.run(f"kill {pid}")
    assert "ndctl" in on_node(rocky, code)


def test_centos_7_says_what_it_cannot_do_and_what_would_work(centos: ElHost, tmp_path: Path) -> None:
    # This host's python3 is Debian's, 3.11; CentOS 7's would be refused: cases/os-centos7-server.json.
    variables = {"kernel_archive_url": ARCHIVE}
    put_wheel(tmp_path / "state", "centos-7-x86_64-py3.11")
    shown = oeprov(tmp_path, centos, variables, "plan", "--commands", expect=2)
    assert "yum install -y '--disablerepo=*' --enablerepo=oeprov-archive libpmem libstdc++" in shown
    assert "1 host converged" in oeprov(tmp_path, centos, variables, "bootstrap", "--yes", expect=0)
    assert "libpmem-1.6.1-1.el8.noarch" in centos.run("rpm -qa")


def test_a_host_without_a_network_is_set_up_from_a_bundle_made_on_another(
    rocky: ElHost, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    put_wheel(work / "state", "rocky-8-x86_64-py3.11")
    variables: dict[str, Any] = {"runtime_packages": ["of-a-module"]}
    kernel = {
        "kernel_version": "newest",
        "kernel_source": "elrepo-lt",
        "kernel_repository_url": f"file://{REPOSITORY} unsigned",
    }
    with ElHost(tmp_path / "site", ROCKY) as site:
        base = f"[base]\nname=base\nbaseurl=file://{REPOSITORY}\ngpgcheck=0\n"
        site.put("/etc/yum.repos.d/base.repo", base)
        site.bind(share.root(), Path(sys.base_prefix), work)
        oeprov(work, rocky, {**variables, **kernel}, "inventory", "check", expect=0)
        bundle = f"cd {work} && {BIN}/oeprov bundle all -i inventory.yml --limit server --state-dir state"
        site.run("rpm -e createrepo_c 2>/dev/null; mv /usr/bin/createrepo_c /usr/bin/hidden")
        assert "createrepo_c: dnf install createrepo_c" in site.run(f"{bundle} 2>&1", check=False)
        site.run("mv /usr/bin/hidden /usr/bin/createrepo_c")
        made = site.run(bundle)
        assert "packages/rocky-8-x86_64: " in made
        assert site.run("rpm -qa") == "", "nothing is installed where it is made"
    names = {path.name for path in (work / "all/packages/rocky-8-x86_64").glob("*.rpm")}
    assert f"kernel-lt-{KERNEL}.noarch.rpm" in names
    assert "python3.11-3.11.9-1.el8.noarch.rpm" in names, "python3.11-numpy wants it"

    # What is enabled on the host cannot be reached.
    rocky.put("/etc/yum.repos.d/base.repo", "[base]\nname=base\nbaseurl=http://192.0.2.9/\ngpgcheck=0\n")
    rocky.run(f": >/etc/resolv.conf; rm -r {REPOSITORY}")
    shown = oeprov(work, rocky, variables, "bootstrap", "--bundle", "all", "--yes", expect=0)
    assert "1 host converged" in shown
    installed = rocky.run("rpm -qa").splitlines()
    assert {"libpmem-1.6.1-1.el8.noarch", "of-a-module-1-1.noarch"} <= set(installed)
    again = oeprov(work, rocky, variables, "bootstrap", "--bundle", "all", "--yes", expect=0)
    assert "nothing to do" in again
    there = "/var/lib/oeprov/bundle/packages"
    code = (
        "from node import kernelinstall\nfrom node.command import System\nfrom node.state import OsInfo\n"
        "os = OsInfo('rocky', '8.10', 'rhel', architecture='x86_64', package_manager='dnf')\n"
        f"given = {{'archive': '{there}', 'kernel': '{there}'}}\n"
        "kernelinstall._run_install(System(), os, kernelinstall.Package('', 'elrepo-lt', given))\n"
    )
    on_node(rocky, code)
    assert rocky.run("rpm -q kernel-lt").strip() == f"kernel-lt-{KERNEL}.noarch"


@needs_3_6
@pytest.mark.parametrize("python", [PYTHON_3_6, None], ids=["3.6", "none"])
def test_adopt_installs_a_python_from_a_bundle(rocky: ElHost, tmp_path: Path, python: Path | None) -> None:
    """The host has no repository that it could reach, and Python 3.6 or none."""
    assert PYTHON_3_6
    packages = tmp_path / "all/packages/rocky-8-x86_64"
    shutil.copytree(f"{rocky.directory}/upper{REPOSITORY}", packages)
    sums = {
        path.relative_to(tmp_path / "all").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in packages.rglob("*")
        if path.is_file()
    }
    manifest = tmp_path / "all" / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": sums}))
    rocky.stock_python(python, PYTHON_3_6)
    rocky.run(f": >/etc/resolv.conf; rm -r {REPOSITORY}")
    nothing = "There are no enabled repositories"
    assert nothing in oeprov(tmp_path, rocky, {}, "adopt", "--yes", expect=1)
    shown = oeprov(tmp_path, rocky, {}, "adopt", "--bundle", "all", "--yes", expect=0)
    assert "✓ server: install python3.11 for Ansible" in shown
    assert ("✓ server: install python36 " in shown) == (python is None)
    assert "3.6." in rocky.run("python3 --version")
    assert "3.11." in rocky.run("oeprov-python3 --version")
    assert "nothing to do" in oeprov(tmp_path, rocky, {}, "adopt", "--yes", expect=0)

    other = {key.replace("rocky-8", "rocky-9"): value for key, value in sums.items()}
    packages.rename(packages.with_name("rocky-9-x86_64"))
    manifest.write_text(json.dumps({"format": FORMAT, "files": other}))
    rocky.run("rm /usr/local/bin/oeprov-python3")
    lacks = oeprov(tmp_path, rocky, {}, "adopt", "--bundle", "all", "--yes", expect=1)
    assert "has nothing for rocky-8-x86_64, only for rocky-9-x86_64; nothing was changed" in lacks


def test_the_fabric_manager_follows_the_driver(rocky: ElHost) -> None:
    rocky.put("/usr/bin/systemctl", "#!/bin/sh\nexit 0\n")
    rocky.run("chmod +x /usr/bin/systemctl")
    code = (
        "from node import gpufabric, repositories\nfrom node.command import System\n"
        "from node.state import OsInfo\n"
        "gpufabric._LOADED = '/root/driver'\n"
        "os = OsInfo('rocky', '8.10', 'rhel', package_manager='dnf')\n"
        f"use = repositories.use(os, {{'archive': '{ARCHIVE}'}}, [])._asdict()\n"
        "args = {'manager': 'dnf', 'package': 'nvidia-fabric-manager', 'repositories': use}\n"
        "print(gpufabric.ACTIONS['run_gpu_fabric'](System(), args).message)\n"
    )
    for driver in (FABRICS[1], FABRICS[2], FABRICS[0]):  # the second is a way back
        rocky.put("/root/driver", driver)
        assert f"nvidia-fabricmanager {driver} runs" in on_node(rocky, code)
    rocky.put("/root/driver", "570.1.2")
    assert "update the driver (gpu_driver: newest)" in on_node(rocky, code, check=False)
