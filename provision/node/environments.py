"""Python environments by digest: PATH is a link to PATH.d/NAME, and jobs run from the latter.

A change makes a new environment beside the one in use and then moves the link, so a running job and its
restarts keep the environment that they began with. An old environment goes when nothing runs from it.
Environments of oeprov 0.2 and earlier are directories at PATH itself; the first change makes a link of it.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from typing import Any, Dict, List

from . import inuse, openat, systemd
from .command import CommandError, System, flush_directory
from .directory import human
from .state import OldEnvironment

_MAKING = ".making"  # beside an environment that is not finished
_OVER = ".over"  # beside an environment that uses another one's packages: the interpreter of that one
_BEFORE = "before"  # name of an environment that was a directory at PATH
_PLACES = re.compile(r"(/[^\s\"'=:;,]+?\.d/[^/\s\"']+)/(?=(?:bin|lib|lib64)\b)")
_PATHS = re.compile(r"(?<![^\s\"'=:;,+-])/[^\s\"'=:;,]+")  # in a unit's text


def digest(*facts: Any) -> str:
    """Name of an environment that is made of these facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def folder(path: str) -> str:
    """The directory of the environments to which ``path`` is a link."""
    return path.rstrip("/") + ".d"


def home(system: System, path: str) -> str:
    """``path``, or where a link of the user's own leads to, such as a larger disk."""
    path = path.rstrip("/")
    for _ in range(40):
        found = system.link(path)
        if not found or target(system, path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), found))
    return path


def target(system: System, path: str) -> str:
    """The environment that ``path`` is a link to; empty if it is no such link."""
    found = system.link(path.rstrip("/"))
    found = os.path.normpath(os.path.join(os.path.dirname(path.rstrip("/")), found)) if found else ""
    return found if os.path.dirname(found) == folder(path) else ""


def resolve(system: System, program: str) -> str:
    """``PATH/bin/PROGRAM`` by the environment that PATH is a link to."""
    path, _, rest = program.rpartition("/bin/")
    found = target(system, path) if path else ""
    return f"{found}/bin/{rest}" if found else program


def pin(system: System, job: str, units: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """``units`` of a job with links to environments replaced by what they lead to.

    That is the environment which the job's units on this host have already, or else the newest.
    """
    earlier = "".join(system.read(systemd.path(name)) for name in systemd.ours(system, job))

    def by_place(match: "re.Match[str]") -> str:
        word = match.group()
        for end in [found.start() for found in re.finditer(r"/(?=(?:bin|lib|lib64)\b)", word)]:
            base = home(system, word[:end])
            kept = re.search(re.escape(folder(base)) + r"/[^/\s\"']+(?=/)", earlier)
            found = kept.group() if kept and system.exists(kept.group()) else target(system, base)
            if found:
                return found + word[end:]
        return word

    def fixed(text: str) -> str:
        return _PATHS.sub(by_place, text)

    return [
        dict(
            item,
            text=fixed(item["text"]),
            files={name: fixed(text) for name, text in item.get("files", {}).items()},
        )
        for item in units
    ]


def jobs(system: System, environment: str) -> List[str]:
    """Training jobs whose units on this host run from an environment, or start again from it."""
    units = [name for name in systemd.ours(system) if environment + "/" in _unit_text(system, name)]
    return ["training job " + job for job in sorted(set(map(systemd.job_of, units)))]


def _unit_text(system: System, name: str) -> str:
    """The text of a unit, and the interpreters below the environments that it runs from."""
    text = system.read(systemd.path(name))
    return "\n".join([text] + [system.read(place + _OVER) for place in set(_PLACES.findall(text))])


def users(system: System, environment: str) -> List[str]:
    """What runs from an environment: training jobs, or else processes."""
    known = jobs(system, environment)
    if known:
        return known
    found = inuse.observe_users(system, environment, by_command=True)
    return [f"process {inuse.describe(found)}"] if found else []


def old(system: System, path: str) -> List[OldEnvironment]:
    """Environments beside the one that ``path`` is a link to."""
    now, base = target(system, path), folder(path)
    if not _is_roots(system, base):
        return []
    places = [f"{base}/{name}" for name in system.list(base) if not name.endswith((_MAKING, _OVER))]
    return [
        OldEnvironment(place, own_bytes(system, place), users(system, place))
        for place in places
        if place != now
    ]


def _is_roots(system: System, path: str) -> bool:
    """The path is a directory, and no link to one, of root or of this user."""
    try:
        found = os.lstat(system.path(path))
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())


