"""Ask a registry whether it has an image, on hosts without a container engine.

This is the manifest request of the OCI distribution specification, after one for a token if required.
"""

import json
import re
from typing import Any, Dict, NamedTuple
from urllib.parse import urlencode

_HUB = "registry-1.docker.io"
_ACCEPT = ", ".join(
    "application/vnd." + name
    for name in (
        "oci.image.index.v1+json",
        "oci.image.manifest.v1+json",
        "docker.distribution.manifest.list.v2+json",
        "docker.distribution.manifest.v2+json",
    )
)
_SECONDS = 10


class Reference(NamedTuple):
    """Location of an image: ``name`` and ``tag`` (or digest) in its registry."""

    registry: str
    name: str
    tag: str


def parse(image: str) -> Reference:
    """``ubuntu`` → library/ubuntu:latest of Docker's registry, as engines read it."""
    first, _, rest = image.partition("/")
    named = bool(rest) and (first == "localhost" or "." in first or ":" in first)
    registry, path = (first, rest) if named else (_HUB, image)
    name, at, tag = path.partition("@")
    if not at:
        match = re.search(r":([\w.-]+)$", path)
        name, tag = (path[: match.start()], match.group(1)) if match else (path, "latest")
    if registry in (_HUB, "docker.io"):
        registry, name = _HUB, name if "/" in name else "library/" + name
    return Reference(registry, name, tag)


def missing(image: str) -> str:
    """Why the image is not available without a login; empty if it is, or if the registry does not answer.

    The engine may get a proxy later, so a registry that does not answer proves nothing.
    """
    where = parse(image)
    # Engines use HTTP for this host only, too.
    scheme = "http" if re.match(r"(localhost|127\.[\d.]+)(:|$)", where.registry) else "https"
    url = f"{scheme}://{where.registry}/v2/{where.name}/manifests/{where.tag}"
    try:
        code, wants = _ask(url, {})
        if code == 401 and wants.lower().startswith("bearer "):
            fields = dict(re.findall(r'(\w+)="([^"]*)"', wants))
            realm = fields.pop("realm", "")
            token = (
                _token(realm + "?" + urlencode(fields)) if realm.startswith(("https://", "http://")) else ""
            )
            code, _ = _ask(url, {"Authorization": "Bearer " + token} if token else {})
    except (OSError, ValueError):
        return ""
    if code == 404:
        return f"{where.registry} has no {where.name}:{where.tag}"
    if code in (401, 403):
        return f"{where.registry} requires a login for {where.name}, or does not have it"
    return ""


def _ask(url: str, headers: Dict[str, str]) -> Any:
    """(status, how to authenticate) of a HEAD request."""
    from urllib import error, request  # slow to import, and rarely needed

    asked = request.Request(url, headers=dict(headers, Accept=_ACCEPT), method="HEAD")  # noqa: S310
    try:
        with request.urlopen(asked, timeout=_SECONDS) as answer:  # noqa: S310
            return answer.status, ""
    except error.HTTPError as refused:
        return refused.code, refused.headers.get("WWW-Authenticate", "")


def _token(url: str) -> str:
    """Get an anonymous token."""
    from urllib import request

    with request.urlopen(url, timeout=_SECONDS) as answer:  # noqa: S310
        found = json.loads(answer.read(1 << 20).decode("utf-8", "replace"))
    return str(found.get("token") or found.get("access_token") or "")
