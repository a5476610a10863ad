"""The runtime's environment on a host: real environments, a wheel of one module, and what interrupts it."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pip
import pytest

from provision.node import build, environments, runtime, systemd
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.state import OsInfo, State
from provision.node.step import Applied, Desired, Step

BUILD = "debian-12-x86_64-py3.11-0123456789abcdef"
OTHER = "debian-12-x86_64-py3.11-fedcba9876543210"
BORROWED = Path(pip.__file__).parents[1]


class Host(System):
    """Remembers the commands that are run, and fails the one that a test names.

    Environments borrow the pip of this one: to install it anew costs seconds for each.
    """

    def __init__(self, fail: str = "") -> None:
        super().__init__()
        self.fail = fail
        self.commands: list[str] = []

    def run(self, argv: list[str], timeout: float = 60, environment: Any = None) -> Result:
        self.commands.append(" ".join(argv))
        if self.fail and self.fail in self.commands[-1]:
            return Result(argv, 1, "", "power was cut")
        if argv[1:3] != ["-m", "venv"]:
            return super().run(argv, timeout, environment)
        made = super().run([*argv[:3], "--without-pip", *argv[3:]], timeout, environment)
        site = next(Path(argv[-1]).glob("lib/python*/site-packages"))
        (site / "borrowed.pth").write_text(f"{BORROWED}\n")
        return made


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "wheels"
    monkeypatch.setattr(build, "WHEELS", str(directory))
    monkeypatch.setattr(runtime, "WHEELS", str(directory))
    return directory


def pack(directory: Path, name: str, files: dict[str, str], needs: str = "") -> None:
    """A wheel of version 0.1.0 that pip takes for a real one."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-0.1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n"
    with zipfile.ZipFile(directory / f"{name}-0.1.0-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
        file.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {needs}\n" if needs else ""))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def bring(wheels: Path, name: str = BUILD, server: str = "print('usage')\n") -> None:
    """Put oeprov's wheel on the host; it needs a distribution that only PyPI would have."""
    pack(wheels / name, "oeprov", {"oe_runtime/__init__.py": "", "oe_runtime/server.py": server}, "numbers")


def install(venv: Path, system: System, name: str = BUILD, framework: str = "") -> Applied:
    args = {
        "venv": str(venv),
        "python": sys.executable,
        "build": name,
        "offline": not framework,
        "requirements": [framework] if framework else [],
        "name": name[-16:-4],
    }
    return apply(Step("runtime", "install", "why", action="install_runtime", args=args), system)


def stamp(venv: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((venv / runtime.STAMP).read_text())
    return found


def test_a_server_host_gets_the_wheel_and_nothing_from_elsewhere(tmp_path: Path, wheels: Path) -> None:
    venv, system = tmp_path / "venv", Host()
    bring(wheels)
    done = install(venv, system)
    assert done.changed
    assert done.message.startswith(f"installed oeprov in {venv} (")
    assert done.message.endswith(" of disk)")
    made = tmp_path / "venv.d/0123456789ab"
    assert venv.readlink() == Path("venv.d/0123456789ab")
    assert "include-system-site-packages = true" in (venv / "pyvenv.cfg").read_text()
    place = "{}/lib/python{}.{}/site-packages".format(made, *sys.version_info)
    assert [line for line in system.commands if "-m pip" in line or "-m zipfile" in line] == [
        f"{made}/bin/python -m zipfile -e {wheels}/{BUILD}/oeprov-0.1.0-py3-none-any.whl {place}"
    ]
    assert stamp(venv) == {"wheel": BUILD, "made": True, "finished": True}
    assert not wheels.exists()

    # From here on the host is looked at without starting one interpreter.
    system.commands.clear()
    found = runtime.observe(system, str(venv), [], sys.executable)
    assert (found.exists, found.made, found.wheel, found.unfinished) == (True, True, BUILD, False)
    assert (found.oeprov, found.python, found.base) == (
        "0.1.0",
        found.base,
        "{}.{}.{}".format(*sys.version_info),
    )
    assert install(venv, system).changed is False
    assert system.commands == []

    # Another build of the same version takes its place, with nothing of the old one left.
    (venv / "old").write_text("")
    bring(wheels, OTHER, "print('newer')\n")
    assert install(venv, system, OTHER).changed
    assert not (venv / "old").exists()
    assert [path.name for path in venv.resolve().parent.iterdir()] == ["fedcba987654"]
    done = system.run([f"{venv}/bin/python", "-I", "-m", "oe_runtime.server"])
    assert done.out == "newer\n", done.err
    assert stamp(venv)["wheel"] == OTHER


def test_a_worker_gets_its_framework_too_in_one_call(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, system, index = tmp_path / "venv", Host(), tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    for name in ("framework", "numbers"):
        pack(index, name, {f"{name}.py": ""})
    bring(wheels)
    assert install(venv, system, framework="framework>=0.1").changed
    assert "include-system-site-packages = false" in (venv / "pyvenv.cfg").read_text()
    assert len([line for line in system.commands if "-m pip" in line]) == 1
    found = runtime.observe(system, str(venv), ["framework>=0.1", "numbers", "absent"], sys.executable)
    assert found.missing == ["absent"]
    assert (found.oeprov, found.wheel) == ("0.1.0", BUILD)
    assert install(venv, system, framework="framework>=0.1").changed is False
    # Another build of the same version, which pip by itself would not take.
    bring(wheels, OTHER, "print('newer')\n")
    assert install(venv, system, OTHER, framework="framework>=0.1").changed
    assert system.run([f"{venv}/bin/python", "-I", "-m", "oe_runtime.server"]).out == "newer\n"


@pytest.mark.parametrize("framework", ["", "framework>=0.1"])
def test_what_runs_keeps_its_environment_while_another_is_installed(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """A server that imports later, or is started again, must not get half of another build.

    With a framework the new environment is a copy that pip changes; without, it is made from nothing.
    """
    venv, system = tmp_path / "venv", Host()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for name in ("framework", "numbers"):
        pack(tmp_path / "index", name, {f"{name}.py": ""})
    bring(wheels, BUILD, "print('older')\n")
    install(venv, system, framework=framework)
    python = environments.resolve(system, f"{venv}/bin/python")
    program = [python, "-I", "-c", "input(); import oe_runtime.server"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        bring(wheels, OTHER, "print('newer')\n")
        done = install(venv, system, OTHER, framework=framework)
        assert f"stays for process {process.pid} (python)" in done.message
        (old,) = runtime.observe(system, str(venv), [], sys.executable).old
        assert old.path == str(Path(python).parents[1])
        assert process.communicate("\n")[0] == "older\n"
    assert system.run([f"{venv}/bin/python", "-I", "-m", "oe_runtime.server"]).out == "newer\n"
    environments.clean(system, str(venv))
    assert not Path(python).exists()


def test_a_change_in_place_waits_for_the_jobs_that_run_there(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user's own environment, and once in one that an earlier version made."""
    venv, system, units = tmp_path / "venv", Host(), tmp_path / "units"
    Host().check([sys.executable, "-m", "venv", str(venv)])
    monkeypatch.setattr(systemd, "DIRECTORY", str(units))
    system.write(f"{units}/oeprov-j-server-0.service", f"ExecStart={venv}/bin/python -m oe_runtime.server\n")
    bring(wheels)
    for made, words in (
        (False, "it is yours, and changed in place"),
        (True, "oeprov 0.2 or earlier made it"),
    ):
        runtime.write_stamp(system, str(venv), runtime.Stamp(OTHER, made, True))
        with pytest.raises(CommandError, match=f"training job j runs from {venv} .{words}"):
            install(venv, system)
        seen = runtime.observe(system, str(venv), [], sys.executable)
        state = State(os=OsInfo("debian", "12", "debian", architecture="x86_64"), runtime=seen)
        desired = Desired(kind="cpu", runtime_venv=str(venv), runtime_wheel_digest="0123456789abcdef")
        assert "stop it first: oeprov stop j" in " ".join(runtime.problems(state, desired))
    system.remove(f"{units}/oeprov-j-server-0.service")
    assert install(venv, system).changed
    assert venv.is_symlink()


@pytest.mark.parametrize("where", ["-m venv", "-m zipfile", "oe_runtime.server"])
def test_an_interrupted_environment_is_rebuilt(tmp_path: Path, wheels: Path, where: str) -> None:
    venv = tmp_path / "venv"
    bring(wheels)
    with pytest.raises(CommandError, match="power was cut"):
        install(venv, Host(fail=where))
    assert not venv.exists(), "nothing runs from what is not finished"
    half = tmp_path / "venv.d/0123456789ab/half"
    half.write_text("")
    assert [item.path for item in runtime.observe(Host(), str(venv), [], sys.executable).old] == [
        str(half.parent)
    ]
    assert install(venv, Host()).changed
    assert not half.exists()
    assert stamp(venv) == {"wheel": BUILD, "made": True, "finished": True}
    assert [path.name for path in half.parent.parent.iterdir()] == [half.parent.name]


def test_without_the_wheel_nothing_is_touched(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=build.WHEEL_WANTED + BUILD):
        install(tmp_path / "venv", Host())
    assert not (tmp_path / "venv").exists()


def test_a_foreign_directory_is_not_changed(tmp_path: Path, wheels: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "thesis.txt").write_text("mine")
    bring(wheels)
    with pytest.raises(CommandError, match="the directory is not empty, and what is in it is no Python"):
        install(venv, Host())
    assert [path.name for path in venv.iterdir()] == ["thesis.txt"]
    assert (venv / "thesis.txt").read_text() == "mine"


def test_a_foreign_environment_is_never_emptied(tmp_path: Path, wheels: Path) -> None:
    venv = tmp_path / "venv"
    Host().check([sys.executable, "-m", "venv", str(venv)])
    (venv / "thesis.txt").write_text("mine")
    bring(wheels)
    with pytest.raises(CommandError, match="power was cut"):
        install(venv, Host(fail="-m pip"))
    assert stamp(venv)["made"] is False
    assert install(venv, Host()).changed
    assert (venv / "thesis.txt").read_text() == "mine"
    assert stamp(venv) == {"wheel": BUILD, "made": False, "finished": True}


def test_a_runtime_that_does_not_start_is_not_taken_for_installed(tmp_path: Path, wheels: Path) -> None:
    bring(wheels, server="import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    with pytest.raises(CommandError, match="this processor cannot run the runtime's instructions"):
        install(tmp_path / "venv", Host())
    assert not runtime.observe(Host(), str(tmp_path / "venv"), []).exists
