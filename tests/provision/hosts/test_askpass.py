"""Passwords for ssh: which of its questions are answered, and who can read the answers."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import recorded

from provision.cluster.errors import HostError
from provision.hosts import askpass

ODD = "  two \\ 'words' $(x) "


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    askpass._table.cache_clear()
    askpass._ssh_version.cache_clear()
    yield
    askpass._table.cache_clear()
    askpass._ssh_version.cache_clear()


def answer(question: str) -> str:
    """What askpass.sh answers ssh; empty: it fails."""
    line = [str(askpass.SSH.with_name("askpass.sh")), question]
    environment = {**os.environ, **askpass.environment()}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def test_only_the_question_for_the_hosts_own_password_is_answered() -> None:
    askpass.add("a", "root@10.0.0.1", "first")
    askpass.add("b", "me@host", ODD)
    assert answer("root@10.0.0.1's password: ") == "first\n"
    assert answer("me@host's password: ") == ODD + "\n"
    for question in (
        "root@gate's password: ",
        "root@10.0.0.10's password: ",
        "(root@10.0.0.1) Verification code: ",
        "Enter root@10.0.0.1's old password: ",
        "Are you sure you want to continue connecting (yes/no/[fingerprint])? ",
        "Enter passphrase for key '/root/.ssh/id_ed25519': ",
    ):
        assert answer(question) == ""


def test_the_passwords_lie_in_memory_and_a_child_gets_them_by_an_open_file() -> None:
    askpass.add("b", "me@host", ODD)
    environment, files = askpass.for_child()
    found = os.fstat(files[0])
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert os.readlink(f"/proc/self/fd/{files[0]}").startswith("/memfd:")
    assert not os.get_inheritable(files[0])
    code = "from provision.hosts import askpass; print(askpass.known('me@host'), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        pass_fds=files,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ODD


def test_what_ssh_could_not_tell_apart_or_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    askpass.add("a", "root@host", "one")
    with pytest.raises(HostError, match=r"another password on another port, .* set -o HostKeyAlias=NAME"):
        askpass.add("b", "root@host", "two")
    programs = recorded.Programs(tmp_path / "programs")
    programs.add("ssh", "print('OpenSSH_8.0p1, OpenSSL 1.1.1k', file=sys.stderr)")
    monkeypatch.setenv("PATH", f"{programs.directory}:{os.environ['PATH']}")
    askpass._ssh_version.cache_clear()
    with pytest.raises(HostError, match=r"needs OpenSSH 8.4 or newer on this machine: found 8.0; update"):
        askpass.add("a", "root@other", "one")
