"""``oeprov adopt`` on real hosts whose sshd takes passwords: keys, sudo, su, and how it fails."""

from __future__ import annotations

import json
import os
import platform
import pty
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret
from ssh_hosts import SshHost, SshHosts, why_not

from provision.hosts.journal import cluster_lock

WHY_NOT = why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
SECRET, OTHER = "first-of-all-secrets", "root-has-another"
SSHD = "PasswordAuthentication yes\nPermitRootLogin yes\nAuthorizedKeysFile .ssh/authorized_keys\n"
# A user with sudo, one without, and root; sudo's own configuration is not this machine's.
_USERS = f"""\
printf 'root:{OTHER}\\n' | chpasswd
for name in deploy plain; do useradd -m -s /bin/sh $name && echo "$name:{SECRET}" | chpasswd; done
printf '%s\\n' 'root ALL=(ALL:ALL) ALL' 'deploy ALL=(ALL:ALL) ALL' '@includedir /etc/sudoers.d' >/etc/sudoers
rm -f /etc/sudoers.d/*
"""


class Site:
    """Hosts, and an inventory and environment for them."""

    def __init__(self, directory: Path, hosts: SshHosts) -> None:
        self.directory, self.hosts = directory, hosts
        self.wrapper: list[str] = []  # runs commands
        self.path = directory / "inventory.yml"
        self.known_hosts = directory / "known hosts"
        self.key = directory / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        for host in hosts:
            host.enter("sh", "-c", _USERS)
        self.write()

    def write(self, variables: dict[str, Any] | None = None, **own: dict[str, Any]) -> None:
        """The inventory; ``own``: variables of single hosts."""
        common = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": self.options(),
            "oeprov_kind": "cpu",
            "runtime_extra": "none",
        }
        entries = {host.name: {"ansible_host": host.address, **own.get(host.name, {})} for host in self.hosts}
        names = dict.fromkeys(entries, None)
        children = {"parameter_servers": {"hosts": names}, "workers": {"hosts": names}}
        content = {"vars": {**common, **(variables or {})}, "hosts": entries, "children": children}
        self.path.write_text(json.dumps({"all": content}))

    def options(self) -> str:
        """Options for ssh; the file has a space in its name."""
        return f"-o IdentitiesOnly=yes -o UserKnownHostsFile='\"{self.known_hosts}\"'"

    def oeprov(self, *words: str, expect: int, **environment: str) -> str:
        """Output of a command, which must end with that status and show no password anywhere."""
        argv = [
            *self.wrapper,
            sys.executable,
            "-m",
            "provision.cli",
            words[0],
            "-i",
            str(self.path),
            *words[1:],
        ]
        clean = {key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.directory,
            env={**clean, "COLUMNS": "300", **environment},
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        assert done.returncode == expect, said
        assert "Traceback" not in said
        for secret in (SECRET, OTHER):
            assert secret not in said + self.journal()
        return said

    def adopt(self, *words: str, expect: int = 0, **environment: str) -> str:
        return self.oeprov("adopt", *words, expect=expect, **environment)

    def journal(self) -> str:
        path = self.directory / ".oeprov" / "journal.jsonl"
        return path.read_text() if path.exists() else ""

    def knows(self, host: SshHost) -> list[str]:
        """Type and key that known_hosts has for a host, whose name may be hashed there."""
        argv = ["ssh-keygen", "-F", host.address, "-f", str(self.known_hosts)]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()[-2:]

    def refused(self, host: SshHost) -> int:
        """How often a host's sshd refused a password."""
        return (host.directory / "sshd.log").read_text().count("Failed password")


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """One host, or as many as the test says."""
    count = getattr(request, "param", 1)
    with SshHosts(tmp_path / "hosts", count, sshd=SSHD + "LogLevel VERBOSE\nMaxAuthTries 3\n") as hosts:
        yield Site(tmp_path, hosts)


three = pytest.mark.parametrize("site", [3], indirect=True)
two = pytest.mark.parametrize("site", [2], indirect=True)


def test_root_is_let_in_with_a_key_once_and_for_all(site: Site) -> None:
    host = site.hosts[0]
    hint = site.oeprov("plan", expect=1)
    assert "has a host key that is not in known_hosts" in hint
    assert f"`oeprov adopt -i INVENTORY --limit {host.name}`" in hint

    planned = site.adopt("--accept-new", "--check", expect=2, OEPROV_PASSWORD=OTHER)
    assert "record the host key ED25519 SHA256:" in planned
    assert "let root in with the key ssh-ed25519" in planned
    assert not site.known_hosts.exists()
    assert not site.journal()

    shown = site.adopt("--accept-new", "--check", "--json", expect=2, OEPROV_PASSWORD=OTHER)
    report = json.loads(shown.splitlines()[0])
    assert [step["id"] for step in report["pending"][0]["steps"]] == ["host-key", "login-key"]
    assert (report["adopted"], report["unreachable"]) == ([], {})
    done = site.adopt("--accept-new", "--yes", OEPROV_PASSWORD=OTHER)
    assert "1 host adopted" in done
    assert site.knows(host) == (host.directory / "host_key.pub").read_text().split()[:2]
    assert "sudoers" not in done
    assert site.key.with_suffix(".pub").read_text() in host.enter("cat", "/root/.ssh/authorized_keys")
    modes = host.enter("stat", "-c", "%a", "/root/.ssh", "/root/.ssh/authorized_keys").split()
    assert modes == ["700", "600"]
    events = [json.loads(line) for line in site.journal().splitlines()]
    assert [item["event"] for item in events] == ["run", *["begin", "end"] * 2, "finished"]
    assert [item["step"] for item in events if item["event"] == "end" and item["ok"]] == [
        "host-key",
        "login-key",
    ]

    before = host.written(), site.known_hosts.read_text()
    again = site.adopt("--yes")
    assert "adopted already: nothing to do" in again
    assert (host.written(), site.known_hosts.read_text()) == before
    site.oeprov("plan", expect=2)


def test_every_command_says_what_lets_a_key_in_where_only_a_password_is_known(site: Site) -> None:
    host = site.hosts[0]
    site.known_hosts.write_text(f"{host.address} {(host.directory / 'host_key.pub').read_text()}")
    said = site.oeprov("plan", expect=1)
    assert f"{host.address} port 22 refuses to let root in (publickey,password)" in said
    assert f"`oeprov adopt -i INVENTORY --limit {host.name}` installs your key" in said


def test_a_user_with_sudo_gets_a_line_of_sudoers_that_the_plan_shows(site: Site) -> None:
    host = site.hosts[0]
    site.write({"ansible_user": "deploy", "ansible_become": True, "ansible_password": SECRET})
    planned = site.adopt("--accept-new", "--check", expect=2)
    line = "deploy ALL=(root) NOPASSWD: ALL"
    assert line in planned
    site.adopt("--accept-new", "--yes")
    assert line in host.enter("cat", "/etc/sudoers.d/oeprov-deploy")
    assert host.enter("stat", "-c", "%a %U", "/etc/sudoers.d/oeprov-deploy") == "440 root\n"
    assert host.enter("find", "/etc/sudoers.d", "-name", "*.new*") == ""
    assert "nothing to do" in site.adopt("--yes")
    site.oeprov("plan", expect=2)


@pytest.mark.slow  # PAM waits after each wrong password
def test_su_makes_root_where_the_user_has_no_sudo(site: Site) -> None:
    variables = {"ansible_user": "plain", "ansible_become": True, "ansible_password": SECRET}
    site.write(variables)
    refused = site.adopt("--accept-new", "--yes", expect=1)
    assert "sudo refused (" in refused
    assert "plain is not in the sudoers file" in refused
    assert "log in as root once" in refused
    assert not site.hosts[0].enter("find", "/home/plain", "-name", "authorized_keys")

    site.write({**variables, "ansible_become_method": "su"})
    wrong = site.adopt("--accept-new", "--yes", expect=1, OEPROV_BECOME_PASSWORD=SECRET)
    assert "su refused the password of root from OEPROV_BECOME_PASSWORD (su: Authentication failure)" in wrong
    assert not site.hosts[0].enter("find", "/home/plain", "-name", "authorized_keys")

    site.adopt("--accept-new", "--yes", OEPROV_BECOME_PASSWORD=OTHER)
    assert "nothing to do" in site.adopt("--yes")
    site.oeprov("plan", expect=2)


def test_sudo_is_asked_for_a_host_that_takes_our_key_already(site: Site) -> None:
    """As clouds make hosts, where the user's key is there and sudo is not."""
    home = "/home/deploy/.ssh"
    key = site.key.with_suffix(".pub").read_text()
    script = f"mkdir -m 700 {home} && printf %s '{key}' >{home}/authorized_keys && chown -R deploy {home}"
    site.hosts[0].enter("sh", "-c", script)
    site.write({"ansible_user": "deploy", "ansible_become": True})
    none = site.adopt("--accept-new", "--yes", expect=1)
    assert "set OEPROV_BECOME_PASSWORD in the environment, or ansible_become_password" in none
    done = site.adopt("--accept-new", "--yes", OEPROV_BECOME_PASSWORD=SECRET)
    assert "with the key" not in done
    assert site.refused(site.hosts[0]) == 0
    site.oeprov("plan", expect=2)


@three
def test_a_wrong_password_is_tried_once_in_the_whole_fleet(site: Site) -> None:
    said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD="not this one")
    assert sum(site.refused(host) for host in site.hosts) == 1
    assert said.count("refused the password of root: it is wrong") == 1
    assert said.count("was not asked: ") == 2
    assert not site.known_hosts.exists()
    for host in site.hosts:
        assert not host.enter("find", "/root", "-name", "authorized_keys")


