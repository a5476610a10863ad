"""The runtime on hosts with a Debian of their own: packages, wheel, environment, a server that serves."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bare_debian
import numpy as np
import pytest
import yaml
from bare_debian import BareDebian, put_wheel

from oe_runtime import Client, TableSpec
from provision.cluster import own_sources
from provision.node.runtime import STAMP

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
VENV = "/opt/oeprov/venv"

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(bare_debian.why_not()), reason=bare_debian.why_not() or "never"),
]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BareDebian]:
    with at_work(tmp_path, "bookworm") as made:
        yield made


@contextlib.contextmanager
def at_work(tmp_path: Path, suite: str) -> Iterator[BareDebian]:
    """A host with that release, and an inventory of it."""
    with BareDebian(tmp_path / "host", suite=suite) as made:
        inventory = {
            "all": {
                "vars": {"oeprov_cluster": "runtime"},
                "children": {
                    "parameter_servers": {"hosts": {"server": None}},
                    "workers": {"hosts": {"here": None}},
                },
                "hosts": {
                    "server": {"oeprov_kind": "cpu", **made.inventory()},
                    "here": {
                        "oeprov_kind": "local",
                        "ansible_connection": "local",
                        "runtime_extra": "none",
                        "pmem_mode": "none",
                    },
                },
            }
        }
        (tmp_path / "inventory.yml").write_text(yaml.safe_dump(inventory))
        yield made


def run(directory: Path, *argv: str, expect: int = 0) -> str:
    """Run a program as anybody would, from outside the repository; gives its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        [str(BIN / argv[0]), *argv[1:]],
        cwd=directory,
        env={
            **environment,
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
            "OEPROV_STATE_DIR": str(directory / "state"),
            "OEPROV_INVENTORY": str(directory / "inventory.yml"),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def playbook(directory: Path, *words: str, expect: int = 0) -> str:
    name = str(REPOSITORY / "playbooks" / "bootstrap.yml")
    return run(
        directory, "ansible-playbook", "-i", "inventory.yml", name, "--limit", "server", *words, expect=expect
    )


def stamp(host: BareDebian) -> dict[str, object]:
    found: dict[str, object] = json.loads(host.run(f"cat {VENV}/{STAMP}"))
    return found


def serve(host: BareDebian) -> None:
    """A server of the host's environment keeps rows for a client here."""
    ready, token = "/run/ready.json", "of this test and no other"
    host.run(f"umask 077; echo '{token}' >/run/token")
    argv = [
        *("ssh", *host.ssh_options(), "-i", str(host.key), "-p", str(host.port), "root@127.0.0.1"),
        f"exec {VENV}/bin/python -m oe_runtime.server --port 0 --ready-file {ready} --exit-with-parent "
        "--token-file /run/token --tls on",
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as server:
        text = host.run(f"until cat {ready} 2>/dev/null; do sleep 0.1; done")
        with Client([f"127.0.0.1:{json.loads(text)['port']}"], token=token, tls="on") as client:
            table = client.create_table(TableSpec("t", 4))
            rows = client.pull_rows(table, np.arange(100))
            assert rows.shape == (100, 4)
            assert len(np.unique(rows)) > 100
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(30) == 0


def test_a_bare_host_becomes_a_parameter_server_and_what_breaks_there_is_repaired(
    host: BareDebian, tmp_path: Path
) -> None:
    # Nothing may come from PyPI.
    host.run(
        "mkdir -p /root/.config/pip && printf '[global]\\nno-index = true\\n' >/root/.config/pip/pip.conf"
    )
    planned = run(tmp_path, "oeprov", "plan", expect=2)
    assert "install oeprov in /opt/oeprov/venv" in planned
    assert "python3-numpy" in planned
    shown = run(tmp_path, "oeprov", "bootstrap", "--yes")
    assert "2 hosts converged" in shown
    wheels = list((tmp_path / "state" / "wheels").rglob("*.whl"))
    assert [path.parent.parent.name for path in wheels] == [own_sources.own_key()]
    assert stamp(host)["wheel"] == f"{own_sources.own_key()}-{own_sources.digest()[:16]}"
    # The wheel is not kept on the host.
    assert host.run("ls -A /var/lib/oeprov 2>/dev/null || true").split() == []
    serve(host)
    assert "nothing to do" in run(tmp_path, "oeprov", "bootstrap", "--yes")
    assert "changed=0" in playbook(tmp_path)

    # Another build is a step of its own, and packages are left alone for it.
    other = {"wheel": f"{own_sources.own_key()}-0000000000000000", "made": True, "finished": True}
    host.run(f"printf '%s' '{json.dumps(other)}' >{VENV}/{STAMP}")
    assert "another build than the one here" in run(tmp_path, "oeprov", "plan", expect=2).replace("\n", " ")
    first = host.run(f"readlink -f {VENV}").strip()
    program = "import time; time.sleep(600)"
    host.run(f"setsid -f {first}/bin/python -c '{program}' </dev/null >/dev/null 2>&1")
    assert "changed=1" in playbook(tmp_path, "--tags", "runtime")
    # What ran from the earlier one still does, and the next change removes it.
    assert len(host.run(f"ls {VENV}.d").split()) == 2
    assert f"{first} (" in run(tmp_path, "oeprov", "plan").replace("\n", " ")
    host.run("pkill -f time.sleep")

    # Power was cut while pip wrote, and dpkg was interrupted while a package was being removed.
    host.run("apt-get remove -y python3-numpy && : >/var/lib/dpkg/updates/0001")
    host.run(f"printf '%s' '{json.dumps({**other, 'finished': False})}' >{VENV}/{STAMP}")
    host.run(f"rm -rf {VENV}/lib/python3*/site-packages/pip && : >{VENV}/half")
    assert "dpkg was interrupted" in host.run("apt-get install -y hello 2>&1 || true")
    assert "changed=1" in playbook(tmp_path, "--tags", "runtime")
    assert len(host.run(f"ls {VENV}.d").split()) == 1
    assert host.run(f"ls {VENV}/").split() == ["bin", "include", "lib", "lib64", "pyvenv.cfg"]
    serve(host)
    assert "changed=0" in playbook(tmp_path)


def test_a_host_of_another_release_builds_for_its_kind(host: BareDebian, tmp_path: Path) -> None:
    host.run("sed -i 's/^VERSION_ID=.*/VERSION_ID=\"99\"/' /etc/os-release")
    planned = run(tmp_path, "oeprov", "plan", expect=2)
    assert "one host of debian-99-" in planned.replace("\n", " ")
    out = playbook(tmp_path, "--tags", "runtime")
    assert "server: builds the runtime for its kind of system" in out
    assert "changed=1" in out
    (found,) = (tmp_path / "state" / "wheels").rglob("*.whl")
    assert found.parent.parent.name == own_sources.own_key().replace("-12-", "-99-")
    assert host.run("ls -A ~/.ansible/tmp").split() == []
    serve(host)
    assert "changed=0" in playbook(tmp_path, "--tags", "runtime")


def test_a_debian_13_host_becomes_a_parameter_server(tmp_path: Path) -> None:
    with at_work(tmp_path, "trixie") as host:
        assert "one host of debian-13-" in run(tmp_path, "oeprov", "plan", expect=2).replace("\n", " ")
        assert "2 hosts converged" in run(tmp_path, "oeprov", "bootstrap", "--yes")
        serve(host)
        assert "nothing to do" in run(tmp_path, "oeprov", "bootstrap", "--yes")


def test_a_debian_11_host_has_a_python_too_old(tmp_path: Path) -> None:
    with at_work(tmp_path, "bullseye") as host:
        before = host.run("dpkg-query -W")
        refused = run(tmp_path, "oeprov", "bootstrap", "--yes", expect=1)
        assert "Python 3.9" in refused
        assert host.run("dpkg-query -W") == before


def test_a_build_that_fails_on_a_host_shows_where_the_log_is(host: BareDebian, tmp_path: Path) -> None:
    host.run("sed -i 's/^VERSION_ID=.*/VERSION_ID=\"99\"/' /etc/os-release")
    cmake = "/usr/local/bin/cmake"
    host.run(f"printf '#!/bin/sh\\necho no such compiler >&2\\nexit 1\\n' >{cmake} && chmod +x {cmake}")
    out = playbook(tmp_path, "--tags", "runtime", expect=2).replace("\n", " ")
    assert "the runtime could not be built on server: `" in out
    (log,) = (tmp_path / "state" / "logs").glob("wheel-debian-99-*.log")
    assert str(log) in out
    assert "no such compiler" in log.read_text()
    assert not list((tmp_path / "state").rglob("*.whl"))
    assert "No such file" in host.run(f"ls {VENV} 2>&1 || true")


def test_a_host_without_a_network_is_set_up_from_a_bundle(host: BareDebian, tmp_path: Path) -> None:
    put_wheel(tmp_path / "state", own_sources.own_key())
    inventory = yaml.safe_load((tmp_path / "inventory.yml").read_text())
    # An interpreter of its own: numpy then comes by pip, from the bundle too.
    inventory["all"]["hosts"]["server"].update(
        runtime_python="/usr/bin/python3", runtime_packages=["python3-venv", "hello"]
    )
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(inventory))
    made = run(tmp_path, "oeprov", "bundle", "all", "--limit", "server")
    assert "packages/debian-12-x86_64: " in made
    assert "pip/debian-12-x86_64-py3.11: numpy" in made

    host.run("rm -rf /var/lib/apt/lists/* /etc/apt/sources.list.d/* && : >/etc/resolv.conf")
    host.run("echo 'deb http://192.0.2.9/debian bookworm main' >/etc/apt/sources.list")
    host.run(
        "mkdir -p /root/.config/pip && "
        "printf '[global]\\nindex-url = http://192.0.2.9/\\n' >/root/.config/pip/pip.conf"
    )
    shown = run(tmp_path, "oeprov", "bootstrap", "--limit", "server", "--bundle", "all", "--yes")
    assert "1 host converged" in shown
    assert host.run("hello").strip() == "Hello, world!"
    assert host.run(f"{VENV}/bin/python -c 'import numpy; print(numpy.__file__)'").startswith(VENV)
    again = run(tmp_path, "oeprov", "bootstrap", "--limit", "server", "--bundle", "all", "--yes")
    assert "nothing to do" in again
