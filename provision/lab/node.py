"""One node of a lab: commands on it, its power and its network cable."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from provision.cluster.errors import LabError
from provision.lab import machine
from provision.lab.machine import Machine

BOOT_SECONDS = 1200  # that a boot may take; seven minutes were seen on a machine that did other things too


class Node:
    """One virtual node of a lab."""

    def __init__(
        self,
        spec: Machine,
        directory: Path,
        key: Path,
        known_hosts: Path,
        accelerator: Callable[[], list[str]],
        qemu: Callable[[], list[str]] = lambda: [machine.QEMU],
    ) -> None:
        self.spec = spec
        # Where its disk, its modules and its console log lie.
        self.directory = directory
        self._key, self._known_hosts, self._accelerator, self._qemu = key, known_hosts, accelerator, qemu

    @property
    def name(self) -> str:
        """Its name in the inventory, and its host name."""
        return self.spec.name

    @property
    def ssh_port(self) -> int:
        """Port of 127.0.0.1 that leads to its sshd."""
        return self.spec.ssh_port

    @property
    def console(self) -> Path:
        """What it wrote on its serial console, over all boots."""
        return self.directory / "console.log"

    @property
    def pid(self) -> int:
        """Process id of its QEMU; 0: it is off."""
        return machine.pid(self.directory)

    def ssh_command(self, *, tty: bool = False, options: Sequence[str] = ()) -> list[str]:
        """Command line of an ssh to it; host key checking is on. With ``tty``, ssh may ask and show."""
        settings = [
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={self._known_hosts}",
            "IdentitiesOnly=yes",
        ]
        settings += ["GlobalKnownHostsFile=/dev/null", "LogLevel=ERROR", "ServerAliveInterval=15"]
        settings += ["ConnectTimeout=10", *([] if tty else ["BatchMode=yes"])]
        argv = ["ssh", "-F", "/dev/null", "-p", str(self.ssh_port), "-i", str(self._key), *options]
        return [*argv, *(word for setting in settings for word in ("-o", setting)), "root@127.0.0.1"]

    def run(
        self, command: str | Sequence[str], *, stdin: str = "", timeout: float = 300
    ) -> tuple[int, str, str]:
        """(exit status, output, errors) of a command on the node: a shell line, or a list of words.

        255 is also ssh's own failure, 124 that the time was over.
        """
        line = command if isinstance(command, str) else shlex.join(command)
        try:
            done = subprocess.run(
                [*self.ssh_command(), line],
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return 124, "", f"no end within {timeout} s"
        return done.returncode, done.stdout, done.stderr

    def check(self, command: str | Sequence[str], *, stdin: str = "", timeout: float = 300) -> str:
        """Output of a command that must succeed; LabError with what it said when it does not."""
        code, out, err = self.run(command, stdin=stdin, timeout=timeout)
        if code:
            said = (err or out).strip() or "it said nothing"
            raise LabError(f"{self.name}: {command} ended with {code}: {said}")
        return out

    def boot_id(self) -> str:
        """Identifier of the boot that it runs."""
        return self.check("cat /proc/sys/kernel/random/boot_id").strip()

    def wait_ssh(self, seconds: float = BOOT_SECONDS, after: str = "") -> None:
        """Return once the node lets us in; with ``after`` (a boot_id), once it does so in another boot.

        Raises LabError with the console's last line when that takes more than ``seconds``.
        """
        end = time.monotonic() + seconds
        while True:
            if not self.pid:
                raise LabError(
                    f"{self.name} is off; `oeprov lab start {self.name}` (console: {self.console})"
                )
            if self._greets():
                code, out, _ = self.run("cat /proc/sys/kernel/random/boot_id", timeout=60)
                if code == 0 and out.strip() != after:
                    return
            if time.monotonic() > end:
                text = self.console.read_text(errors="replace") if self.console.exists() else ""
                last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "nothing")
                where = f"its console ({self.console}) says"
                raise LabError(f"{self.name} has no ssh after {seconds:.0f} s; {where}: {last}")
            time.sleep(0.5)

    def _greets(self) -> bool:
        """Whether an sshd answers; cheaper than an ssh that fails."""
        try:
            with socket.create_connection(("127.0.0.1", self.ssh_port), timeout=5) as connection:
                connection.settimeout(5)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def start(self) -> None:
        """Power on, if it is off; does not wait."""
        if not self.pid:
            machine.start(self.spec, self._accelerator(), self.directory, self._qemu())

    def power_cut(self) -> None:
        """Cut the power: nothing gets written any more; the modules keep what they hold."""
        machine.kill(self.directory)

    def shutdown(self, seconds: float = 120) -> None:
        """Press the power button and wait; LabError when it is still on after ``seconds``."""
        if not machine.power_button(self.directory, seconds):
            raise LabError(f"{self.name} is still on {seconds:.0f} s after its power button was pressed")

    def cable(self, plugged: bool) -> None:
        """Plug the network cable in or pull it: established connections stall, they are not reset."""
        machine.qmp(self.directory, "set_link", name="net0", up=plugged)