@three
def test_hosts_with_passwords_of_their_own_are_asked_each_and_the_good_ones_go_on(site: Site) -> None:
    first, second, third = site.hosts
    second.enter("sh", "-c", "echo root:of-its-own | chpasswd")
    own = {first.name: {"ansible_password": OTHER}, second.name: {"ansible_password": "of-its-own"}}
    site.write({"ansible_password": "wrong one"}, **own)
    said = site.adopt("--accept-new", "--yes", expect=1)
    assert [site.refused(host) for host in site.hosts] == [0, 0, 1]
    assert "2 hosts adopted" in said
    assert f"{third.name}: {third.address} port 22 refused the password" in said
    site.oeprov("plan", "--limit", f"{first.name},{second.name}", expect=2)


def test_host_keys_are_never_recorded_in_silence(site: Site) -> None:
    host = site.hosts[0]
    said = site.adopt("--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"{host.name} ({host.address} port 22): ED25519 SHA256:" in said
    assert "add --known-hosts FILE or, if you trust the network, --accept-new" in said
    assert "password" not in (host.directory / "sshd.log").read_text()

    key = (host.directory / "host_key.pub").read_text()
    file = site.directory / "keys.txt"
    file.write_text(f"other.example {key}")
    none = site.adopt("--known-hosts", str(file), "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"{file} has no key of {host.address}" in none
    made = site.directory / "made"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made)], check=True)
    file.write_text(f"{host.name} {made.with_suffix('.pub').read_text()}")
    wrong = site.adopt("--known-hosts", str(file), "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"than {file} says: another machine answers there" in wrong
    assert not site.known_hosts.exists()
    assert "password" not in (host.directory / "sshd.log").read_text()

    file.write_text(f"{host.name} {key}")
    site.adopt("--known-hosts", str(file), "--yes", OEPROV_PASSWORD=OTHER)
    assert site.knows(host) == key.split()[:2]


def test_a_changed_host_key_is_refused_with_the_cure(site: Site) -> None:
    host = site.hosts[0]
    made = site.directory / "made"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made)], check=True)
    site.known_hosts.write_text(f"{host.address} {made.with_suffix('.pub').read_text()}")
    said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"{host.name}: {host.address} port 22 has another host key than known_hosts says" in said
    assert f"`ssh-keygen -R {host.address}`" in said
    assert "password" not in (host.directory / "sshd.log").read_text()


