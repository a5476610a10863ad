"""Names of services and of their pods, answered from the API's endpoints: what CoreDNS does in a cluster.

Debian has no CoreDNS. ``python kube_dns.py CA TOKEN ADDRESS`` serves UDP port 53 of ADDRESS.
"""

from __future__ import annotations

import socket
import struct
import sys

from kube_request import ask

_DOMAIN = ["svc", "cluster", "local"]
_A, _IN, _NO_SUCH_NAME = 1, 1, 3


def addresses(ca: str, token: str, name: list[str]) -> list[str] | None:
    """The addresses of ``[pod.]service.namespace.svc.cluster.local``; None: there is no such name."""
    if name[-3:] != _DOMAIN or len(name) not in (5, 6):
        return None
    service, namespace = name[-5], name[-4]
    found = ask(ca, token, "GET", f"/api/v1/namespaces/{namespace}/endpoints/{service}")
    ready = [item for part in found.get("subsets") or [] for item in part.get("addresses") or []]
    if len(name) == 6:
        ready = [item for item in ready if item.get("hostname") == name[0]]
    return [str(item["ip"]) for item in ready] or None


def answer(ca: str, token: str, query: bytes) -> bytes:
    """The answer to a query of one question."""
    name, at = [], 12
    while size := query[at]:
        name.append(query[at + 1 : at + 1 + size].decode().lower())
        at += 1 + size
    question = query[12 : at + 5]
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    found = addresses(ca, token, name)
    records = b""
    if found and kind == _A:
        for item in found:
            records += struct.pack("!HHHIH", 0xC00C, _A, _IN, 1, 4) + socket.inet_aton(item)
    code = 0 if found else _NO_SUCH_NAME
    counts = struct.pack("!HHHH", 1, len(records) // 16, 0, 0)
    return query[:2] + struct.pack("!H", 0x8580 | code) + counts + question + records


def main(ca: str, token: str, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            query, peer = server.recvfrom(4096)
            try:
                server.sendto(answer(ca, token, query), peer)
            except (OSError, ValueError, IndexError, struct.error) as error:
                print(f"{peer}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
