"""Stand-ins for programs, which write down how they were called."""

import json
import shlex
import sys
from pathlib import Path

RECORD = """\
import json, os, subprocess, sys, time
NAME, LOG = {name!r}, {log!r}
with open(LOG, "a") as file:
    file.write(json.dumps([NAME, *sys.argv[1:]]) + "\\n")
"""


def write_program(path: Path, code: str) -> None:
    """Make `path` a program of this Python, whose own path may have a space: `#!` cannot name such a one."""
    # A command for sh, a string for Python.
    path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -IS \"$0\" \"$@\"\n'''\n{code}")
    path.chmod(0o755)


class Programs:
    """Stand-ins that write down how they were called."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "calls.log"
        directory.mkdir(parents=True, exist_ok=True)
        self.log.touch()

    def add(self, name: str, code: str = "") -> None:
        write_program(self.directory / name, RECORD.format(name=name, log=str(self.log)) + code)

    def calls(self, name: str = "") -> list[list[str]]:
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [words for words in found if name in ("", words[0])]