def own_bytes(system: System, path: str) -> int:
    """Bytes that removing the directory would free; files that another environment shares do not count."""
    found = 0
    for place, _, files in os.walk(system.path(path)):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                found += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return found


def begin(system: System, path: str, name: str) -> str:
    """Where to make the environment ``name``: not where one is that is linked to or in use.

    Until ``switch`` it counts as unfinished, and only another installation removes it.
    """
    now, number, place = target(system, path), 1, f"{folder(path)}/{name}"
    while place == now or (system.exists(place) and users(system, place)):
        number += 1
        place = f"{folder(path)}/{name}-{number}"
    system.write(place + _MAKING, "")
    openat.remove(system, place)
    return place


def place_over(system: System, path: str, python: str, facts: Any) -> str:
    """Where an environment over that of ``python`` is, or is to be made; unfinished until ``switch``."""
    place = f"{folder(path)}/{digest(python, facts)}"
    system.write(place + _OVER, python + "\n")
    if target(system, path) != place:
        system.write(place + _MAKING, "")
    return place


def forget(system: System, path: str, place: str) -> None:
    """Forget an environment that could not be made."""
    if not system.exists(place):
        for end in (_MAKING, _OVER):
            system.remove(place + end)
        system.remove_empty(folder(path))


def copy(system: System, source: str, place: str) -> None:
    """Make ``place`` a copy of an environment that shares its files, for a change by pip.

    pip replaces files and never writes into them, so the source stays as it is.
    """
    now = target(system, source) or source
    system.check(["cp", "-al", system.path(now), system.path(place)], timeout=600)
    # Programs name their interpreter by its path.
    bin_ = os.path.join(place, "bin")
    for name in [f"{bin_}/{name}" for name in system.list(bin_)] + [os.path.join(place, "pyvenv.cfg")]:
        real = system.path(name)
        if os.path.islink(real) or not os.path.isfile(real):
            continue
        with open(real, "rb") as file:
            text = file.read()
        changed = re.sub(
            rb"(?:%s|%s)(?=[/\"'\s]|$)" % (re.escape(source.encode()), re.escape(now.encode())),
            place.encode(),
            text,
        )
        if changed != text and b"\0" not in text:
            system.write(name, changed.decode("utf-8", "surrogateescape"), os.stat(real).st_mode & 0o777)


def switch(system: System, path: str, place: str) -> None:
    """Make ``path`` a link to ``place``, in one step where it is a link already.

    CommandError if it is a directory, as earlier versions made it, and something runs from it.
    """
    path = path.rstrip("/")
    real = system.path(path)
    if target(system, path) == place:
        return
    if os.path.isdir(real) and not os.path.islink(real):
        found = users(system, path)
        if found:
            raise CommandError(
                f"{path} was made by an earlier version, and {', '.join(found)} runs from it: stop that "
                "first; later changes will not need it"
            )
        before = f"{folder(path)}/{_BEFORE}"
        openat.remove(system, before)
        os.rename(real, system.path(before))
    temporary = real + ".oeprov-new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(os.path.join(os.path.basename(folder(path)), os.path.basename(place)), temporary)
    os.rename(temporary, real)
    flush_directory(os.path.dirname(real))
    system.remove(place + _MAKING)


def clean(system: System, path: str, unfinished: bool = False) -> int:
    """Remove the old environments that nothing uses; bytes that this freed.

    ``unfinished``: also those that an installation left, which only the next installation may say.
    """
    freed = 0
    for item in old(system, path):
        if not item.users and (unfinished or not system.exists(item.path + _MAKING)):
            openat.remove(system, item.path)
            for end in (_MAKING, _OVER):
                system.remove(item.path + end)
            freed += item.bytes
    return freed


def linked_by_units(system: System, names: List[str]) -> List[str]:
    """Paths of the links to the environments that these units run from.

    A unit's text has words of the job's too: only what is such a link, of root's, counts.
    """
    text = "\n".join(_unit_text(system, name) for name in names)
    paths = {os.path.dirname(place)[: -len(".d")] for place in _PLACES.findall(text)}
    return sorted(path for path in paths if target(system, path) and _is_roots(system, folder(path)))


def notes(items: List[OldEnvironment]) -> List[str]:
    """A note for each old environment: its size, and what keeps it."""
    return [
        "{} ({}) is an earlier environment: {}".format(
            item.path,
            human(item.bytes),
            f"{', '.join(item.users)} runs from it, and it goes when that has ended"
            if item.users
            else "nothing runs from it, and the next change or job that ends removes it",
        )
        for item in items
    ]
