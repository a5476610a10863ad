"""The image that pods of the test cluster run: this environment on Debian 12, laid out by the Containerfile.

One image is server, worker and pause. It is made of what this tree has built already, where podman would
compile it all again; those that users run are made by `make images`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bare_debian

NAME, PAUSE = "oeprov.test/oeprov:1", "oeprov.test/pause:1"
USER = 10001
PACKAGES = "python3,libpmem1,libmemkind0,libssl3"
_REPOSITORY = Path(__file__).parents[2]
_HOME = "opt/oeprov"
# Of the environment, what neither servers nor workers import.
_LEFT_OUT = (
    "ansible*", "alibabacloud*", "clang*", "cryptography*", "fabric*", "invoke*", "kubernetes*", "mypy*",
    "*__mypyc*", "paramiko*", "pip", "pip-*", "ruff*", "selenium*", "torch*", "tensorflow/include",
)  # fmt: skip


def why_not() -> str:
    """Why the image cannot be made here; empty when it can."""
    if sys.version_info[:2] != (3, 11):
        return "the image has Debian 12's Python 3.11, and this environment has another"
    return ""


def write(directory: Path) -> None:
    """An OCI layout with the image under both names; about 1.7 GB."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    root = bare_debian.pristine_root(PACKAGES)
    layers = [
        _layer(blobs, "-C", str(root), "--exclude=./var/cache/apt/*", "--exclude=./dev/*", "."),
        _layer(blobs, "-C", str(_environment(directory)), "."),
        _layer(blobs, *_site_packages()),
        _layer(
            blobs,
            "-C",
            str(_REPOSITORY),
            f"--transform=s,^,{_HOME}/lib/python3.11/site-packages/,",
            "--exclude=core",
            "--exclude=__pycache__",
            "oe_runtime",
        ),
    ]
    manifests = [
        _manifest(blobs, layers, NAME, ["python", "-m", "oe_runtime.train", "--help"]),
        _manifest(blobs, layers, PAUSE, ["sleep", "infinity"]),
    ]
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))


def _environment(directory: Path) -> Path:
    """/opt/oeprov as a virtual environment of the image's own Python."""
    place = directory / "environment"
    (place / _HOME / "bin").mkdir(parents=True)
    (place / _HOME / "bin" / "python").symlink_to("/usr/bin/python3")
    (place / _HOME / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    return place


def _site_packages() -> list[str]:
    lib = Path(sys.prefix) / "lib"
    return [
        "-C",
        str(lib),
        f"--transform=s,^python3.11,{_HOME}/lib/python3.11,",
        *(f"--exclude=site-packages/{name}" for name in (*_LEFT_OUT, "_editable_skbc*", "__editable__*")),
        "python3.11/site-packages",
    ]


def _layer(blobs: Path, *words: str) -> dict[str, Any]:
    path = blobs / "layer"
    subprocess.run(
        ["tar", "-cf", str(path), "--sort=name", "--owner=0", "--group=0", "--numeric-owner", *words],
        check=True,
    )
    return _keep(path, "application/vnd.oci.image.layer.v1.tar")


def _keep(path: Path, kind: str) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    os.replace(path, path.with_name(digest))
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _manifest(blobs: Path, layers: list[dict[str, Any]], name: str, command: list[str]) -> dict[str, Any]:
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Env": [
                f"PATH=/{_HOME}/bin:/usr/local/bin:/usr/bin:/bin",
                "PYTHONUNBUFFERED=1",
                "PYTHONDONTWRITEBYTECODE=1",
            ],
            "Cmd": command,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    part = blobs / "part"
    part.write_text(json.dumps(config))
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _keep(part, "application/vnd.oci.image.config.v1+json"),
        "layers": layers,
    }
    part.write_text(json.dumps(document))
    found = _keep(part, str(document["mediaType"]))
    return {**found, "annotations": {"io.containerd.image.name": name}}