@pytest.mark.slow
@two
def test_the_way_through_another_host(site: Site) -> None:
    gate, host = site.hosts
    gate.enter("sh", "-c", "mkdir -m 700 -p /root/.ssh")
    gate.enter(
        "sh", "-c", f"printf %s '{site.key.with_suffix('.pub').read_text()}' >/root/.ssh/authorized_keys"
    )
    host.enter("ip", "route", "add", "blackhole", f"{site.hosts.controller}/32")
    way = f"ssh -F none -o BatchMode=yes -i {site.key} -o UserKnownHostsFile={site.hosts.known_hosts}"
    command = f"-o 'ProxyCommand={way} -W %h:%p root@{gate.address}' -o IdentitiesOnly=yes"
    site.write(
        {"ansible_ssh_common_args": f"{command} -o UserKnownHostsFile='\"{site.known_hosts}\"'"},
    )
    site.adopt("--limit", host.name, "--accept-new", "--yes", OEPROV_PASSWORD=OTHER)
    assert "nothing to do" in site.adopt("--limit", host.name)
    site.oeprov("plan", "--limit", host.name, expect=2)

    site.known_hosts.unlink()
    gate.enter("rm", "/root/.ssh/authorized_keys")
    said = site.adopt("--limit", host.name, "--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"{host.name}: " in said
    assert "Permission denied" in said or gate.address in said


@pytest.mark.slow
@three
def test_jump_hosts_of_the_users_own_configuration(site: Site) -> None:
    """ProxyJump over two of them; ~/.ssh is replaced for these commands alone."""
    home = Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh"
    if not home.is_dir():
        pytest.skip(f"{home} is not there to mount another one over it")
    first, second, host = site.hosts
    own = site.directory / "ssh"
    own.mkdir(mode=0o700)
    (own / "config").write_text(
        f"Host way-1\n  HostName {first.address}\n  User root\n"
        f"Host way-2\n  HostName {second.address}\n  User root\n"
        f"Host *\n  IdentityFile {site.key}\n  IdentitiesOnly yes\n"
        f"Host new\n  HostName {host.address}\n  ProxyJump way-1,way-2\n  HashKnownHosts no\n"
    )
    lines = [f"{item.address} {(item.directory / 'host_key.pub').read_text()}" for item in (first, second)]
    (own / "known_hosts").write_text("".join(lines))
    for item in (first, second):
        key = site.key.with_suffix(".pub").read_text()
        item.enter("sh", "-c", f"mkdir -m 700 -p /root/.ssh; printf %s '{key}' >/root/.ssh/authorized_keys")
    host.enter("ip", "route", "add", "blackhole", f"{site.hosts.controller}/32")
    site.write({"ansible_ssh_common_args": ""}, **{host.name: {"ansible_host": "new"}})
    site.wrapper = ["unshare", "--mount", "sh", "-c", f"mount --bind '{own}' '{home}' && exec \"$@\"", "sh"]
    said = site.adopt("--limit", host.name, "--accept-new", "--yes", OEPROV_PASSWORD=OTHER)
    assert "1 host adopted" in said
    assert host.address in (own / "known_hosts").read_text()
    assert "nothing to do" in site.adopt("--limit", host.name)
    site.oeprov("plan", "--limit", host.name, expect=2)


def test_one_machine_under_two_names_is_refused(site: Site) -> None:
    host = site.hosts[0]
    second = f"{host.address.rsplit('.', 1)[0]}.249"
    host.enter("ip", "addr", "add", f"{second}/16", "dev", "eth0")
    content = json.loads(site.path.read_text())
    content["all"]["hosts"]["twin"] = {"ansible_host": second}
    content["all"]["children"]["workers"]["hosts"] = {"twin": None, host.name: None}
    site.path.write_text(json.dumps(content))
    said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"twin: has the same host key as {host.name} (ED25519 SHA256:" in said
    assert "1 host adopted" in said
    site.known_hosts.write_text(
        site.known_hosts.read_text() + f"{second} {(host.directory / 'host_key.pub').read_text()}"
    )
    said = site.adopt("--yes", expect=1)
    assert f"twin: is the same machine as {host.name} ({host.name}, machine-id " in said
    said = site.oeprov("plan", expect=1)
    assert f"twin: is the same machine as {host.name} ({host.name}, boot " in said
    assert "give it one name and put that in all its groups" in said


def test_the_controller_is_refused(site: Site) -> None:
    host = site.hosts[0]
    host.enter("hostname", platform.node())
    said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"{host.name}: is this machine, the controller: set ansible_connection: local for it" in said
    assert not host.enter("find", "/root", "-name", "authorized_keys")
    assert not site.known_hosts.exists()


def test_two_controllers_at_once_leave_both_keys_and_one_waits_its_turn(site: Site) -> None:
    host = site.hosts[0]
    site.write({"ansible_user": "deploy", "ansible_become": True, "ansible_password": SECRET})
    other = site.directory / "other"
    other.mkdir()
    key = other / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    text = site.path.read_text().replace(str(site.key), str(key))
    (other / "inventory.yml").write_text(text.replace(str(site.known_hosts), str(other / "known")))
    argv = [sys.executable, "-m", "provision.cli", "adopt", "--accept-new", "--yes"]
    both = [
        subprocess.Popen(argv, cwd=path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for path in (site.directory, other)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    found = host.enter("cat", "/home/deploy/.ssh/authorized_keys")
    assert sorted(found.splitlines()) == sorted(
        path.with_suffix(".pub").read_text().strip() for path in (site.key, key)
    )
    assert host.enter("ls", "/etc/sudoers.d").split() == ["oeprov-deploy"]
    with cluster_lock(site.directory / ".oeprov", "inventory"):
        said = site.adopt("--yes", expect=1)
    assert "cluster inventory is being changed by pid " in said
    assert "wait for it or stop it" in said


def test_a_vaulted_password_and_one_that_is_typed(site: Site) -> None:
    host = site.hosts[0]
    vault = VaultLib([("default", VaultSecret(b"open sesame"))])
    (site.directory / "group_vars").mkdir()
    (site.directory / "group_vars" / "all.yml").write_bytes(vault.encrypt(f"ansible_password: {OTHER}\n"))
    (site.directory / "pass").write_text("open sesame\n")
    site.adopt("--accept-new", "--yes", "--vault-id", str(site.directory / "pass"))
    site.oeprov("plan", "--vault-id", str(site.directory / "pass"), expect=2)

    (site.directory / "group_vars" / "all.yml").unlink()
    host.enter("rm", "-r", "/root/.ssh")
    site.known_hosts.unlink()
    argv = [sys.executable, "-m", "provision.cli", "adopt", "-i", str(site.path)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=site.directory, start_new_session=True
    )
    os.close(theirs)
    said = ""
    for question, answer in (
        ("Are these the keys of your hosts?", "y"),
        ("Password of root: ", "mistyped"),
        ("Password of root: ", OTHER),
        ("Apply these steps?", "y"),
    ):
        said = _read_until(ours, question)
        os.write(ours, answer.encode() + b"\n")
    said += _read_until(ours, "adopted")
    assert process.wait(timeout=60) == 0
    assert site.refused(host) == 1
    assert OTHER not in said
    site.oeprov("plan", expect=2)


def _read_until(terminal: int, words: str) -> str:
    text = ""
    while words not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text):
        text += os.read(terminal, 4096).decode(errors="replace")
    return text


def test_a_host_that_takes_no_passwords_and_keys_that_cannot_be_used(site: Site) -> None:
    passphrase = site.directory / "locked"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "a long phrase", "-f", str(passphrase)], check=True
    )
    site.write({"ansible_ssh_private_key_file": str(passphrase)})
    said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert f"the key {passphrase} has a passphrase and ssh-agent does not hold it" in said
    assert f"ssh-add {passphrase}" in said
    site.write({"ansible_ssh_private_key_file": str(site.directory / "nothing")})
    assert f"there is no key {site.directory / 'nothing'}" in site.adopt(
        "--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER
    )
    assert site.refused(site.hosts[0]) == 0
    with SshHosts(site.directory / "closed", 1) as closed:
        site.hosts = closed
        site.write()
        said = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
        assert "lets nobody in with a password (it takes publickey); put your key there" in said


