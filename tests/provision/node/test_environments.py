"""Environments by digest: what a job runs from, what a change leaves, and what goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provision.node import environments, job
from provision.node.command import CommandError, Result, System

VENV = "/opt/oeprov/venv"
UNITS = "/etc/systemd/system"
TEXT = """\
[Service]
Environment="PATH=/opt/oeprov/venv/bin:/usr/bin"
ExecStart=/opt/oeprov/venv/bin/python -m oe_runtime.train --script "/srv/my/opt/oeprov/venv/bin/x"
"""


class Host(System):
    """A root directory, whose commands succeed; no unit runs."""

    def which(self, name: str) -> str:
        return "/usr/bin/" + name

    def run(self, argv: list[str], timeout: float = 60, environment: dict[str, str] | None = None) -> Result:
        if argv[0] == "cp":
            return super().run(argv, timeout, environment)
        return Result(argv, 0, "", "")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    found = Host(str(tmp_path))
    (tmp_path / "opt/oeprov").mkdir(parents=True)
    return found


def make(host: Host, name: str, path: str = VENV) -> str:
    """Make an environment and link to it, as an installation does."""
    place = environments.begin(host, path, name)
    host.write(place + "/bin/python", "#!" + place + "/bin/sh\n")
    environments.switch(host, path, place)
    environments.clean(host, path, unfinished=True)
    return place


def start(host: Host, job: str = "j", text: str = TEXT) -> str:
    """Start a worker's unit as ``job.start`` does; gives its text."""
    name = f"oeprov-{job}-worker-0.service"
    (item,) = environments.pin(host, job, [{"unit": name, "text": text}])
    host.write(f"{UNITS}/{name}", item["text"])
    return str(item["text"])


def places(host: Host) -> list[str]:
    return [item.path for item in environments.old(host, VENV)]


def test_a_job_keeps_the_environment_that_it_began_with(host: Host) -> None:
    first = make(host, "first")
    text = start(host)
    assert f"ExecStart={first}/bin/python" in text
    assert f"PATH={first}/bin:" in text
    assert '"/srv/my/opt/oeprov/venv/bin/x"' in text, "another directory"
    second = make(host, "second")
    assert environments.target(host, VENV) == second
    assert start(host) == text, "a worker that is started again"
    assert start(host, "other") == text.replace(first, second)
    (old,) = environments.old(host, VENV)
    assert (old.path, old.users) == (first, ["training job j"])
    assert old.bytes > 0
    (note,) = environments.notes([old])
    assert "training job j runs from it, and it goes when that has ended" in note


def test_an_environment_goes_with_the_last_job_that_ran_from_it(host: Host, tmp_path: Path) -> None:
    """The stop of a job removes it, or the next change; the one in use stays."""
    first = make(host, "first")
    start(host, "a")
    start(host, "b")
    make(host, "second")
    third = make(host, "third")
    assert places(host) == [first]
    for name, left in (("a", [first]), ("b", [])):
        job.stop(host, {"directory": f"/var/lib/oeprov/jobs/{name}", "units": None})
        assert places(host) == left
    assert environments.target(host, VENV) == third
    assert os.listdir(tmp_path / "opt/oeprov/venv.d") == ["third"]


def test_an_installation_that_goes_on_is_not_removed_by_a_job_that_ends(host: Host) -> None:
    make(host, "first")
    start(host)
    place = environments.begin(host, VENV, "second")
    host.write(place + "/bin/python", "")
    job.stop(host, {"directory": "/var/lib/oeprov/jobs/j", "units": None})
    assert places(host) == [place]
    environments.switch(host, VENV, place)
    assert environments.target(host, VENV) == place


def test_the_same_content_again_is_made_beside_the_one_in_use(host: Host) -> None:
    first = make(host, "first")
    start(host)
    assert make(host, "first") == first + "-2"
    assert make(host, "second").endswith("/second")
    assert places(host) == [first]


