"""Send files of a training job from its host: a line with their sizes, then a tar archive."""

import os
import sys
import tarfile
from typing import Any, Dict, List

from . import answer, openat
from .command import CommandError, System


def main(wanted: Dict[str, Any]) -> None:
    """Print a line, then the archive; ``wanted``: ``top``, ``names`` in it.

    The line has ``files``, bytes by path, and ``others``: links and what else is no plain file of the job's.
    """
    system, top = System(), wanted["top"]
    files: Dict[str, int] = {}
    others: List[str] = []
    try:
        for name in wanted["names"]:
            found, rest = openat.sizes(system, os.path.join(top, name))
            files.update((os.path.join(name, inner).rstrip("/"), found[inner]) for inner in sorted(found))
            others += sorted(os.path.join(name, inner).rstrip("/") for inner in rest)
    except CommandError as error:
        sys.exit(str(error))
    answer.give(lambda: {"files": files, "others": others})
    sys.stdout.flush()
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name, size in files.items():
            with openat.opened(system, os.path.join(top, name)) as file:
                member = tarfile.TarInfo(name)
                member.size = size  # a file may grow meanwhile
                archive.addfile(member, file)
    sys.stdout.buffer.flush()
