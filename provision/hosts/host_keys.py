"""What OpenSSH's client would do for a host (``ssh -G``): address, jump hosts, known host keys.

The first login is Fabric's, which must end at the same host and check the same keys.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.cluster.errors import ConvergeError, HostError
from provision.cluster.inventory import Host
from provision.hosts import remote
from provision.node.command import flush_directory

if TYPE_CHECKING:  # slow to import
    import paramiko

_SAFE = re.compile(r"[\w.:%@-]+")
_TOKEN = re.compile(r"%(.)")


@dataclass(frozen=True)
class Route:
    """How to reach a host's sshd, and by which name known_hosts knows it."""

    host: str
    address: str
    port: int
    user: str
    known_as: str
    files: tuple[Path, ...]  # known_hosts of the user, then of the machine
    record_in: Path | None  # None: the user's options keep none
    hashed: bool
    proxy: tuple[str, ...]  # a command whose input and output are the connection; empty: none
    identities: tuple[Path, ...]  # private keys that ssh would try

    @property
    def where(self) -> str:
        """The host for messages."""
        return f"{self.address} port {self.port}"


def find_route(host: Host) -> Route:
    """The route to a host; HostError where ssh does not take its options."""
    return parse_route(host.name, remote.settings(host))


def parse_route(name: str, text: str) -> Route:
    """The route in the output of ``ssh -G``."""
    pairs = [line.partition(" ")[::2] for line in text.splitlines()]
    values = dict(reversed(pairs))  # the first of a kind counts
    address, user, port = values["hostname"], values["user"], int(values.get("port", "22"))
    for word in (address, user):
        if not _SAFE.fullmatch(word):
            raise HostError(name, f"the name {word!r} has characters that ssh takes for others; correct it")
    alias = values.get("hostkeyalias", "")
    own = _paths(values.get("userknownhostsfile", "~/.ssh/known_hosts"))
    shared = _paths(values.get("globalknownhostsfile", ""))
    return Route(
        host=name,
        address=address,
        port=port,
        user=user,
        known_as=alias or (address if port == 22 else f"[{address}]:{port}"),
        files=(*own, *shared),
        record_in=own[0] if own and str(own[0]) != os.devnull else None,
        hashed=values.get("hashknownhosts") == "yes",
        proxy=_proxy(values, address, port, user),
        identities=tuple(_path(value) for key, value in pairs if key == "identityfile"),
    )


def _path(word: str) -> Path:
    return Path(word).expanduser()


def _paths(words: str) -> list[Path]:
    """Absolute paths in one line, which may have spaces inside."""
    return [_path(word) for word in re.split(r"\s+(?=[/~])", words.strip()) if word not in ("", "none")]


def _proxy(values: dict[str, str], address: str, port: int, user: str) -> tuple[str, ...]:
    """ProxyJump and ProxyCommand as ssh carries them out."""
    jump, command = values.get("proxyjump", "none"), values.get("proxycommand", "none")
    if jump != "none":
        *before, last = jump.split(",")
        through = ["-J", ",".join(before)] if before else []
        target = f"[{address}]:{port}"
        own = ["-oBatchMode=yes", f"-oConnectTimeout={remote.CONNECT_TIMEOUT}"]
        if not last.startswith("ssh://"):
            last = "ssh://" + last
        return ("ssh", "-F", str(remote.CONFIG), *own, *through, "-W", target, "--", last)
    if command != "none":
        tokens = {"%": "%", "h": address, "p": str(port), "r": user, "n": address}
        line = _TOKEN.sub(lambda match: tokens.get(match[1], match[0]), command)
        return ("sh", "-c", "exec " + line)  # as ssh itself runs it
    return ()


def known_keys(route: Route, file: Path | None = None, names: tuple[str, ...] = ()) -> set[tuple[str, str]]:
    """The entries (type, base64) that known_hosts has for a host.

    ``file``: read only this one; ``names``: more names of the host.
    """
    found: set[tuple[str, str]] = set()
    revoked: set[tuple[str, str]] = set()
    for path in [file] if file else route.files:
        for name in (route.known_as, *names) if path.exists() else ():
            line = ["ssh-keygen", "-F", name, "-f", str(path)]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            for words in (item.split() for item in done.stdout.splitlines() if not item.startswith("#")):
                if words[0] == "@revoked":
                    revoked.add((words[2], words[3]))
                elif not words[0].startswith("@") and len(words) > 2:
                    found.add((words[1], words[2]))
    return found - revoked


def fingerprint(key: paramiko.PKey) -> str:
    """A host key as ``ssh-keygen -l`` shows it."""
    return f"{key.get_name().removeprefix('ssh-').upper()} {key.fingerprint}"


def entry(key: paramiko.PKey) -> tuple[str, str]:
    """Type and key in base64, as in known_hosts."""
    return key.get_name(), key.get_base64()


def line_of(route: Route, key: paramiko.PKey, *, hashed: bool = False) -> str:
    """The line of known_hosts for a host's key."""
    from paramiko import HostKeys

    name = HostKeys.hash_host(route.known_as) if hashed else route.known_as
    return " ".join((name, *entry(key))) + "\n"


def record(route: Route, key: paramiko.PKey) -> None:
    """Append a host's key to the user's known_hosts; once."""
    path = route.record_in
    if path is None or entry(key) in known_keys(route, path):
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            end = b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
            os.write(descriptor, end + line_of(route, key, hashed=route.hashed).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        flush_directory(str(path.parent))
    except OSError as error:
        raise ConvergeError(f"{path}: cannot be written: {error.strerror}") from None


def public_key(host: Host, route: Route) -> str:
    """The public key that ssh will log in with, as authorized_keys has it; HostError says how to get one."""
    for path in route.identities:
        public = Path(f"{path}.pub")
        if path.suffix == ".pub" and path.exists():  # the agent has the private one
            return _usable(host, path, None)
        if public.exists() and path.exists():
            return _usable(host, public, path)
        if path.exists():
            return _derived(host, path)
    agent = _agent_keys()
    if agent and not host.private_key:
        return agent[0]
    if host.private_key:
        raise HostError(host.name, f"there is no key {host.private_key}; make it with `ssh-keygen -f FILE`")
    raise HostError(host.name, "there is no SSH key here to install; make one: ssh-keygen -t ed25519")


def _usable(host: Host, public: Path, private: Path | None) -> str:
    key = public.read_text(errors="replace").strip()
    if _blob(key) in map(_blob, _agent_keys()):
        return key
    if private is None:
        raise HostError(host.name, f"ssh-agent does not hold the key of {public}: ssh-add it")
    _derived(host, private)  # it opens without a passphrase
    return key


def _derived(host: Host, private: Path) -> str:
    """The public half of a private key."""
    line = ["ssh-keygen", "-y", "-P", "", "-f", str(private)]
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    if "passphrase" in done.stderr:
        raise HostError(
            host.name,
            f"the key {private} has a passphrase and ssh-agent does not hold it, so that no later login "
            f"would work: ssh-add {private}",
        )
    raise HostError(host.name, f"the key {private} cannot be read: {remote.last_line(done.stderr)}")


def _blob(line: str) -> str:
    words = line.split()
    return words[1] if len(words) > 1 else ""


def _agent_keys() -> list[str]:
    if not os.environ.get("SSH_AUTH_SOCK"):
        return []
    done = subprocess.run(["ssh-add", "-L"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
