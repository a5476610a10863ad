"""A user at a terminal, in a directory with the lab's inventory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.cluster import own_sources
from provision.lab import Lab
from provision.lab.node import BOOT_SECONDS

REPOSITORY = Path(__file__).parents[2]


class User:
    """Runs `oeprov` as a user would, on a copy of the lab's inventory that tests may change."""

    def __init__(self, lab: Lab, directory: Path, **settings: Any) -> None:
        self.lab = lab
        self.directory = directory
        self.inventory = directory / "lab.yml"
        self.inventory.write_text(lab.inventory.read_text())
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OEPROV_")},
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "300",
        }
        self.times: list[tuple[str, float]] = []
        self.set(oeprov_cluster="lab", **settings)

    def set(self, **settings: Any) -> None:
        """Variables of the parameter servers (those of the whole job under all)."""
        document = yaml.safe_load(self.inventory.read_text())
        for name, value in settings.items():
            wide = name.startswith(("training_", "oeprov_cluster"))
            group = document["all"] if wide else document["all"]["children"]["parameter_servers"]
            group.setdefault("vars", {})[name] = value
        self.inventory.write_text(yaml.safe_dump(document, sort_keys=False))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin an `oeprov` command in a session of its own, as in another terminal."""
        return subprocess.Popen(
            [sys.executable, "-m", "provision.cli", words[0], "-i", str(self.inventory), *words[1:]],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(
        self, command: subprocess.Popen[str], expect: int = 0, seconds: float = 2 * BOOT_SECONDS
    ) -> tuple[str, str]:
        """(output, errors) of a command that must end with ``expect``."""
        try:
            out, err = command.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGKILL)
            out, err = command.communicate()
            raise AssertionError(f"no end within {seconds} s: {out}{err}") from None
        assert command.returncode == expect, f"exit status {command.returncode}: {out}{err}"
        assert "Traceback" not in out + err
        return out, err

    def oeprov(self, *words: str, expect: int = 0) -> str:
        """Output and errors of a command that must end with ``expect``."""
        begun = time.monotonic()
        found = self.finish(self.start(*words), expect)
        self.times.append((" ".join(words), time.monotonic() - begun))
        return "".join(found)

    def json(self, *words: str, expect: int = 0) -> Any:
        """The document that a command with `--json` prints."""
        begun = time.monotonic()
        out, _ = self.finish(self.start(*words, "--json"), expect)
        self.times.append((" ".join(words), time.monotonic() - begun))
        return json.loads(out)

    def ansible(self, playbook: str, *words: str) -> str:
        """Output of one of our playbooks under plain `ansible-playbook`."""
        begun = time.monotonic()
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                "-i",
                str(self.inventory),
                str(REPOSITORY / "playbooks" / f"{playbook}.yml"),
                *words,
            ],
            cwd=self.directory,
            env={**self.environment, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.times.append((f"(ansible-playbook {playbook}.yml {' '.join(words)})", time.monotonic() - begun))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def consents(self, *words: str) -> list[str]:
        """The `--consent` options that a change needs, as its plan shows them."""
        pending = self.json(*words, "--check", expect=2)["pending"]
        objects = [
            f"{plan['host']}:{item}"
            for plan in pending
            for step in plan["steps"]
            for item in step["destroys"]
        ]
        return [word for item in dict.fromkeys(objects) for word in ("--consent", item)]

    def on(self, name: str, command: str, timeout: float = 300) -> str:
        """Output of a shell line on a node, which must succeed."""
        return self.lab.node(name).check(command, timeout=timeout)

    def everywhere(self, command: str) -> list[str]:
        """The same on all nodes, in their order."""
        return [node.check(command) for node in self.lab.nodes]

    def train(self, *more: str) -> dict[str, Any]:
        """The result of a training job that must end well."""
        found: dict[str, Any] = self.json("launch-training", *more)
        return found

    def told(self) -> str:
        """What each command took."""
        lines = [f"{seconds:7.1f} s  oeprov {words}" for words, seconds in self.times]
        return "\n".join([*lines, f"{sum(seconds for _, seconds in self.times):7.1f} s  in all"])


def bring_wheel(user: User) -> None:
    """Make the wheel for Debian 13 here, with a Python 3.13: an emulated node would compile for hours."""
    digest = own_sources.digest_of(REPOSITORY)[:16]
    directory = user.directory / ".oeprov/wheels/debian-13-x86_64-py3.13" / digest
    if list(directory.glob("*.whl")):
        return
    found = [shutil.which("python3.13"), *Path.home().glob(".pyenv/versions/3.13*/bin/python3.13")]
    # A shim of pyenv may be there without its Python.
    python = next((item for item in found if item and not subprocess.call([item, "-c", ""])), None)
    if python is None:
        pytest.skip("no Python 3.13 here, which the wheel for a Debian 13 node is made with")
    environment = user.directory / "python3.13"
    pip = [environment / "bin/python", "-m", "pip"]
    for words in (
        [python, "-m", "venv", environment],
        [*pip, "install", "-q", "scikit-build-core>=0.10", "pybind11>=2.12"],
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory, REPOSITORY],
    ):
        subprocess.run(words, check=True)
