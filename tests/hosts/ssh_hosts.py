"""Throw-away SSH hosts: network namespaces with an sshd, an address, a name and a disk of their own each.

Their root is this machine's own, under an overlay in memory: nothing they write is kept, and this machine's
sshd, /etc and ~/.ssh are not touched. A bridge in a namespace of its own joins them; one interface leads
there from this machine. All of it is held by processes that wait on pipes from here, so that a crash of this
process, or its end, takes everything away.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SSHD_CONFIG = """\
Port 22
HostKey /etc/oeprov-test/host_key
AuthorizedKeysFile /etc/oeprov-test/authorized_keys
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
StrictModes no
"""
_NEEDED = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "mount", "chroot")
# A host that is cut off has an address on the link that nobody has: packets to it vanish.
_NOBODY = "02:00:00:00:00:01"
_COUNTER = itertools.count()
# All network namespaces share one table of neighbours. With more than this many, "No route to host" comes.
_MOST_NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")


def why_not() -> str:
    """Why such hosts cannot be had here; empty when they can."""
    if os.geteuid() != 0:
        return "throw-away SSH hosts need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in _NEEDED if not shutil.which(name, path=path)]
    if absent:
        return f"throw-away SSH hosts need {', '.join(absent)}"
    # Everything that a host needs, tried once.
    script = (
        "set -e; d=$(mktemp -d); trap 'umount -R $d; rmdir $d' EXIT;"
        "mount -t tmpfs none $d; mkdir $d/u $d/w $d/r;"
        "mount -t overlay -o lowerdir=/,upperdir=$d/u,workdir=$d/w none $d/r; mount -t sysfs none $d/r/sys;"
        "ip link add br0 type bridge; ip link add veth0 type veth peer name veth1"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces or overlays cannot be made here: {done.stderr.strip()}" if done.returncode else ""


def why_no_systemd() -> str:
    """Why such hosts cannot have a systemd of their own here; empty when they can."""
    if reason := why_not():
        return reason
    if not shutil.which("systemd-nspawn"):
        return "hosts with a systemd of their own need systemd-nspawn (Debian's package systemd-container)"
    groups = Path("/sys/fs/cgroup")
    if not any(os.access(path / "cgroup.procs", os.W_OK) for path in (groups, groups / "systemd")):
        return (
            f"hosts with a systemd of their own need a control group each, and {groups} has none to write to"
        )
    return ""


@dataclass
class SshHost:
    """One host; ``name`` is its host name and the name in inventories."""

    name: str
    address: str
    directory: Path
    process: subprocess.Popen[str]

    def start(self) -> None:
        """Start its sshd; returns when it answers."""
        self.tell("start")
        self.wait_ssh()

    def stop(self) -> None:
        """Kill its sshd and every login; returns when connections to it are refused."""
        self.tell("stop")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self.address, 22), timeout=5).close()
            except ConnectionRefusedError:
                return
            except OSError:
                pass  # one that was under way when sshd was killed
            time.sleep(0.02)
        raise TimeoutError(f"{self.address} does not refuse connections after its sshd was killed")

    def freeze(self) -> None:
        """Let its sshd accept connections and never answer."""
        os.kill(self._sshd(), signal.SIGSTOP)

    def hang_logins(self) -> None:
        """Let each login end in a shell that never comes to its command."""
        self.enter("sh", "-c", "echo 'exec sleep 600' >/root/.bashrc")

    def hang_reading(self, path: str) -> None:
        """Let programs that read a file wait for ever."""
        self.enter("sh", "-c", 'rm -f "$0" && mkfifo "$0"', path)

    def tell(self, command: str) -> None:
        """Give the host's process one command and wait until it is done."""
        self.send(command)
        self.expect(command)

    def send(self, command: str) -> None:
        """Give the host's process one command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def expect(self, command: str) -> None:
        """Wait until the process says that a command is done; RuntimeError when it ended instead."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if said.strip() != command:
            raise RuntimeError(f"{self.name}: {(self.directory / 'host.log').read_text()}")

    def wait_ssh(self, seconds: float = 20) -> None:
        """Wait until the sshd sends its greeting."""
        end = time.monotonic() + seconds
        while True:
            try:
                with socket.create_connection((self.address, 22), timeout=5) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name}: no sshd: {(self.directory / 'sshd.log').read_text()}")
            time.sleep(0.02)

    def cpu_seconds(self) -> float:
        """Processor time of its sshd and of everything that has ended below it."""
        fields = Path(f"/proc/{self._sshd()}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def _sshd(self) -> int:
        return _child(_child(self.process.pid))  # sh → unshare → sshd

    def written(self) -> str:
        """Every file that was written to its disk since it was made, with time and size."""
        disk = str(self.directory / "disk" / "upper")
        argv = ["nsenter", f"--target={self.process.pid}", "--mount", "find", disk]
        argv += ["-printf", "%P %s %T@\\n"]
        return "".join(
            sorted(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines(True))
        )

    def enter(self, *argv: str) -> str:
        """Standard output of a command in the host's own root, run from outside: no SSH involved."""
        namespaces = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--uts", "--ipc"]
        root = str(self.directory / "disk" / "root")
        done = subprocess.run(
            [*namespaces, "chroot", root, *argv], capture_output=True, text=True, check=True
        )
        return done.stdout


class SshHosts:
    """``count`` running hosts; a context manager. ``directory`` gets keys and logs, on this machine's disk.

    ``layer`` is a directory whose files are copied over this machine's in every host, such as a stub of what
    a test needs there. With ``systemd`` its own one runs on each of them (see ``why_no_systemd``). They see
    ``packages``, a directory of this machine, read-only in /srv/packages. ``sshd``: lines of sshd's
    configuration, which come before ours and so count.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        layer: Path | None = None,
        prefix: str = "node",
        systemd: bool = False,
        packages: Path | None = None,
        sshd: str = "",
    ) -> None:
        self.directory = directory
        self._sshd_config = sshd + _SSHD_CONFIG
        self.key = directory / "id_ed25519"
        self.known_hosts = directory / "known_hosts"
        self._layer = str(layer or "")
        self._packages = str(packages or "")
        self._nspawn = (shutil.which("systemd-nspawn") or "") if systemd else ""
        self._switch: subprocess.Popen[str] | None = None
        self.controller = ""  # this machine's address for the hosts
        self._interface = f"oep{os.getpid()}.{next(_COUNTER)}"[-15:]
        self._hosts: list[SshHost] = []
        self._names = [f"{prefix}{index:03d}" for index in range(1, count + 1)]

    def __enter__(self) -> SshHosts:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[SshHost]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> SshHost:
        return self._hosts[index]

    def cut(self, host: SshHost) -> None:
        """Let packets to a host vanish, as a firewall that drops them does."""
        argv = ["ip", "neigh", "replace", host.address, "lladdr", _NOBODY, "dev", self._interface]
        subprocess.run([*argv, "nud", "permanent"], check=True)

    def unplug(self, host: SshHost) -> None:
        """Pull the host's cable: nothing reaches it or comes from it until ``plug``."""
        self._set_cable(host, "down")

    def plug(self, host: SshHost) -> None:
        """Put the host's cable back."""
        self._set_cable(host, "up")

    def _set_cable(self, host: SshHost, state: str) -> None:
        assert self._switch is not None
        _ip(self._switch.pid, f"link set h{self._hosts.index(host)} {state}")

    def ssh_options(self) -> list[str]:
        """What ``ssh`` needs to reach the hosts as root."""
        return [
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", f"IdentityFile={self.key}"),
            *("-o", "IdentitiesOnly=yes"),
        ]

    def write_known_hosts(self) -> None:
        """Every host's key, under its address."""
        lines = [f"{host.address} {(host.directory / 'host_key.pub').read_text()}" for host in self]
        self.known_hosts.write_text("".join(lines))

    def close(self) -> None:
        """End everything; waits until it has gone."""
        processes = [host.process for host in self._hosts] + ([self._switch] if self._switch else [])
        for process in processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._hosts, self._switch = [], None

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        self._switch = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        network = _free_network()
        self.controller = f"{network}.0.1"
        for index, name in enumerate(self._names):
            self._hosts.append(self._make(name, f"{network}.{(index + 10) // 250}.{(index + 10) % 250 + 2}"))
        self._wire(network)
        for host in self._hosts:
            host.send("start")
        for host in self._hosts:
            host.expect("start")
        for host in self._hosts:
            host.wait_ssh()
        self.write_known_hosts()

    def _make(self, name: str, address: str) -> SshHost:
        directory = self.directory / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        (directory / "sshd_config").write_text(self._sshd_config)
        shutil.copy(self.key.with_suffix(".pub"), directory / "authorized_keys")
        argv = ["unshare", "--net", "--mount", "--uts", "--ipc"]
        with (directory / "host.log").open("w") as log:
            process = subprocess.Popen(
                [
                    *argv,
                    "sh",
                    str(_HERE / "host.sh"),
                    str(directory),
                    name,
                    self._layer,
                    self._nspawn,
                    self._packages,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return SshHost(name, address, directory, process)

    def _wire(self, network: str) -> None:
        """One bridge, a cable to each host and one to this machine."""
        assert self._switch is not None
        neighbours = 4 * len(self._hosts)  # each host and this machine know each other, and twice that
        if int(_MOST_NEIGHBOURS.read_text()) < neighbours:
            _MOST_NEIGHBOURS.write_text(str(neighbours))
        pids = {process.pid for process in [self._switch, *(host.process for host in self._hosts)]}
        _await_namespaces(pids)
        _ip(None, f"link add {self._interface} type veth peer name uplink netns {self._switch.pid}")
        _ip(None, f"addr add {self.controller}/16 dev {self._interface}", f"link set {self._interface} up")
        lines = ["link add br0 type bridge", "link set br0 up", "link set uplink master br0 up"]
        for index, host in enumerate(self._hosts):
            lines.append(f"link add h{index} type veth peer name eth0 netns {host.process.pid}")
            lines.append(f"link set h{index} master br0 up")
        _ip(self._switch.pid, *lines)
        for host in self._hosts:
            _ip(
                host.process.pid, f"addr add {host.address}/16 dev eth0", "link set eth0 up", "link set lo up"
            )


def _child(pid: int) -> int:
    """The one child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _ip(pid: int | None, *lines: str) -> None:
    """``ip`` commands, in the network namespace of a process or here."""
    inside = ["nsenter", f"--target={pid}", "--net"] if pid else []
    subprocess.run([*inside, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _await_namespaces(pids: set[int]) -> None:
    """Wait until each process has left this one's network namespace."""
    mine = os.readlink("/proc/self/ns/net")
    end = time.monotonic() + 20
    while any(os.readlink(f"/proc/{pid}/ns/net") == mine for pid in pids):
        if time.monotonic() > end:
            raise RuntimeError("no network namespace could be made")
        time.sleep(0.01)


def _free_network() -> str:
    """The first two numbers of a private /16 that this machine has no address in."""
    used = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    seconds = [213 + (os.getpid() + index) % 40 for index in range(40)]
    return next(net for second in seconds if f" {(net := f'10.{second}')}." not in used)
