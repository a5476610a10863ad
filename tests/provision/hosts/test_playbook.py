"""Where ansible-playbook is found."""

import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

from provision.hosts import playbook

FIND = "import shutil; from provision.hosts import playbook; "
FIND += "print(shutil.which('ansible-playbook', path=playbook._environment()['PATH']))"


def test_a_second_environment_runs_the_ansible_of_the_first(tmp_path: Path) -> None:
    """It was said to be incomplete, though all packages came from the first by a .pth file."""
    venv.create(tmp_path / "second", with_pip=False)
    python = tmp_path / "second" / "bin" / "python"
    first = sysconfig.get_path("purelib")
    packages = tmp_path / "second" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (packages / "first.pth").write_text(f"import site; site.addsitedir({first!r})\n")
    done = subprocess.run(
        [python, "-c", FIND],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": "/nowhere"},
        cwd=tmp_path,
    )
    found = Path(done.stdout.strip())
    assert found.parent.samefile(sysconfig.get_path("scripts"))


def test_without_the_package_there_is_still_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs the program says that it is missing."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    monkeypatch.setenv("PATH", "/somewhere")
    assert playbook._environment()["PATH"].split(":") == [str(Path(sys.executable).parent), "/somewhere"]
