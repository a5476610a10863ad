"""Other versions of Python than the one that runs the tests, where this machine has them."""

from __future__ import annotations

import glob
import os
import subprocess
from pathlib import Path


def find_python(version: str) -> Path | None:
    """Python `version` ("3.6") of PATH or of pyenv; None where there is none that this user can run."""
    pyenv = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    folders = [*os.get_exec_path(), *sorted(glob.glob(f"{pyenv}/versions/{version}*/bin"), reverse=True)]
    ask = "import sys; print('%d.%d %s' % (sys.version_info[0], sys.version_info[1], sys.executable))"
    for folder in folders:
        try:
            done = subprocess.run(
                [f"{folder}/python{version}", "-c", ask], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        found, _, path = done.stdout.strip().partition(" ")  # pyenv has a shim in PATH that only fails
        if found == version:
            return Path(path)
    return None