def test_what_an_administrator_forbids_is_named(site: Site) -> None:
    host = site.hosts[0]
    site.write({"ansible_user": "deploy", "ansible_become": True, "ansible_password": SECRET})
    host.enter("sh", "-c", "echo 'deploy ALL=(ALL:ALL) PASSWD: ALL' >/etc/sudoers.d/zz")
    said = site.adopt("--accept-new", "--yes", expect=1)
    assert "a later line there overrules /etc/sudoers.d/oeprov-deploy" in said
    host.enter("sh", "-c", "echo 'Defaults requiretty' >/etc/sudoers.d/zz; rm /etc/sudoers.d/oeprov-*")
    said = site.adopt("--accept-new", "--yes", expect=1)
    assert "sudo there wants a terminal: remove requiretty from its sudoers, or log in as root once" in said
    host.enter("sh", "-c", "rm /etc/sudoers.d/*; sed -i /includedir/d /etc/sudoers")
    said = site.adopt("--accept-new", "--yes", expect=1)
    assert "/etc/sudoers does not read /etc/sudoers.d: add the line @includedir" in said
    assert host.enter("find", "/etc/sudoers.d", "-type", "f") == ""


_APT = """\
#!/bin/sh
case "$*" in *install*python3*) mv /usr/bin/hidden /usr/bin/python3 ;; esac
"""


