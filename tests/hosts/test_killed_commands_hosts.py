"""``adopt`` and ``destroy`` that are killed at every event: the same command goes on."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from converged import inventory
from kill_sweep import run_apart
from ssh_hosts import SshHosts, why_not
from test_adopt_hosts import OTHER, Site, site  # noqa: F401 - a fixture
from test_destroy_hosts import DONE, JOBS, SAVED, hosts, there  # noqa: F401 - a fixture

from provision.cli import main

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def sweep(
    directory: Path,
    command: Callable[[], int],
    prepare: Callable[[], object],
    again: Callable[[], object],
    capfd: pytest.CaptureFixture[str],
) -> list[str]:
    """Kill the command at every event, each time after ``prepare``; what went wrong afterwards."""
    prepare()
    code, events = run_apart(command, directory)
    assert code == 0, capfd.readouterr()
    assert len(events) > 5
    wrong = []
    for number, event in enumerate(events):
        prepare()
        code, _ = run_apart(command, directory, at=number)
        try:
            assert code in (0, -signal.SIGKILL), code  # 0: threads may come to an event in another order
            again()
        except AssertionError as error:
            wrong.append(f"killed before {event!r}: {error}")
        capfd.readouterr()
    return wrong


def test_adopt(
    site: Site,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (host,) = site.hosts
    monkeypatch.chdir(site.directory)
    monkeypatch.setenv("OEPROV_PASSWORD", OTHER)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - ends with the test
    words = ["adopt", "-i", str(site.path), "--accept-new", "--yes"]

    def forget() -> None:
        site.known_hosts.unlink(missing_ok=True)
        host.enter("sh", "-c", "rm -rf /root/.ssh")

    def again() -> None:
        assert main.run(words) == 0
        assert "nothing to do" in site.adopt("--yes")
        keys = host.enter("cat", "/root/.ssh/authorized_keys")
        assert keys.count(site.key.with_suffix(".pub").read_text()) == 1
        assert len(site.known_hosts.read_text().splitlines()) == 1

    assert sweep(site.directory, lambda: main.run(words), forget, again, capfd) == []


def test_destroy(
    tmp_path: Path,
    hosts: SshHosts,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    one = next(iter(hosts))
    path = str(inventory(tmp_path / "inventory.yml", hosts))
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - ends with the test
    words = ["destroy", "-i", path, "--state-dir", str(tmp_path / "state"), "--limit", one.name, "--yes"]
    words += ["--consent", f"{one.name}:job/{SAVED}"]
    one.enter(
        "sh", "-c", "tar -cf /root/before.tar /opt/oeprov /etc/oeprov /var/lib/oeprov /etc/systemd/system"
    )

    def make() -> None:
        one.enter("sh", "-c", "tar -xf /root/before.tar -C /")
        assert f"{JOBS}/{DONE}" in there(one)

    def again() -> None:
        assert main.run(words) == 0
        assert there(one) == []
        assert not list((tmp_path / "state").glob("ansible/*"))

    assert sweep(tmp_path / "state", lambda: main.run(words), make, again, capfd) == []
