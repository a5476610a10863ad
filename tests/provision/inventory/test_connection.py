"""Ansible's connection variables: what ssh is given for them, and which are refused."""

import os
from pathlib import Path

import pytest

from provision.cluster.errors import HostError, InventoryError
from provision.cluster.inventory import FirstLogin, Host
from provision.hosts import askpass, playbook, remote
from provision.hosts.passwords import PasswordRefused
from provision.hosts.remote import argv
from provision.hosts.stop_request import StopRequest
from provision.inventory.connection import ssh_arguments
from provision.inventory.loader import load


def one_host(tmp_path: Path, *lines: str) -> Host:
    path = tmp_path / "inventory.yml"
    own = "".join(f"      {line}\n" for line in lines)
    path.write_text(
        f"all:\n  hosts:\n    a:\n      oeprov_kind: cpu\n{own}  children:\n"
        "    workers: {hosts: {a: }}\n    parameter_servers: {hosts: {a: }}\n"
    )
    return load(path).hosts["a"]


def test_nothing_is_said_to_ssh_that_the_inventory_does_not_say(tmp_path: Path) -> None:
    host = one_host(tmp_path)
    assert host.ssh_arguments == ()
    assert argv(host)[-2:] == ["--", "a"]


def test_options_come_in_the_order_that_ansible_gives_them() -> None:
    given = {
        "ansible_ssh_args": "-C -o ControlMaster=auto",
        "ansible_port": 2222,
        "ansible_user": "me",
        "ansible_ssh_private_key_file": "/keys/a key",
        "ansible_ssh_common_args": "-o 'ProxyCommand=ssh -W %h:%p gate'",
        "ansible_ssh_extra_args": "-v",
        "ansible_host_key_checking": "no",
    }
    assert ssh_arguments(given) == (
        *("-C", "-o", "ControlMaster=auto"),
        *("-oStrictHostKeyChecking=no", "-oPort=2222", '-oIdentityFile="/keys/a key"', '-oUser="me"'),
        *("-o", "ProxyCommand=ssh -W %h:%p gate", "-v"),
    )


def test_templates_and_home_directories(tmp_path: Path) -> None:
    host = one_host(
        tmp_path,
        "known: /there",
        "ansible_ssh_common_args: '-o UserKnownHostsFile={{ known }}'",
        "ansible_ssh_private_key_file: ~/.ssh/one",
    )
    assert host.ssh_arguments == (
        f'-oIdentityFile="{Path.home()}/.ssh/one"',
        *("-o", "UserKnownHostsFile=/there"),
    )


def test_host_keys_are_checked_unless_the_inventory_says_otherwise(tmp_path: Path) -> None:
    assert one_host(tmp_path, "ansible_host_key_checking: true").ssh_arguments == ()
    off = one_host(tmp_path, "ansible_ssh_host_key_checking: false")
    assert off.ssh_arguments == ("-oStrictHostKeyChecking=no",)


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ("ansible_ssh_private_key_passphrase: hunter2", "load the key into ssh-agent (ssh-add FILE)"),
        ("ansible_sudo_pass: hunter2", "is an old name; use ansible_become_password"),
        ("ansible_become_method: doas", "becomes root by sudo; `oeprov adopt` sets that up by sudo or su"),
        ("ansible_connection: paramiko", "found 'paramiko'; oeprov reaches hosts by OpenSSH"),
        ("ansible_connection: ansible.netcommon.paramiko_ssh", "and by Fabric only in `oeprov adopt`"),
        ("ansible_become_user: admin", "becomes root only"),
        ("ansible_become_flags: -i", "becomes root by `sudo -n`"),
        ("ansible_ssh_executable: /opt/ssh", "runs the `ssh` that is on the PATH"),
        ("ansible_ssh_host: 10.0.0.1", "is an old name; use ansible_host"),
        ("ansible_ssh_user: me", "is an old name; use ansible_user"),
        ("ansible_private_key_file: /key", "use ansible_ssh_private_key_file"),
        ("ansible_password: 012345", "put it in quotes ('…' in YAML"),
        ("ansible_become_pass: yes", "put it in quotes ('…' in YAML"),
        ("ansible_ssh_common_args: '-o \"A'", "cannot be split into arguments"),
        ("ansible_ssh_common_args: '{{ nobody }}'", "ansible_ssh_common_args: cannot be templated"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, line: str, piece: str) -> None:
    with pytest.raises(InventoryError) as caught:
        one_host(tmp_path, line)
    assert str(tmp_path / "inventory.yml") in str(caught.value)
    assert "host a" in str(caught.value)
    assert piece in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_passwords_are_for_the_first_login_and_stay_out_of_all_texts(tmp_path: Path) -> None:
    """Neither ssh nor Ansible gets them: both log in with keys."""
    host = one_host(
        tmp_path,
        "ansible_ssh_pass: hunter2",
        "ansible_become_pass: hunter3",
        "ansible_become_method: community.general.su",
    )
    assert host.first_login == FirstLogin("hunter2", "hunter3", "su")
    assert "hunter" not in repr(host) + " ".join(argv(host))
    found = playbook._passwords(load(tmp_path / "inventory.yml"))
    assert {found[key] for key in ("ansible_password", "ansible_ssh_pass", "ansible_become_pass")} == {""}
    assert found["ansible_become_method"] == "sudo"
    one_host(tmp_path)
    assert playbook._passwords(load(tmp_path / "inventory.yml")) == {}


@pytest.mark.parametrize(
    "line",
    [
        "ansible_connection: smart",
        "ansible_become_method: sudo",
        "ansible_become_user: root",
        "ansible_become_flags: -H -S -n",
        "ansible_password: ''",
        "ansible_pipelining: true",
        "ansible_ssh_retries: 3",
    ],
)
def test_values_that_change_nothing_are_no_error(tmp_path: Path, line: str) -> None:
    assert one_host(tmp_path, line).ssh_arguments == ()


def test_why_a_host_that_takes_no_keys_refused_its_password(tmp_path: Path) -> None:
    host = one_host(tmp_path, "oeprov_connection: password", "ansible_user: me")
    assert argv(host)[0] == str(askpass.SSH)
    assert os.access(askpass.SSH, os.X_OK)
    assert os.access(askpass.SSH.with_name("askpass.sh"), os.X_OK)
    for methods, kind, words in (
        ("publickey,password", PasswordRefused, "a port 22 refused the password of me: it is wrong; nothing"),
        (
            "keyboard-interactive",
            HostError,
            "keyboard-interactive only: set PasswordAuthentication yes for its",
        ),
        (
            "publickey",
            HostError,
            "takes no passwords (it takes publickey): remove oeprov_connection: password",
        ),
    ):
        found = remote.failure(host, f"me@a: Permission denied ({methods}).", 10)
        assert type(found) is kind
        assert words in found.reason
    with pytest.raises(InventoryError, match="oeprov_connection: ansible_connection is local"):
        one_host(tmp_path, "oeprov_connection: password", "ansible_connection: local")


def test_a_host_that_reads_slowly_gets_all_of_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a stop request is waited for, which asks several times before the host reads."""
    monkeypatch.setattr(remote, "argv", lambda host, timeout: ["sh", "-c"])
    command, given = "sleep 0.5; wc -c", b"x" * 1_000_000
    code, out, _ = remote.run(one_host(tmp_path), command, given, 10, 20, stop=StopRequest())
    assert (code, out.strip()) == (0, "1000000")
