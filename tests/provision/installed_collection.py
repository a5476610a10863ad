"""The collection as users have it: built, installed, run by an Ansible that does not know this checkout."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The environment of the tests has an editable installation of oeprov, which the collection must do without.
_WITHOUT_OEPROV = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.remove({!r})
"""


class Collection:
    """The collection, installed below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "ansible_collections" / "oeprov" / "oeprov"
        python = directory / "python"
        python.mkdir(parents=True)
        (python / "sitecustomize.py").write_text(_WITHOUT_OEPROV.format(str(REPOSITORY)))
        dropped = ("ANSIBLE_", "PYTHON")
        known = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.environment = {
            **known,
            "ANSIBLE_COLLECTIONS_PATH": str(directory),
            "ANSIBLE_HOME": str(directory / "home"),
            "ANSIBLE_LOCALHOST_WARNING": "False",
            "ANSIBLE_PIPELINING": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(python),
        }
        self.galaxy("build", str(REPOSITORY), "--output-path", str(directory))
        (self.archive,) = directory.glob("*.tar.gz")
        self.galaxy("install", "--offline", str(self.archive), "-p", str(directory))

    def galaxy(self, *words: str) -> None:
        """``ansible-galaxy collection``."""
        self.run("ansible-galaxy", "collection", *words, cwd=self.directory)

    def play(self, playbook: Path, inventory: Path, *words: str, expect: int = 0) -> str:
        """Plain ``ansible-playbook``, in the directory of the playbook; gives its output."""
        argv = ("ansible-playbook", "-i", str(inventory), str(playbook), *words)
        return self.run(*argv, cwd=playbook.parent, expect=expect)

    def run(self, program: str, *words: str, cwd: Path, expect: int = 0) -> str:
        """A program of this Python's environment."""
        argv = [str(Path(sys.executable).parent / program), *words]
        done = subprocess.run(
            argv, cwd=cwd, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr
