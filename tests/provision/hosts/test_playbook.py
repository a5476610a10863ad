"""Where ansible-playbook is found."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

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
