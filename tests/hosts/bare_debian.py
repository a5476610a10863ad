"""Hosts with a Debian of their own: an sshd in a pristine root, which apt can really change.

``ssh_hosts`` shares this machine's root, where everything is installed already; here is only what Debian and
an sshd need. The root is made once by mmdebstrap and kept in ``.oeprov/test-roots``; a host writes to an
overlay. It listens on a port of 127.0.0.1 and uses this machine's network, so that it reaches mirrors as this
machine does. The end of this process, however it comes, ends the host and its mounts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import time
import zipfile
from pathlib import Path

from provision.cluster import own_sources
from provision.lab import image

ROOTS = Path(__file__).parents[2] / ".oeprov" / "test-roots"
SUITE, PACKAGES = "bookworm", "python3,openssh-server"
_NEEDED = ("mmdebstrap", "unshare", "nsenter", "chroot", "mount", "ssh", "ssh-keygen")
_SCRIPT = """\
set -eu
directory=$1 lower=$2 port=$3 root=$1/root
mkdir -p "$directory/upper" "$directory/work" "$root"
mount -t overlay -o "lowerdir=$lower,upperdir=$directory/upper,workdir=$directory/work" root "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t sysfs sys "$root/sys"
mount -t tmpfs -o mode=755 run "$root/run"
mkdir -p "$root/run/sshd" "$root/root/.ssh"
cp "$directory/id_ed25519.pub" "$root/root/.ssh/authorized_keys"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
rm -f "$root"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
cp "$root/etc/ssh/ssh_host_ed25519_key.pub" "$directory/host_key.pub"
chroot "$root" /usr/sbin/sshd -D -p "$port" -o ListenAddress=127.0.0.1 -o PidFile=none -o UsePAM=no \\
    -o UseDNS=no -o StrictModes=no </dev/null >"$directory/sshd.log" 2>&1 &
cat
"""


def why_not() -> str:
    """Why such hosts cannot be had here; empty when they can."""
    if os.geteuid() != 0:
        return "hosts with a Debian of their own need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in _NEEDED if not shutil.which(name, path=path)]
    return f"hosts with a Debian of their own need {', '.join(absent)}" if absent else ""


def pristine_root(packages: str = PACKAGES, suite: str = SUITE) -> Path:
    """The root that all hosts begin from; made now if there is none."""
    sources = [line.replace(SUITE, suite) for line in image.sources()]  # this machine's own
    recipe = [suite, packages, *sources]
    root = ROOTS / hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
    ROOTS.mkdir(parents=True, exist_ok=True)
    with (ROOTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            making = root.with_suffix(".making")
            shutil.rmtree(making, ignore_errors=True)
            argv = ["unshare", "--mount", "--propagation", "private", "mmdebstrap", "--quiet", "--mode=root"]
            argv += ["--variant=apt", f"--include={packages}", *image.apt_options(), "--skip=cleanup/apt"]
            subprocess.run([*argv, suite, str(making), *sources], check=True)
            making.rename(root)
    return root


def put_wheel(state: Path, key: str) -> None:
    """A wheel for hosts of that key, whose server only says that it starts: what is tested is the host."""
    directory = state / "wheels" / key / own_sources.digest()[:16]
    directory.mkdir(parents=True)
    with zipfile.ZipFile(directory / "oeprov-0.1.0-py3-none-any.whl", "w") as file:
        file.writestr("oe_runtime/__init__.py", "")
        file.writestr("oe_runtime/server.py", "print('usage')\n")
        info = "oeprov-0.1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: oeprov\nVersion: 0.1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


class BareDebian:
    """One running host; a context manager. ``directory`` gets its disk, keys and logs."""

    def __init__(self, directory: Path, packages: str = PACKAGES, suite: str = SUITE) -> None:
        self.directory = directory
        self.lower = pristine_root(packages, suite)
        self.key = directory / "id_ed25519"
        self.known_hosts = directory / "known_hosts"
        self.root = directory / "root"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BareDebian:
        self.directory.mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        script = self.directory / "host.sh"
        script.write_text(_SCRIPT)
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--propagation", "private"]
        self._process = subprocess.Popen(
            [*argv, "sh", str(script), str(self.directory), str(self.lower), str(self.port)],
            stdin=subprocess.PIPE,
        )
        end = time.monotonic() + 30
        while not self._greets():
            if time.monotonic() > end or self._process.poll() is not None:
                self.close()
                raise RuntimeError(f"no sshd came up: {(self.directory / 'sshd.log').read_text()}")
            time.sleep(0.05)
        kind, key = (self.directory / "host_key.pub").read_text().split()[:2]
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the host and all that runs there."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, command: str, *, check: bool = True) -> str:
        """Standard output of a line of shell on the host, over SSH."""
        argv = [
            "ssh",
            *self.ssh_options(),
            "-i",
            str(self.key),
            "-p",
            str(self.port),
            "root@127.0.0.1",
            command,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"`{command}` ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def bind(self, *paths: Path) -> None:
        """Show directories of this machine at the same places of the host."""
        assert self._process is not None
        for path in paths:
            there = f"{self.root}{path}"
            line = f"mkdir -p '{there}' && mount --bind '{path}' '{there}'"
            argv = ["nsenter", "--mount", f"--target={self._process.pid}", "sh", "-c", line]
            subprocess.run(argv, check=True)

    def ssh_options(self) -> list[str]:
        """What ``ssh`` needs besides address, port and key."""
        return ["-F", "/dev/null", "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "IdentitiesOnly=yes"]

    def inventory(self) -> dict[str, object]:
        """The host's connection variables."""
        return {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.known_hosts}",
        }

    def _greets(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False
