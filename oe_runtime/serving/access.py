"""What clients of a serving process need: its certificate and a token, in files that may change."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from oe_runtime.errors import ServingError
from oe_runtime.support.token_file import read_secret, read_text, read_token


@dataclass(frozen=True)
class Access:
    """A certificate and its key in PEM, and a token; each may be empty."""

    certificate: str = ""
    key: str = ""
    token: str = ""

    def refusal(self, given: str | None) -> str:
        """Return why the value of a request's `authorization` is refused; "" if it is not."""
        scheme, _, token = (given or "").partition(" ")
        said = token.strip() if scheme.lower() == "bearer" else ""
        if not self.token or hmac.compare_digest(said.encode(), self.token.encode()):
            return ""
        sent = "none" if given is None else "another one"
        return f"this server needs a token, and {sent} was sent: send authorization: Bearer TOKEN"


class AccessFiles:
    """The files of --tls-cert, --tls-key and --request-token-file."""

    def __init__(self, certificate: Path | None, key: Path | None, token: Path | None) -> None:
        """Raises ServingError for half of a pair."""
        if (certificate is None) != (key is None):
            flags = ["--tls-cert", "--tls-key"]
            raise ServingError(" needs ".join(reversed(flags) if certificate is None else flags))
        self._certificate, self._key, self._token = certificate, key, token
        self._seen: list[object] = []

    @property
    def scheme(self) -> str:
        """https if connections are encrypted, else http."""
        return "http" if self._certificate is None else "https"

    def read(self) -> Access:
        """Read the files. Raises ValueError."""
        self._seen = self._look()
        certificate = "" if self._certificate is None else read_text(self._certificate, "certificate")
        key = "" if self._key is None else read_secret(self._key, "key", by_group=True)
        token = "" if self._token is None else read_token(self._token, by_group=True)
        return Access(certificate, key, token)

    def have_changed(self) -> bool:
        """Whether a file is another one than at the last `read`."""
        return self._look() != self._seen

    def describe_risk(self, host: str) -> str:
        """Return what others on the network can do where the server listens on `host`; "" if nothing."""
        if _is_loopback(host) or (self._certificate and self._token):
            return ""
        if self._token is None:
            does = "without a token" + ("" if self._certificate else " and without encryption")
            missing = "--request-token-file" + ("" if self._certificate else ", --tls-cert and --tls-key")
        else:
            does, missing = "without encryption, so that the token can be read", "--tls-cert and --tls-key"
        return f"--host {host} is reached from other machines, {does}; set {missing}, or put a proxy in front"

    def _look(self) -> list[object]:
        found: list[object] = []
        for file in (self._certificate, self._key, self._token):
            try:
                status = None if file is None else file.stat()
            except OSError as error:
                found.append(str(error))
                continue
            found.append(status and (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode))
        return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
