"""One request to the API server of ``kube_cluster``, from inside the cluster's namespaces."""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

ADDRESS = "https://127.0.0.1:6443"


def ask(ca: str, token: str, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    """The answer, whatever its code: a refusal is a document of kind Status."""
    request = urllib.request.Request(  # noqa: S310 - the address is ours
        ADDRESS + path,
        data=body,
        method=method,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    tls = ssl.create_default_context(cafile=ca)
    try:
        with urllib.request.urlopen(request, timeout=30, context=tls) as answer:  # noqa: S310
            text = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    print(json.dumps(ask(*sys.argv[1:5], sys.stdin.buffer.read() or None)))
