"""The runtime's environment on a host: real environments, a wheel of one module, and what interrupts it."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pip
import pytest

from provision.node import build, runtime
from provision.node.apply import apply
from provision.node.command import CommandError, Result, System
from provision.node.step import Applied, Step

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


def bring(wheels: Path, name: str = BUILD, server: str = "print('usage')\n") -> None:
    """Put a wheel of oeprov on the host: pip takes it for the real one."""
    (wheels / name).mkdir(parents=True)
    info = "oeprov-0.1.0.dist-info"
    with zipfile.ZipFile(wheels / name / "oeprov-0.1.0-py3-none-any.whl", "w") as file:
        file.writestr("oe_runtime/__init__.py", "")
        file.writestr("oe_runtime/server.py", server)
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: oeprov\nVersion: 0.1.0\nRequires-Dist: nope\n"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def install(venv: Path, system: System, name: str = BUILD) -> Applied:
    args = {"venv": str(venv), "python": sys.executable, "build": name, "offline": True, "requirements": []}
    return apply(Step("runtime", "install", "why", action="install_runtime", args=args), system)


def stamp(venv: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((venv / runtime.STAMP).read_text())
    return found


def test_a_server_host_gets_the_wheel_and_nothing_from_elsewhere(tmp_path: Path, wheels: Path) -> None:
    venv, system = tmp_path / "venv", Host()
    bring(wheels)
    assert install(venv, system) == Applied(True, f"installed oeprov in {venv}")
    assert "include-system-site-packages = true" in (venv / "pyvenv.cfg").read_text()
    assert [line for line in system.commands if "pip" in line] == [
        f"{venv}/bin/python -m pip install --disable-pip-version-check --no-deps --no-index "
        f"--force-reinstall {wheels}/{BUILD}/oeprov-0.1.0-py3-none-any.whl"
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

    # Another build of the same version takes its place, in the same environment.
    (venv / "kept").write_text("")
    bring(wheels, OTHER, "print('newer')\n")
    assert install(venv, system, OTHER).changed
    assert (venv / "kept").exists()
    done = system.run([f"{venv}/bin/python", "-I", "-m", "oe_runtime.server"])
    assert done.out == "newer\n", done.err
    assert stamp(venv)["wheel"] == OTHER


@pytest.mark.parametrize("where", ["-m venv", "-m pip", "oe_runtime.server"])
def test_what_an_interruption_leaves_is_made_again(tmp_path: Path, wheels: Path, where: str) -> None:
    venv = tmp_path / "venv"
    bring(wheels)
    with pytest.raises(CommandError, match="power was cut"):
        install(venv, Host(fail=where))
    assert stamp(venv) == {"wheel": "", "made": True, "finished": False}
    (venv / "half").write_text("")
    assert runtime.observe(Host(), str(venv), [], sys.executable).made
    assert install(venv, Host()).changed
    assert not (venv / "half").exists()
    assert stamp(venv) == {"wheel": BUILD, "made": True, "finished": True}


def test_without_the_wheel_nothing_is_touched(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=build.WHEEL_WANTED + BUILD):
        install(tmp_path / "venv", Host())
    assert not (tmp_path / "venv").exists()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, wheels: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "thesis.txt").write_text("mine")
    bring(wheels)
    with pytest.raises(CommandError, match="the directory is not empty, and what is in it is no Python"):
        install(venv, Host())
    assert [path.name for path in venv.iterdir()] == ["thesis.txt"]
    assert (venv / "thesis.txt").read_text() == "mine"


def test_an_environment_of_somebody_else_is_never_emptied(tmp_path: Path, wheels: Path) -> None:
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
    assert runtime.observe(Host(), str(tmp_path / "venv"), []).unfinished
