"""Steps without Ansible: the first Python of a host, by the shell alone, over SSH to a server on loopback."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ssh_server import SshServer, serving

from provision.cluster.inventory import Host
from provision.hosts import carrier
from provision.inventory.loader import load
from provision.node.ansible_python import CARRIED
from provision.node.step import Step


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with serving(tmp_path) as found:
        (tmp_path / "known_hosts").write_text(found.known_hosts_line())
        yield found


def host(directory: Path, server: SshServer) -> Host:
    path = directory / "inventory.yml"
    arguments = f"-o IdentitiesOnly=yes -o UserKnownHostsFile='{directory / 'known_hosts'}'"
    path.write_text(
        "all:\n  hosts:\n    a:\n      oeprov_kind: cpu\n      ansible_host: 127.0.0.1\n"
        f"      ansible_port: {server.port}\n      ansible_user: me\n"
        f"      ansible_ssh_private_key_file: {server.key_file}\n      ansible_ssh_common_args: {arguments}\n"
        "  children: {workers: {hosts: {a: }}, parameter_servers: {hosts: {a: }}}\n"
    )
    return load(path).hosts["a"]


def carry(directory: Path, server: SshServer, *commands: list[str]) -> carrier.Carried:
    step = Step("first-python", "install python3", "", role=CARRIED, args={"commands": list(commands)})
    begun: list[Any] = []
    (found,) = carrier.carry_out(
        {"a": host(directory, server)}, {"a": step}, {}, lambda *words: begun.append(words)
    )
    assert begun == [("a", step)]
    return found


def test_files_are_written_and_commands_run(tmp_path: Path, server: SshServer) -> None:
    text = "baseurl=https://me:it's-secret@mirror/os\n"
    found = carry(
        tmp_path,
        server,
        ["write", str(tmp_path / "o.repo"), text],
        ["cp", "/dev/stdin", str(tmp_path / "in")],
    )
    assert (found.ok, found.message) == (True, "installed python3")
    assert (tmp_path / "o.repo").read_text() == text
    assert (tmp_path / "o.repo").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "in").read_text() == ""  # the rest of the script is not a command's input
    assert not any("secret" in command for command in server.commands)


def test_a_command_that_fails_ends_the_step_in_its_words(tmp_path: Path, server: SshServer) -> None:
    fails = ["sh", "-c", "echo progress; echo 'Error: No space left on device' >&2; exit 3"]
    found = carry(tmp_path, server, fails, ["touch", str(tmp_path / "later")])
    assert not found.ok
    assert found.message.startswith("`sh -c ")
    assert found.message.endswith("failed with exit status 3: Error: No space left on device")
    assert not (tmp_path / "later").exists()
