"""Where oeprov keeps its state: the usual directory, and the option that names another one."""

from __future__ import annotations

import shlex
from pathlib import Path

DEFAULT_STATE_DIR = Path(".oeprov")


def state_flag(state_dir: Path) -> str:
    """The option that names the state directory, where it is not the usual one."""
    same = state_dir.absolute() == DEFAULT_STATE_DIR.absolute()
    return "" if same else f" --state-dir {shlex.quote(str(state_dir))}"
