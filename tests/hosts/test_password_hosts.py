"""Hosts that forbid keys for good (``oeprov_connection: password``): all commands, by the password."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret
from bare_debian import put_wheel
from converged import VENV, layer
from ssh_hosts import SshHost, SshHosts, why_not
from test_training_hosts import INVENTORY, Cluster, runtime_layer, with_systemd
from test_training_supervisor import until

from provision.hosts import passwords
from provision.hosts.passwords import Passwords
from provision.hosts.survey import ClusterSurvey
from provision.jobs import launching
from provision.node.command import System
from provision.node.observe import observe_os

WHY_NOT = why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
SECRET = "no key opens this door"
SSHD = "PasswordAuthentication yes\nPubkeyAuthentication no\nPermitRootLogin yes\nLogLevel VERBOSE\n"


class Site:
    """Hosts that take a password only, and an inventory for them."""

    def __init__(self, directory: Path, hosts: SshHosts) -> None:
        self.directory, self.hosts = directory, hosts
        self.path = directory / "inventory.yml"
        self.known_hosts = directory / "known hosts"
        self.key = directory / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        for host in hosts:
            host.enter("sh", "-c", f"echo 'root:{SECRET}' | chpasswd")
        self.write()

    def write(self, variables: dict[str, Any] | None = None, **own: dict[str, Any]) -> None:
        """The inventory; ``own``: variables of single hosts."""
        options = f"-o IdentitiesOnly=yes -o UserKnownHostsFile='\"{self.known_hosts}\"'"
        common = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": options,
            "oeprov_kind": "cpu",
            "oeprov_connection": "password",
            "runtime_extra": "none",
        }
        entries = {host.name: {"ansible_host": host.address, **own.get(host.name, {})} for host in self.hosts}
        names = dict.fromkeys(entries, None)
        children = {"parameter_servers": {"hosts": names}, "workers": {"hosts": names}}
        content = {"vars": {**common, **(variables or {})}, "hosts": entries, "children": children}
        self.path.write_text(json.dumps({"all": content}))

    def oeprov(self, *words: str, expect: int = 0, **environment: str) -> str:
        """Output of a command; the password stands in no file beside the inventory."""
        said = oeprov(self.directory, *words, expect=expect, **environment)
        argv = ["grep", "-rl", SECRET, str(self.directory)]
        found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        assert found.strip() in ("", str(self.path))
        return said

    def logins(self, host: SshHost, how: str = "Accepted password") -> int:
        return (host.directory / "sshd.log").read_text().count(how)


def oeprov(directory: Path, *words: str, expect: int = 0, **environment: str) -> str:
    """Output of a command, which must end with that status and show no password."""
    clean = {key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}
    done = subprocess.run(
        [sys.executable, "-m", "provision.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env={**clean, "COLUMNS": "300", **environment},
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.returncode == expect, said
    assert "Traceback" not in said
    assert SECRET not in said
    return said


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    files = with_systemd(layer(tmp_path / "layer"))
    files.chmod(0o755)
    with SshHosts(tmp_path / "hosts", getattr(request, "param", 1), layer=files, sshd=SSHD) as hosts:
        yield Site(tmp_path, hosts)


def test_changes_of_a_host_that_takes_no_keys(site: Site) -> None:
    host = site.hosts[0]
    site.write({"oeprov_connection": "key"})
    refused = site.oeprov("adopt", "--accept-new", "--yes", expect=1, OEPROV_PASSWORD=SECRET)
    assert "it takes no keys: set oeprov_connection: password" in refused
    site.write()
    unknown = site.oeprov("plan", expect=1)
    assert "no password of root is known for oeprov_connection: password: set OEPROV_PASSWORD" in unknown
    known = {"OEPROV_PASSWORD": SECRET}
    adopted = site.oeprov("adopt", "--accept-new", "--yes", **known)
    assert "every command logs in with the password, which is slower" in adopted
    assert "with the key" not in adopted
    assert "nothing to do" in site.oeprov("adopt", "--yes", **known)
    assert "nothing to do" in site.oeprov("plan", **known)
    assert "nothing wrong" in site.oeprov("doctor", **known)
    assert f"remove {VENV}" in site.oeprov("destroy", "--yes", **known)
    assert not host.enter("sh", "-c", f"ls -d {VENV} 2>/dev/null || :")

    version = host.enter("python3", "-c", "import sys; print('py%d.%d' % sys.version_info[:2])").strip()
    system = observe_os(System())
    put_wheel(site.directory / ".oeprov", f"{system.id}-{system.version}-{system.architecture}-{version}")
    done = site.oeprov("bootstrap", "--yes", **known)  # copies a file to the host, too
    assert f"install oeprov in {VENV}" in done
    assert "1 host converged" in done
    assert site.logins(host, "Failed") == 0
    assert site.logins(host, "Accepted publickey") == 0


@pytest.mark.parametrize("site", [3], indirect=True)
def test_a_wrong_password_is_tried_on_one_host_of_a_fleet(site: Site) -> None:
    site.known_hosts.write_text(site.hosts.known_hosts.read_text())
    said = site.oeprov("plan", expect=1, OEPROV_PASSWORD="not this one")
    assert sum(site.logins(host, "Failed password") for host in site.hosts) == 1
    assert said.count("refused the password of root: it is wrong") == 1
    assert "(2 hosts): was not asked: " in said
    first, second, third = site.hosts
    site.write({"ansible_password": SECRET}, **{second.name: {"ansible_password": "wrong there"}})
    said = site.oeprov("plan", expect=1)
    assert f"{second.name}: {second.address} port 22 refused the password of root: it is wrong" in said
    assert "was not asked" not in said
    assert site.logins(first) + site.logins(third) == 3, "one login more shows that the password is right"


@pytest.mark.slow
def test_sudo_is_set_up_by_the_password_that_stays(site: Site) -> None:
    script = (
        f"useradd -m -s /bin/sh deploy && echo 'deploy:{SECRET}' | chpasswd; rm -f /etc/sudoers.d/*;"
        "printf '%s\\n' 'deploy ALL=(ALL) ALL' '@includedir /etc/sudoers.d' >/etc/sudoers"
    )
    site.hosts[0].enter("sh", "-c", script)
    site.known_hosts.write_text(site.hosts.known_hosts.read_text())
    site.write({"ansible_user": "deploy", "ansible_become": True, "ansible_password": SECRET})
    asks = site.oeprov("plan", expect=1)
    assert "sudo refused (sudo: a password is required); it must work without a password" in asks
    assert f"`oeprov adopt -i INVENTORY --limit {site.hosts[0].name}` sets that up" in asks
    assert "deploy ALL=(root) NOPASSWD: ALL" in site.oeprov("adopt", "--yes")
    assert "nothing to do" in site.oeprov("adopt", "--yes")
    assert "nothing to do" in site.oeprov("plan")


JOB = "training_server_wait: 0\n    oeprov_connection: password\n    ansible_password: !vault |\n"


@pytest.mark.slow
def test_a_job_on_hosts_that_take_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its password is vaulted; the supervisor in the background has it from the command that starts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OEPROV_PASSWORD", raising=False)
    monkeypatch.setattr(passwords, "SHARED", Passwords())
    vault = VaultLib([("default", VaultSecret(b"open sesame"))])
    vaulted = textwrap.indent(vault.encrypt(SECRET).decode(), " " * 6)
    (tmp_path / "pass").write_text("open sesame\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(tmp_path / "pass"))
    files = with_systemd(runtime_layer(tmp_path / "layer"))
    with SshHosts(tmp_path / "hosts", 2, layer=files, sshd=SSHD) as hosts:
        for host in hosts:
            host.enter("sh", "-c", f"echo 'root:{SECRET}' | chpasswd")
        one, two = hosts
        cluster = Cluster(hosts, tmp_path)
        cluster.text = INVENTORY.replace("training_server_wait: 0\n", JOB + vaulted)
        cluster.servers = [one]
        cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
        monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey(states={}))
        assert cluster.launch(detach=True) == 0
        job = cluster.job()
        assert SECRET not in job.job_file.read_text()
        until(job.metrics_file)
        state = ("--state-dir", str(cluster.state_dir))
        assert "worker-0" in oeprov(tmp_path, "status", job.id, *state)
        assert "server 0 listens" in oeprov(tmp_path, "logs", job.id, *state)
        assert f"{two.name}: stopped worker-0" in oeprov(tmp_path, "stop", job.id, *state)
        assert "oeprov" not in one.enter("ls", "/etc/systemd/system")
        monkeypatch.delenv("ANSIBLE_VAULT_PASSWORD_FILE")
        locked = oeprov(tmp_path, "fetch", job.id, *state, expect=1)
        assert "is vaulted, and no password is known: name a file in ANSIBLE_VAULT_PASSWORD_FILE" in locked
        for host in hosts:
            log = (host.directory / "sshd.log").read_text()
            assert "Failed" not in log
            assert "Accepted publickey" not in log