def test_a_broken_link_is_named_by_other_commands_too(site: Site) -> None:
    host = site.hosts[0]
    site.adopt("--accept-new", "--yes", OEPROV_PASSWORD=OTHER)
    host.enter("ln", "-sf", "nowhere", "/usr/bin/python3")
    said = site.oeprov("bootstrap", "--yes", expect=1)
    assert f"{host.name}: a Python there is a broken link (/usr/bin/python3 -> nowhere): remove or" in said


def test_a_host_without_python_gets_one_and_a_broken_link_is_named(site: Site) -> None:
    host = site.hosts[0]
    host.enter("sh", "-c", "mv /usr/bin/python3 /usr/bin/hidden; ln -s nowhere /usr/bin/python3")
    broken = site.adopt("--accept-new", "--yes", expect=1, OEPROV_PASSWORD=OTHER)
    assert "a Python there is a broken link (/usr/bin/python3 -> nowhere): remove or repair it" in broken
    assert "nothing was changed" in broken
    assert not host.enter("find", "/root", "-name", "authorized_keys")

    host.enter("sh", "-c", f"rm /usr/bin/python3; echo '{_APT}' >/usr/local/bin/apt-get")
    host.enter("chmod", "755", "/usr/local/bin/apt-get")
    planned = site.adopt("--accept-new", "--check", expect=2, OEPROV_PASSWORD=OTHER)
    assert "install python3" in planned
    done = site.adopt("--accept-new", "--yes", OEPROV_PASSWORD=OTHER)
    assert f"✓ {host.name}: install python3" in done
    assert '"step": "first-python", "ok": true' in site.journal()
    assert "nothing to do" in site.adopt("--yes")
    site.oeprov("plan", expect=2)
