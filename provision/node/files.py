"""Send files of a training job from its host: a line with their sizes, then a tar archive."""

import json
import os
import sys
import tarfile
from typing import Any, Dict, List

MARKER = "OEPROV-FILES "  # marks that line, since login shells may print a banner first


def find(top: str, names: List[str]) -> Dict[str, int]:
    """Bytes of every plain file of these names below ``top``, by its path from there."""
    found = {}
    for name in names:
        path = os.path.join(top, name)
        if os.path.isfile(path) and not os.path.islink(path):
            found[name] = os.path.getsize(path)
        for directory, _, files in os.walk(path):
            for file in files:
                path = os.path.join(directory, file)
                if os.path.isfile(path) and not os.path.islink(path):
                    found[os.path.relpath(path, top)] = os.path.getsize(path)
    # Hidden files are still being written.
    return {name: size for name, size in sorted(found.items()) if "/." not in "/" + name}


def main(wanted: Dict[str, Any]) -> None:
    """Print a line with ``files``, bytes by path, then the archive; ``wanted``: ``top``, ``names`` in it."""
    top = wanted["top"]
    files = find(top, wanted["names"])
    sys.stdout.write("\n" + MARKER + json.dumps({"files": files}) + "\n")
    sys.stdout.flush()
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name, size in files.items():
            with open(os.path.join(top, name), "rb") as file:
                member = tarfile.TarInfo(name)
                member.size = size  # a file may grow meanwhile
                archive.addfile(member, file)
    sys.stdout.buffer.flush()