def test_a_process_without_a_unit_counts(tmp_path: Path) -> None:
    host = System()
    venv = str(tmp_path / "venv")
    place = environments.begin(host, venv, "first")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    environments.switch(host, venv, place)
    with subprocess.Popen([f"{place}/bin/python", "-c", "input()"], stdin=subprocess.PIPE) as process:
        other = environments.begin(host, venv, "second")
        os.mkdir(other)
        environments.switch(host, venv, other)
        assert environments.clean(host, venv) == 0
        (old,) = environments.old(host, venv)
        assert old.users == [f"process {process.pid} (python)"]
        process.communicate(b"\n")
    environments.clean(host, venv)
    assert environments.old(host, venv) == []


def test_a_copy_shares_files_and_has_its_own_programs(host: Host, tmp_path: Path) -> None:
    first = make(host, "first")
    host.write(first + "/lib/big.so", "x" * 80000)
    host.write(first + "/bin/pip", f"#!{first}/bin/python\n")
    place = environments.begin(host, VENV, "second")
    environments.copy(host, VENV, place)
    assert host.read(place + "/bin/pip") == f"#!{place}/bin/python\n"
    assert host.read(first + "/bin/pip") == f"#!{first}/bin/python\n"
    big = [os.stat(host.path(path + "/lib/big.so")) for path in (first, place)]
    assert big[0].st_ino == big[1].st_ino
    assert environments.own_bytes(host, place) < 80000, "removing it would not free what is shared"


def test_a_directory_of_an_earlier_version_becomes_a_link_when_nothing_runs_from_it(host: Host) -> None:
    host.write(VENV + "/bin/python", "")
    start(host)  # by an earlier version: its unit names the directory
    with pytest.raises(CommandError, match="training job j runs from it: stop that first"):
        make(host, "first")
    assert not host.link(VENV)
    job.stop(host, {"directory": "/var/lib/oeprov/jobs/j", "units": None})
    first = make(host, "first")
    assert environments.target(host, VENV) == first
    assert places(host) == []


def test_a_link_of_the_user_s_own_stays(host: Host, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.symlink("../../data/venv", tmp_path / "opt/oeprov/venv")
    home = environments.home(host, VENV)
    assert home == "/data/venv"
    first = make(host, "first", home)
    assert first == "/data/venv.d/first"
    assert host.link(VENV) == "../../data/venv"
    assert f"ExecStart={first}/bin/python" in start(host)


@pytest.mark.parametrize("how", ["no link", "a link to the folder"])
def test_a_job_s_words_make_no_directory_an_environment(host: Host, tmp_path: Path, how: str) -> None:
    """The end of a job must not remove what its arguments, or links of its user, name."""
    precious = tmp_path / "etc/precious"
    precious.mkdir(parents=True)
    base = "/srv/x" if how == "no link" else "/srv/y"
    (tmp_path / "srv").mkdir()
    if how == "no link":
        (tmp_path / "srv/x.d/name/bin").mkdir(parents=True)
    else:
        os.symlink("y.d/name", tmp_path / "srv/y")
        os.symlink("../etc", tmp_path / "srv/y.d")
        (tmp_path / "etc/name/bin").mkdir(parents=True)
    start(host, text=f"ExecStart=/usr/bin/python3 train.py {base}.d/name/bin/x\n")
    job.stop(host, {"directory": "/var/lib/oeprov/jobs/j", "units": None})
    assert precious.exists()
    assert (tmp_path / f"{base[1:]}.d/name/bin").exists()


def test_packages_of_a_script_keep_the_environment_below_them(host: Host) -> None:
    """A job runs from the script's environment, which uses the runtime's."""
    first, own = make(host, "first"), "/var/lib/oeprov/environments/key"
    place = environments.place_over(host, own, environments.resolve(host, VENV + "/bin/python"), ["facts"])
    host.write(place + "/bin/python", "")
    environments.switch(host, own, place)
    assert f"ExecStart={place}/bin/python" in start(host, text=f"ExecStart={own}/bin/python -m x\n")
    make(host, "second")
    assert [(item.path, item.users) for item in environments.old(host, VENV)] == [(first, ["training job j"])]
    job.stop(host, {"directory": "/var/lib/oeprov/jobs/j", "units": None})
    make(host, "third")
    assert places(host) == []
